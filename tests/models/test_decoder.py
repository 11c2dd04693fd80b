"""The decoder's own laws: causality, padding, the shared prompt, and one token at a time."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.models import DecoderConfig, decoder
from grpo_jax.models.attention import attend, attend_causal
from grpo_jax.models.rope import rope_frequencies
from grpo_jax.models.training_pass import remat_that_fits
from grpo_jax.plan import hlo

from conftest import TINY

VARIANTS = {
    "plain": TINY,
    "untied, biased": dataclasses.replace(TINY, tie_word_embeddings=False, attention_bias=True),
    "one head a group, llama3": dataclasses.replace(
        TINY, num_key_value_heads=4, rope_scaling=("llama3", 8.0, 1.0, 4.0, 64)
    ),
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def model_and_params(request):
    model = decoder(request.param)
    params = jax.jit(model.init)(jax.random.key(0))
    # Biases start at zero; give them values that count.
    return model, jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), params)


def tokens(n, seed=1):
    return jax.random.randint(jax.random.key(seed), (n,), 0, TINY.vocab_size, jnp.int32)


def test_left_padding_changes_nothing(model_and_params):
    model, params = model_and_params
    ids = tokens(9)
    prefill = jax.jit(model.prefill)
    hidden, _ = prefill(params, ids, jnp.ones(9, bool))
    padded = jnp.concatenate([jnp.full(4, 17), ids])
    hidden_padded, _ = prefill(params, padded, jnp.arange(13) >= 4)
    np.testing.assert_allclose(hidden_padded[4:], hidden, atol=2e-5)
    assert np.isfinite(hidden_padded).all(), "padding rows must stay finite: a NaN would spread through 0 · NaN"


def test_extending_and_decoding_equal_one_pass(model_and_params):
    model, params = model_and_params
    ids = tokens(14)
    prefill, decode = jax.jit(model.prefill), jax.jit(model.decode)
    hidden, _ = prefill(params, ids, jnp.ones(14, bool))
    _, cache = prefill(params, jnp.pad(ids[:8], (3, 0)), jnp.arange(11) >= 3)
    np.testing.assert_allclose(jax.jit(model.extend)(params, cache, ids[8:]), hidden[8:], atol=2e-5)
    weights, own = model.for_decoding(params), model.empty(6)
    for i in range(6):
        one, own = decode(weights, cache, own, jnp.array(i), ids[8 + i])
        np.testing.assert_allclose(one, hidden[8 + i], atol=2e-5)
        np.testing.assert_allclose(model.decode_logits(weights, one), model.logits(params, one), atol=1e-5)


def test_no_token_sees_the_future_or_padding(model_and_params):
    """Gradients of a hidden state with respect to later and to masked embeddings are exactly zero."""
    model, params = model_and_params
    ids = jnp.arange(10, dtype=jnp.int32)  # distinct tokens: one embedding row a position

    def state(embed, t):
        p = params | {"embed": embed}
        hidden, cache = model.prefill(p, ids[:5], jnp.arange(5) >= 1)
        return jnp.concatenate([hidden, model.extend(p, cache, ids[5:])])[t].sum()

    gradient = jax.jit(jax.grad(state))
    for t in (2, 4, 6, 9):
        touched = np.abs(gradient(params["embed"], t)).sum(-1)[:10] > 0
        np.testing.assert_array_equal(touched, [1 <= i <= t for i in range(10)])


def test_attention_in_parts_is_attention_in_one():
    k = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 4, 5, 3, 8), (2, 9, 8), (2, 9, 8)  # two key heads, four sequences of five queries, nine keys
    q, key, value = (jax.random.normal(x, s) for x, s in zip(k, shapes, strict=True))
    mask = jax.random.bernoulli(jax.random.key(3), 0.7, (5, 9)).at[:, 0].set(True)

    def whole(q, key, value):
        return attend(q, [(key, value, mask)])

    def cut(q, key, value):
        """The last five keys as each sequence's own."""
        own = [jnp.broadcast_to(x[:, None, 4:], (2, 4, 5, 8)) for x in (key, value)]
        return attend(q, [(key[:, :4], value[:, :4], mask[:, :4]), (*own, mask[:, 4:])])

    def expected(q, key, value):
        score = jnp.einsum("kgthd,ksd->kgths", q, key) / np.sqrt(8)
        p = jax.nn.softmax(jnp.where(mask[:, None], score, -jnp.inf), axis=-1)
        return jnp.einsum("kgths,ksd->kgthd", p, value)

    value_and_gradients = lambda f: jax.value_and_grad(lambda *x: jnp.sum(f(*x) ** 2), argnums=(0, 1, 2))(q, key, value)
    np.testing.assert_allclose(whole(q, key, value), expected(q, key, value), atol=1e-6)
    for f in (whole, cut):
        chex.assert_trees_all_close(value_and_gradients(f), value_and_gradients(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [1, 3, 4])
def test_blocks_of_a_causal_attention_change_cost_only(block):
    rng = np.random.default_rng(1)
    shapes = (2, 3, 8, 2, 4), (2, 3, 8, 4), (2, 3, 8, 4), (2, 5, 4), (2, 5, 4)
    q, k, v, *prompt = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    mask, before = jnp.arange(8) >= 3, ((*prompt, jnp.arange(5) >= 1),)
    for seen in ((), before):
        whole, cut = attend_causal(q, k, v, mask, seen), attend_causal(q, k, v, mask, seen, block=block)
        np.testing.assert_allclose(cut[:, :, 3:], whole[:, :, 3:], atol=1e-6)
    assert np.abs(attend_causal(q, k, v, mask) - whole).max() > 0.1  # what stands before is seen


def test_blocks_of_a_causal_attention_save_work(optimized):
    """Four blocks compute 10 of 16 blocks of scores."""
    q, k, v = jnp.zeros((2, 1, 64, 2, 8)), jnp.zeros((2, 1, 64, 8)), jnp.zeros((2, 1, 64, 8))
    program = lambda block: jax.jit(partial(attend_causal, block=block)).lower(q, k, v, jnp.ones(64, bool)).compile()
    assert program(16).cost_analysis()["flops"] < 0.75 * program(64).cost_analysis()["flops"]


def test_a_prompt_and_its_group_together_equal_one_after_another():
    model, ids = decoder(TINY), tokens(8)
    params, mask = jax.jit(model.init)(jax.random.key(0)), jnp.arange(8) >= 2
    group = jnp.stack([tokens(5), tokens(5)[::-1]])

    def separate(params):
        hidden, cache = model.prefill(params, ids, mask)
        return hidden, jax.vmap(lambda x: model.extend(params, cache, x))(group).reshape(10, -1)

    expected = jax.jit(separate)(params)
    other = jnp.zeros(8, jnp.int32)  # a prompt beside it, which must not be seen
    prompts, masks, groups = jnp.stack([other, ids]), jnp.stack([mask | True, mask]), jnp.stack([group[::-1], group])
    whole = jax.jit(lambda p: model.forward(p, prompts, masks, groups, None))(params)
    places = jnp.array([0, 1, 5, 6, 7, 10])
    both = jnp.stack([jnp.arange(6), places])
    packed = jax.jit(lambda p: model.forward(p, prompts, masks, groups, both))(params)
    np.testing.assert_allclose(whole[0][1, 2:], expected[0][2:], atol=1e-5)
    np.testing.assert_allclose(whole[1][1], expected[1], atol=1e-5)
    np.testing.assert_allclose(packed[1][1, :5], expected[1][places[:5]], atol=1e-5)


def test_remat_by_memory_counts_what_is_kept():
    """L · tokens · (2D + 2F + (H + 2K) d) numbers: a byte less of room, and less is kept."""
    wide = dataclasses.replace(TINY, hidden_size=24, intermediate_size=40, num_attention_heads=4, head_dim=8)
    kept = wide.num_hidden_layers * 10 * (2 * 24 + 2 * 40 + (4 + 2 * wide.num_key_value_heads) * 8) * 4
    assert remat_that_fits(wide, 10, kept) == "dots"
    assert remat_that_fits(wide, 10, kept - 1) == "layer"
    assert remat_that_fits(dataclasses.replace(wide, dtype="bfloat16"), 20, kept) == "dots"


@pytest.mark.parametrize("options", [{"remat": "none"}, {"remat": "attention"}, {"remat": "dots"}, {"scan": False}])
def test_remat_and_scan_change_cost_only(options):
    ids, params = tokens(8), jax.jit(decoder(TINY).init)(jax.random.key(0))

    def loss(model):
        return jax.jit(jax.value_and_grad(lambda p: jnp.square(model.prefill(p, ids, jnp.ones(8, bool))[0]).mean()))

    chex.assert_trees_all_close(loss(decoder(TINY, **options))(params), loss(decoder(TINY))(params), atol=1e-5)


def test_remat_saves_memory(optimized):
    config = dataclasses.replace(TINY, num_hidden_layers=8, intermediate_size=256)
    params = jax.eval_shape(decoder(config).init, jax.random.key(0))

    def temporaries(model):
        loss = lambda p: jnp.square(model.prefill(p, tokens(64), jnp.ones(64, bool))[0]).mean()
        return jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(decoder(config)) < 0.6 * temporaries(decoder(config, remat="none"))


def test_each_remat_policy_computes_less_again_than_the_one_before(optimized):
    """FLOPs of a gradient. "none" computes nothing twice, "dots" no product with a weight: its attention alone."""
    config = dataclasses.replace(TINY, num_hidden_layers=2, intermediate_size=256)
    params = jax.eval_shape(decoder(config).init, jax.random.key(0))

    def flops(remat):
        model = decoder(config, remat=remat)
        loss = lambda p: jnp.square(model.prefill(p, tokens(64), jnp.ones(64, bool))[0]).mean()
        return hlo.count(jax.jit(jax.grad(loss)).lower(params).compile().as_text()).flops

    layer, attention, dots, none = map(flops, ("layer", "attention", "dots", "none"))
    assert layer > attention > dots > none
    H, d, D, F = config.num_attention_heads, config.head_dim, config.hidden_size, config.intermediate_size
    assert attention - dots == 2 * 2 * 64 * D * (H * d + 2 * F)  # o, gate and up of two layers
    assert dots - none == 2 * 2 * 2 * 64 * 64 * H * d  # scores and mixture of two layers


def test_bfloat16_parameters_give_float32_logits():
    model = decoder(dataclasses.replace(TINY, dtype="bfloat16"))
    params = jax.jit(model.init)(jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    hidden, _ = jax.jit(model.prefill)(params, tokens(6), jnp.ones(6, bool))
    assert hidden.dtype == jnp.bfloat16
    assert model.logits(params, hidden).dtype == jnp.float32


def test_llama3_scaling_keeps_short_and_stretches_long_wavelengths():
    config = dataclasses.replace(TINY, head_dim=64, rope_scaling=("llama3", 8.0, 1.0, 4.0, 8192))
    plain = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    scaled = rope_frequencies(config)
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)


def test_equal_configurations_are_one_model():
    assert decoder(TINY) is decoder(dataclasses.replace(TINY))
    assert decoder(TINY) is not decoder(TINY, remat="none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rope_scaling": ("yarn", 1, 2, 3, 4)}, "rope_scaling must be"),
        ({"rope_scaling": ("llama3", 8.0, 4.0, 4.0, 64)}, "low_freq_factor .* must be below high_freq_factor"),
        ({"rope_scaling": ("linear", float("nan"))}, "factor must be a finite number"),
        ({"rope_theta": -1.0}, "rope_theta must be above 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a finite number"),
        ({"rotary_share": 0.1}, "rotary_share must give an even number"),
        ({"dtype": "float8"}, "dtype must be"),
        ({"qk_norm": "both"}, "qk_norm must be one of"),
        ({"norm_places": "after"}, "norm_places must be one of"),
        ({"activation": "swiglu"}, "activation must be one of"),
        ({"attention_cap": 0}, "attention_cap must be above 0"),
        ({"query_scale": (0.1, 0)}, "query_scale must be above 0"),
        ({"layer_windows": (4,)}, "layer_windows must be a tuple with one entry for each of 2 layers"),
        ({"layer_windows": [4, 4]}, "layer_windows must be a tuple"),
        ({"layer_windows": (4, 0)}, "layer_windows must be positive integers"),
        ({"layer_ropes": (None,)}, "layer_ropes must be a tuple with one entry"),
    ],
)
def test_bad_configurations_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**dataclasses.asdict(TINY) | change)
