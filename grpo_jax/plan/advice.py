"""What to try where a plan does not fit, from what takes the memory."""

from grpo_jax.models.decoder import REMAT
from grpo_jax.plan.plan import CompiledProgram, Plan
from grpo_jax.plan.topology import GIB, larger

ROOM = 0.9  # advice aims at this share of the memory


def suggestions(plan: Plan) -> list[str]:
    """Options to try, the cheapest first; none where the plan fits."""
    if plan.fits:
        return []
    own = {
        "step": for_step,
        "sampler": for_sampler,
        "evaluation": for_evaluation,
    }
    found: list[str | None] = []
    for listed, program in plan.compiled:
        if program.needed_bytes > plan.topology.usable_bytes:
            found += own.get(listed.kind, for_rest)(plan, program)
    return list(dict.fromkeys(filter(None, [*found, more_chips(plan)])))


def for_step(plan: Plan, step: CompiledProgram) -> list[str | None]:
    """Temporaries are cut first, by as much as is needed."""
    config = plan.config
    room = ROOM * plan.topology.usable_bytes
    fixed = step.needed_bytes - step.temp_bytes
    if fixed > room:
        return smaller_state(plan)
    cuts = step.temp_bytes / max(room - fixed, 1)  # by how much temporaries must shrink
    update = config.update
    rows = prompts_of_a_part(plan) // update.microbatches
    group = config.generation.group_size // update.group_microbatches
    found: list[str | None] = []
    if config.remat != "layer":
        found.append(f"--remat layer (now {config.remat}; one of {', '.join(REMAT)})")
    if rows > 1:
        more = divisor(rows, cuts)
        flag = f"--microbatches {update.microbatches * more}"
        found.append(f"{flag}: {rows // more} prompts a chip at a time, now {rows}")
        cuts /= more
    if cuts > 1 and group > 1:
        more = divisor(group, cuts)
        flag = f"--group-microbatches {update.group_microbatches * more}"
        smaller = f"{group // more} completions of a prompt at a time, now {group}"
        found.append(f"{flag}: {smaller}")
        cuts /= more
    if cuts > 1:
        found.append(more_tensor(plan))
    return found


def for_sampler(plan: Plan, sampler: CompiledProgram) -> list[str | None]:
    """Weights if they are more than the caches, then fewer caches."""
    config = plan.config
    found = smaller_weights(plan, sampler)
    rows = prompts_of_a_part(plan)
    cuts = config.update.microbatches
    if rows > cuts:
        fewer = config.batching.prompts_per_step // rows * cuts
        flag = f"--prompts-per-step {fewer}"
        found.append(f"{flag}: fewer caches at a time, now {rows} prompts a chip")
    slots = config.generation.slots
    if slots > 1:
        flag = f"--decode-slots {slots // 2}"
        found.append(f"{flag}: caches of half as many completions of a prompt, now {slots}")
    return [*found, narrower_sampler(plan)]


def for_evaluation(plan: Plan, sampler: CompiledProgram) -> list[str | None]:
    """As `for_sampler`, for one completion of each held-out row."""
    size = plan.config.eval_batch_size
    parts = prompt_parts(plan)
    found = smaller_weights(plan, sampler)
    if size > parts:
        fewer = max(parts, size // 2)
        found.append(f"--eval-batch-size {fewer}: fewer caches at a time, now {size} rows")
    return [*found, narrower_sampler(plan)]


def for_rest(plan: Plan, program: CompiledProgram) -> list[str | None]:
    return smaller_state(plan)


def smaller_weights(plan: Plan, sampler: CompiledProgram) -> list[str | None]:
    """Where the sampler's weights are gathered over fsdp and take more than its caches."""
    config = plan.config
    gathered = config.decode_weights == "gather" and config.mesh_sizes["fsdp"] > 1
    if not gathered or sampler.argument_bytes <= sampler.temp_bytes:
        return []
    size = sampler.argument_bytes / GIB
    taken = f"the sampler's weights take {size:.1f} GiB of each chip"
    return [more_tensor(plan), f"--decode-weights split: {taken}"]


def smaller_state(plan: Plan) -> list[str | None]:
    sizes = plan.config.mesh_sizes
    found: list[str | None] = []
    if sizes["data"] > 1:
        flag = f"--mesh fsdp={sizes['data'] * sizes['fsdp']},tensor={sizes['tensor']}"
        now = sizes["fsdp"] * sizes["tensor"]
        found.append(f"{flag}: parameters and optimiser state over all chips, now over {now}")
    if plan.config.precision.moments == "float32":
        found.append("--moment-dtype bfloat16: halves the optimiser's first moment")
    return found


def narrower_sampler(plan: Plan) -> str | None:
    wide = plan.config.precision.computed == "float32"
    return "--compute-dtype bfloat16: halves the sampler's weights and caches" if wide else None


def more_tensor(plan: Plan) -> str | None:
    """Twice the tensor axis for half the fsdp axis, or for half of data; prompts must allow it."""
    sizes = plan.config.mesh_sizes
    axis = "fsdp" if sizes["fsdp"] % 2 == 0 else "data"
    if sizes[axis] % 2:
        return None
    changed = sizes | {axis: sizes[axis] // 2, "tensor": sizes["tensor"] * 2}
    mesh = ",".join(f"{name}={size}" for name, size in changed.items())
    return f"--mesh {mesh}: each chip holds and computes less of a layer"


def more_chips(plan: Plan) -> str | None:
    """The slice that would hold everything if all of it were spread over the chips."""
    most = max(program.needed_bytes for _, program in plan.compiled)
    needed = plan.topology.chips * max(most / (ROOM * plan.topology.usable_bytes), 1.01)
    found = larger(plan.topology, needed)
    return found and f"--topology {found.name}: {found.chips} chips"


def prompt_parts(plan: Plan) -> int:
    """The parts that prompts are spread over."""
    sizes = plan.config.mesh_sizes
    return sizes["data"] * sizes["fsdp"]


def prompts_of_a_part(plan: Plan) -> int:
    return plan.config.batching.prompts_per_step // prompt_parts(plan)


def divisor(number: int, least: float) -> int:
    """The smallest divisor that is at least `least`, or the number itself."""
    return next((d for d in range(2, number + 1) if number % d == 0 and d >= least), number)
