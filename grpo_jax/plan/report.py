"""A plan as figures and as a page."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo_jax.plan.advice import suggestions
from grpo_jax.plan.listed import Listed
from grpo_jax.plan.plan import CompiledProgram, Plan, Planned
from grpo_jax.plan.topology import GIB

TITLES = {
    "cast": "weights for the sampler, cast",
    "layout": "layout, largest",
    "sampler": "sampler",
    "evaluation": "evaluation's sampler",
    "logp": "log-probabilities",
    "entropy": "entropies",
    "values": "critic's values",
    "ages_of": "ages",
    "own_where_fresh": "π_old of fresh prompts",
    "assemble": "advantages",
    "busy_and_tokens": "zero-variance groups, found",
    "part_and_rest": "zero-variance groups, dropped",
    "step": "train step",
    "supervised": "supervised step",
}
# Figures of the train step that also stand at the top.
TOP = (
    "argument_bytes",
    "temp_bytes",
    "flops",
    "hbm_bytes",
    "roofline_seconds",
    "collective_share",
    "collectives",
)


def figures(plan: Plan) -> dict[str, Any]:
    """All of a plan for JSON.

    The figures at the top are those of the largest train step (None where none was compiled),
    `fits` and the time are of all programs. Every program is listed; `compiled` is None where a
    larger one of its kind stands for it.
    """
    config = plan.config
    step = plan.largest("step")
    of_step = {} if step is None else compiled_figures(step)
    generation = config.generation
    return {
        "fits": plan.fits,
        "topology": plan.topology.name,
        "chips": plan.topology.chips,
        "chip_bytes": plan.topology.chip.hbm_bytes,
        "usable_bytes": plan.topology.usable_bytes,
        "model": config.model,
        "parameters": plan.parameters,
        "dtype": config.precision.computed,
        "param_dtype": config.precision.params,
        "moment_dtype": config.precision.moments,
        "remat": config.remat,
        "mesh": config.mesh_sizes,
        "decode_weights": config.decode_weights,
        "prompts": config.batching.prompts_per_step,
        "group_size": generation.group_size,
        "decode_slots": generation.slots,
        "prompt_length": config.batching.prompt_length,
        "max_new_tokens": generation.max_new_tokens,
        "microbatches": config.update.microbatches,
        "group_microbatches": config.update.group_microbatches,
        "objective": config.objective,
        **{name: of_step.get(name) for name in TOP},
        "compile_seconds": round(sum(one.compile_seconds for _, one in plan.compiled), 1),
        "suggestions": suggestions(plan),
        "programs": [program_figures(one) for one in plan.programs],
    }


def program_figures(planned: Planned) -> dict[str, Any]:
    """A program: what it is, and what it does on one chip where it was compiled."""
    listed = planned.listed
    compiled = planned.compiled
    return {
        "name": listed.name,
        "kind": listed.kind,
        "shapes": listed.sizes,
        "options": plain(listed.options),
        "resident_bytes": listed.resident_bytes,
        "hbm_bound_bytes": listed.bound_bytes,
        "compiled": None if compiled is None else compiled_figures(compiled),
    }


def compiled_figures(program: CompiledProgram) -> dict[str, Any]:
    """A compiled program on one chip; None is what is not known where it did not fit."""
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


def by_kind(program: CompiledProgram) -> list[dict[str, Any]]:
    """A program's collectives by kind: how often they run, and the bytes of one chip."""
    sums: dict = defaultdict(lambda: [0, 0.0])
    for one in program.counts.collectives:
        sums[one.kind][0] += one.times
        sums[one.kind][1] += one.times * one.bytes
    return [
        {"kind": kind, "count": times, "bytes": size}
        for kind, (times, size) in sorted(sums.items())
    ]


