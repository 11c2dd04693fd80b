"""Bytes between main memory and the cores, of hand-written instructions."""

import pytest
from grpo_jax.plan import hlo

FUSED = """HloModule m

%view (v: f32[64,8]) -> f32[64,8] {
  ROOT %v = f32[64,8]{1,0} parameter(0)
}

%seen (v: f32[64,8]) -> f32[8,64] {
  %v.1 = f32[64,8]{1,0} parameter(0)
  ROOT %turned = f32[8,64]{0,1} bitcast(%v.1)
}

%inside (INSIDE

ENTRY %main (x: f32[64,8], y: f32[4,64], i: s32[]) -> f32[4,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %y = f32[4,64]{1,0:T(4,128)S(1)} parameter(1)
  %i = s32[]{:S(6)} parameter(2)
  ROOT %f = RESULT fusion(%x, %y, %i), kind=kOutput, calls=%inside
}
"""
PARAMETERS = """x.1: f32[64,8], y.1: f32[4,64], i.1: s32[]) -> f32[4,8] {
  %x.1 = f32[64,8]{1,0} parameter(0)
  %y.1 = f32[4,64]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %none = f32[] constant(0)
"""


def fused_bytes(*lines, result="f32[4,8]{1,0:S(1)}"):
    """Bytes of one fusion of an f32[64,8] in main memory and an f32[4,64] on the chip."""
    inside = PARAMETERS + "".join(f"  {line}\n" for line in lines) + "}"
    return hlo.count(FUSED.replace("INSIDE", inside).replace("RESULT", result)).bytes


WHOLE = 64 * 8 * 4


@pytest.mark.parametrize("view", ["view", "seen"])
def test_a_product_reads_an_operand_that_a_fusion_inside_only_views(view):
    seen = "f32[8,64]{0,1}" if view == "seen" else "f32[64,8]{1,0}"
    axis = 1 if view == "seen" else 0
    axes = f"lhs_contracting_dims={{1}}, rhs_contracting_dims={{{axis}}}"
    lines = (
        f"%v.2 = {seen} fusion(%x.1), kind=kLoop, calls=%{view}",
        f"ROOT %d = f32[4,8]{{1,0}} dot(%y.1, %v.2), {axes}",
    )
    assert fused_bytes(*lines) == WHOLE
    assert fused_bytes(*lines, result="f32[4,8]{1,0}") == WHOLE + 4 * 8 * 4


def test_a_slice_behind_views_and_conversions_reads_the_slice():
    view = "%v.2 = f32[8,64]{0,1} fusion(%x.1), kind=kLoop, calls=%seen"
    convert = "%c = bf16[8,64]{0,1} convert(%v.2)"
    cut = "%s = bf16[2,64]{0,1} dynamic-slice(%c, %i.1, %zero), dynamic_slice_sizes={2,64}"
    assert fused_bytes(view, convert, "ROOT " + cut) == WHOLE / 4
    # Two slices add up, and never to more than there is; a use beside a slice needs all of it.
    other = "%o = bf16[4,64]{0,1} slice(%c), slice={[4:8], [0:64]}"
    both = "ROOT %t = (bf16[2,64]{0,1}, bf16[4,64]{0,1}) tuple(%s, %o)"
    result = "(bf16[2,64]{0,1:S(1)}, bf16[4,64]{0,1:S(1)})"
    assert fused_bytes(view, convert, cut, other, both, result=result) == WHOLE * 3 / 4
    total = "ROOT %r = f32[] reduce(%c, %none), dimensions={0,1}, to_apply=%add"
    assert fused_bytes(view, convert, cut, total) == WHOLE


def test_of_several_results_only_those_in_main_memory_are_written():
    lines = (
        "%n = f32[64,8]{1,0} negate(%x.1)",
        "%row = f32[1,8]{1,0} slice(%x.1), slice={[0:1], [0:8]}",
        "ROOT %t = (f32[64,8]{1,0}, f32[1,8]{1,0}) tuple(%n, %row)",
    )
    result = "(f32[64,8]{1,0:T(8,128)S(1)}, f32[1,8]{1,0})"
    assert fused_bytes(*lines, result=result) == WHOLE + 8 * 4
    assert fused_bytes(*lines, result="(f32[64,8]{1,0}, f32[1,8]{1,0:S(1)})") == WHOLE + WHOLE


