"""A plan as figures, as a page, and as advice on what to try next where it does not fit."""

from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo_jax.models.decoder import REMAT
from grpo_jax.plan.plan import CompiledProgram, Plan
from grpo_jax.plan.topology import larger

TITLES = {
    "step": "train step",
    "layout": "layout, largest",
    "sampler": "sampler",
    "reference": "reference's log-probs",
}
ROOM = 0.9  # advice aims at this share of the memory


def by_kind(program: CompiledProgram) -> list[dict[str, Any]]:
    """The collectives of a program, by kind: how often they run and the bytes that go through them,
    on one chip.
    """
    sums: dict = defaultdict(lambda: [0, 0.0])
    for one in program.counts.collectives:
        sums[one.kind][0] += one.times
        sums[one.kind][1] += one.times * one.bytes
    return [
        {"kind": kind, "count": times, "bytes": size}
        for kind, (times, size) in sorted(sums.items())
    ]


def program_figures(program: CompiledProgram) -> dict[str, Any]:
    """One program on one chip; what is only known of a compiled program is None where it did not
    compile.
    """
    counts = program.counts
    roof = program.roofline
    return {
        "needed_bytes": program.needed_bytes,
        "argument_bytes": program.argument_bytes,
        "temp_bytes": program.temp_bytes,
        "output_bytes": program.output_bytes,
        "alias_bytes": program.alias_bytes,
        "code_bytes": program.code_bytes,
        "resident_bytes": program.resident_bytes,
        "flops": counts and counts.flops,
        "hbm_bytes": counts and counts.bytes,
        "busy_seconds": roof and roof.busy_seconds,
        "collective_seconds": roof and roof.collective_seconds,
        "collective_share": roof and roof.collective_share,
        "roofline_seconds": roof and roof.seconds,
        "collectives": counts and by_kind(program),
        "unknown_loops": counts
        and sorted(name for name, trips in counts.loops.items() if trips is None),
        "compile_seconds": round(program.compile_seconds, 1),
    }


def figures(plan: Plan) -> dict[str, Any]:
    """All of a plan for JSON; the figures at the top are those of the train step, `fits` and the
    time are of all.
    """
    programs = {name: program_figures(program) for name, program in plan.programs.items()}
    config = plan.config
    top = (
        "argument_bytes",
        "temp_bytes",
        "flops",
        "hbm_bytes",
        "roofline_seconds",
        "collective_share",
        "collectives",
    )
    return {
        "fits": plan.fits,
        "topology": plan.topology.name,
        "chips": plan.topology.chips,
        "chip_bytes": plan.topology.chip.hbm_bytes,
        "usable_bytes": plan.topology.usable_bytes,
        "model": config.model,
        "parameters": plan.parameters,
        "dtype": config.dtype,
        "remat": config.remat,
        "mesh": config.mesh_sizes,
        "decode_weights": config.decode_weights,
        "prompts": config.batch,
        "group_size": config.group_size,
        "decode_slots": config.decode_slots or config.group_size,
        "prompt_length": config.prompt_length,
        "max_new_tokens": config.max_new_tokens,
        "microbatches": config.microbatches,
        "group_microbatches": config.group_microbatches,
        "objective": config.objective,
        **{name: programs["step"][name] for name in top},
        "compile_seconds": round(sum(p.compile_seconds for p in plan.programs.values()), 1),
        "suggestions": suggestions(plan),
        "programs": programs,
    }


def suggestions(plan: Plan) -> list[str]:
    """What to try where a plan does not fit, the cheapest first, from what takes the memory; empty
    where it fits.
    """
    if plan.fits:
        return []
    found = []
    for name, program in plan.programs.items():
        if program.needed_bytes > plan.topology.usable_bytes:
            found += {"step": _for_step, "sampler": _for_sampler}.get(name, _for_rest)(
                plan, program
            )
    return list(dict.fromkeys(filter(None, [*found, _more_chips(plan)])))


def _for_step(plan: Plan, step: CompiledProgram) -> list[str | None]:
    config = plan.config
    room = ROOM * plan.topology.usable_bytes
    fixed = step.needed_bytes - step.temp_bytes
    if fixed > room:
        return _smaller_state(plan, fixed)
    cuts = step.temp_bytes / max(room - fixed, 1)  # by how much temporaries must shrink
    sizes = config.mesh_sizes
    rows = config.batch // (sizes["data"] * sizes["fsdp"] * config.microbatches)
    group = config.group_size // config.group_microbatches
    found = [
        None
        if config.remat == "layer"
        else f"--remat layer (now {config.remat}; one of {', '.join(REMAT)})"
    ]
    if rows > 1:
        more = _divisor(rows, cuts)
        found.append(
            f"--microbatches {config.microbatches * more}: {rows // more} prompts a chip at a time, now {rows}"
        )
        cuts /= more
    if cuts > 1 and group > 1:
        more = _divisor(group, cuts)
        found.append(
            f"--group-microbatches {config.group_microbatches * more}: {group // more} completions of a prompt at a "
            f"time, now {group}"
        )
        cuts /= more
    if cuts > 1:
        found.append(_more_tensor(plan))
    return found


