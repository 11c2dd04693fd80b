"""The fused attention of training equals that of einsums: TPU kernels run interpreted, what surrounds cuDNN's on a
stand-in for it.
"""

import dataclasses
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.models import decoder
from grpo_jax.models.attention import attend_causal
from grpo_jax.models.kernels import fused_cuda
from grpo_jax.models.kernels.fused import AXES, with_fused_attention
from grpo_jax.models.kernels.fused_cuda import Kernel, available, takes
from grpo_jax.models.kernels.fused_tpu import Together, attend_together, block_size
from grpo_jax.parallel import backends
from grpo_jax.parallel.backends import SINGLE, pmapped, sharded
from grpo_jax.parallel.sharding import batch_shardings, gather, make_mesh, param_shardings, spread

from conftest import TINY

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


def seen(q, k, length, causal):
    """Softmax weights before they are divided, `[B, K, h, T, S]`, and their sum."""
    (B, T, H, d), (S, K) = q.shape, k.shape[1:3]
    score = jnp.einsum("btkhd,bskd->bkhts", q.reshape(B, T, K, H // K, d), k) * d**-0.5
    mask = jnp.arange(S) < length[:, None, None, None, None]
    mask = mask & (jnp.arange(S) <= jnp.arange(T)[:, None]) if causal else mask
    return jnp.where(mask, jnp.exp(score), 0.0)


def stand_in_forward(q, k, v, length, causal):
    weight = seen(q, k, length, causal)
    total = weight.sum(-1)
    out = jnp.einsum("bkhts,bskd->btkhd", weight / total[..., None], v).reshape(q.shape)
    return out, jnp.log(total).reshape(q.shape[0], q.shape[2], q.shape[1])


def stand_in_backward(q, k, v, length, causal, out, lse, g):
    """What the kernel is documented to compute: the whole softmax is known by `out` and `lse` alone."""
    (B, T, H, d), K = q.shape, k.shape[2]
    heads = lambda y: y.reshape(B, T, K, H // K, d)
    share = seen(q, k, length, causal) / jnp.exp(lse).reshape(B, K, H // K, T, 1)
    inner = jnp.einsum("btkhd,btkhd->bkht", heads(g), heads(out))[..., None]
    slope = share * (jnp.einsum("btkhd,bskd->bkhts", heads(g), v) - inner) * d**-0.5
    dq = jnp.einsum("bkhts,bskd->btkhd", slope, k).reshape(q.shape)
    return dq, *(jnp.einsum("bkhts,btkhd->bskd", w, heads(y)) for w, y in ((slope, q), (share, g)))


STAND_IN = Kernel(stand_in_forward, stand_in_backward)


@pytest.mark.parametrize("sizes", [*SIZES, (2, 2, 1, 2, 3, 2, 8), (1, 2, 6, 1, 1, 1, 8)])
def test_two_calls_merged_are_the_attention_of_einsums(sizes):
    args, weight = rows(*sizes)
    merged = partial(fused_cuda.attend_together, kernel=STAND_IN)
    got, wanted = (out_and_gradients(f, args, weight, sizes[4]) for f in (merged, by_einsums))
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_forgets_the_other_part_fails_the_comparison():
    def alone(q, k, v, length, causal, out, lse, g):
        return stand_in_backward(q, k, v, length, causal, *stand_in_forward(q, k, v, length, causal), g)

    args, weight = rows(*SIZES[0])
    wrong = partial(fused_cuda.attend_together, kernel=STAND_IN._replace(backward=alone))
    got, wanted = (out_and_gradients(f, args, weight, 51) for f in (wrong, by_einsums))
    chex.assert_trees_all_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert all(np.abs(x - y).max() > 0.1 for x, y in zip(got[1:], wanted[1:], strict=True))


@pytest.fixture
def cudnn(monkeypatch):
    """JAX's binding as on a machine with cuDNN: programs for CUDA can be lowered, not compiled."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 92600)
    return fused_attention_stablehlo


def calls(program, *args) -> list[str]:
    """The calls of cuDNN in a program lowered for CUDA: which way, and what is masked."""
    text = program.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"@__cudnn\$fmhaSoftmax((?:Backward)?)\(.*?mask_type\\22: \\22(\w+)\\22", text)


# The prompt to itself; the group to its prompt; a completion to itself.
EACH = [("", "PADDING"), ("", "PADDING_CAUSAL"), ("", "PADDING_CAUSAL")]
BOTH_WAYS = sorted([*EACH, *(("Backward", kind) for _, kind in EACH)])


@pytest.mark.parametrize(("dtype", "T"), [("bfloat16", 51), ("float16", 51), ("bfloat16", 1)])
def test_a_gradient_for_cuda_calls_cudnn_for_each_part(cudnn, dtype, T):
    args, weight = rows(*SIZES[0][:4], T, *SIZES[0][5:])
    *qkv, mask_PS = args
    loss = lambda *qkv: jnp.sum(fused_cuda.attend_together(*qkv, mask_PS, T=T) * weight)
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    shapes = [jax.ShapeDtypeStruct(x.shape, dtype) for x in qkv]
    assert sorted(calls(program, *shapes)) == BOTH_WAYS
    assert [x.dtype for x in program.eval_shape(*shapes)[1]] == [dtype] * 3


@pytest.mark.parametrize(("remat", "again"), [("layer", EACH), ("attention", []), ("none", [])])
def test_a_decoder_for_cuda_keeps_what_its_rematerialisation_says(cudnn, remat, again):
    model = decoder(dataclasses.replace(TINY, dtype="bfloat16"), remat=remat)
    params, data = jax.eval_shape(model.init, jax.random.key(0)), batch(packed=True)
    model = model.with_attention(fused_cuda.attend_together)
    program = jax.jit(jax.grad(lambda params: loss(model, params, *data)[0]))
    assert sorted(calls(program, params)) == sorted([*BOTH_WAYS, *again])


def test_devices_for_cuda_attend_each_to_its_own(cudnn):
    mesh, args = make_mesh(), rows(*SIZES[0])[0]
    attend = spread(mesh, fused_cuda.attend_together, AXES)
    loss = lambda q: jnp.sum(attend(q, *(x.astype("bfloat16") for x in args[1:3]), args[3], T=51).astype("float32"))
    assert sorted(calls(jax.jit(jax.grad(loss)), args[0].astype("bfloat16"))) == BOTH_WAYS


@pytest.mark.parametrize(
    ("dtype", "head_dim", "wanted"),
    [
        ("bfloat16", 64, True),
        ("float16", 128, True),
        ("float32", 64, False),
        ("float16", 60, False),
        ("float16", 256, False),
    ],
)
def test_what_cudnn_takes(dtype, head_dim, wanted):
    assert takes(dataclasses.replace(TINY, dtype=dtype, head_dim=head_dim)) == wanted


class Neighbours(Together):
    """A wrong mask: a completion sees those before it in its group."""

    def mask_function(self, query, key):
        return key <= self._start(query >> self._bits) + (query & (1 << self._bits) - 1) - self._lead


def test_a_wrong_mask_fails_the_comparison():
    args, weight = rows(*SIZES[0])
    wanted = out_and_gradients(by_einsums, args, weight, 51)
    wrong = out_and_gradients(partial(interpreted, mask=Neighbours), args, weight, 51)
    for got, right in zip(wrong, wanted, strict=True):
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
    token_index_PN = (
        jnp.array([[0, 1, 5, 6, 7, 10, 15], [0, 5, 6, 10, 11, 12, 13]]) if packed else None
    )  # 15 is no place
    return draw(1, 2, 9), mask_PS, draw(2, 2, 3, 5), token_index_PN


def loss(model, params, tokens_PS, mask_PS, tokens_PGT, token_index_PN):
    prompt, group = model.forward(params, tokens_PS, mask_PS, tokens_PGT, token_index_PN)
    used = jnp.ones(group.shape[:2]) if token_index_PN is None else token_index_PN < 15
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


def by_pmap():
    """The same of two devices with a prompt each."""
    model = decoder(dataclasses.replace(TINY, num_hidden_layers=1))
    params, data = jax.jit(model.init)(jax.random.key(0)), batch(packed=True)
    fused = model.with_attention(interpreted)
    gradient = lambda params, *rows: jax.lax.psum(jax.grad(lambda p: loss(fused, p, *rows)[0])(params), "devices")
    several = jax.pmap(gradient, "devices", in_axes=(None, 0, 0, 0, 0), out_axes=None, devices=jax.devices()[:2])
    return distance(several(params, *(x[:, None] for x in data)), with_gradients(model, params, data)[1])


def test_devices_attend_each_to_its_own():
    _, tests, root, *_ = Path(__file__).parents
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": f"{root}{os.pathsep}{tests}"}
    done = subprocess.run([sys.executable, __file__], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(map(float, done.stdout.split())) < 1e-5


def device(platform, version="", capability="9.0"):
    return SimpleNamespace(
        platform=platform, client=SimpleNamespace(platform_version=version), compute_capability=capability
    )


CUDA, ROCM = (device("gpu", f"PJRT C API\n{name} 60300") for name in ("cuda", "rocm"))


def test_each_platform_has_its_own(cudnn):
    model, half = decoder(TINY), decoder(dataclasses.replace(TINY, dtype="bfloat16", head_dim=16))
    assert with_fused_attention(model, device("tpu")) is model.with_attention(attend_together)
    assert with_fused_attention(half, CUDA) is half.with_attention(fused_cuda.attend_together)
    assert with_fused_attention(half, CUDA, lambda attention: interpreted) is half.with_attention(interpreted)
    einsum = decoder(TINY, attention="einsum")
    for one, where in ((model, CUDA), (half, ROCM), (half, jax.devices()[0]), (einsum, device("tpu"))):
        assert with_fused_attention(one, where) is one


@pytest.mark.parametrize(
    ("capability", "version", "wanted"),
    [("7.5", 92700, 0), ("8.0", 90100, 1), ("9.0", 92599, 0), ("9.0", 92600, 1), ("10.0", 91500, 1), ("9.0", None, 0)],
)
def test_cudnn_is_available_where_its_kernels_are_right(monkeypatch, cudnn, capability, version, wanted):
    def ask():
        if version is None:
            raise RuntimeError("cuDNN is not detected.")
        return version

    monkeypatch.setattr(cudnn, "check_cudnn_version", ask)
    assert available(device("gpu", "cuda", capability)) == wanted


@pytest.mark.parametrize("where", [SINGLE, pmapped(1), sharded(make_mesh())], ids=lambda where: where.name)
def test_every_way_to_run_asks_its_device(monkeypatch, where):
    asked = []
    monkeypatch.setattr(backends, "with_fused_attention", lambda model, device, *_: asked.append(device) or model)
    where.for_training(decoder(TINY))
    assert asked == [jax.devices()[0]]


def test_cpus_keep_einsums():
    model, mesh = decoder(TINY), make_mesh()
    assert SINGLE.for_training(model) is model
    assert sharded(mesh, model.axes).for_training(model) is model.with_gather(gather(mesh))
    assert decoder(TINY, attention="einsum").with_attention is None
    other = model.with_attention(interpreted)
    assert model.with_attention(interpreted) is other is other.with_gather(None)
    assert spread(mesh, interpreted, AXES) is spread(mesh, interpreted, AXES)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_windows": (4, None)}, "a window"),
        ({"attention_cap": 5.0}, "capped scores"),
        ({"layer_windows": (4, 4), "attention_cap": 5.0}, "a window and capped scores"),
    ],
)
def test_what_no_kernel_computes_stays_with_einsums_and_is_told_once(changes, reason):
    model = decoder(dataclasses.replace(TINY, **changes, model_type=f"kind of {reason}"))
    with pytest.warns(UserWarning, match=f"with {reason} trains by einsums"):
        assert with_fused_attention(model, device("tpu", "")) is model
    assert with_fused_attention(model, device("tpu", "")) is model  # a warning would be an error
    assert with_fused_attention(model, jax.devices()[0]) is model
    with pytest.raises(ValueError, match=f"a kernel does not compute {reason}"):
        model.with_attention(interpreted)


def test_a_kernel_is_given_queries_of_the_scale_of_the_model(prompts):
    config = dataclasses.replace(TINY, attention_scale=0.8)
    params = jax.jit(decoder(config).init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 2, 5), 0, TINY.vocab_size)
    args = params, *prompts, tokens, None
    got, wanted = (decoder(config, attention=how).forward(*args)[1] for how in (by_einsums, None))
    chex.assert_trees_all_close(got, wanted, atol=1e-5)
    other = decoder(TINY).forward(*args)[1]
    assert np.abs(other - wanted).max() > 1e-3


if __name__ == "__main__":
    print(over_a_mesh(), by_pmap())
