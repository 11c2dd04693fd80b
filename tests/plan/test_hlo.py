"""Counting in HLO text: hand-written programs, and programs compiled for several simulated devices."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from grpo_jax.plan import hlo, hlo_collectives, hlo_text

LOOPS = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_slice (p0: f32[5,8,16], p1: s32[]) -> f32[8,16] {
  %p0 = f32[5,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,8,16]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %flat = f32[8,16]{1,0} bitcast(%cut)
}

%body (state: (s32[], f32[4,8], f32[5,8,16])) -> (s32[], f32[4,8], f32[5,8,16]) {
  %state = (s32[], f32[4,8]{1,0}, /*index=2*/f32[5,8,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%state), index=1
  %stack = f32[5,8,16]{2,1,0} get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %layer = f32[8,16]{1,0} fusion(%stack, %i), kind=kLoop, calls=%fused_slice
  %whole = f32[16,16]{1,0} all-gather(%layer), channel_id=1, replica_groups=[2,2]<=[4], dimensions={0}
  %y = f32[4,16]{1,0} dot(%x, %layer), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %half = f32[4,8]{1,0} slice(%y), slice={[0:4], [0:8]}
  ROOT %out = (s32[], f32[4,8]{1,0}, f32[5,8,16]{2,1,0}) tuple(%next, %half, %stack)
}

%condition (state.1: (s32[], f32[4,8], f32[5,8,16])) -> pred[] {
  %state.1 = (s32[], f32[4,8]{1,0}, f32[5,8,16]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %end = s32[] constant(5)
  ROOT %go = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %main (x0: f32[4,8], w: f32[5,8,16]) -> f32[4,8] {
  %x0 = f32[4,8]{1,0:T(4,128)S(1)} parameter(0)
  %w = f32[5,8,16]{2,1,0:T(8,128)} parameter(1)
  %start = s32[] constant(2)
  %begin = (s32[], f32[4,8]{1,0}, f32[5,8,16]{2,1,0}) tuple(%start, %x0, %w)
  %loop = (s32[], f32[4,8]{1,0}, f32[5,8,16]{2,1,0}) while(%begin), condition=%condition, body=%body
  %last = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %all = f32[4,8]{1,0} all-reduce(%last), replica_groups={{0,2},{1,3}}, to_apply=%add
}
"""


def test_a_loop_multiplies_what_is_inside_it():
    counts = hlo.count(LOOPS)
    assert counts.loops == {"loop": 3}  # from 2 to 5
    assert counts.flops == 3 * 2 * 4 * 16 * 8
    reduce, gather = counts.collectives
    assert gather == hlo.Collective("all-gather", 3, 16 * 16 * 4, (0, 1))
    assert reduce == hlo.Collective("all-reduce", 1, 4 * 8 * 4, (0, 2))


KERNEL = """HloModule jit_attention

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %splash_mha_dq_segmented.1 = f32[4,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, metadata={op_name="jit(f)/transpose(jvp(product_flops_1000))/vmap()/splash_mha_dq_segmented/pallas_call"}
  ROOT %y = f32[4,8]{1,0} add(%splash_mha_dq_segmented.1, %x)
}
"""


def test_an_attention_kernel_tells_its_flops_by_its_name():
    """Three products: scores, their gradient and that of q. And its attributes may take several lines."""
    assert hlo.count(KERNEL).flops == 3000
    assert hlo.count(KERNEL.replace("product_flops_", "")).flops == 0
    assert hlo.count(KERNEL).bytes == (2 + 3) * 4 * 8 * 4


def test_bytes_are_of_slices_and_leave_out_memory_on_the_chip():
    counts = hlo.count(LOOPS)
    layer, x, y = 8 * 16 * 4, 4 * 8 * 4, 4 * 16 * 4
    integers = 4 + 4 + 4  # next = i + one
    inside = integers + (layer + layer + 4) + (layer + 16 * 16 * 4) + (x + layer + y) + 2 * x
    condition = 4 + 4 + 1
    assert counts.bytes == 3 * (inside + condition) + 2 * x
    assert hlo_text.size("f32[4,8]{1,0:T(4,128)S(1)}", main_memory=True) == 0
    assert hlo_text.size("(bf16[2,3]{1,0}, pred[], s4[8], f8e4m3fn[5], token[])") == 12 + 1 + 4 + 5


