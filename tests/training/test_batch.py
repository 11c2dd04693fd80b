"""Where device and host meet: texts, rewards on the right tokens, and what a person watches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.inference.generate import generate
from grpo_jax.inference.logprobs import Sampling, completion_logp
from grpo_jax.inference.text import completion_texts, encode, prompt_texts, step_rewards
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.objectives import grpo
from grpo_jax.rewards import combine
from grpo_jax.rewards import score as score_rewards
from grpo_jax.training.batch import assemble, score, trim
from grpo_jax.training.metrics import group_statistics
from grpo_jax.types import Prompts, Rollout

from toy import bigram, letters

BYTES = ByteTokenizer()


class VisibleTokenizer(ByteTokenizer):
    """Every id is a character, the stop token (46, a full stop) too."""

    stop_ids = (46,)

    def decode(self, ids):
        return "".join(map(chr, ids))


def rollout_of(groups, stopped=None, T=12):
    """A rollout of byte strings, `[P][G]`, or of lists of ids."""
    ids = [[list(x) for x in group] for group in groups]
    P, G = len(ids), len(ids[0])
    tokens, mask = np.full((P, G, T), 256, np.int32), np.zeros((P, G, T), bool)
    for p, g in np.ndindex(P, G):
        n = len(ids[p][g])
        tokens[p, g, :n], mask[p, g, :n] = ids[p][g], True
    prompts = Prompts(np.zeros((P, 4), np.int32), np.ones((P, 4), bool))
    stopped = np.zeros((P, G), bool) if stopped is None else np.asarray(stopped)
    return Rollout(prompts, tokens, mask, np.where(mask, -1.5, 0).astype(np.float32), stopped)


def test_prompts_are_encoded_and_a_long_one_is_named():
    task = letters()
    prompts = encode(BYTES, task.prompt, task.train[:2], length=8)
    for row, tokens, mask in zip(task.train, prompts.tokens_PS, prompts.mask_PS, strict=False):
        assert bytes(tokens[mask][:-1].tolist()).decode() == row["question"]
        assert tokens[-1] == BYTES.separator_id
    with pytest.raises(ValueError, match="prompt 1 has 9 tokens, more than the 5 allowed"):
        encode(BYTES, task.prompt, [{"question": "q"}, {"question": "12345678"}], length=5)


def test_a_reward_sees_all_messages_of_a_prompt():
    task = letters()._replace(
        prompt=lambda row: [{"role": "system", "content": "Be short."}, {"role": "user", "content": row["question"]}]
    )
    assert prompt_texts(task, [{"question": "a"}, {"question": "b"}]) == ["Be short.\na", "Be short.\nb"]


def test_the_stop_token_leaves_the_text_only_where_it_stopped():
    """A completion cut off by the limit may end with any token; all of it is text."""
    rollout = rollout_of([[b"ab.", b"ab."], [b".", b"abc"]], stopped=[[True, False], [True, False]])
    assert completion_texts(VisibleTokenizer(), rollout) == [["ab", "ab."], ["", "abc"]]


@pytest.mark.parametrize(
    ("longest", "buckets", "size"), [(3, 4, 3), (4, 4, 6), (12, 4, 12), (1, 5, 3), (6, 5, 8), (2, 1, 12), (5, 100, 5)]
)
def test_trim_cuts_padding_to_the_next_bucket(longest, buckets, size):
    rollout = rollout_of([[b"a", b"x" * longest]])
    out = trim(rollout, buckets)
    for whole, cut in zip(rollout[1:4], out[1:4], strict=True):
        np.testing.assert_array_equal(cut, whole[..., :size])
    assert out.mask_PGT.sum() == rollout.mask_PGT.sum()
    assert out.prompts is rollout.prompts


def test_trim_makes_at_most_as_many_shapes_as_buckets():
    shapes = {trim(rollout_of([[b"x" * n]]), 3).tokens_PGT.shape for n in range(1, 13)}
    assert shapes == {(1, 1, 4), (1, 1, 8), (1, 1, 12)}


def placed(groups, functions, weights=None, stopped=None):
    rollout = rollout_of(groups, stopped)
    texts = completion_texts(BYTES, rollout)
    scores = score_rewards(functions, [{}] * len(texts), ["p"] * len(texts), texts, weights=weights)
    return step_rewards(BYTES, rollout, scores, weights), scores


def by_token(reward_T):
    return {t: pytest.approx(float(r)) for t, r in enumerate(reward_T) if not np.isnan(r)}


def test_a_step_is_placed_on_the_token_that_completes_it():
    """Step ends are in characters: `é` takes two bytes and `€` three, and counts when its last byte is there."""
    text = "aé€b"  # bytes: a, é é, € € €, b
    steps = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    reward_PGT, _ = placed([[text.encode()]], lambda completion: steps)
    assert by_token(reward_PGT[0, 0]) == {0: 0.1, 2: 0.2, 5: 0.3, 6: 0.4}


def test_a_step_behind_a_cut_character():
    """Bytes that are no UTF-8 are characters too; the last one is cut by the limit and stays as it is."""
    cut = b"\xffa" + "€".encode()[:2]
    assert BYTES.decode(cut) == "\ufffda\ufffd"
    reward_PGT, _ = placed([[cut]], lambda completion: [(1, 1.0), (2, 2.0), (3, 3.0)])
    assert by_token(reward_PGT[0, 0]) == {0: 1.0, 1: 2.0, 2: 3.0}


def test_an_outcome_lies_on_the_last_token_the_stop_token_included():
    reward_PGT, _ = placed([[[97, 98, 257], [97, 98]]], lambda completion: 0.5, stopped=[[True, False]])
    assert by_token(reward_PGT[0, 0]) == {2: 0.5}
    assert by_token(reward_PGT[0, 1]) == {1: 0.5}


def test_step_rewards_of_several_functions_are_weighted_and_added():
    def steps(completion):
        return [(1, 1.0), (3, 2.0)]

    def outcome(completion):
        return 10.0

    def sometimes(completion):
        return None if completion == "abc" else 5.0

    weights = (2.0, 0.5, -1.0)
    reward_PGT, scores = placed([[b"abc", b"xyzw"]], [steps, outcome, sometimes], weights)
    assert by_token(reward_PGT[0, 0]) == {0: 2.0, 2: 4.0 + 5.0}
    assert by_token(reward_PGT[0, 1]) == {0: 2.0, 2: 4.0, 3: 5.0 - 5.0}
    np.testing.assert_allclose(np.nansum(reward_PGT, -1), combine(scores.reward_PGN, weights))


def test_what_cannot_be_scored_has_no_step():
    reward_PGT, scores = placed([[b"abc", b"x"]], lambda completion: None if completion == "abc" else 1.0)
    assert np.isnan(scores.reward_PG[0, 0])
    assert by_token(reward_PGT[0, 0]) == {}
    assert by_token(reward_PGT[0, 1]) == {0: 1.0}


def test_group_statistics():
    """Unscorable completions are left out; a group teaches nothing if it is constant or has one known reward."""
    nan = np.nan
    reward_PG = np.array([[1.0, 0.0, nan], [0.7, 0.7, 0.7], [nan, nan, 2.0], [nan, nan, nan]])
    groups = [[b"aaa", b"a", b"aa"], [b"a", b"a", b"a"], [b"aaaa", b"a", b"a"], [b"a", b"a", b"a"]]
    stopped = np.ones((4, 3), bool)
    stopped[0, 0] = stopped[1, 1] = stopped[2, 2] = False
    out = group_statistics(rollout_of(groups, stopped), reward_PG)
    known = [1.0, 0.0, 0.7, 0.7, 0.7, 2.0]
    assert out == {
        "reward": pytest.approx(np.mean(known)),
        "reward_std": pytest.approx(np.std(known)),
        "frac_zero_variance": 0.75,
        "unscorable": 0.5,
        "length": 1.5,
        "truncated": 0.25,
        "tokens": 18,
    }


def test_rounding_is_no_signal_at_any_size():
    groups = [[b"a", b"a"]] * 3
    reward_PG = np.array([[0.7, 0.7 + 1e-8], [1e6, 1e6 + 0.5], [1e6, 1e6 + 2]])
    assert group_statistics(rollout_of(groups), reward_PG)["frac_zero_variance"] == pytest.approx(2 / 3)


@pytest.mark.filterwarnings("error")
def test_nothing_scorable_is_not_a_reward_of_zero():
    out = group_statistics(rollout_of([[b"a", b"b"]]), np.full((1, 2), np.nan))
    assert np.isnan(out["reward"])
    assert np.isnan(out["reward_std"])
    assert (out["frac_zero_variance"], out["unscorable"]) == (1.0, 1.0)


MODEL = bigram()


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def sampled(params, prompts):
    return generate(MODEL, params, prompts, jax.random.key(0), group_size=2, max_new_tokens=5, top_k=9)


def test_scores_are_those_of_the_policy(params, sampled):
    """Under the sampling given, in chunks of any size; entropies if asked for, between 0 and log k."""
    logp, entropy = score(MODEL, params, sampled, sampling=Sampling(top_k=9), with_entropy=True, chunk=3)
    expected = completion_logp(MODEL, params, *sampled[:3], top_k=9)
    np.testing.assert_allclose(logp, expected, atol=1e-5)
    assert entropy.min() > 0
    assert entropy.max() < np.log(9) + 1e-5


def test_a_batch_is_assembled_with_the_samplers_log_probabilities(sampled):
    reward_PG = jnp.array([[0.0, 1.0], [3.0, 1.0], [2.0, 2.0], [jnp.nan, 1.0]])
    ref = sampled.logp_PGT - 1
    batch = assemble(grpo(beta=0.1), sampled, reward_PG, ref_logp_T=ref)
    np.testing.assert_array_equal(batch.samples.adv, [[-1, 1], [1, -1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(batch.samples.old_logp_T, sampled.logp_PGT)
    np.testing.assert_array_equal(batch.samples.sampler_logp_T, sampled.logp_PGT)
    np.testing.assert_array_equal(batch.samples.ref_logp_T, ref)
    np.testing.assert_array_equal(batch.samples.stopped, sampled.stopped_PG)


def test_the_objective_prepares_the_whole_batch_once(sampled):
    seen = []

    def prepare(samples):
        seen.append(samples.adv.shape)
        return samples._replace(adv=samples.adv + samples.reward_T[..., 0])

    objective = grpo(beta=0.0)._replace(prepare=prepare)
    reward_PG = jnp.array([[0.0, 1.0]] * 4)
    batch = assemble(objective, sampled, reward_PG, reward_T=jnp.full((4, 2, 5), 7.0))
    assert seen == [(4, 2)]
    np.testing.assert_array_equal(batch.samples.adv, [[6, 8]] * 4)
