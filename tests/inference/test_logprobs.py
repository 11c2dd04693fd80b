"""Log-probabilities of completions against a plain forward pass, and what they cost."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.inference.logprobs import (
    KEPT_LOGITS,
    completion_logp,
    completion_scores,
    filter_logits,
    log_sum_exp,
    over_chunks,
)
from grpo_jax.models import DecoderConfig, decoder
from grpo_jax.options import OptionError, Sampling
from grpo_jax.plan import hlo
from grpo_jax.types import Prompts

from conftest import TINY, ragged

G, T = 3, 7


@pytest.fixture(scope="module")
def completions():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, TINY.vocab_size, (4, G, T)), jnp.int32), jnp.asarray(ragged(rng, 4, G, T))


def plain_logp(model, params, prompt, mask, completion):
    """log π of a completion: the unpadded prompt and the completion in one sequence, softmax in float64."""
    ids = np.concatenate([np.asarray(prompt)[np.asarray(mask)], completion])
    # One length for all, so that one program is compiled; causality makes what stands behind irrelevant.
    padded = jnp.asarray(np.pad(ids, (0, 24 - len(ids))))
    logits = jax.jit(lambda p, x: model.logits(p, model.prefill(p, x, jnp.ones(24, bool))[0]))(params, padded)
    logits = np.asarray(logits, np.float64)[: len(ids)]
    logp = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    n = len(completion)
    return logp[-n - 1 : -1][np.arange(n), completion], logp[-n - 1 : -1]


def test_equals_a_plain_pass_over_the_whole_sequence(tiny_model, tiny_params, prompts, completions):
    tokens, mask = completions
    scores = jax.jit(lambda p: completion_scores(tiny_model, p, prompts, tokens, mask, with_entropy=True))
    logp, entropy = scores(tiny_params)
    for p in range(4):
        for g in range(G):
            n = int(mask[p, g].sum())
            expected, rows = plain_logp(
                tiny_model, tiny_params, prompts.tokens_PS[p], prompts.mask_PS[p], np.asarray(tokens[p, g, :n])
            )
            np.testing.assert_allclose(logp[p, g, :n], expected, atol=1e-5)
            np.testing.assert_allclose(entropy[p, g, :n], -(np.exp(rows) * rows).sum(-1), atol=1e-5)
            assert not np.any(logp[p, g, n:])
            assert not np.any(entropy[p, g, n:])


def test_temperature_divides_the_logits():
    # Logits [2, 0]: log-probability of token 0 at temperature .9 and 1 (computed by hand: −log(1 + e^(−2/τ))).
    for temperature, expected in ((0.9, -0.1028887), (1.0, -0.1269280)):
        logits = filter_logits(jnp.array([2.0, 0.0]), Sampling(temperature))
        np.testing.assert_allclose(jax.nn.log_softmax(logits)[0], expected, atol=1e-6)


def test_shared_prompt_equals_repeated_prompt(tiny_model, tiny_params, prompts, completions):
    """Values and gradients: the prompt's gradient is summed over its group."""
    tokens, mask = completions
    repeated = jax.tree.map(lambda x: jnp.repeat(x, G, axis=0), prompts)
    weight = jax.random.normal(jax.random.key(5), mask.shape)

    def shared(params):
        logp = completion_logp(tiny_model, params, prompts, tokens, mask)
        return (weight * logp).sum(), logp

    def separate(params):
        logp = completion_logp(tiny_model, params, repeated, tokens.reshape(4 * G, 1, T), mask.reshape(4 * G, 1, T))
        return (weight * logp.reshape(mask.shape)).sum(), logp.reshape(mask.shape)

    (_, logp), grads = jax.jit(jax.value_and_grad(shared, has_aux=True))(tiny_params)
    (_, expected), expected_grads = jax.jit(jax.value_and_grad(separate, has_aux=True))(tiny_params)
    np.testing.assert_allclose(logp, expected, atol=1e-5)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected_grads))
    chex.assert_trees_all_close(grads, expected_grads, atol=1e-5 * largest, rtol=1e-5)


def test_the_prompt_is_computed_once_by_xlas_own_count(optimized):
    """FLOPs of loss and gradient at G 8, S 256, T 64: at most .45 of those with the prompt repeated.

    Layers are unrolled and the vocabulary projected in one chunk, because XLA counts a loop's body once.
    """
    config = DecoderConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = decoder(config, scan=False)
    params = jax.eval_shape(model.init, jax.random.key(0))

    def flops(P, G, S=256, T=64):
        shape = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct(s, dtype)
        prompts = Prompts(shape(P, S), shape(P, S, dtype=bool))
        tokens, mask = shape(P, G, T), shape(P, G, T, dtype=bool)
        loss = lambda p, *batch: completion_logp(model, p, *batch, logit_chunk=P * G * T).sum()
        return jax.jit(jax.value_and_grad(loss)).lower(params, prompts, tokens, mask).compile().cost_analysis()["flops"]

    assert flops(1, 8) <= 0.45 * flops(8, 1)


