"""Every family of models beside transformers' own class, with every feature of the family switched on.

A case is a small model of transformers whose parameters are all random, norms and biases too. It is saved, loaded here,
and compared: under left padding, in the training pass of groups, and token by token behind a cache.
"""

import json
import logging
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from grpo_jax import completion_logp, generate
from grpo_jax.models import decoder, load_pretrained, save_pretrained
from grpo_jax.models.decoder_config import Rope
from grpo_jax.models.families import FAMILIES
from grpo_jax.models.hf_tensors import hf_tensors
from grpo_jax.options import Generation
from grpo_jax.types import Prompts
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
PHI_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [1.25, 3.0],
    "partial_rotary_factor": 0.5,
}


class Case(NamedTuple):
    """A model of transformers, and changes of the decoder's configuration that must move its logits."""

    model_type: str
    settings: dict[str, Any]
    changes: tuple[dict[str, Any], ...]


BIASES = ({"attention_bias": False}, {"output_bias": False})
WINDOW = {"layer_windows": None}
CASES = {
    "llama": Case(
        "llama",
        dict(
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=LLAMA3 | dict(original_max_position_embeddings=16),
        ),
        (*BIASES, {"mlp_bias": False}, {"rope_scaling": None}),
    ),
    "llama, linear": Case(
        "llama",
        dict(tie_word_embeddings=True, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}),
        ({"rope_scaling": None}, {"rope_theta": 500.0}),
    ),
    "qwen2": Case(
        "qwen2",
        dict(
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=1,
            rope_parameters=YARN | dict(original_max_position_embeddings=16),
        ),
        ({"attention_bias": False}, WINDOW, {"rope_scaling": None}),
    ),
    "qwen3": Case(
        "qwen3",
        dict(
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=1,
            rope_parameters=YARN
            | dict(
                original_max_position_embeddings=16, beta_fast=8.0, beta_slow=2.0, attention_factor=1.3, truncate=False
            ),
        ),
        (*BIASES, WINDOW, {"qk_norm": "none"}, {"rope_scaling": None}),
    ),
    "mistral": Case("mistral", dict(head_dim=16, sliding_window=5), (WINDOW,)),
    "smollm3": Case(
        "smollm3",
        dict(
            no_rope_layer_interval=2,
            attention_bias=True,
            mlp_bias=True,
            use_sliding_window=True,
            sliding_window=5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        (*BIASES, {"mlp_bias": False}, {"layer_ropes": None}, WINDOW),
    ),
    "gemma2": Case(
        "gemma2",
        dict(
            head_dim=16,
            attention_bias=True,
            sliding_window=5,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=4.0,
        ),
        (
            *BIASES,
            WINDOW,
            {"norm_plus_one": False},
            {"norm_places": "pre"},
            {"activation": "gelu"},
            {"embed_scale": 1.0},
            {"attention_scale": None},
            {"attention_cap": None},
            {"logit_cap": None},
        ),
    ),
    "gemma3_text": Case(
        "gemma3_text",
        dict(
            head_dim=16,
            attention_bias=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=24,
            final_logit_softcapping=4.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
        (
            *BIASES,
            WINDOW,
            {"qk_norm": "none"},
            {"norm_plus_one": False},
            {"norm_places": "pre"},
            {"embed_scale": 1.0},
            {"attention_scale": None},
            {"logit_cap": None},
            {"layer_ropes": None},
            {"layer_ropes": (Rope(100.0), Rope(5000.0))},
        ),
    ),
    "phi3": Case(
        "phi3",
        dict(original_max_position_embeddings=8, sliding_window=5, rope_parameters=PHI_ROPE),
        (
            WINDOW,
            {"rotary_share": 1.0, "rope_scaling": None},
            {"rope_scaling": None},
            {"rope_scaling": ("longrope", (1.0, 1.5), (1.25, 3.0), 64, 1.3)},
        ),
    ),
    "phi3, short": Case(
        "phi3",
        dict(original_max_position_embeddings=32, rope_parameters=PHI_ROPE),
        ({"rope_scaling": None}, {"rope_scaling": ("longrope", (1.0, 1.5), (1.25, 3.0), 8, 1.0)}),
    ),
    "olmo2": Case(
        "olmo2",
        dict(attention_bias=True),
        (*BIASES, {"norm_places": "pre"}, {"norm_places": "both"}, {"qk_norm": "none"}),
    ),
    "olmo3": Case(
        "olmo3",
        dict(
            attention_bias=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": YARN | dict(original_max_position_embeddings=16),
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
        (*BIASES, WINDOW, {"norm_places": "pre"}, {"qk_norm": "none"}, {"layer_ropes": (Rope(500.0),) * 2}),
    ),
    "granite": Case(
        "granite",
        dict(
            attention_bias=True,
            mlp_bias=True,
            embedding_multiplier=3.0,
            attention_multiplier=0.5,
            residual_multiplier=0.6,
            logits_scaling=1.7,
        ),
        (
            *BIASES,
            {"mlp_bias": False},
            {"embed_scale": 1.0},
            {"attention_scale": None},
            {"residual_scale": 1.0},
            {"logit_divisor": 1.0},
        ),
    ),
    "glm4": Case(
        "glm4",
        dict(head_dim=16, attention_bias=True),
        ({"attention_bias": False}, {"norm_places": "pre"}, {"rope_interleaved": False}, {"rotary_share": 1.0}),
    ),
    "exaone4": Case(
        "exaone4",
        dict(sliding_window=5, sliding_window_pattern=2),
        (WINDOW, {"norm_places": "pre"}, {"qk_norm": "none"}, {"layer_ropes": None}),
    ),
    "seed_oss": Case(
        "seed_oss",
        dict(head_dim=16, attention_bias=True, attention_out_bias=True, mlp_bias=True),
        (*BIASES, {"mlp_bias": False}),
    ),
    "ministral3": Case(
        "ministral3",
        dict(
            head_dim=16,
            sliding_window=9,
            rope_parameters=YARN
            | dict(
                original_max_position_embeddings=4,
                llama_4_scaling_beta=0.5,
                mscale=1.5,
                mscale_all_dim=1.0,
                beta_fast=2.0,
                beta_slow=0.1,
            ),
        ),
        (WINDOW, {"query_scale": None}, {"rope_scaling": None}),
    ),
}
SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None
)
P, S, G, T = 3, 12, 2, 6
LENGTHS = np.array([12, 10, 9])


def peer_of(case, seed=0):
    """transformers' model, with matrices that keep the size of what they multiply and no norm or bias at its start."""
    # A copy: transformers writes into the dictionaries that it is given.
    config = AutoConfig.for_model(case.model_type, **SIZES | deepcopy(case.settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    plus_one = case.model_type.startswith("gemma")
    with torch.no_grad():
        for name, x in model.named_parameters():
            scale = 1.3 * x.shape[-1] ** -0.5 if x.ndim > 1 else 0.3
            x.copy_(torch.randn(x.shape, generator=generator) * scale)
            if name.endswith("norm.weight") and not plus_one:
                x += 1
    return model


class Loaded(NamedTuple):
    """A case's model here and there."""

    case: Case
    folder: Any
    peer: Any
    model: Any
    params: Any


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    @cache
    def of(name):
        case = CASES[name]
        peer = peer_of(case)
        folder = tmp_path_factory.mktemp("family") / "source"
        peer.save_pretrained(folder)
        return Loaded(case, folder, peer, *load_pretrained(folder))

    return of


def batch():
    """Left-padded prompts, and a group of completions for each."""
    rng = np.random.default_rng(1)
    tokens_PS = rng.integers(0, 61, (P, S))
    mask_PS = np.arange(S) >= S - LENGTHS[:, None]
    return tokens_PS, mask_PS, rng.integers(0, 61, (P, G, T))


def torch_logits(peer, tokens, mask):
    mask = torch.tensor(mask).long()
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    return peer(torch.tensor(tokens), attention_mask=mask, position_ids=position, use_cache=False).logits


@jax.jit(static_argnames="model")
def sampled(model, params, tokens_PS, mask_PS):
    """Logits of prompts, T greedy tokens behind each, and the logits that they were chosen by."""
    weights = model.for_decoding(params)

    def one(tokens_S, mask_S):
        hidden_SD, cache = model.prefill(params, tokens_S, mask_S)
        logits_SV = model.logits(params, hidden_SD)

        def step(carry, index):
            own, logits_V = carry
            token = logits_V.argmax()
            hidden_D, own = model.decode(weights, cache, own, index, token)
            return (own, model.decode_logits(weights, hidden_D)), (token, logits_V)

        _, (token_T, logits_TV) = jax.lax.scan(step, (model.empty(T), logits_SV[-1]), jnp.arange(T))
        return logits_SV, token_T, logits_TV

    return jax.vmap(one)(tokens_PS, mask_PS)


@jax.jit(static_argnames="model")
def trained(model, params, weight_PGTV, tokens_PS, mask_PS, tokens_PGT):
    """The gradient of a weighted sum of a group's logits, and these logits."""

    def loss(params):
        logits = model.logits(params, model.forward(params, tokens_PS, mask_PS, tokens_PGT, None)[1])
        return (logits.reshape(weight_PGTV.shape) * weight_PGTV).sum(), logits

    return jax.grad(loss, has_aux=True)(params)


@pytest.mark.parametrize("name", CASES)
def test_logits_under_padding_and_a_greedy_continuation(name, load):
    """One pass of transformers over prompt and continuation proves both: its best token is each next one."""
    _, _, peer, model, params = load(name)
    tokens_PS, mask_PS, _ = batch()
    ours_PSV, token_PT, logits_PTV = map(np.asarray, sampled(model, params, tokens_PS, mask_PS))
    mask = np.concatenate([mask_PS, np.ones((P, T), bool)], 1)
    with torch.no_grad():
        theirs = torch_logits(peer, np.concatenate([tokens_PS, token_PT], 1), mask).numpy()
    assert np.abs(theirs[mask]).max() > 1
    np.testing.assert_allclose(ours_PSV[mask_PS], theirs[:, :S][mask_PS], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(token_PT, theirs[:, S - 1 : -1].argmax(-1))
    np.testing.assert_allclose(logits_PTV, theirs[:, S - 1 : -1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_training_pass_and_its_gradient(name, load):
    """Groups behind a prompt that is computed once, beside transformers with the prompt repeated for each."""
    _, _, peer, model, params = load(name)
    tokens_PS, mask_PS, tokens_PGT = batch()
    weight = np.random.default_rng(2).normal(size=(P, G, T, 61)).astype("float32")
    gradient, logits_PMV = trained(model, params, weight, tokens_PS, mask_PS, tokens_PGT)
    whole = np.concatenate([np.repeat(tokens_PS[:, None], G, 1), tokens_PGT], -1).reshape(P * G, -1)
    mask = np.concatenate([np.repeat(mask_PS, G, 0), np.ones((P * G, T), bool)], -1)
    peer.zero_grad()
    theirs = torch_logits(peer, whole, mask)[:, S:]
    (theirs * torch.tensor(weight).reshape(theirs.shape)).sum().backward()
    theirs = theirs.detach().numpy().reshape(P, G * T, -1)
    np.testing.assert_allclose(logits_PMV, theirs, atol=1e-4, rtol=0)
    ours = hf_tensors(model.config.model_type, gradient)
    named = {key: x for key, x in peer.named_parameters()}
    assert ours.keys() == named.keys()
    for key, x in named.items():
        scale = x.grad.abs().max()
        # A bias on keys that are not rotated adds the same to all scores of a query: it has no gradient.
        if key.endswith("k_proj.bias") and scale < 1e-5:
            scale = torch.tensor(1.0)
        assert scale > 1e-3, key
        assert np.abs(ours[key] - x.grad.numpy()).max() <= 1e-4 * scale, key


# Completions of other lengths, all their tokens in 9 of 12 places.
INDEX_PN = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 12], [0, 1, 6, 7, 8, 9, 10, 11, 12], [0, 1, 2, 6, 7, 8, 9, 12, 12]])


@pytest.mark.parametrize("name", ["gemma2", "exaone4", "ministral3"])
def test_packed_rows_and_a_completion_after_a_cache(name, load):
    """Windows, rotations and scales of queries go by positions, wherever a token's row lies."""
    _, _, _, model, params = load(name)
    tokens_PS, mask_PS, tokens_PGT = batch()
    extend = jax.vmap(model.extend, (None, None, 0))
    of_prompt = lambda s, m, gt: extend(params, model.prefill(params, s, m)[1], gt)
    expected = np.asarray(jax.jit(jax.vmap(of_prompt))(tokens_PS, mask_PS, tokens_PGT)).reshape(P, G * T, -1)
    packed = jax.jit(model.forward)(params, tokens_PS, mask_PS, tokens_PGT, jnp.asarray(INDEX_PN))[1]
    for p, index_N in enumerate(INDEX_PN):
        real = index_N < G * T
        np.testing.assert_allclose(packed[p][real], expected[p][index_N[real]], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("phi3", marks=pytest.mark.slow)])
def test_the_sampler_says_what_the_trainer_says(name, load):
    """With slots and compactions, in which completions move between rows while they grow."""
    _, _, _, model, params = load(name)
    tokens_PS, mask_PS, _ = batch()
    prompts = Prompts(jnp.asarray(tokens_PS), jnp.asarray(mask_PS))
    generation = Generation(4, T, decode_slots=3, compactions=1)
    rollout = generate(model, params, prompts, jax.random.key(0), generation=generation, stop_ids=tuple(range(20)))
    lengths = np.asarray(rollout.mask_PGT).sum(-1)
    assert lengths.min() < lengths.max()
    scored = completion_logp(model, params, prompts, rollout.tokens_PGT, rollout.mask_PGT)
    np.testing.assert_allclose(scored, rollout.logp_PGT, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gemma2", "granite", "glm4", "ministral3"])
def test_bfloat16_stays_bfloat16(name, load):
    """What a family multiplies and adds in float32 does not widen the stream, in training and in decoding."""
    model = decoder(replace(load(name).model.config, dtype="bfloat16", param_dtype="float32"))
    params = jax.eval_shape(model.init, jax.random.key(0))
    prompt, mask, group = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in batch())
    forward = lambda params, *batch: model.forward(model.outer(params), *batch, None)[1]
    assert jax.eval_shape(forward, params, prompt, mask, group).dtype == jnp.bfloat16

    def decode(params, tokens_S, mask_S):
        params = model.cast(params)
        cache = model.prefill(params, tokens_S, mask_S)[1]
        weights = model.for_decoding(params)
        hidden, own = model.decode(weights, cache, model.empty(T), jnp.int32(0), tokens_S[0])
        return hidden, own, model.decode_logits(weights, hidden)

    one = (jax.ShapeDtypeStruct((S,), dtype) for dtype in ("int32", "bool"))
    hidden, own, logits = jax.eval_shape(decode, params, *one)
    assert {x.dtype for x in jax.tree.leaves((hidden, own))} == {jnp.dtype("bfloat16")}
    assert logits.dtype == jnp.float32


def filled(config, params):
    """The parameters that a configuration has, the missing ones as they start."""
    init = jax.eval_shape(decoder(config).init, jax.random.key(0))

    def of(own, has):
        return {key: own[key] if key in own else jnp.ones(x.shape, x.dtype) for key, x in has.items()}

    return {key: of(params[key], x) if key == "layers" else params[key] for key, x in init.items()}


# Whose features others of the list have, too: these take long, as each is computed without being compiled.
ALIKE = "llama, linear", "qwen3", "mistral", "olmo3", "seed_oss"


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in ALIKE)) for one in CASES])
def test_no_feature_is_without_effect(name, load):
    """Whatever of a row is taken away, the comparisons above would see it."""
    case, _, _, model, params = load(name)
    tokens_S, mask_S = (jnp.asarray(x[1]) for x in batch()[:2])

    def logits(config):
        model = decoder(config)
        own = filled(config, params)
        # Not compiled: each configuration would be a program of its own.
        with jax.disable_jit():
            return np.asarray(model.logits(own, model.prefill(own, tokens_S, mask_S)[0]))[mask_S]

    with_all = logits(model.config)
    for change in case.changes:
        config = replace(model.config, **change)
        assert config != model.config, change
        assert np.abs(logits(config) - with_all).max() > 1e-3, change


