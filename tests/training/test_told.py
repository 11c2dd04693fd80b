"""What is shown is what is trained, and what does not belong together is said before anything runs."""

import datetime
import json
import os
import warnings
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax import evaluate, make_stages, train
from grpo_jax.inference.logprobs import FILTERED, with_vocabulary
from grpo_jax.inference.text import encode
from grpo_jax.inference.tokenizer import ByteTokenizer, HFTokenizer, message_text
from grpo_jax.objectives import AdaptiveObjective, Objective, center, gdpo, grpo, gspo, rloo
from grpo_jax.options import Batching, Generation, OptionError, Sampling, Scoring, Update
from grpo_jax.rewards import RewardError, overlong, reward_functions, score, trl_style
from grpo_jax.training.checks import clip_range
from grpo_jax.training.evaluate import pass_at_k
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.sft import target_ids
from grpo_jax.types import Mean

from toy import V, bigram, letters

BYTES = ByteTokenizer()
SIZES = {"generation": Generation(4, 8), "batching": Batching(3, 16, 1)}


def length_of(completion):
    return float(len(completion))


def constant(completion):
    return 2.0


def run(task, objective=None, model=None, **options):
    model = bigram(0.7) if model is None else model
    parts = (model, model.init(jax.random.key(0)), task, BYTES, objective or grpo(beta=0.0), adamw(0.05))
    return train(*parts, **{"steps": 1} | SIZES | options)


def only(iterations):
    ((state, metrics),) = iterations
    return state, metrics


# Rewards.


def test_a_reward_may_read_ids_length_and_stop():
    seen = []

    def reward(completion, completion_ids, completion_length, stopped):
        seen.append((completion, completion_ids, completion_length, stopped))
        return 0.0

    only(run(letters()._replace(reward=reward)))
    assert len(seen) == 12
    for text, ids, length, stopped in seen:
        assert len(ids) == length
        assert BYTES.decode(ids) == text
        assert stopped == (ids[-1] in BYTES.stop_ids)


def test_rewards_run_in_workers_where_asked_and_lose_only_the_completion_that_ends_one():
    def process(completion, completion_ids):
        if completion_ids[0] % 2:
            os._exit(1)
        return float(os.getpid())

    _, metrics = only(run(letters()._replace(reward=process), scoring=Scoring(on_error="skip", workers=1, timeout=30)))
    assert metrics["reward"] > 0
    assert metrics["reward"] != os.getpid()


def test_overlong_is_bound_by_two_numbers():
    from functools import partial

    reward = partial(overlong, max_length=8, buffer=7)
    _, metrics = only(run(letters()._replace(reward=reward)))
    assert -1 <= metrics["reward"] < 0


@pytest.mark.parametrize("value", [jnp.float32(0.5), np.float32(0.5), Decimal("0.5"), Fraction(1, 2)], ids=type)
def test_numbers_of_every_library_are_rewards(value):
    assert score(lambda completion: value, [{}], ["q"], [["a"]]).reward_PG.tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("value", "message"),
    [({"a": 1}, "mapping of names to functions"), (1e39, "finite in float32"), (float("nan"), "finite in float32")],
)
def test_what_is_no_reward_is_said(value, message):
    with pytest.raises(RewardError, match=message):
        score(lambda completion: value, [{}], ["q"], [["a"]])


def test_rewards_by_name():
    named = {"accuracy": length_of, "format": constant}
    assert list(reward_functions(named)) == ["accuracy", "format"]
    assert list(reward_functions([constant, constant, length_of])) == ["constant", "constant_2", "length_of"]
    _, metrics = only(run(letters()._replace(reward=named), scoring=Scoring(weights=(1.0, 0.25))))
    rows = metrics["completions"]
    assert all(row["reward"] == row["rewards"]["accuracy"] + 0.25 * row["rewards"]["format"] for row in rows)
    lengths = [row["rewards"]["accuracy"] for row in rows]
    assert metrics["rewards/accuracy/mean"] == pytest.approx(np.mean(lengths))
    assert metrics["rewards/accuracy/std"] == pytest.approx(np.std(lengths))
    assert (metrics["rewards/format/mean"], metrics["rewards/format/weight"]) == (2.0, 0.25)


def test_rewards_of_trl_get_the_messages_that_were_asked():
    seen = []

    def reward(prompts, completions, completion_ids, **columns):
        seen.append((prompts, completions, completion_ids, columns))
        return [0.0] * len(prompts)

    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    task = letters()._replace(reward=trl_style(reward, conversational=True), prompt=lambda row: asked)
    only(run(task))
    prompts, completions, ids, columns = seen[0]
    assert prompts == [asked] * 12
    assert completions[0][0]["role"] == "assistant"
    assert len(ids) == 12
    assert "_messages" not in columns