def test_an_update_in_place_moves_the_update():
    row = "%row = f32[1,8]{1,0} slice(%y.1), slice={[0:1], [0:8]}"
    update = "%u = f32[64,8]{1,0} dynamic-update-slice(%x.1, %row, %i.1, %zero)"
    assert fused_bytes(row, "ROOT " + update, result="f32[64,8]{1,0}") == 8 * 4
    assert fused_bytes(row, "ROOT " + update, result="f32[64,8]{1,0:S(1)}") == 0
    # What is read of the array beside the update is read.
    total = "%r = f32[] reduce(%u, %none), dimensions={0,1}, to_apply=%add"
    both = "ROOT %t = (f32[64,8]{1,0}, f32[]) tuple(%u, %r)"
    result = "(f32[64,8]{1,0}, f32[]{:S(1)})"
    assert fused_bytes(row, update, total, both, result=result) == WHOLE + 8 * 4
    # An array that the fusion makes itself is written whole.
    filled = "%b = f32[64,8]{1,0} broadcast(%none), dimensions={}"
    fresh = "ROOT " + update.replace("%x.1", "%b")
    assert fused_bytes(filled, row, fresh, result="f32[64,8]{1,0}") == WHOLE
    scatter = (
        "%at = s32[1] bitcast(%i.1)",
        row,
        "ROOT %s = f32[64,8]{1,0} scatter(%x.1, %at, %row), to_apply=%add",
    )
    assert fused_bytes(*scatter, result="f32[64,8]{1,0}") == 8 * 4


def moved(*lines):
    """Bytes of instructions with an f32[64,8] in main memory, %x, and one on the chip, %v."""
    text = """ENTRY %main (x: f32[64,8], v: f32[64,8], i: s32[]) -> f32[64,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %v = f32[64,8]{1,0:T(8,128)S(1)} parameter(1)
  %i = s32[]{:S(6)} parameter(2)
"""
    return hlo.count(text + "".join(f"  {line}\n" for line in lines) + "}\n").bytes


CHIP, MAIN = "{1,0:T(8,128)S(1)}", "{1,0:T(8,128)}"


@pytest.mark.parametrize(
    ("operand", "layout", "transfers"),
    [("x", MAIN, 2), ("x", CHIP, 1), ("v", MAIN, 1), ("v", CHIP, 0)],
)
def test_slices_and_copies_cross_the_border_of_the_chip(operand, layout, transfers):
    """Read once where the operand is in main memory, written once where the result is."""
    own = MAIN if operand == "x" else CHIP
    part, whole = f"f32[16,8]{layout}", f"f32[64,8]{layout}"
    sliced = transfers * WHOLE / 4
    cut, flag = "slice={[16:32], [0:8]}", "s32[]{:S(2)}"
    assert moved(f"%s = {part} slice(%{operand}), {cut}") == sliced
    assert moved(f"%s = {part} dynamic-slice(%{operand}, %i, %i)") == sliced
    start = f"%s = ((f32[64,8]{own}), {part}, {flag}) slice-start(%{operand}), {cut}"
    assert moved(start, f"%d = {part} slice-done(%s)") == sliced
    copy = f"%c = ({whole}, f32[64,8]{own}, {flag}) copy-start(%{operand})"
    assert moved(copy, f"%d = {whole} copy-done(%c)") == transfers * WHOLE
    update = f"%p = f32[1,8]{layout} slice(%v), slice={{[0:1], [0:8]}}"
    into = f"%u = f32[64,8]{own} dynamic-update-slice(%{operand}, %p, %i, %i)"
    assert moved(update, into) - moved(update) == transfers * 8 * 4


def test_functions_that_name_memory_move_nothing():
    target = 'custom_call_target="TARGET"'
    lines = (
        f"%a = f32[64,8]{MAIN} custom-call(), {target.replace('TARGET', 'AllocateBuffer')}",
        f"%b = f32[128,8]{MAIN} custom-call(%x, %a), {target.replace('TARGET', 'ConcatBitcast')}",
    )
    assert moved(*lines) == 0
    kernel = f"%k = f32[64,8]{MAIN} custom-call(%x, %v), {target.replace('TARGET', 'own')}"
    assert moved(kernel) == 2 * WHOLE


