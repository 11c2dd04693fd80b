"""Where device and host meet: texts, rewards on the right tokens, and what a person watches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.inference.generate import generate
from grpo_jax.inference.logprobs import completion_logp
from grpo_jax.inference.text import completion_texts, encode, prompt_texts, step_rewards
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.objectives import AdaptiveObjective, grpo
from grpo_jax.options import Generation, Sampling
from grpo_jax.rewards import combine
from grpo_jax.rewards import score as score_rewards
from grpo_jax.training.batch import (
    GatheredScores,
    HostRollout,
    assemble,
    cut,
    infer_logp,
    lengths,
    lengths_and_stops,
    of_all,
    rollout_shapes,
    take_prompts,
    take_scores,
    trim,
)
from grpo_jax.training.metrics import completion_rows, group_statistics
from grpo_jax.training.packing import FRACTIONS, pack, packed_sizes
from grpo_jax.types import Prompts, Rollout

from toy import bigram, compilations, letters

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
    for whole, part in zip(rollout[1:4], out[1:4], strict=True):
        np.testing.assert_array_equal(part, whole[..., :size])
    assert out.mask_PGT.sum() == rollout.mask_PGT.sum()
    assert out.prompts is rollout.prompts


@pytest.mark.parametrize(("T", "buckets", "sizes"), [(12, 4, [3, 6, 9, 12]), (5, 2, [3, 5]), (2, 5, [1, 2])])
def test_lengths_are_equal_fractions_rounded_up(T, buckets, sizes):
    assert lengths(T, buckets) == sizes


def test_trim_makes_at_most_as_many_shapes_as_buckets():
    shapes = {trim(rollout_of([[b"x" * n]]), 3).tokens_PGT.shape for n in range(1, 13)}
    assert shapes == {(1, 1, 4), (1, 1, 8), (1, 1, 12)}


def test_a_cut_keeps_whose_rollout_it_is():
    """Rows and updates belong to prompts: a shorter T leaves them alone."""
    rollout = rollout_of([[b"abc"], [b"a"]])._replace(row_P=np.array([7, 3]), update_P=np.array([1, 0]))
    out = cut(rollout, 4)
    assert out.tokens_PGT.shape == out.logp_PGT.shape == (2, 1, 4)
    np.testing.assert_array_equal(out.row_P, [7, 3])
    np.testing.assert_array_equal(out.update_P, [1, 0])


def test_packing_lists_the_trained_tokens_in_order():
    """g·T + t of each, then G·T; the smallest size that holds every prompt's tokens, or none."""
    rollout = rollout_of([[b"ab", b"a"], [b"a", b"abc"]], T=4)
    np.testing.assert_array_equal(pack(rollout.mask_PGT), [[0, 1, 4, 8], [0, 4, 5, 6]])
    assert pack(np.ones((2, 2, 4), bool)) is None
    assert packed_sizes(8) == [4, 5, 6]
    assert packed_sizes(1) == [], "rounded up, nothing would be smaller"
    for count in range(1, 9):
        index_PN = pack(np.arange(8).reshape(1, 2, 4) < count)
        expected = next((n for n in (4, 5, 6) if n >= count), None)
        assert (None if index_PN is None else index_PN.shape[1]) == expected
    assert len(FRACTIONS) == 3


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


def host_of(rollout):
    everything = np.arange(len(rollout.tokens_PGT))
    rows = [{"answer": str(i)} for i in everything]
    return HostRollout(rows, rollout.tokens_PGT, rollout.mask_PGT, rollout.stopped_PG, everything, everything)


def test_group_statistics():
    """Unscorable completions are left out; a group teaches nothing if it is constant or has one known reward."""
    nan = np.nan
    reward_PG = np.array([[1.0, 0.0, nan], [0.7, 0.7, 0.7], [nan, nan, 2.0], [nan, nan, nan]])
    groups = [[b"aaa", b"a", b"aa"], [b"a", b"a", b"a"], [b"aaaa", b"a", b"a"], [b"a", b"a", b"a"]]
    stopped = np.ones((4, 3), bool)
    stopped[0, 0] = stopped[1, 1] = stopped[2, 2] = False
    out = group_statistics(host_of(rollout_of(groups, stopped)), reward_PG)
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
    assert group_statistics(host_of(rollout_of(groups)), reward_PG)["frac_zero_variance"] == pytest.approx(2 / 3)


@pytest.mark.filterwarnings("error")
def test_nothing_scorable_is_not_a_reward_of_zero():
    out = group_statistics(host_of(rollout_of([[b"a", b"b"]])), np.full((1, 2), np.nan))
    assert np.isnan(out["reward"])
    assert np.isnan(out["reward_std"])
    assert (out["frac_zero_variance"], out["unscorable"]) == (1.0, 1.0)


MODEL = bigram()


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def sampled(params, prompts):
    return generate(MODEL, params, prompts, jax.random.key(0), generation=Generation(2, 5, Sampling(top_k=9)))


def test_scores_are_those_of_the_policy(params, sampled):
    """Under the sampling given, in chunks of any size; entropies if asked for, between 0 and log k."""
    sampling = Sampling(top_k=9)
    logp, entropy = infer_logp(MODEL, params, sampled, sampling=sampling, with_entropy=True, logit_chunk=3)
    expected = completion_logp(MODEL, params, *sampled[:3], sampling=sampling)
    np.testing.assert_allclose(logp, expected, atol=1e-5)
    np.testing.assert_allclose(logp, sampled.logp_PGT, atol=1e-5)
    assert infer_logp(MODEL, params, sampled, sampling=sampling)[1] is None
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