def test_known_trip_counts_come_first_and_unknown_loops_run_once():
    noted = LOOPS.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert hlo.count(noted).loops == {"loop": 7}
    unknown = hlo.count(LOOPS.replace("constant(5)", "parameter(1)"))
    assert unknown.loops == {"loop": None}
    assert unknown.flops == 2 * 4 * 16 * 8


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups={{0,4},{1,5}}", (0, 4)),
        ("replica_groups=[4,2]<=[8]", (0, 1)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("replica_groups=mesh['a'=8,'b'=1] {'a'}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", (0, 2)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", (0, 1)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a','b'}", (0, 4, 1, 5, 2, 6, 3, 7)),
        ("source_target_pairs={{0,0},{3,5},{5,3}}", (3, 5)),
        ("replica_groups={}", ()),
    ],
)
def test_groups(text, group):
    assert hlo_collectives.group_of(f", channel_id=3, {text}, use_global_device_ids=true") == group


def test_reduce_scatter_under_another_name_and_asynchronous_collectives():
    text = """HloModule m

%all-reduce-scatter.1 (p: f32[8,4]) -> f32[2,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %r = f32[8,4]{1,0} all-reduce(%p), replica_groups=[1,4]<=[4], to_apply=%add
  %c = s32[] constant(0)
  ROOT %s = f32[2,4]{1,0} dynamic-slice(%r, %c, %c), dynamic_slice_sizes={2,4}
}

ENTRY %main (x: f32[8,4]) -> f32[2,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %g = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %d = f32[32,4]{1,0} all-gather-done(%g)
  ROOT %f = f32[2,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    gather, scatter = hlo.count(text).collectives
    assert gather == hlo.Collective("all-gather", 1, 32 * 4 * 4, (0, 1, 2, 3))
    assert scatter == hlo.Collective("reduce-scatter", 1, 8 * 4 * 4, (0, 1, 2, 3))


def test_a_collective_that_several_fusions_name_counts_once():
    fused = """%part.NUMBER (p: f32[8,4]) -> f32[32,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %g = f32[32,4]{1,0} all-gather(%p), channel_id=CHOSEN, replica_groups=[1,4]<=[4], dimensions={0}
}
"""
    parts = [fused.replace("NUMBER", str(i)).replace("CHOSEN", str(channel)) for i, channel in enumerate((7, 7, 8))]
    calls = "\n".join(f"  %f.{i} = f32[32,4]{{1,0}} fusion(%x), kind=kCustom, calls=%part.{i}" for i in range(3))
    text = "\n".join(parts) + "\nENTRY %main (x: f32[8,4]) -> f32[32,4] {\n  %x = f32[8,4]{1,0} parameter(0)\n" + calls
    assert hlo.count(text + "\n}\n").collectives == [hlo.Collective("all-gather", 1, 512, (0, 1, 2, 3))] * 2


def test_convolutions_count_the_pairs_that_meet():
    shape = "ENTRY %main () -> f32[] {\n %l = bf16[8,4,16] parameter(0)\n %r = bf16[8,16,32] parameter(1)\n %c = "
    # Eight products [4, 16] × [16, 32] as one convolution: a window of 8 over entries 8 apart meets one entry each.
    text = (
        shape + "bf16[8,4,32] convolution(%l, %r), window={size=8 stride=7 pad=0_0 lhs_dilate=8}, "
        "dim_labels=0bf_0io->0bf\n}\n"
    )
    assert hlo.count(text).flops == 2 * 8 * 4 * 16 * 32
    # A window of 3 over 6 entries with a border of 1: the two outer outputs miss one entry each.
    text = (
        "ENTRY %main () -> f32[] {\n %l = f32[2,6,5] parameter(0)\n %r = f32[3,5,7] parameter(1)\n"
        " %c = f32[2,6,7] convolution(%l, %r), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f\n}\n"
    )
    assert hlo.count(text).flops == 2 * 2 * 5 * 7 * (6 * 3 - 2)


def test_flops_are_those_of_xla_where_nothing_loops(optimized):
    def function(x, y):
        return jnp.tanh(x @ y) @ y.T

    x, y = jnp.ones((64, 128)), jnp.ones((128, 256))
    compiled = jax.jit(function).lower(x, y).compile()
    ours = hlo.count(compiled.as_text()).flops
    assert ours == 2 * 2 * 64 * 128 * 256
    assert ours == pytest.approx(compiled.cost_analysis()["flops"], rel=0.02)


def test_a_scan_counts_as_its_unrolled_form(optimized):
    def function(x, w_L, unroll):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w_L, unroll=unroll)[0]

    x, w = jnp.ones((32, 64)), jnp.ones((6, 64, 64))
    compile = lambda unroll: jax.jit(function, static_argnums=2).lower(x, w, unroll).compile()
    looped, unrolled = (hlo.count(compile(n).as_text()) for n in (1, 6))
    assert looped.flops == unrolled.flops == 6 * 2 * 32 * 64 * 64
    assert list(looped.loops.values()) == [6]


def test_an_early_exit_counts_as_the_bound_of_its_counter():
    def function(x):
        going = lambda carry: (carry[0] < 9) & ~jnp.all(carry[1] > 1e9)
        return jax.lax.while_loop(going, lambda carry: (carry[0] + 1, carry[1] @ carry[1]), (1, x))

    compiled = jax.jit(function).lower(jnp.ones((16, 16))).compile()
    assert hlo.count(compiled.as_text()).flops == 8 * 2 * 16**3


@pytest.mark.parametrize("swapped", [False, True])
def test_of_a_conditional_the_branch_that_moves_most_is_counted(swapped):
    busy, idle = (lambda x: jnp.sin(x) @ x), jnp.cos
    branches = (idle, busy) if swapped else (busy, idle)
    count_of = lambda f, *args: hlo.count(jax.jit(f).lower(*args).compile().as_text())
    x = jnp.ones((64, 64))
    alone = count_of(busy, x)
    found = count_of(lambda yes, x: jax.lax.cond(yes, *branches, x), True, x)
    assert found.flops == alone.flops > 0
    assert alone.bytes <= found.bytes < 2 * alone.bytes  # with a copy in and one out, not with the other branch


def test_a_loop_that_counts_on_has_the_steps_that_are_left(optimized):
    """Of two loops that share a counter and its bound, the first is counted with all steps."""

    def function(x):
        def part(least, bound, carry):
            going = lambda carry: (carry[0] < bound) & (jnp.max(carry[1]) > least)
            return jax.lax.while_loop(going, lambda carry: (carry[0] + 1, carry[1] @ x), carry)

        at, y = part(1.0, 9, (2, x))
        return part(-1.0, 12, part(0.0, 9, (at, y + 1)))

    compiled = jax.jit(function).lower(jnp.ones((16, 16))).compile()
    counts = hlo.count(compiled.as_text())
    assert sorted(counts.loops.values()) == [0, 3, 7]
    assert counts.flops == 10 * 2 * 16**3


SHARDED = """
import json
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from grpo_jax.plan import hlo
mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
put = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
def function(x, w_L):
    def layer(x, w):
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        return jnp.tanh(x @ w), None
    return jax.lax.scan(layer, x, w_L)[0]
def counted(function, out, *args):
    program = jax.jit(function, out_shardings=NamedSharding(mesh, P(*out)))
    return hlo.count(program.lower(*args).compile().as_text())
layers = counted(function, ("data",), put((16, 64), "data"), put((5, 64, 64), None, "fsdp"))
summed = counted(jnp.sum, (), put((16, 64), ("data", "fsdp")))
print(json.dumps([layers.collectives, summed.collectives, layers.flops]))
"""


def test_collectives_of_a_sharded_scan_are_exact():
    """Each of 5 layers gathers its 64 × 64 matrix over the 4 devices of an fsdp group; a sum is reduced over all 8."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    gathers, sums, flops = json.loads(ran.stdout)
    assert gathers == [["all-gather", 5, 64 * 64 * 4, [0, 1, 2, 3]]]
    assert sums == [["all-reduce", 1, 4, [0, 1, 2, 3, 4, 5, 6, 7]]]
    assert flops == 5 * 2 * 8 * 64 * 64


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.count("module @jit_f {}")
