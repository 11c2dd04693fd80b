"""The sampler against the trainer's log-probabilities, and the laws of stopping and of noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.inference.generate import draw, generate
from grpo_jax.inference.logprobs import completion_logp
from grpo_jax.options import Generation, OptionError, Sampling
from grpo_jax.plan import hlo
from grpo_jax.plan.hlo_text import parse, size
from grpo_jax.types import Prompts

from toy import bigram

KEY = jax.random.key(7)


def generation_of(group_size=4, max_new_tokens=10, decode_slots=None, compactions=0, **sampling):
    return Generation(group_size, max_new_tokens, Sampling(**sampling), decode_slots, compactions)


def sample(model, params, prompts, key=KEY, first_prompt=0, stop_ids=(), pad_id=0, **options):
    generation = generation_of(**options)
    return generate(model, params, prompts, key, first_prompt, generation=generation, stop_ids=stop_ids, pad_id=pad_id)


def lowered(model, params, prompts, stop_ids=(), **options):
    return generate.lower(model, params, prompts, KEY, generation=generation_of(**options), stop_ids=stop_ids)


@pytest.mark.parametrize(
    "options",
    [{"compactions": 3}, {"decode_slots": 1}, {"decode_slots": 3}, {"decode_slots": 5, "compactions": 2}],
    ids=str,
)
def test_compaction_and_slots_change_cost_only(tiny_model, tiny_params, prompts, options):
    """Every completion at its own place, with its own noise, whichever slot it was computed in, and when."""
    shared = {"group_size": 8, "max_new_tokens": 12, "stop_ids": tuple(range(0, 60, 3))}
    whole = sample(tiny_model, tiny_params, prompts, **shared)
    assert len(np.unique(whole.mask_PGT.sum(-1))) > 3
    other = sample(tiny_model, tiny_params, prompts, **options, **shared)
    for field in ("tokens_PGT", "mask_PGT", "stopped_PG"):
        np.testing.assert_array_equal(getattr(other, field), getattr(whole, field))
    np.testing.assert_allclose(other.logp_PGT, whole.logp_PGT, atol=1e-5)


def test_slots_hold_the_cache_of_as_many_completions(tiny_model, tiny_params, prompts, optimized):
    def temporaries(**options):
        program = lowered(tiny_model, tiny_params, prompts, group_size=32, max_new_tokens=256, **options)
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(decode_slots=4) < 0.25 * temporaries()


def steps_with_slots(lengths: list[int], decode_slots: int) -> int:
    """Token steps until all completions of a prompt are there, each of which gets its first token without a step."""
    waiting = lengths[decode_slots:]
    going = [length - 1 for length in lengths[:decode_slots]]
    steps = 0
    while waiting or any(left > 0 for left in going):
        steps += 1
        going = [left - 1 for left in going]
        for i, left in enumerate(going):
            if left <= 0 and waiting:
                going[i] = waiting.pop(0) - 1
    return steps


def test_compaction_and_slots_decode_fewer_sequences():
    """A model that counts: the sequences decoded, from a group in which one completion goes on to the end."""
    decoded = []

    def decode(params, context, own, index, token):
        jax.debug.callback(lambda x: decoded.append(int(x)), token)  # once for each sequence
        return jnp.where(params["long"][token] > 0, params["long"][token] * 50.0 + 1.0, 0.0)[None], own

    model = bigram()._replace(
        prefill=lambda params, tokens_S, mask_S: (jnp.zeros((len(tokens_S), 1)), None),
        decode=decode,
        logits=lambda params, hidden_D: jnp.zeros(3),
        for_decoding=lambda params: params,
        empty=lambda max_tokens: jnp.zeros(()),
        decode_logits=lambda params, hidden: jnp.where(
            hidden == 0, jnp.array([1.5, 0.0, -1e9]), jnp.where(hidden > 1, jnp.array([-1e9, 0.0, -1e9]), 0.0)
        ),
    )
    prompts = Prompts(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    params = {"long": jnp.array([0.0, 1.0, 0.0])}
    counts = {}
    for compactions in (0, 1, 3):
        decoded.clear()
        out = sample(model, params, prompts, group_size=16, max_new_tokens=10, stop_ids=(0,), compactions=compactions)
        jax.effects_barrier()
        counts[compactions] = len(decoded)
        going = int((~out.stopped_PG).sum())
    assert 0 < going <= 8
    assert counts == {
        0: 16 * 9,
        1: 8 * 9,
        3: next(decode_slots for decode_slots in (4, 8, 12) if decode_slots >= going) * 9,
    }
    for decode_slots in (1, 3, 15):
        decoded.clear()
        out = sample(model, params, prompts, group_size=16, max_new_tokens=10, stop_ids=(0,), decode_slots=decode_slots)
        jax.effects_barrier()
        lengths = [int(n) for n in out.mask_PGT[0].sum(-1)]
        assert len(decoded) == decode_slots * steps_with_slots(lengths, decode_slots)


@pytest.mark.parametrize("decode_slots", [1, 3, 4, None])
def test_the_number_of_steps_has_a_bound_that_full_completions_reach(tiny_model, tiny_params, prompts, decode_slots):
    options = {"group_size": 7, "max_new_tokens": 6, "decode_slots": decode_slots}
    text = lowered(tiny_model, tiny_params, prompts, **options).compile().as_text()
    bound = steps_with_slots([6] * 7, decode_slots or 7)
    assert bound in hlo.count(text).loops.values()
    assert sample(tiny_model, tiny_params, prompts, **options).mask_PGT.all()


@pytest.mark.parametrize("count", [1, 2])
def test_no_cache_is_copied_at_a_token(tiny_model, tiny_params, prompts, optimized, count):
    few = jax.tree.map(lambda x: x[:count], prompts)
    module = parse(lowered(tiny_model, tiny_params, few).compile().as_text())
    c = tiny_model.config
    cache = count * 4 * c.num_key_value_heads * c.head_dim * 10  # keys or values of a layer, all completions
    inside = [one for name, one in module.computations.items() if name != module.entry]
    copied = [i for one in inside for i in one.instructions.values() if i.op == "copy"]
    assert not [i for i in copied if size(i.shape) == 4 * cache]


def test_one_token_each_is_drawn_without_a_step(tiny_model, tiny_params, prompts):
    whole = sample(tiny_model, tiny_params, prompts, max_new_tokens=1)
    few = sample(tiny_model, tiny_params, prompts, max_new_tokens=1, decode_slots=2)
    np.testing.assert_array_equal(few.tokens_PGT, whole.tokens_PGT)
    assert few.mask_PGT.all()


def test_inside_a_compiled_function_and_by_itself_are_the_same(tiny_model, tiny_params, prompts):
    """On its own it is compiled with options of its own, which a part of another program cannot have."""
    alone = sample(tiny_model, tiny_params, prompts, stop_ids=(3,))
    inside = jax.jit(lambda p: sample(tiny_model, p, prompts, stop_ids=(3,)))(tiny_params)
    ahead = lowered(tiny_model, tiny_params, prompts, stop_ids=(3,)).compile()
    for other in (inside, ahead(tiny_params, prompts, KEY, 0)):
        np.testing.assert_array_equal(other.tokens_PGT, alone.tokens_PGT)
        np.testing.assert_allclose(other.logp_PGT, alone.logp_PGT, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7, "temperature": 1.2},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.9},
    ],
    ids=str,
)
def test_log_probabilities_equal_the_trainers(tiny_model, tiny_params, prompts, options):
    out = sample(tiny_model, tiny_params, prompts, stop_ids=(3, 5), **options)
    sampling = Sampling(**options)
    logp = completion_logp(tiny_model, tiny_params, prompts, out.tokens_PGT, out.mask_PGT, sampling=sampling)
    np.testing.assert_allclose(out.logp_PGT, logp, atol=1e-5)


def test_another_temperature_would_show(tiny_model, tiny_params, prompts):
    out = sample(tiny_model, tiny_params, prompts, temperature=0.9)
    logp = completion_logp(tiny_model, tiny_params, prompts, out.tokens_PGT, out.mask_PGT)
    assert np.abs(out.logp_PGT - logp).max() > 1e-2


def test_the_mask_ends_with_the_stop_token(tiny_model, tiny_params, prompts):
    stop_ids = (3, 5, 8, 11)
    out = sample(tiny_model, tiny_params, prompts, group_size=16, max_new_tokens=12, stop_ids=stop_ids, pad_id=3)
    tokens, mask, stopped = map(np.asarray, (out.tokens_PGT, out.mask_PGT, out.stopped_PG))
    lengths = mask.sum(-1)
    assert stopped.any()
    assert not stopped.all()
    for index in np.ndindex(stopped.shape):
        n = lengths[index]
        assert mask[index][:n].all()
        is_stop = np.isin(tokens[index], stop_ids)
        assert not is_stop[: n - 1].any(), "a stop token inside a completion"
        assert is_stop[n - 1] == stopped[index], "the stop token is part of the completion"
        assert (tokens[index][n:] == 3).all(), "padding, here equal to a stop id"
        if not stopped[index]:
            assert n == 12


def test_greedy_takes_the_most_likely_token(tiny_model, tiny_params, prompts):
    out = sample(tiny_model, tiny_params, prompts, group_size=1, temperature=0.0)
    ids = np.concatenate([np.asarray(prompts.tokens_PS[1])[3:], out.tokens_PGT[1, 0]])
    hidden, _ = tiny_model.prefill(tiny_params, jnp.asarray(ids), jnp.ones(len(ids), bool))
    best = np.asarray(tiny_model.logits(tiny_params, hidden)).argmax(-1)
    np.testing.assert_array_equal(out.tokens_PGT[1, 0], best[8:-1])
    logp = completion_logp(tiny_model, tiny_params, prompts, out.tokens_PGT, out.mask_PGT)
    np.testing.assert_allclose(out.logp_PGT, logp, atol=1e-5)


def test_noise_depends_on_key_prompt_and_sample_alone(tiny_model, tiny_params, prompts):
    whole = sample(tiny_model, tiny_params, prompts)
    again = sample(tiny_model, tiny_params, prompts)
    np.testing.assert_array_equal(whole.tokens_PGT, again.tokens_PGT)
    other = sample(tiny_model, tiny_params, prompts, key=jax.random.key(8))
    assert (np.asarray(whole.tokens_PGT) != np.asarray(other.tokens_PGT)).any()
    half = sample(tiny_model, tiny_params, jax.tree.map(lambda x: x[2:], prompts), first_prompt=2)
    np.testing.assert_array_equal(whole.tokens_PGT[2:], half.tokens_PGT)
    fewer = sample(tiny_model, tiny_params, prompts, group_size=2)
    np.testing.assert_array_equal(whole.tokens_PGT[:, :2], fewer.tokens_PGT)


def test_equal_prompts_and_samples_draw_different_noise(tiny_model, tiny_params, prompts):
    same = jax.tree.map(lambda x: jnp.repeat(x[:1], 4, axis=0), prompts)
    out = np.asarray(sample(tiny_model, tiny_params, same).tokens_PGT).reshape(16, -1)
    assert len({tuple(row) for row in out}) == 16


def test_draws_follow_the_distribution():
    p = np.array([0.1, 0.2, 0.0, 0.4, 0.25, 0.05])
    logits = jnp.maximum(jnp.log(p), -1e30)
    n = 50_000
    tokens = jax.vmap(draw, (0, None))(jax.random.split(KEY, n), logits)
    count = np.bincount(np.asarray(tokens), minlength=6)
    assert count[2] == 0
    # Pearson's statistic with 4 degrees of freedom: 18.5 has a chance of .001.
    assert (((count - n * p) ** 2)[p > 0] / (n * p[p > 0])).sum() < 18.5


def test_a_distribution_of_one_token_is_drawn_at_any_place():
    for V in (1, 2, 3, 64, 65, 1000):
        for token in {0, V // 2, V - 1}:
            logits = jnp.full(V, -1e30).at[token].set(2.0)
            drawn = jax.vmap(draw, (0, None))(jax.random.split(KEY, 50), logits)
            assert (np.asarray(drawn) == token).all()


def test_sampling_stops_when_all_have_stopped(tiny_model, tiny_params, prompts):
    """Every token stops: one token each, whatever the limit."""
    out = sample(tiny_model, tiny_params, prompts, stop_ids=tuple(range(61)))
    np.testing.assert_array_equal(out.mask_PGT.sum(-1), 1)
    assert np.asarray(out.stopped_PG).all()


@pytest.mark.parametrize("name", ["group_size", "max_new_tokens"])
def test_sizes_are_checked(tiny_model, tiny_params, prompts, name):
    with pytest.raises(OptionError, match=f"^{name} must be an integer of at least 1, got 0") as raised:
        sample(tiny_model, tiny_params, prompts, **{name: 0})
    assert raised.value.name == name


def test_sampling_settings_are_checked(tiny_model, tiny_params, prompts):
    """Also by the program that is not run yet."""
    for call in (sample, lowered):
        with pytest.raises(OptionError, match=r"^top_p must be in \(0, 1\]"):
            call(tiny_model, tiny_params, prompts, top_p=2.0)