def plain(value: Any) -> Any:
    """Options as JSON has them."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def show(plan: Plan, console: Console) -> None:
    """Prints a plan."""
    console.print(heading(plan), highlight=False)
    console.print(listed_table(plan))
    console.print(memory_table(plan))
    console.print(cost_table(plan))
    console.print(collective_table(plan))
    usable = plan.topology.usable_bytes / GIB
    room = f"{usable:.2f} of {plan.topology.chip.hbm_bytes / GIB:.0f} GiB a chip"
    verdict = "[bold green]fits[/]" if plan.fits else "[bold red]does not fit[/]"
    seconds = sum(one.compile_seconds for _, one in plan.compiled)
    console.print(f"{verdict} the {room}; compiled in {seconds:.0f} s", highlight=False)
    for advice in suggestions(plan):
        console.print(f"  try {advice}", highlight=False, markup=False)


def heading(plan: Plan) -> str:
    """What is planned, in a few lines."""
    config = plan.config
    generation = config.generation
    update = config.update
    axes = [f"{axis} {size}" for axis, size in config.mesh_sizes.items() if size > 1]
    slots = generation.decode_slots
    sampled = "" if slots is None else f" ({slots} sampled at a time)"
    types = f"{config.precision.params}, computed in {config.precision.computed}"
    size = f"{plan.parameters / 1e9:.2f} billion parameters, {types}"
    chips = f"{plan.topology.chips} chips as {' × '.join(axes)}" if axes else "one device"
    batch = f"{config.batching.prompts_per_step} prompts of {config.batching.prompt_length} tokens"
    group = f"{generation.group_size} completions of {generation.max_new_tokens}{sampled}"
    cuts = f"{update.microbatches} × {update.group_microbatches} micro-batches"
    return (
        f"{config.model} ({size}) on {plan.topology.name}: {chips}\n"
        f"{batch} × {group}, {cuts}, {config.objective}, "
        f"remat {config.remat}, weights in decoding: {config.decode_weights}"
    )


def title(listed: Listed) -> str:
    return TITLES.get(listed.kind, listed.kind)


def listed_table(plan: Plan) -> Table:
    """Every program; those of one kind with completions of one length are in one row."""
    heads = ("programs", "prompts", "completions", "tokens of a group", "kept", "compiled")
    table = Table("", *heads)
    rows: dict = defaultdict(list)
    for planned in plan.programs:
        sizes = planned.listed.sizes
        group = [sizes[name] for name in ("group_size", "completion_length") if name in sizes]
        rows[title(planned.listed), " × ".join(map(str, group))].append(planned)
    for (name, completions), found in rows.items():
        compiled = sum(one.compiled is not None for one in found)
        prompts = values_of("prompts", found)
        tokens = values_of("packed_tokens", found, "all" if completions else "")
        kept = values_of("kept_prompts", found, "")
        cells = (prompts, completions, tokens, kept, compiled or "")
        table.add_row(name, str(len(found)), *map(str, cells))
    return table


def values_of(size: str, programs: Sequence[Planned], absent: Any = "") -> str:
    """The values that programs have of a size, each once."""
    found = dict.fromkeys(one.listed.sizes.get(size, absent) for one in programs)
    return ", ".join(str(value) for value in found if value != "")


def memory_table(plan: Plan) -> Table:
    """What the compiled programs need of a chip's memory."""
    parts = ("arguments", "temporaries", "new outputs", "code", "kept beside", "together", "")
    table = Table("GiB a chip", *parts)
    for listed, p in plan.compiled:
        new = p.output_bytes - p.alias_bytes
        own = (p.argument_bytes, p.temp_bytes, new, p.code_bytes)
        cells = [f"{size / GIB:.2f}" for size in (*own, p.resident_bytes, p.needed_bytes)]
        enough = p.needed_bytes <= plan.topology.usable_bytes
        table.add_row(title(listed), *cells, "" if enough else "[red]too much[/]")
    return table


def cost_table(plan: Plan) -> Table:
    """What the compiled programs compute and read, and how long that takes at best."""
    costs = ("TFLOP", "GB of HBM", "seconds", "collectives", "their share", "compile")
    table = Table("a chip, at best", *costs)
    for listed, p in plan.compiled:
        if p.counts is not None:
            table.add_row(
                title(listed),
                f"{p.counts.flops / 1e12:.4g}",
                f"{p.counts.bytes / 1e9:.4g}",
                f"{p.roofline.busy_seconds:.4g} s",
                f"{p.roofline.collective_seconds:.4g} s",
                f"{100 * p.roofline.collective_share:.0f} %",
                f"{p.compile_seconds:.0f} s",
            )
    return table


def collective_table(plan: Plan) -> Table:
    """The collectives of the compiled programs."""
    table = Table("collectives", "", "times", "GB a chip")
    for listed, compiled in plan.compiled:
        for one in by_kind(compiled) if compiled.counts is not None else ():
            gigabytes = f"{one['bytes'] / 1e9:.3f}"
            table.add_row(title(listed), one["kind"], str(one["count"]), gigabytes)
    return table