def test_weights_reach_evaluation_and_objectives_of_several_rewards():
    """The mean reward of an evaluation is weighed as in training; gdpo weighs its z-scores."""
    model = bigram(0.7)
    task = letters()._replace(reward=[length_of, constant])
    options = {"generation": SIZES["generation"]._replace(group_size=1, sampling=Sampling(0.0))}
    told = {
        weights: evaluate(
            model, model.init(jax.random.key(0)), BYTES, task, task.held_out, scoring=Scoring(weights), **options
        ).mean_reward
        for weights in ((1.0, 0.0), (0.0, 1.0), (0.5, 2.0))
    }
    assert told[0.0, 1.0] == 2.0
    assert told[0.5, 2.0] == pytest.approx(0.5 * told[1.0, 0.0] + 4.0)
    moved = [only(run(task, gdpo(beta=0.0), scoring=Scoring(w)))[0].train.params["out"] for w in ((1, 0), (-1, 0))]
    assert jnp.abs(moved[0] - moved[1]).max() > 1e-3
    with pytest.raises(OptionError, match="give them to the objective"):
        run(task, gdpo(weights=(1, 2)), scoring=Scoring((1, 2)))


def test_an_accuracy_is_told_of_rewards_of_0_and_1_alone():
    model = bigram(0.7)
    task = letters()._replace(reward=lambda completion: 0.5)
    options = {"generation": Generation(1, 8, Sampling(0.0)), "prompt_length": 16}
    found = evaluate(model, model.init(jax.random.key(0)), BYTES, task, task.held_out, **options)
    assert (found.mean_reward, found.accuracy) == (0.5, None)


def test_pass_at_k_leaves_out_what_cannot_be_scored():
    """Of two known ones, one is right: 1/2; the row with one known completion has no pass@2."""
    nan = float("nan")
    assert pass_at_k(np.array([[1.0, 0.0, nan, nan]]), 1) == 0.5
    assert pass_at_k(np.array([[1.0, 0.0, nan], [0.0, nan, nan]]), 2) == 1.0
    assert np.isnan(pass_at_k(np.array([[nan, nan]]), 1))


# Prompts, ids, lengths.


def test_ids_that_the_tokenizer_does_not_know_are_neither_sampled_nor_trained():
    """A vocabulary padded to 300: of the 41 ids beyond the tokenizer's a fresh model would draw a seventh."""
    model = bigram(0.3, vocab=300)
    params = model.init(jax.random.key(0))
    known = with_vocabulary(model, V)
    assert with_vocabulary(model, V) is known, "or it would be compiled again and again"
    assert with_vocabulary(model, 300) is model
    logits = known.logits(params, jnp.ones(8))
    assert (logits[V:] == FILTERED).all()
    np.testing.assert_array_equal(known.decode_logits(params, jnp.ones(8)), logits)
    _, metrics = only(run(letters(), model=model))
    assert metrics["sampler_logp_diff"] < 1e-5
    stages = make_stages(model, letters(), BYTES, grpo(beta=0.0), adamw(0.1), **SIZES)
    state = stages.start(params)
    prompts, *_ = stages.prompts(state.data)
    drawn = stages.generate(stages.publish(stages_weights(state)), prompts, state.key)
    assert drawn.tokens_PGT.max() < V


def stages_weights(state):
    from grpo_jax.training.loop import weights_of

    return weights_of(state)


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match=r"stop_ids \[257\] must be below the model's vocabulary size \(257\)"):
        run(letters(), model=bigram(0.3, vocab=257)._replace(init=bigram(0.3).init))
    asks = lambda row: [{"role": "user", "content": "z"}]
    with pytest.raises(ValueError, match="a prompt has the token 258, and the model's vocabulary ends at 257"):
        encode(BYTES, asks, [{}], vocab_size=258)


@pytest.mark.parametrize("length", [33, 1000])
def test_positions_must_suffice(length):
    with pytest.raises(OptionError, match=f"max_new_tokens \\({length}\\) and prompts of up to 16 tokens do not fit"):
        run(letters(), generation=Generation(4, length))


def test_an_answer_that_has_begun_is_continued():
    begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert BYTES.render(begun) == [*b"q", 258, *b"a"]
    assert BYTES.render(begun[:1]) == [*b"q", 258]


def test_contents_may_be_parts_of_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message_text({"role": "user", "content": parts}) == "ab"
    assert BYTES.render([{"role": "user", "content": parts}]) == [*b"ab", 258]
    with pytest.raises(ValueError, match="must be text, or a list of text parts"):
        message_text({"role": "user", "content": [{"type": "image"}]})


TEMPLATE = (
    "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    "{% if not (loop.last and continue_final) %}<|im_end|>{% endif %}{% endfor %}{{ style or '' }}"
)