def test_an_asynchronous_call_counts_what_it_calls():
    text = """%twice (a: f32[64,8]) -> f32[64,8] {
  %a = f32[64,8]{1,0} parameter(0)
  ROOT %b = f32[64,8]{1,0} add(%a, %a)
}

ENTRY %main (x: f32[64,8]) -> f32[64,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %s = ((f32[64,8]{1,0}), f32[64,8]{1,0}, u32[]{:S(8)}) call-start(%x), to_apply=%twice
  ROOT %d = f32[64,8]{1,0} call-done(%s)
}
"""
    assert hlo.count(text).bytes == 3 * WHOLE


def test_an_asynchronous_collective_moves_its_arrays_once():
    """Its start reads and writes; fusions that carry it on hand its arrays through, aliased."""
    gather = "all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}"
    text = f"""%start (p: f32[8,4]) -> (f32[8,4], f32[32,4], u32[]) {{
  %p = f32[8,4]{{1,0}} parameter(0)
  %g = f32[32,4]{{1,0}} {gather}
  ROOT %c = (f32[8,4]{{1,0}}, f32[32,4]{{1,0}}, u32[]{{:S(2)}}) custom-call(%g), \
custom_call_target="AsyncCollectiveStart"
}}

%carry (p: f32[8,4], o: f32[32,4], v: f32[4]) -> (f32[4], f32[8,4], f32[32,4], f32[32,4]) {{
  %p = f32[8,4]{{1,0}} parameter(0)
  %o = f32[32,4]{{1,0}} parameter(1)
  %v = f32[4]{{0}} parameter(2)
  %g = f32[32,4]{{1,0}} {gather}
  %n = f32[4]{{0}} negate(%v)
  ROOT %t = (f32[4]{{0}}, f32[8,4]{{1,0}}, f32[32,4]{{1,0}}, f32[32,4]{{1,0}}) tuple(%n, %p, %o, %g)
}}

%end (p: f32[8,4], o: f32[32,4]) -> f32[32,4] {{
  %p = f32[8,4]{{1,0}} parameter(0)
  %o = f32[32,4]{{1,0}} parameter(1)
  %g = f32[32,4]{{1,0}} {gather}
  ROOT %c = f32[32,4]{{1,0}} custom-call(%p, %o, %g), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (x: f32[8,4], v: f32[4]) -> f32[32,4] {{
  %x = f32[8,4]{{1,0}} parameter(0)
  %v.1 = f32[4]{{0}} parameter(1)
  %s = (f32[8,4]{{1,0}}, f32[32,4]{{1,0}}, u32[]{{:S(2)}}) fusion(%x), kind=kCustom, \
output_to_operand_aliasing={{{{0}}: (0, {{}})}}, calls=%start
  %a = f32[8,4]{{1,0}} get-tuple-element(%s), index=0
  %b = f32[32,4]{{1,0}} get-tuple-element(%s), index=1
  %m = (f32[4]{{0}}, f32[8,4]{{1,0}}, f32[32,4]{{1,0}}, f32[32,4]{{1,0}}) fusion(%a, %b, %v.1), \
kind=kOutput, output_to_operand_aliasing={{{{1}}: (0, {{}}), {{2}}: (1, {{}}), {{3}}: (1, {{}})}}, \
calls=%carry
  %c = f32[8,4]{{1,0}} get-tuple-element(%m), index=1
  %d = f32[32,4]{{1,0}} get-tuple-element(%m), index=3
  ROOT %f = f32[32,4]{{1,0}} fusion(%c, %d), kind=kCustom, \
output_to_operand_aliasing={{{{}}: (1, {{}})}}, calls=%end
}}
"""
    counts = hlo.count(text)
    assert counts.bytes == (8 * 4 + 32 * 4) * 4 + 2 * 4 * 4
    assert counts.collectives == [hlo.Collective("all-gather", 1, 32 * 4 * 4, (0, 1, 2, 3))]
