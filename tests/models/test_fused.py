"""The fused attention of training equals that of einsums; its kernels run interpreted."""

import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY

from grpo_jax.devices import SINGLE, sharded
from grpo_jax.models import decoder, fused
from grpo_jax.models.attention import attend_causal
from grpo_jax.models.fused import AXES, Together, attend_together, block_size
from grpo_jax.parallel import batch_shardings, gather, make_mesh, param_shardings, spread

interpreted = partial(attend_together, interpret=True)


def by_einsums(q, k, v, mask_PS, *, T):
    """As `decoder` attends without the kernel: the prompt alone, then its group after it."""
    (K, _, R, h, d), S = q.shape, mask_PS.shape[1]

    def one(q, k, v, mask_S):
        first = attend_causal(q[:, None, :S], k[:, None, :S], v[:, None, :S], mask_S)[:, 0]
        own = (y[:, S:].reshape(K, -1, T, *y.shape[2:]) for y in (q, k, v))
        out = attend_causal(*own, jnp.ones(T, bool), ((k[:, :S], v[:, :S], mask_S),))
        return jnp.concatenate([first, out.reshape(K, R - S, h, d)], 1)

    return jax.vmap(one, in_axes=(1, 1, 1, 0), out_axes=1)(q, k, v, mask_PS)


def rows(K, P, S, G, T, h, d):
    """q, k, v and masks; every second prompt has a third of padding. And a cotangent of the rows that are read."""
    keys, R = jax.random.split(jax.random.key(0), 4), S + G * T
    shapes = (K, P, R, h, d), (K, P, R, d), (K, P, R, d)
    mask_PS = jnp.arange(S) >= jnp.arange(P)[:, None] % 2 * (S // 3)
    read = jnp.concatenate([mask_PS, jnp.ones((P, G * T), bool)], 1)[..., None, None]
    *qkv, weight = (jax.random.normal(x, s) for x, s in zip(keys, (*shapes, shapes[0]), strict=True))
    return (*qkv, mask_PS), weight * read


def out_and_gradients(attention, args, weight, T):
    *qkv, mask_PS = args
    loss = lambda *qkv: (lambda out: (jnp.sum(out * weight), out * (weight != 0)))(attention(*qkv, mask_PS, T=T))
    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return out, *gradients


# (K, P, S, G, T, h, d): one block and several, several blocks a completion, a prompt longer and shorter than those.
SIZES = ((2, 2, 37, 3, 51, 3, 16), (1, 2, 150, 2, 70, 2, 8), (1, 1, 40, 2, 260, 1, 8))


@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_gradients_are_those_of_einsums(sizes):
    args, weight = rows(*sizes)
    got, wanted = (out_and_gradients(f, args, weight, sizes[4]) for f in (interpreted, by_einsums))
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)


class Neighbours(Together):
    """A wrong mask: a completion sees those before it in its group."""

    def mask_function(self, query, key):
        return key <= self._start(query >> self._bits) + (query & (1 << self._bits) - 1) - self._lead


def test_a_wrong_mask_fails_the_comparison(monkeypatch):
    args, weight = rows(*SIZES[0])
    wanted = out_and_gradients(by_einsums, args, weight, 51)
    monkeypatch.setattr(fused, "Together", Neighbours)
    for got, right in zip(out_and_gradients(interpreted, args, weight, 51), wanted, strict=True):
        assert np.abs(got - right).max() > 0.1


@pytest.mark.parametrize(("S", "T"), [(5, 7), (20, 3), (7, 7), (1, 1)])
def test_the_mask_is_the_definition(S, T):
    mask, part = Together(S, T, 64), lambda row: 0 if row < S else 1 + (row - S) // T
    wanted = [[j <= i and (j < S or part(i) == part(j)) for j in range(64)] for i in range(64)]
    np.testing.assert_array_equal(mask[0:64, 0:64], wanted)
    np.testing.assert_array_equal(mask[16:32, 0:24], np.array(wanted)[16:32, :24])


def test_blocks_are_not_above_a_completion_and_pad_little():
    assert [block_size(*x) for x in ((8704, 1024), (8704, 300), (8704, 64), (600, 512), (2000, 1024))] == [
        512, 256, 128, 128, 512,
    ]  # fmt: skip


def batch(packed):
    draw = lambda seed, *shape: jax.random.randint(jax.random.key(seed), shape, 0, TINY.vocab_size, jnp.int32)
    mask_PS = jnp.arange(9) >= jnp.array([[0], [4]])
    place_PN = jnp.array([[0, 1, 5, 6, 7, 10, 15], [0, 5, 6, 10, 11, 12, 13]]) if packed else None  # 15 is no place
    return draw(1, 2, 9), mask_PS, draw(2, 2, 3, 5), place_PN


def loss(model, params, tokens_PS, mask_PS, tokens_PGT, place_PN):
    prompt, group = model.together(params, tokens_PS, mask_PS, tokens_PGT, place_PN)
    used = jnp.ones(group.shape[:2]) if place_PN is None else place_PN < 15
    read = prompt * mask_PS[..., None], group * used[..., None]
    return sum(jnp.sum(jnp.sin(3 * x)) for x in read), read


def with_gradients(model, params, rows, **shardings):
    return jax.jit(jax.value_and_grad(partial(loss, model), has_aux=True), **shardings)(params, *rows)


def distance(got, wanted):
    """The largest over all arrays, relative to the array's norm."""
    norm = lambda x: np.linalg.norm(np.ravel(x))
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(norm(x - y) / norm(y)), got, wanted)))


@pytest.mark.parametrize(("packed", "remat"), [(False, "layer"), (True, "attention")])
def test_a_decoder_has_equal_gradients(packed, remat):
    model = decoder(TINY, remat=remat)
    params, data = jax.jit(model.init)(jax.random.key(0)), batch(packed)
    got = with_gradients(model.with_attention(interpreted), params, data)
    assert distance(got, with_gradients(model, params, data)) < 1e-5


def over_a_mesh():
    """How far a gradient of four devices, each with its key heads and prompts, is from that of one."""
    mesh, model = make_mesh(fsdp=2, tensor=2), decoder(dataclasses.replace(TINY, num_hidden_layers=1))
    params, data = jax.jit(model.init)(jax.random.key(0)), batch(packed=True)
    layout = jax.device_put((params, data), (param_shardings(mesh, model, params), batch_shardings(mesh, data)))
    fused = model.with_gather(gather(mesh)).with_attention(spread(mesh, interpreted, AXES))
    return distance(jax.device_get(with_gradients(fused, *layout)), with_gradients(model, params, data))


def test_devices_attend_each_to_its_own():
    _, tests, root, *_ = Path(__file__).parents
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": f"{root}{os.pathsep}{tests}"}
    done = subprocess.run([sys.executable, __file__], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 1e-5


def test_only_tpus_have_it():
    model, mesh = decoder(TINY), make_mesh()
    assert SINGLE.for_training(model) is model
    assert sharded(mesh, model.axes).for_training(model) is model.with_gather(gather(mesh))
    assert decoder(TINY, attention="einsum").with_attention is None
    other = model.with_attention(interpreted)
    assert model.with_attention(interpreted) is other is other.with_gather(None)
    assert spread(mesh, interpreted, AXES) is spread(mesh, interpreted, AXES)


if __name__ == "__main__":
    print(over_a_mesh())
