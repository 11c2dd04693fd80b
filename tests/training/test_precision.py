"""Masters in float32, matrices computed in bfloat16: what must not be lost between the two."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grpo_jax import Prompts, adamw, assemble, generate, grpo, init_state, make_train_step
from grpo_jax.inference.logprobs import completion_logp, completion_scores
from grpo_jax.models import decoder
from grpo_jax.models.precision import MASTERS, cast, cast_with_masters
from grpo_jax.objectives import ema
from grpo_jax.options import Generation, OptionError, Precision, Update
from grpo_jax.training.batch import infer_logp

from conftest import TINY

P, G, T = 2, 4, 8
CONFIG = TINY
MIXED = dict(dtype="bfloat16", param_dtype="float32")


def with_types(**types):
    import dataclasses

    return decoder(dataclasses.replace(CONFIG, param_dtype=types.pop("param_dtype", None), **types))


@pytest.fixture(scope="module")
def wide():
    return with_types()


@pytest.fixture(scope="module")
def mixed():
    return with_types(**MIXED)


@pytest.fixture(scope="module")
def batches(wide, tiny_params, prompts):
    """Recorded batches: rollouts of the float32 model, and rewards."""
    some = Prompts(prompts.tokens_PS[:P], prompts.mask_PS[:P])
    options = Generation(G, T)
    found = []
    for i in range(100):
        rollout = generate(wide, tiny_params, some, jax.random.key(i), generation=options, stop_ids=(7,))
        found.append((rollout, jax.random.bernoulli(jax.random.key(1000 + i), 0.4, (P, G)) * 1.0))
    return found


def change(model, params, batches, rate):
    """θ_n − θ_0 of GRPO with AdamW on these batches, as one vector, and the first metrics."""
    objective, optimizer = grpo(beta=0.02), adamw(rate)
    step = jax.jit(make_train_step(model, objective, optimizer))
    state, first = init_state(params, optimizer), None
    for rollout, reward in batches:
        reference, _ = infer_logp(model, params, rollout)
        fresh = rollout._replace(update_P=jnp.full(P, state.step))
        state, metrics = step(state, assemble(objective, fresh, reward, ref_logp_T=reference))
        first = metrics if first is None else first
    moved = jax.tree.map(lambda new, old: (new - old).ravel(), state.params, params)
    return jnp.concatenate(jax.tree.leaves(moved)), first


@pytest.mark.parametrize("rate", [1e-6, 3e-6, 1e-5])
def test_a_hundred_updates_arrive_where_float32_does(wide, mixed, tiny_params, batches, rate):
    """The change of the parameters, and not the parameters: a bfloat16 weight of .02 moves by
    steps of 1e-4, so that with bfloat16 masters 3 % of this change would arrive."""
    there, _ = change(wide, tiny_params, batches, rate)
    here, first = change(mixed, tiny_params, batches, rate)
    cosine = there @ here / jnp.linalg.norm(there) / jnp.linalg.norm(here)
    assert cosine >= 0.99
    assert float(jnp.linalg.norm(here)) == pytest.approx(float(jnp.linalg.norm(there)), rel=0.02)
    assert (here != 0).mean() > 0.99
    assert first["ratio"] == 1.0
    assert first["kl"] == 0.0


def test_narrow_masters_lose_the_change(tiny_params, batches):
    """What the masters are for: the same updates on bfloat16 parameters."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_params)
    moved, _ = change(with_types(dtype="bfloat16"), narrow, batches[:20], 1e-6)
    assert (moved != 0).mean() < 0.2


def test_every_activation_has_the_type_that_is_computed_in(mixed, tiny_params, prompts):
    """An uncast scale or bias would promote the whole residual stream to float32."""
    seen = []

    def attention(q, k, v, mask, *, T):
        seen.extend((q.dtype, k.dtype, v.dtype))
        return q

    model = mixed.with_attention(attention)
    tokens = jnp.zeros((4, G, T), jnp.int32)
    outer = model.outer(tiny_params)
    hidden = jax.eval_shape(lambda: model.forward(outer, *prompts, tokens, None))
    assert set(seen) == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in hidden} == {jnp.dtype("bfloat16")}
    logp, _ = completion_scores(mixed, tiny_params, prompts, tokens, jnp.ones(tokens.shape, bool))
    assert logp.dtype == jnp.float32


def test_matrices_are_cast_and_scales_are_not(mixed, tiny_params):
    tree = cast(mixed.config, tiny_params)
    kinds = {name: x.dtype for name, x in tree["layers"].items()}
    assert {name for name, kind in kinds.items() if kind == jnp.float32} == {"input_norm", "post_norm"}
    assert tree["norm"].dtype == jnp.float32
    assert tree["embed"].dtype == jnp.bfloat16
    assert cast_with_masters(mixed.config, tiny_params)[MASTERS]["embed"] is tiny_params["embed"]
    assert cast(CONFIG, tiny_params) is tiny_params, "nothing is copied where nothing is cast"