def test_memory_does_not_grow_with_vocabulary_times_length(optimized):
    """Temporaries of loss and gradient: eight times the tokens must not add eight times the logits."""
    V, D, chunk = 32768, 32, 64
    config = DecoderConfig(
        vocab_size=V, hidden_size=D, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    model = decoder(config)
    params = jax.eval_shape(model.init, jax.random.key(0))

    def temporaries(T):
        shape = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct(s, dtype)
        batch = Prompts(shape(1, 16), shape(1, 16, dtype=bool)), shape(1, 4, T), shape(1, 4, T, dtype=bool)
        loss = lambda p, *b: completion_logp(model, p, *b, logit_chunk=chunk).sum()
        return jax.jit(jax.grad(loss)).lower(params, *batch).compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(32), temporaries(256)
    assert large - small < 0.25 * (4 * 256 - 4 * 32) * V * 4
    assert large < 8 * chunk * V * 4 + 4 * V * D * 4


def test_logits_are_kept_where_products_are_and_they_are_few(tiny_params, prompts, completions, optimized):
    """One product with the vocabulary less: 2 FLOPs for each token and entry of it, up to `KEPT_LOGITS` entries."""
    N = 4 * G * T

    def programs(vocab):
        model = decoder(dataclasses.replace(TINY, vocab_size=vocab), remat="dots")
        params = jax.eval_shape(model.init, jax.random.key(0))
        for one in (model, model._replace(keeps_products=False)):
            score = partial(completion_logp, one, logit_chunk=4 * T)  # G chunks
            loss = lambda p, score=score: score(p, prompts, *completions).sum()
            yield jax.jit(jax.value_and_grad(loss)).lower(params).compile()

    flops = lambda program: hlo.count(program.as_text()).flops
    once, again = programs(TINY.vocab_size)
    assert flops(again) - flops(once) == 2 * N * TINY.hidden_size * TINY.vocab_size
    chex.assert_trees_all_close(once(tiny_params), again(tiny_params), rtol=1e-6, atol=1e-6)
    assert not decoder(TINY).keeps_products
    once, again = programs(KEPT_LOGITS // N + 1)
    assert flops(again) == flops(once)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_the_chunk_changes_cost_only(tiny_model, tiny_params, prompts, completions, chunk):
    def loss(chunk):
        score = partial(completion_logp, tiny_model, logit_chunk=chunk)
        return jax.jit(jax.value_and_grad(lambda p: score(p, prompts, *completions).mean()))

    chex.assert_trees_all_close(loss(chunk)(tiny_params), loss(256)(tiny_params), atol=1e-5, rtol=1e-5)


def test_over_chunks_pads_and_cuts():
    x = jnp.arange(20.0).reshape(2, 10)
    np.testing.assert_array_equal(over_chunks(lambda x: x * 2, 4, x), 2 * x)


def test_chunks_are_of_one_size_and_hardly_padded():
    """Ten entries, at most six at once: two chunks of five, where six and four would be two of six."""
    sizes = []
    over_chunks(lambda x: sizes.append(x.shape) or x, 6, jnp.zeros((2, 10)))
    assert set(sizes) == {(2, 5)}


def test_log_sum_exp_is_that_of_jax():
    x = 30 * jax.random.normal(jax.random.key(0), (3, 5, 1000))
    np.testing.assert_allclose(log_sum_exp(x), jax.nn.logsumexp(x, axis=-1), rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(log_sum_exp(x) ** 2))(x)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: jnp.sum(jax.nn.logsumexp(x, -1) ** 2))(x), atol=1e-4)


def test_what_stands_after_the_mask_changes_nothing(tiny_model, tiny_params, prompts, completions):
    tokens, mask = completions
    other = jnp.where(mask, tokens, 60)
    loss = jax.jit(jax.value_and_grad(lambda p, t: completion_logp(tiny_model, p, prompts, t, mask).sum()))
    chex.assert_trees_all_equal(loss(tiny_params, other), loss(tiny_params, jnp.where(mask, tokens, 3)))


LOGITS = jnp.log(jnp.array([0.4, 0.3, 0.15, 0.1, 0.05]))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), 5),
        (Sampling(top_k=2), 2),
        (Sampling(top_k=99), 5),
        (Sampling(top_p=0.65), 2),
        (Sampling(top_p=0.71), 3),
        (Sampling(top_p=0.01), 1),
        (Sampling(min_p=0.3), 3),
        (Sampling(min_p=0.3, top_k=2), 2),
        (Sampling(temperature=100.0, top_p=0.5), 3),  # nearly uniform: three fifths reach a half
    ],
)
def test_filters(sampling, kept):
    p = jax.nn.softmax(filter_logits(LOGITS, sampling))
    assert int((p > 0).sum()) == kept
    np.testing.assert_allclose(p.sum(), 1, atol=1e-6)
    np.testing.assert_array_equal(p[:kept] > 0, True)


def test_a_drawn_token_stays_possible_on_the_edge_of_a_filter():
    logits = filter_logits(LOGITS, Sampling(top_k=2), token=jnp.array(4))
    assert np.isfinite(jax.nn.log_softmax(logits)[4])
    assert jax.nn.log_softmax(logits)[4] > -5


def test_the_trainers_sampling_is_checked(tiny_model, tiny_params, prompts, completions):
    with pytest.raises(OptionError, match=r"^min_p must be in"):
        completion_logp(tiny_model, tiny_params, prompts, *completions, sampling=Sampling(min_p=1.5))
