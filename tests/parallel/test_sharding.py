"""Sharding rules and meshes; that they give equal numbers is in test_backends.py."""

import jax
import jax.numpy as jnp
import optax
import pytest
from grpo_jax.inference.critic import value_network, with_critic
from grpo_jax.models import DecoderConfig, decoder
from grpo_jax.parallel.sharding import (
    AXES,
    array_sharding,
    batch_shardings,
    make_mesh,
    param_shardings,
    state_shardings,
)
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.train_step import init_state
from jax.sharding import AbstractMesh, PartitionSpec
from jax.tree_util import tree_leaves_with_path

MESH = AbstractMesh((2, 4, 2), AXES)
MODEL = decoder(DecoderConfig(32, 16, 24, 3, 4, 2, 4, tie_word_embeddings=False, attention_bias=True))
PARAMS = jax.eval_shape(MODEL.init, jax.random.key(0))


def specs(shardings):
    is_leaf = lambda x: isinstance(x, jax.sharding.Sharding)
    named = tree_leaves_with_path(shardings, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): sharding.spec for path, sharding in named}


def test_every_parameter_of_the_decoder_is_named():
    shape_of = {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in tree_leaves_with_path(PARAMS)}
    assert {path: len(names.split()) for path, names in MODEL.axes} == {p: len(s) for p, s in shape_of.items()}


def test_decoder_parameters():
    got = specs(param_shardings(MESH, MODEL, PARAMS))
    assert got["embed"] == PartitionSpec("tensor", "fsdp")
    assert got["head"] == PartitionSpec("fsdp", "tensor")
    assert got["norm"] == PartitionSpec(None)
    assert got["layers/q"] == got["layers/up"] == PartitionSpec(None, "fsdp", "tensor")
    assert got["layers/o"] == got["layers/down"] == PartitionSpec(None, "tensor", "fsdp")
    assert got["layers/k_bias"] == PartitionSpec(None, "tensor")
    assert got["layers/input_norm"] == PartitionSpec(None, None)


def test_an_axis_that_does_not_divide_stays_whole():
    assert array_sharding(MESH, (33, 16), "vocab embed").spec == PartitionSpec(None, "fsdp")
    assert array_sharding(MESH, (32, 18), "vocab embed").spec == PartitionSpec("tensor", None)


def test_no_mesh_axis_is_used_twice():
    assert array_sharding(MESH, (8, 16), "heads mlp").spec == PartitionSpec("tensor", None)


def test_names_that_do_not_fit_are_errors():
    with pytest.raises(ValueError, match="name 2 axes, the array has shape"):
        array_sharding(MESH, (4, 4, 4), "vocab embed")
    with pytest.raises(ValueError, match="color not in the table"):
        array_sharding(MESH, (4,), "color")


def test_fallback_takes_the_largest_axis_that_divides():
    shard = lambda *shape: array_sharding(MESH, shape).spec
    assert shard(64, 128) == PartitionSpec(None, "fsdp")
    assert shard(64, 130) == PartitionSpec("fsdp", None)
    assert shard(64, 64) == PartitionSpec("fsdp", None)
    assert shard(66, 130) == PartitionSpec(None, None)
    assert shard(4, 8) == PartitionSpec(None, None)  # small
    assert shard() == PartitionSpec()


def test_unknown_models_take_the_fallback():
    got = specs(
        param_shardings(MESH, MODEL._replace(axes=None), PARAMS | {"embed": jax.ShapeDtypeStruct((640, 16), "f4")})
    )
    assert got["embed"] == PartitionSpec("fsdp", None)
    assert got["layers/q"] == PartitionSpec(None, None, None)  # 768 entries: small


@pytest.mark.parametrize("critic", [None, value_network(MODEL)], ids=["policy", "critic"])
def test_optimiser_moments_lie_where_their_parameters_do(critic):
    params = jax.eval_shape(lambda p: with_critic(critic, jax.random.key(0), p), PARAMS)
    optimizer = optax.chain(adamw(1e-3, total_updates=5), optax.ema(0.9))
    got = state_shardings(MESH, MODEL, optimizer, params)
    state = jax.eval_shape(lambda p: init_state(p, optimizer), params)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    own = param_shardings(MESH, MODEL, params)
    assert own == got.params
    moments = optax.tree_utils.tree_get(got.opt_state, "mu"), optax.tree_utils.tree_get(got.opt_state, "nu")
    assert moments == (own, own)
    assert optax.tree_utils.tree_get(got.opt_state, "ema") == own
    assert specs(got)["step"] == PartitionSpec()
    if critic is not None:
        assert own["critic"]["body"] == own["policy"]


def test_batches_are_spread_over_data_and_fsdp():
    batch = {"tokens": jnp.zeros((16, 2, 3)), "adv": 0.0}
    assert specs(batch_shardings(MESH, batch)) == {"tokens": PartitionSpec(("data", "fsdp")), "adv": PartitionSpec()}
    with pytest.raises(
        ValueError,
        match=r"12 prompts cannot be spread evenly over data 2 × fsdp 4: their number must be a multiple of 8",
    ):
        batch_shardings(MESH, jnp.zeros((12, 2)))


def test_meshes():
    assert dict(make_mesh().shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    with pytest.raises(ValueError, match="mesh axis fsdp must be a positive integer, got 0"):
        make_mesh(fsdp=0)
    with pytest.raises(ValueError, match="data 2 × fsdp 3 × tensor 4 needs 24 devices, there are 1"):
        make_mesh(2, 3, 4)
    with pytest.raises(ValueError, match="uses 1 of 2 devices"):
        make_mesh(devices=jax.devices() * 2)