def test_an_adaptive_objective_assembles_in_its_state(sampled):
    """One program: the state is an argument of it."""

    def bind(scale):
        return grpo(beta=0.0)._replace(advantage=lambda reward_G: scale * reward_G)

    objective = AdaptiveObjective(lambda: jnp.float32(1.0), bind, lambda state, metrics: state)
    reward_PG = jnp.array([[0.0, 1.0]] * 4)
    with compilations() as names:
        for scale in (2.0, 5.0):
            batch = assemble(objective, sampled, reward_PG, jnp.float32(scale))
            np.testing.assert_array_equal(batch.samples.adv, scale * reward_PG)
    assert names.count("assemble") == 1
    np.testing.assert_array_equal(assemble(objective, sampled, reward_PG).samples.adv, reward_PG)


def test_the_shapes_of_a_rollout_are_those_that_are_sampled(params, prompts):
    generation = Generation(2, 5)
    made = jax.eval_shape(lambda: generate(MODEL, params, prompts, jax.random.key(0), generation=generation))
    assert rollout_shapes(4, 2, 12, 5) == made


def test_prompts_of_several_batches_are_taken_as_one(sampled):
    """With all that belongs to them: rows and updates too, and nothing of the others."""
    first = sampled._replace(row_P=jnp.arange(4), update_P=jnp.zeros(4, jnp.int32))
    second = jax.tree.map(lambda x: x[::-1], first)._replace(update_P=jnp.full(4, 7))
    out = take_prompts([first, second], [4, 1, 6])
    np.testing.assert_array_equal(out.row_P, [3, 1, 1])
    np.testing.assert_array_equal(out.update_P, [7, 0, 7])
    for got, whole in zip(out[1:5], first[1:5], strict=True):
        np.testing.assert_array_equal(got, whole[np.array([3, 1, 1])])
    np.testing.assert_array_equal(out.prompts.tokens_PS, first.prompts.tokens_PS[np.array([3, 1, 1])])
    assert out.token_index_PN is None


def scores_of(*rewards):
    """The scores of prompts "0", "1", … whose groups have two completions."""
    reward_PG = np.array(rewards, float)
    count = range(len(rewards))
    steps = [[[None], [((1, reward_PG[p, 1]),)]] for p in count]
    texts = [[f"{p}", "x"] for p in count]
    return GatheredScores(reward_PG, reward_PG[..., None], steps, [str(p) for p in count], texts)


def test_scores_of_several_batches_are_taken_as_one():
    first, second = scores_of([0.0, 1.0], [2.0, np.nan]), scores_of([5.0, 6.0])
    out = take_scores([first, second], [2, 1])
    np.testing.assert_array_equal(out.reward_PG, [[5, 6], [2, np.nan]])
    np.testing.assert_array_equal(out.reward_PGN, out.reward_PG[..., None])
    assert out.questions == ["0", "1"]
    assert out.texts == [["0", "x"], ["1", "x"]]
    assert out.steps_PGN[0] == second.steps_PGN[0]
    assert type(out) is GatheredScores


def test_what_a_process_owns_and_what_lies_on_its_devices():
    """Prompts 1 to 3 of four lie here, 1 belongs to a process before this one."""
    rollout = rollout_of([[b"a"], [b"bb"], [b"ccc"], [b"dddd"]], [[True], [False], [True], [False]])
    rows = [{"answer": "2"}, {}]
    here = np.array([1, 2, 3])
    host = HostRollout(rows, rollout.tokens_PGT[1:], rollout.mask_PGT, rollout.stopped_PG, here, here[1:])
    for mine, expected in ((host.owned(), [2, 3]), (host.local(), [1, 2, 3])):
        for field in ("tokens_PGT", "mask_PGT", "stopped_PG"):
            np.testing.assert_array_equal(getattr(mine, field), getattr(rollout, field)[expected])
    scores = scores_of(*[[float(i)] * 2 for i in range(4)])
    assert completion_rows(host, scores) == [
        {"prompt": "2", "completion": "2", "reward": 2.0, "answer": "2"},
        {"prompt": "2", "completion": "x", "reward": 2.0, "answer": "2"},
        {"prompt": "3", "completion": "3", "reward": 3.0},
        {"prompt": "3", "completion": "x", "reward": 3.0},
    ]


def test_a_completion_without_a_reward_is_told_as_none():
    scores = GatheredScores(np.array([[np.nan]]), np.zeros((1, 1, 1)), [[[None]]], ["q"], [["a"]])
    (row,) = completion_rows(host_of(rollout_of([[b"a"]])), scores)
    assert row == {"prompt": "q", "completion": "a", "reward": None, "answer": "0"}


def test_lengths_are_exchanged_in_place_of_masks():
    rollout = rollout_of([[b"ab", b""], [b"a", b"abc"]], [[True, False], [True, True]])
    mask_PGT, stopped_PG = lengths_and_stops(rollout, np.arange(2))
    np.testing.assert_array_equal(mask_PGT, rollout.mask_PGT)
    np.testing.assert_array_equal(stopped_PG, rollout.stopped_PG)


def test_what_is_found_of_own_prompts_is_put_in_their_order():
    found = of_all(np.array([2, 0, 1]), lambda: (["two", "zero", "one"], [2, 0, 1]))
    assert found == [("zero", "one", "two"), (0, 1, 2)]