class Said(logging.Handler):
    """What transformers' logger says."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("name", CASES)
def test_a_model_goes_back_as_what_it_was(name, load, tmp_path):
    case, source, peer, model, params = load(name)
    folder = save_pretrained(tmp_path / "saved", model, params)
    settings = json.loads((folder / "config.json").read_text())
    assert settings["model_type"] == case.model_type
    assert settings["architectures"] == [type(peer).__name__] == [FAMILIES[case.model_type].architecture]
    before, after = (load_file(one / "model.safetensors") for one in (source, folder))
    assert before.keys() == after.keys()
    for key, x in before.items():
        np.testing.assert_array_equal(x, after[key])
    again, loaded = load_pretrained(folder)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    said = Said()
    logging.getLogger("transformers").addHandler(said)
    try:
        back, info = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    finally:
        logging.getLogger("transformers").removeHandler(said)
    assert not said.lines
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens_PS, mask_PS, _ = batch()
    with torch.no_grad():
        equal = (torch_logits(one, tokens_PS, mask_PS) for one in (peer, back))
        torch.testing.assert_close(*equal, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_has_names_for_its_axes(name, load):
    model, params = load(name)[3:]
    ranks = {key: x.ndim for key, x in params.items() if key != "layers"}
    ranks |= {f"layers/{key}": x.ndim for key, x in params["layers"].items()}
    assert {path: len(names.split()) for path, names in model.axes} == ranks


def test_every_family_is_tested():
    assert {case.model_type for case in CASES.values()} == set(FAMILIES)