def test_the_gradient_of_a_frequent_token_is_summed_in_float32(wide, mixed, tiny_params):
    """One token, 2113 times: its embedding's gradient is the sum of 2113 rows. In bfloat16, whose
    sums stop growing at 256 times a summand, a quarter of its norm was lost."""
    count = 2113
    some = Prompts(jnp.full((1, 4), 3), jnp.ones((1, 4), bool))
    tokens, mask = jnp.full((1, 1, count), 3), jnp.ones((1, 1, count), bool)

    def gradient(model, **options):
        loss = lambda p: completion_logp(model, p, some, tokens, mask, **options).sum()
        return jax.jit(jax.grad(loss))(tiny_params)["embed"]

    there = gradient(wide)
    for chunk in (64, count):
        here = gradient(mixed, logit_chunk=chunk)
        assert here.dtype == jnp.float32
        assert float(jnp.linalg.norm(here[3])) == pytest.approx(float(jnp.linalg.norm(there[3])), rel=0.03)
        assert jnp.linalg.norm(here - there) < 0.05 * jnp.linalg.norm(there)


def test_the_head_of_a_model_that_is_not_tied(prompts):
    """Its gradient in chunks is that of one chunk."""
    untied = with_types(**MIXED, tie_word_embeddings=False)
    params = jax.jit(untied.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, G, T), 0, CONFIG.vocab_size)
    mask = jnp.ones(tokens.shape, bool)

    def head(chunk):
        loss = lambda p: completion_logp(untied, p, prompts, tokens, mask, logit_chunk=chunk).sum()
        return jax.jit(jax.grad(loss))(params)["head"]

    whole, cut = head(4 * G * T), head(4)
    assert whole.dtype == jnp.float32
    assert jnp.linalg.norm(whole - cut) < 1e-3 * jnp.linalg.norm(whole)


def test_moments_are_float32_and_decay():
    """ν of g = 1e-2, then g a hundredth of it: .999 is 1 in bfloat16, where ν would stay."""
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    optimizer = adamw(1e-3, clip_norm=None)
    state = init_state(params, optimizer).opt_state
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype("float32")}
    update = jax.jit(lambda g, state: optimizer.update({"w": jnp.full((4, 4), g)}, state, params)[1])
    for _ in range(1000):
        state = update(1e-2, state)
    high = optax.tree_utils.tree_get(state, "nu")["w"][0, 0]
    assert float(high) == pytest.approx(1e-4 * (1 - 0.999**1000), rel=1e-3)
    for _ in range(1000):
        state = update(1e-4, state)
    assert optax.tree_utils.tree_get(state, "nu")["w"][0, 0] < 0.4 * high
    narrow = adamw(1e-3, moments="bfloat16").init({"w": jnp.ones((4, 4))})
    assert optax.tree_utils.tree_get(narrow, "mu")["w"].dtype == jnp.bfloat16
    assert optax.tree_utils.tree_get(narrow, "nu")["w"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_moving_reference_stays_at_a_policy_that_it_equals(dtype):
    policy = {"w": jax.random.normal(jax.random.key(0), (64,)).astype(dtype)}
    reference = policy
    for step in range(300):
        reference = ema(step, policy, reference, decay=0.99)
    np.testing.assert_array_equal(reference["w"], policy["w"])


@pytest.mark.parametrize("name", ["params", "compute", "moments"])
def test_float16_is_refused_in_training(name):
    with pytest.raises(OptionError, match=f"{name} must not be float16"):
        Precision()._replace(**{name: "float16"}).check_training()
    with pytest.raises(OptionError, match=f"{name} must be one of"):
        Precision()._replace(**{name: "fp8"}).check()


def test_a_batch_in_micro_batches_under_bfloat16_compute(mixed, tiny_params, batches):
    """Law of cutting, for bfloat16: products round in another order. Log-probabilities of 1, 2 and 4
    parts differ by less than .05 nats at most; the float32 law is 1e-6 (see test_train_step)."""
    rollout, _ = batches[0]
    rows = lambda a, b: jax.tree.map(lambda x: x[a:b], (rollout.prompts, rollout.tokens_PGT, rollout.mask_PGT))
    whole = completion_logp(mixed, tiny_params, *rows(0, P))
    parts = jnp.concatenate([completion_logp(mixed, tiny_params, *rows(i, i + 1)) for i in range(P)])
    assert jnp.abs(whole - parts).max() < 0.05


def test_updates_with_micro_batches_point_the_same_way(mixed, tiny_params, batches):
    found = {}
    for cuts in (1, 2):
        objective, optimizer = grpo(beta=0.0), optax.sgd(1.0)
        step = jax.jit(make_train_step(mixed, objective, optimizer, update=Update(microbatches=cuts)))
        rollout, reward = batches[0]
        state, _ = step(init_state(tiny_params, optimizer), assemble(objective, rollout, reward))
        moved = jax.tree.map(lambda new, old: (new - old).ravel(), state.params, tiny_params)
        found[cuts] = jnp.concatenate(jax.tree.leaves(moved))
    assert jnp.linalg.norm(found[1] - found[2]) < 0.02 * jnp.linalg.norm(found[1])
