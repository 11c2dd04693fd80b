"""Models from functions and NNX modules give what the decoder gives."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from grpo_jax.inference.generate import generate
from grpo_jax.inference.logprobs import completion_logp
from grpo_jax.models import from_apply, from_nnx
from grpo_jax.options import Generation, Sampling
from grpo_jax.types import Prompts

from nnx_toy import Averager

G, T = 3, 5


def whole_sequence(model, params, tokens_BN):
    """The decoder as a function of whole sequences: what a user would bring."""
    hidden = jax.vmap(lambda tokens: model.prefill(params, tokens, jnp.ones(tokens.shape, bool))[0])(tokens_BN)
    return model.logits(params, hidden)


@pytest.fixture(scope="module")
def wrapped(tiny_model):
    return from_apply(partial(whole_sequence, tiny_model), vocab_size=61, init=tiny_model.init)


@pytest.fixture(scope="module")
def completions():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 61, (4, G, T)).astype(np.int32)
    return tokens, np.arange(T) < rng.integers(1, T + 1, (4, G))[..., None]


def test_logp_and_gradient_are_the_decoders(tiny_model, wrapped, tiny_params, prompts, completions):
    """For padded prompts of four lengths, as one function of whole sequences that knows no padding."""

    @partial(jax.jit, static_argnums=0)
    def value_and_grad(model, params):
        logp = lambda p: completion_logp(model, p, prompts, *completions, sampling=Sampling(0.7, 20))
        weights = jnp.cos(jnp.arange(4 * G * T).reshape(4, G, T))
        return logp(params), jax.grad(lambda p: (logp(p) * weights).sum())(params)

    got, wanted = value_and_grad(wrapped, tiny_params), value_and_grad(tiny_model, tiny_params)
    chex.assert_trees_all_close(got, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_draws_the_decoders_tokens(tiny_model, wrapped, tiny_params, prompts, temperature):
    draw = partial(generate, generation=Generation(G, T, Sampling(temperature)), stop_ids=(3, 5))
    got = draw(wrapped, tiny_params, prompts, jax.random.key(1))
    wanted = draw(tiny_model, tiny_params, prompts, jax.random.key(1))
    np.testing.assert_array_equal(got.tokens_PGT, wanted.tokens_PGT)
    np.testing.assert_array_equal(got.mask_PGT, wanted.mask_PGT)
    np.testing.assert_allclose(got.logp_PGT, wanted.logp_PGT, atol=1e-5)


def test_init_is_the_one_given(wrapped, tiny_model):
    chex.assert_trees_all_equal(wrapped.init(jax.random.key(2)), tiny_model.init(jax.random.key(2)))
    with pytest.raises(ValueError, match="without init="):
        from_apply(lambda params, tokens: tokens, vocab_size=4).init(jax.random.key(0))


def test_logits_of_another_shape_are_an_error(prompts):
    model = from_apply(lambda params, tokens: jnp.zeros((*tokens.shape, 5)), vocab_size=4)
    with pytest.raises(ValueError, match=r"logits of shape \(1, 12, 4\), got \(1, 12, 5\)"):
        model.prefill({}, prompts.tokens_PS[0], prompts.mask_PS[0])


@pytest.fixture(scope="module")
def averager():
    return Averager(11, 8, nnx.Rngs(0))


def test_an_nnx_module_is_itself(averager):
    """log π from the adapter is the log-softmax of the module's own logits."""
    model, params = from_nnx(averager, vocab_size=11)
    prompts = Prompts(jnp.array([[9, 9, 4, 7]]), jnp.array([[False, False, True, True]]))
    tokens = jnp.array([[[1, 2, 10]]])
    got = completion_logp(model, params, prompts, tokens, jnp.ones((1, 1, 3), bool))
    logits = averager(jnp.array([[4, 7, 1, 2, 10]]))[0]
    wanted = jax.nn.log_softmax(logits)[jnp.array([1, 2, 3]), tokens[0, 0]]
    np.testing.assert_allclose(got[0, 0], wanted, rtol=1e-5)
    assert model.config.dtype == "float32"
    assert model.axes is None


def test_nnx_parameters_are_plain_and_all_trained(averager):
    """Every Param has a gradient, nothing else is a parameter, and the module keeps its own."""
    model, params = from_nnx(averager, vocab_size=11)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(averager, nnx.Param)))
    prompts = Prompts(jnp.array([[4, 7]]), jnp.ones((1, 2), bool))
    tokens, mask = jnp.array([[[1, 2, 10]]]), jnp.ones((1, 1, 3), bool)
    grads = jax.grad(lambda p: completion_logp(model, p, prompts, tokens, mask).sum())(params)
    assert jax.tree.structure(params) == jax.tree.structure(before)
    assert len(jax.tree.leaves(params)) == 7
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))
    moved = jax.tree.map(lambda p, g: p + g, params, grads)
    rollout = generate(model, moved, prompts, jax.random.key(0), generation=Generation(2, 3))
    assert rollout.tokens_PGT.shape == (1, 2, 3)
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(averager, nnx.Param)), before)


def test_nnx_call_says_how(averager):
    halved, params = from_nnx(averager, vocab_size=11, call=lambda module, tokens: module(tokens) / 2)
    plain, _ = from_nnx(averager, vocab_size=11)
    one = lambda model: model.prefill(params, jnp.array([4, 7]), jnp.ones(2, bool))[0]
    np.testing.assert_allclose(2 * one(halved), one(plain), rtol=1e-6)