def _for_sampler(plan: Plan, sampler: CompiledProgram) -> list[str | None]:
    config = plan.config
    sizes = plan.config.mesh_sizes
    weights = sampler.argument_bytes
    found = []
    if weights > sampler.temp_bytes and config.decode_weights == "gather" and sizes["fsdp"] > 1:
        size = weights / 1024**3
        found += [
            _more_tensor(plan),
            f"--decode-weights split: the sampler's weights take {size:.1f} GiB of each chip",
        ]
    rows = config.batch // (sizes["data"] * sizes["fsdp"])
    if rows > 1:
        found.append(
            f"--prompts {config.batch // rows}: fewer caches at a time, now {rows} prompts a chip"
        )
    decode_slots = config.decode_slots or config.group_size
    if decode_slots > 1:
        found.append(
            f"--decode_slots {decode_slots // 2}: caches of half as many completions of a prompt, now {decode_slots}"
        )
    if config.dtype == "float32":
        found.append("--dtype bfloat16: halves weights and caches")
    return found


def _for_rest(plan: Plan, program: CompiledProgram) -> list[str | None]:
    return _smaller_state(plan, program.needed_bytes - program.temp_bytes)


def _smaller_state(plan: Plan, fixed: int) -> list[str | None]:
    config = plan.config
    sizes = plan.config.mesh_sizes
    found = []
    if sizes["data"] > 1:
        found.append(
            f"--mesh fsdp={sizes['data'] * sizes['fsdp']},tensor={sizes['tensor']}: parameters and optimiser state "
            f"over all chips, now over {sizes['fsdp'] * sizes['tensor']}"
        )
    if config.dtype == "float32":
        found.append("--dtype bfloat16: halves parameters and moments")
    return found


def _more_tensor(plan: Plan) -> str | None:
    """Twice the tensor axis for half the fsdp axis (or data, if that is all there is); the prompts
    must allow it.
    """
    sizes = plan.config.mesh_sizes
    axis = "fsdp" if sizes["fsdp"] % 2 == 0 else "data"
    if sizes[axis] % 2:
        return None
    changed = sizes | {axis: sizes[axis] // 2, "tensor": sizes["tensor"] * 2}
    return f"--mesh {','.join(f'{a}={n}' for a, n in changed.items())}: each chip holds and computes less of a layer"


def _more_chips(plan: Plan) -> str | None:
    """The slice that would hold everything if all of it were spread over the chips."""
    most = max(program.needed_bytes for program in plan.programs.values())
    needed = plan.topology.chips * max(most / (ROOM * plan.topology.usable_bytes), 1.01)
    found = larger(plan.topology, needed)
    return found and f"--topology {found.name}: {found.chips} chips"


def _divisor(number: int, least: float) -> int:
    """The smallest divisor that is at least `least`, or the number itself."""
    return next((d for d in range(2, number + 1) if number % d == 0 and d >= least), number)


def show(plan: Plan, console: Console) -> None:
    """Prints a plan."""
    told = figures(plan)
    config = plan.config
    axes = (
        " × ".join(f"{axis} {size}" for axis, size in config.mesh_sizes.items() if size > 1)
        or "one chip"
    )
    decode_slots = (
        "" if config.decode_slots is None else f" ({config.decode_slots} sampled at a time)"
    )
    console.print(
        f"{config.model} ({plan.parameters / 1e9:.2f} billion parameters, {config.dtype}) on {plan.topology.name}: "
        f"{plan.topology.chips} chips as {axes}\n{config.batch} prompts of {config.prompt_length} tokens × "
        f"{config.group_size} completions of {config.max_new_tokens}{decode_slots}, {config.microbatches} × "
        f"{config.group_microbatches} micro-batches, {config.objective}, weights in decoding: {config.decode_weights}",
        highlight=False,
    )
    console.print(_memory_table(plan))
    console.print(_cost_table(told["programs"]))
    console.print(_collective_table(told["programs"]))
    room = f"{plan.topology.usable_bytes / 1024**3:.2f} of {plan.topology.chip.hbm_bytes / 1024**3:.0f} GiB a chip"
    verdict = "[bold green]fits[/]" if plan.fits else "[bold red]does not fit[/]"
    console.print(
        f"{verdict} the {room}; compiled in {told['compile_seconds']:.0f} s", highlight=False
    )
    for advice in told["suggestions"]:
        console.print(f"  try {advice}", highlight=False, markup=False)


def _memory_table(plan: Plan) -> Table:
    table = Table(
        "GiB a chip",
        "arguments",
        "temporaries",
        "new outputs",
        "code",
        "kept beside",
        "together",
        "",
    )
    for name, p in plan.programs.items():
        sizes = (
            p.argument_bytes,
            p.temp_bytes,
            p.output_bytes - p.alias_bytes,
            p.code_bytes,
            p.resident_bytes,
        )
        enough = p.needed_bytes <= plan.topology.usable_bytes
        cells = [f"{size / 1024**3:.2f}" for size in (*sizes, p.needed_bytes)]
        table.add_row(TITLES[name], *cells, "" if enough else "[red]too much[/]")
    return table


def _cost_table(programs: dict[str, dict]) -> Table:
    table = Table(
        "a chip, at best", "TFLOP", "GB of HBM", "seconds", "collectives", "their share", "compile"
    )
    for name, p in programs.items():
        if p["flops"] is not None:
            table.add_row(
                TITLES[name],
                f"{p['flops'] / 1e12:.4g}",
                f"{p['hbm_bytes'] / 1e9:.4g}",
                f"{p['busy_seconds']:.4g} s",
                f"{p['collective_seconds']:.4g} s",
                f"{100 * p['collective_share']:.0f} %",
                f"{p['compile_seconds']:.0f} s",
            )
    return table


def _collective_table(programs: dict[str, dict]) -> Table:
    table = Table("collectives", "", "times", "GB a chip")
    for name, p in programs.items():
        for one in p["collectives"] or ():
            table.add_row(TITLES[name], one["kind"], str(one["count"]), f"{one['bytes'] / 1e9:.3f}")
    return table
