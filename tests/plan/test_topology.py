"""Names of slices, the arithmetic of the roofline, and the links that a collective can use."""

import math
from itertools import product

import pytest
from grpo_jax.plan.hlo import Collective, Counts, Work
from grpo_jax.plan.topology import (
    CHIPS,
    SHAPES,
    collective_seconds,
    larger,
    parse_topology,
    roofline,
    wire_bytes,
)


@pytest.mark.parametrize(
    ("name", "expected", "chips"),
    [
        ("v5e:16x16", "v5e:16x16", 256),
        ("v5p:4x4x4", "v5p:4x4x4", 64),
        ("v5e-16", "v5e:4x4", 16),
        ("v5litepod-64", "v5e:8x8", 64),
        ("v6e-8", "v6e:2x4", 8),
        ("v5p-64", "v5p:2x4x4", 32),
        ("v4-8", "v4:2x2x1", 4),
        ("V5E-64", "v5e:8x8", 64),
    ],
)
def test_names(name, expected, chips):
    topology = parse_topology(name)
    assert (topology.name, topology.chips) == (expected, chips)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "unknown chip 'v9', expected one of v4, v5e, v5p, v6e"),
        ("", "unknown chip ''"),
        ("v5e", r"a v5e slice is written v5e:2x2 \(chips along 2 axes\)"),
        ("v5e:4x4x4", "v5e:2x2"),
        ("v5p:4x4", "v5p:2x2x2"),
        ("v5e:0x4", "v5e:2x2"),
        ("v5e-48", r"v5e comes in 1, 4, 8, 16, .* \(chips\)"),
        ("v5p-4", r"v5p comes in 8, 16, .* \(TensorCores, two a chip\)"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(name)


def test_shapes_have_the_size_they_are_listed_under():
    for axes, shapes in SHAPES.items():
        for chips, shape in shapes.items():
            assert math.prod(shape) == chips
            assert len(shape) == axes


def test_memory_that_programs_can_have():
    """What XLA reports where a program does not fit these chips."""
    assert parse_topology("v5e-16").usable_bytes == 15.75 * 1024**3
    assert parse_topology("v4-8").usable_bytes == 30.75 * 1024**3
    assert parse_topology("v6e-16").usable_bytes == 31.25 * 1024**3


def test_what_libtpu_is_told_of_small_slices_and_of_v4():
    assert parse_topology("v5e-16").options == {}
    assert parse_topology("v5e-1").options == {"chips_per_host_bounds": (1, 1, 1)}
    assert parse_topology("v4-8").options == {"chip_config_name": "megacore"}


def test_larger_slices():
    topology = parse_topology("v5e:4x4")
    assert larger(topology, 17).name == "v5e:4x8"
    assert larger(topology, 256).name == "v5e:16x16"
    assert larger(topology, 257) is None


def test_rings():
    assert parse_topology("v5e:8x16").rings() == (False, True)
    assert parse_topology("v5p:4x4x4").rings() == (True, True, True)
    assert parse_topology("v5p:2x4x4").rings() == (False, False, False)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all-gather", 3 / 4),
        ("reduce-scatter", 3 / 4),
        ("all-to-all", 3 / 4),
        ("all-reduce", 6 / 4),
        ("collective-permute", 1),
    ],
)
def test_bytes_on_the_wire(kind, factor):
    assert wire_bytes(Collective(kind, 1, 1000.0, ()), 4) == 1000 * factor


def coords(topology):
    return [place for place in product(*map(range, topology.shape))]


def test_links_that_a_collective_can_use():
    link = CHIPS["v5e"].link_bandwidth
    gather = lambda group: Collective("all-gather", 1, link, group)  # its array takes a second over one link
    plane = parse_topology("v5e:4x4")
    column, row = (0, 4, 8, 12), (0, 1, 2, 3)
    for line in (column, row):
        assert collective_seconds(gather(line), plane, coords(plane)) == pytest.approx(3 / 4)
    assert collective_seconds(gather(()), plane, coords(plane)) == pytest.approx(15 / 16 / 2)
    assert collective_seconds(gather((3,)), plane, coords(plane)) == 0
    torus = parse_topology("v5e:16x16")
    assert collective_seconds(gather(tuple(range(16))), torus, coords(torus)) == pytest.approx(15 / 16 / 2)
    assert collective_seconds(gather(tuple(range(8))), torus, coords(torus)) == pytest.approx(7 / 8)
    assert collective_seconds(gather(()), torus, coords(torus)) == pytest.approx(255 / 256 / 4)


def test_roofline_takes_the_slower_bound_of_each_instruction():
    topology = parse_topology("v5e:4x4")
    chip = topology.chip
    work = [Work(3, 2 * chip.flops, chip.hbm_bandwidth), Work(2, chip.flops, 4 * chip.hbm_bandwidth)]
    gather = Collective("all-gather", 5, chip.link_bandwidth, (0, 1, 2, 3))
    found = roofline(Counts(work, [gather], {}), topology, coords(topology))
    assert found.busy_seconds == pytest.approx(3 * 2 + 2 * 4)
    assert found.collective_seconds == pytest.approx(5 * 3 / 4)
    assert found.seconds == pytest.approx(14)
    assert found.collective_share == pytest.approx(3.75 / 17.75)
    assert roofline(Counts([], [], {}), topology, []).collective_share == 0