@pytest.fixture
def folder(tmp_path):
    """A tokenizer whose template writes the day, and whose end of turn is not its lowest stop id."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    words = ["<eos>", "<unk>", "<|im_start|>", "<|im_end|>", *"0123456789-abcdefghijklmnopqrstuvwxyz "]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = Split("", "isolated")
    inner.add_special_tokens([AddedToken(word, special=True) for word in words[:4]])
    inner.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE.replace("continue_final", "false"),
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_template_is_told_the_day_that_the_run_began(folder):
    ask = [{"role": "user", "content": "hi"}]
    old = HFTokenizer(folder, date=datetime.date(2024, 2, 29))
    text = old.inner.decode(old.render(ask))
    assert text.replace(" ", "").startswith("2024-02-29")
    assert old.render(ask) == HFTokenizer(folder, date=datetime.date(2024, 2, 29)).render(ask)
    assert old.render(ask) != HFTokenizer(folder).render(ask)
    styled = HFTokenizer(folder, date=datetime.date(2024, 2, 29), template_args={"style": "x"})
    assert styled.render(ask) == [*old.render(ask), *old.encode("x")]


def test_supervised_targets_end_as_the_template_ends_a_turn(folder):
    tokenizer = HFTokenizer(folder)
    assert min(tokenizer.stop_ids) == tokenizer.inner.eos_token_id
    assert tokenizer.end_id == tokenizer.inner.convert_tokens_to_ids("<|im_end|>")
    task = letters()._replace(target=lambda row: "ab")
    assert target_ids(task, tokenizer, {})[-1] == tokenizer.end_id
    assert target_ids(task, BYTES, {}) == [*b"ab", BYTES.end_id]


# Objectives, epochs, warnings.


def test_a_group_of_one_warns():
    with pytest.warns(UserWarning, match="a group of one has no spread"):
        only(run(letters(), generation=Generation(1, 8)))


def test_several_updates_need_a_ratio():
    with pytest.raises(OptionError, match=r"epochs \(4\) above 1 needs an objective with a ratio"):
        run(letters(), rloo(), update=Update(epochs=4))


def scalar_loss(logp_T, sample):
    return -jnp.sum(jnp.where(sample.mask_T, sample.adv * logp_T, 0.0))


def test_what_is_no_objective_is_refused_at_once():
    with pytest.raises(TypeError, match="Mean"):
        run(letters(), Objective(lambda reward_G: reward_G, scalar_loss))
    with pytest.raises(TypeError, match="call it"):
        run(letters(), grpo)


def test_a_weight_that_depends_on_the_policy_is_refused():
    def loss(logp_T, sample):
        weight = jnp.sum(jnp.where(sample.mask_T, jnp.exp(logp_T), 0.0))
        return Mean(-weight * sample.adv, weight)

    with pytest.raises(ValueError, match="weight that depends on the policy's parameters"):
        run(letters(), Objective(lambda reward_G: reward_G, loss))


def test_clip_ranges_are_found():
    """log 1.2 and log .8 of GRPO; 3e-4 and 4e-4 of GSPO; REINFORCE clips nothing. On a grid of 16 % steps."""
    assert 0.17 < clip_range(grpo()) < 0.23
    assert 2.5e-4 < clip_range(gspo()) < 4e-4
    assert clip_range(rloo()) is None


def test_a_sampler_whose_rounding_is_beyond_the_clip_range_is_told():
    """GSPO clips at 3e-4; this sampler tells log-probabilities that are 8e-4 off."""
    model = bigram(0.7)
    params = model.init(jax.random.key(0))

    def metrics(objective, old_logp):
        options = {"update": Update(old_logp=old_logp)} | SIZES
        stages = make_stages(model, letters(), BYTES, objective, adamw(0.05), **options)
        generate = stages.generate

        def off(*args):
            rollout = generate(*args)
            return rollout._replace(logp_PGT=rollout.logp_PGT + 8e-4)

        from grpo_jax import iterate

        return only(iterate(stages._replace(generate=off), stages.start(params), steps=1))

    with pytest.warns(UserWarning, match="start outside the clip range"):
        metrics(gspo(), "sampler")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        metrics(grpo(beta=0.0), "sampler")
        metrics(gspo(), "auto")


def test_an_objective_with_a_state_moves_it_and_compiles_once():
    from toy import compilations

    def at(beta):
        return Objective(lambda reward_G: beta * center(reward_G), grpo(beta=0.0).loss)

    adaptive = AdaptiveObjective(lambda: jnp.float32(1.0), at, lambda beta, metrics: beta * 0.5)
    with compilations() as compiled:
        states = [state.objective for state, _ in run(letters(), adaptive, steps=3)]
    assert [float(beta) for beta in states] == [0.5, 0.25, 0.125]
    assert compiled.count("step") == 1
