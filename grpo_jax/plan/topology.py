"""TPU chips and how they are wired: names, public figures, and how long a program takes at best.

Left out on purpose: measured efficiencies. A time here is a bound from the chip's data sheet, not a
forecast.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_jax.options import OptionError
from grpo_jax.plan.hlo import Collective, Counts

MIB = 1024**2
GIB = 1024**3


class Chip(NamedTuple):
    """One chip, by its data sheet.

    `reserved_bytes` of its memory are the runtime's, and `own_bytes` are memory on the chip itself,
    which programs use besides HBM. `link_bandwidth` is bytes a second over one link in one
    direction; a chip has two links along each of `axes` axes of the torus. `ring` is the length
    from which an axis closes to a ring. `name_cores` is the number of TensorCores a chip counts for
    in names such as v5p-64.
    """

    hbm_bytes: int
    reserved_bytes: int
    own_bytes: int
    flops: float
    hbm_bandwidth: float
    link_bandwidth: float
    axes: int
    ring: int
    name_cores: int


# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}: memory, peak bf16 FLOP/s, memory bandwidth,
# bidirectional bandwidth of all a chip's links together (v4 600, v5e 400, v5p 1200, v6e 800 GB/s: 6
# links on a 3D torus, 4 on a 2D one). What programs get of the memory: libtpu's messages where it
# does not suffice (v4 30.75 GiB, v5e 15.75). Memory on the chip:
# jax.experimental.pallas.tpu.get_tpu_info; a v4 has 128 MiB beside the 16 MiB of each core.
CHIPS = {
    "v4": Chip(32 * GIB, 1280 * MIB, 160 * MIB, 275e12, 1.2e12, 600e9 / 12, 3, 4, 2),
    "v5e": Chip(16 * GIB, 256 * MIB, 128 * MIB, 197e12, 0.819e12, 400e9 / 8, 2, 16, 1),
    "v5p": Chip(95 * GIB, 256 * MIB, 128 * MIB, 459e12, 2.765e12, 1200e9 / 12, 3, 4, 2),
    "v6e": Chip(32 * GIB, 768 * MIB, 128 * MIB, 918e12, 1.64e12, 800e9 / 8, 2, 16, 1),
}
HOST = (2, 2, 1)  # chips of one host, of slices that are not smaller

# The shapes of slices that Google offers, by their number of chips.
SHAPES = {
    2: {
        1: (1, 1),
        4: (2, 2),
        8: (2, 4),
        16: (4, 4),
        32: (4, 8),
        64: (8, 8),
        128: (8, 16),
        256: (16, 16),
    },
    3: {
        4: (2, 2, 1),
        8: (2, 2, 2),
        16: (2, 2, 4),
        32: (2, 4, 4),
        64: (4, 4, 4),
        128: (4, 4, 8),
        256: (4, 8, 8),
        512: (8, 8, 8),
        1024: (8, 8, 16),
    },
}


class Topology(NamedTuple):
    """A slice of chips of one kind, and the shape it is wired in."""

    kind: str
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def usable_bytes(self) -> int:
        """Memory of a chip that programs can have."""
        return self.chip.hbm_bytes - self.chip.reserved_bytes

    @property
    def options(self) -> dict[str, Any]:
        """What libtpu must be told besides the name.

        The two cores of a v4 are one device, as they are when it is used; the chips of a host are
        fewer in a slice that is smaller than one.
        """
        sizes = (*self.shape, 1)[:3]
        host = tuple(map(min, zip(sizes, HOST, strict=True)))
        found: dict[str, Any] = {} if host == HOST else {"chips_per_host_bounds": host}
        return found | ({"chip_config_name": "megacore"} if self.kind == "v4" else {})

    def rings(self) -> tuple[bool, ...]:
        """Whether the ends of each axis are connected: full axes of v5e and v6e, whole cubes of v4
        and v5p.
        """
        ring = self.chip.ring
        if self.chip.axes == 3:
            return (all(size % ring == 0 for size in self.shape),) * 3
        return tuple(size == ring for size in self.shape)


def parse_topology(name: str) -> Topology:
    """`v5e:4x4` (the shape in chips), or an alias by size.

    An alias counts as Google's names do: chips for v5e and v6e (v5e-64 is 8x8), TensorCores, two a
    chip, for v4 and v5p (v5p-64 is 2x4x4: 32 chips). Raises an `OptionError` for a kind or a size
    that is not known.
    """
    parts = re.fullmatch(r"([^:\-]*)([:\-]?)(.*)", name.strip().lower(), re.DOTALL)
    kind, separator, rest = parts.groups()
    kind = {"v5litepod": "v5e"}.get(kind, kind)
    if kind not in CHIPS:
        known = f"expected one of {', '.join(CHIPS)}, as in v5e:4x4"
        raise OptionError("topology", f"{name!r}: unknown chip {kind!r}, {known}")
    chip = CHIPS[kind]
    if separator == "-" and rest.isdecimal():
        sizes = {chips * chip.name_cores: shape for chips, shape in SHAPES[chip.axes].items()}
        if int(rest) not in sizes:
            unit = "chips" if chip.name_cores == 1 else "TensorCores, two a chip"
            known = f"{kind} comes in {', '.join(map(str, sizes))} ({unit})"
            raise OptionError("topology", f"{name!r}: {known}")
        return Topology(kind, sizes[int(rest)])
    if separator == ":" and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", rest):
        shape = tuple(map(int, rest.split("x")))
        if len(shape) == chip.axes:
            return Topology(kind, shape)
    written = f"a {kind} slice is written {kind}:{'x'.join('2' * chip.axes)}"
    raise OptionError("topology", f"{name!r}: {written} (chips along {chip.axes} axes)")


def larger(topology: Topology, chips: float) -> Topology | None:
    """The smallest slice of the same kind with at least so many chips; None if there is none."""
    sizes = SHAPES[topology.chip.axes]
    return next((Topology(topology.kind, sizes[n]) for n in sorted(sizes) if n >= chips), None)


class Roofline(NamedTuple):
    """Seconds on one chip: products and memory traffic, and collectives.

    `busy_seconds` adds up, over all instructions, the longer of FLOPs at peak speed and bytes at
    full bandwidth. `seconds` is the longer of the two (everything overlaps); `collective_share`
    their share if nothing overlaps.
    """

    busy_seconds: float
    collective_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.busy_seconds, self.collective_seconds)

    @property
    def collective_share(self) -> float:
        total = self.busy_seconds + self.collective_seconds
        return self.collective_seconds / total if total else 0.0


def roofline(counts: Counts, topology: Topology, coords: Sequence[tuple[int, ...]]) -> Roofline:
    """The best time that a chip can take for a program.

    `coords` are the places of all chips, in partition order.
    """
    chip = topology.chip
    busy = sum(
        w.times * max(w.flops / chip.flops, w.bytes / chip.hbm_bandwidth) for w in counts.work
    )
    together = sum(c.times * collective_seconds(c, topology, coords) for c in counts.collectives)
    return Roofline(busy, together)


def wire_bytes(collective: Collective, members: int) -> float:
    """Bytes that a chip must at least receive: `(n−1)/n` of the whole array, twice that for an
    all-reduce.
    """
    if collective.kind in ("collective-permute", "collective-broadcast"):
        return collective.bytes
    passes = 2 if collective.kind == "all-reduce" else 1
    return passes * collective.bytes * (members - 1) / members


def collective_seconds(
    collective: Collective, topology: Topology, coords: Sequence[tuple[int, ...]]
) -> float:
    """One run of a collective at full speed of the links that its group can use.

    A group spread along an axis of the torus receives over one link of that axis, or over two where
    the group takes up the whole of a ring; several axes add up.
    """
    group = collective.group or tuple(range(len(coords)))
    if len(group) < 2:
        return 0.0
    links = 0
    for axis, (size, ring) in enumerate(zip(topology.shape, topology.rings(), strict=True)):
        places = len({coords[member][axis] for member in group})
        if places > 1:
            links += 2 if ring and places == size and size > 2 else 1
    return wire_bytes(collective, len(group)) / (links * topology.chip.link_bandwidth)
