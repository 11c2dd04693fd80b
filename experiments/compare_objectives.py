"""Every preset and every step from the vanilla policy gradient to GRPO, as systems that train,
compared.

    python -m experiments.compare_objectives --only grpo ppo --seeds 0 --steps 20
    python -m experiments.compare_objectives --shard 3/8

Without options it trains all of them, then writes the table and the picture. With `--shard` it
trains a part of the runs; a last call without it reports.

The tiny model on the pricing task with the settings of `grpo-jax train`. All systems start, for
each seed, from the same policy, trained once on right answers, see the same prompts, and sample as
many completions; what a method needs of its own stands in `SYSTEMS`. Runs that are finished are not
repeated.

Left out on purpose: a search over settings for each method. This shows what a method does where
GRPO was set up, not what it could do at its best.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments import compare_report
from grpo_jax.components import (
    Components,
    build,
    objective_of,
    optimizer_of,
    reference_rule,
    stages_of,
)
from grpo_jax.config import TrainConfig
from grpo_jax.inference.critic import value_network
from grpo_jax.named_options import choose
from grpo_jax.objectives import (
    PRESETS,
    AdaptiveObjective,
    Objective,
    adaptive_beta,
    kl_in_reward,
    reads,
)
from grpo_jax.options import whole
from grpo_jax.rewards import number_reward
from grpo_jax.runs import folder as run_folder
from grpo_jax.runs import run, terminal
from grpo_jax.tasks import Task
from grpo_jax.training.loop import iterate
from grpo_jax.training.programs import programs_of
from grpo_jax.training.stages import Stages
from grpo_jax.types import Params, RunState

NUMBER = r"\d+(?:\.\d\d)?"
STEP = rf"{NUMBER}(?:[*+-]{NUMBER}%?)+={NUMBER}"


def format_reward(prompt: str, completion: str) -> float:
    """1 if the completion is a working, right or wrong: steps like `7*3=21` with a space between
    them.
    """
    return float(re.fullmatch(f"{STEP}(?: {STEP})*", completion) is not None)


def working_reward(prompt: str, completion: str, working: str) -> list[tuple[int, float]] | float:
    """Two rewards a written step, in the order of the true working: what is computed (at its `=`),
    and its result.

    The two sides of a sum or product may be swapped. Steps beyond those of the working earn 0. A
    step without its result is one that earned 0, or a policy would be paid for stopping at `=`; so
    is nothing written at all.
    """
    rewards = []
    truth = working.split()
    for index, written in enumerate(re.finditer(r"\S+", completion)):
        left, _, right = written[0].partition("=")
        true_left, _, true_right = (truth[index] if index < len(truth) else "").partition("=")
        if right:
            rewards.append(
                (written.start() + len(left) + 1, float(left != "" and _same(left, true_left)))
            )
        rewards.append((written.end(), float(right != "" and right == true_right)))
    return rewards or 0.0


def _same(left: str, other: str) -> bool:
    operator = "+" if "+" in other else "*"
    return sorted(left.split(operator)) == sorted(other.split(operator))


class System(NamedTuple):
    """A method and what it needs beyond the settings that all share.

    `options` are options of a run, by the names of their flags; `rewards` stand in for the task's
    own; `kl_reward` is the β of a KL inside the reward, which `kl_target` (nats a token) moves
    after every step. `cost` is the time of a step; GRPO's is 1.
    """

    name: str
    options: dict[str, Any]
    rewards: tuple[Callable, ...] = ()
    kl_reward: float | None = None
    kl_target: float | None = None
    cost: float = 1.0

    def settings(self) -> str:
        """What is said of it in the table: everything that is not the default."""
        config = TrainConfig.of(**self.options)
        named = [config.objective, *config.objective_args]
        named += [
            f"{name}={value}"
            for name, value in self.options.items()
            if not name.startswith("objective")
        ]
        penalty = {"kl_reward": self.kl_reward, "kl_target": self.kl_target}
        named += [f"{name}={value}" for name, value in penalty.items() if value is not None]
        rewards = "+".join(reward.__name__ for reward in self.rewards)
        return " ".join([*named, f"rewards={rewards}"] if rewards else named)

    def objective(self, base: Objective) -> Objective | AdaptiveObjective:
        """The objective of its options, with the KL in the reward where it has one."""
        if self.kl_reward is None:
            return base
        if self.kl_target is None:
            return kl_in_reward(base, beta=self.kl_reward)
        return AdaptiveObjective(
            init=lambda: jnp.float32(self.kl_reward),
            bind=lambda beta: kl_in_reward(base, beta=beta),
            step=lambda beta, metrics: adaptive_beta(beta, metrics["kl"], target=self.kl_target),
        )

    def beta(self, state: RunState) -> float | None:
        """The β of the KL in the reward, where it has one."""
        return self.kl_reward if state.objective is None else float(state.objective)


# The default run's, wherever a KL holds the policy.
BETA = TrainConfig.of(objective="grpo").objective_options()["beta"]
KL_TARGET = 0.1  # nats a token: about half of where GRPO with that β ends
# What a preset needs that the default of its options does not give. The plain policy gradients know
# no reference.
NEEDS: dict[str, dict[str, Any]] = {
    "rloo": {"options": {"objective_args": ("beta=0.0",)}},
    "reinforce": {"options": {"objective_args": ("beta=0.0",)}},
    "reinforce_baseline": {"options": {"objective_args": ("beta=0.0",)}, "cost": 1.7},
    "ppo": {"cost": 1.7},
    "process_grpo": {"rewards": (working_reward,)},
    "gdpo": {"rewards": (number_reward, format_reward)},
}


def _preset(name: str) -> System:
    needs = NEEDS.get(name, {})
    return System(name, **(needs | {"options": {"objective": name} | needs.get("options", {})}))


def _grpo(name: str, *, beta: float | None = None, **fields: Any) -> System:
    arguments = {} if beta is None else {"objective_args": (f"beta={beta}",)}
    own = {key: fields.pop(key) for key in tuple(fields) if key not in System._fields}
    return System(f"grpo_{name}", {"objective": "grpo"} | arguments | own, **fields)


SYSTEMS: tuple[System, ...] = (
    *map(_preset, PRESETS),
    System(
        "reinforce_discounted",
        {"objective": "reinforce", "objective_args": ("beta=0.0", "gamma=0.9")},
    ),
    _grpo("without_kl", beta=0.0),
    _grpo("kl_in_reward", beta=0.0, kl_reward=BETA),
    _grpo("adaptive_beta", beta=0.0, kl_reward=BETA, kl_target=KL_TARGET),
    _grpo("iterative", ref_every=10),
    _grpo("ema", ref_ema=0.9),
    _grpo("two_rewards", rewards=(number_reward, format_reward)),
    _grpo("2_epochs", epochs=2, cost=1.7),
    _grpo("4_epochs", epochs=4, cost=3.0),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Train the tiny model on the pricing task under every objective, with equal budgets, and
    compare.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    """Of starting policy, order of the prompts and sampling."""
    steps: int = 40
    """Iterations of each run."""
    eval_every: int = 10
    """Iterations between evaluations on the held-out rows; also before the first and after the
    last.
    """
    epochs: int = 1
    """Updates on each batch (μ) of systems that do not say otherwise. With 1 the ratios are 1 and
    no clip acts.
    """
    sft_target_loss: float = 0.2
    """Cross-entropy at which the supervised updates end: below the default run's, so that 80 % is
    within the budget's reach.
    """
    only: tuple[str, ...] = ()
    """Systems, by name; none means all."""
    out: Path = Path("runs/compare_objectives")
    """Folder of results, table and picture; a call with the same settings continues there."""
    figure: Path | None = None
    """The picture; None puts compare_objectives.png into the folder."""
    shard: str = "0/1"
    """I/N: this process takes part I (from 0) of N of the runs, and leaves the report to a call
    without it.
    """
    merge: bool = False
    """Train nothing: report what is finished."""
    shared: tyro.conf.Fixed[dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Further options of every run, by the names of their flags; for callers in Python."""

    def __post_init__(self):
        for name in ("steps", "eval_every", "epochs"):
            whole(name, getattr(self, name), 1)
        if not self.seeds:
            raise ValueError("--seeds needs at least one seed")
        for seed in self.seeds:
            whole("seeds", seed, 0)
        for name in self.only:
            choose("only", name, tuple(system.name for system in SYSTEMS))
        if not re.fullmatch(r"\d+/[1-9]\d*", self.shard) or self.part[0] >= self.part[1]:
            raise ValueError(f"--shard takes I/N with I from 0 to N − 1, got {self.shard!r}")

    @property
    def part(self) -> tuple[int, int]:
        index, count = self.shard.split("/")
        return int(index), int(count)

    def config(self, system: System | None = None, seed: int = 0) -> TrainConfig:
        """The settings of `grpo-jax train` for the tiny model, with the system's own on top."""
        names = ("steps", "eval_every", "epochs", "sft_target_loss")
        budget = {name: getattr(self, name) for name in names}
        own = {} if system is None else system.options
        return TrainConfig.of(**self.shared | budget | {"seed": seed} | own)


Pair = tuple[System, int]


def pairs(options: Options) -> list[Pair]:
    """All runs that were asked for: a system and a seed."""
    chosen = [system for system in SYSTEMS if not options.only or system.name in options.only]
    return [(system, seed) for system in chosen for seed in options.seeds]


def share(runs: Sequence[Pair], index: int, count: int) -> list[Pair]:
    """Part `index` of `count` of the runs: neighbours, so that seeds of a system share its
    programs, of equal cost.
    """
    ends = np.cumsum([system.cost for system, _ in runs])
    middles = ends - np.array([system.cost for system, _ in runs]) / 2
    return [
        pair for pair, at in zip(runs, middles, strict=True) if int(at / ends[-1] * count) == index
    ]


def specialise(system: System, shared: Components, config: TrainConfig) -> Components:
    """The shared model and task with the system's rewards, objective, optimiser and reference."""
    task = shared.task._replace(reward=list(system.rewards)) if system.rewards else shared.task
    objective = system.objective(objective_of(config))
    return shared._replace(
        task=task,
        objective=objective,
        optimizer=optimizer_of(config),
        critic=value_network(shared.model) if "value_T" in reads(objective) else None,
        update_reference=reference_rule(config),
    )


def with_seed(stages: Stages, config: TrainConfig, built: Components) -> Stages:
    """The same programs, with the rows and the noise of the configuration's seed."""
    own = stages_of(config, built)
    return stages._replace(start=own.start, prompts=own.prompts)


def memory_of_update(stages: Stages, state: RunState, task: Task) -> dict[str, int]:
    """What the compiled update needs, in bytes: its arguments (state, batch) and its temporaries.

    Its completions have one length: there is one update.
    """
    (update,) = (p for p in programs_of(stages, state, task) if p.name == "step")
    update.compile()  # the iterations then run what is measured here
    needs = update.lower().compile().memory_analysis()
    return {
        "arguments": needs.argument_size_in_bytes,
        "temporaries": needs.temp_size_in_bytes,
    }


def record(
    system: System,
    stages: Stages,
    iterations: Iterable[tuple[RunState, dict]],
    config: TrainConfig,
    evaluate: Callable[[Params], float],
    show: Callable[..., None],
) -> dict:
    """What is kept of a run's iterations: the curve of evaluations, and what they took."""
    tokens = 0
    seconds = []
    curve = []
    for state, metrics in iterations:
        step = state.iteration
        tokens += metrics["tokens"]
        seconds.append(sum(metrics[name] for name in metrics if name.startswith("seconds/")))
        numbers = {"reward": metrics["reward"], "kl": metrics.get("kl")}
        if step % config.eval_every == 0 or step == config.steps:
            numbers["held_out"] = evaluate(stages.policy(state.train.params))
            numbers["beta"] = system.beta(state)
            curve.append({"step": step, **numbers})
        show(step, **numbers)
    return {"curve": curve, "sampled_tokens": tokens, "seconds_per_step": float(np.median(seconds))}


def starting_policy(
    folder: Path,
    config: TrainConfig,
    built: Components,
    screen: terminal.Screen,
    start: Callable[..., Params] = run.start_policy,
) -> Params:
    """The policy that a seed starts from, after the supervised updates of `start`.

    It is computed once and kept in the folder; processes agree on the first one.
    """
    path = folder / f"start-{config.seed}.npz"
    params = jax.jit(built.model.init)(jax.random.key(config.seed))
    leaves, structure = jax.tree.flatten(params)
    if not path.exists():
        started = start(config, built._replace(params=params), screen)
        own = folder / f"start-{config.seed}.{os.getpid()}.npz"
        np.savez(own, *jax.tree.leaves(started))
        # Where another process was first, its policy is everybody's.
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # whole or not at all
        own.unlink()
    with np.load(path) as kept:
        arrays = [jnp.asarray(kept[f"arr_{i}"]) for i in range(len(leaves))]
    return jax.tree.unflatten(structure, arrays)


def open_folder(options: Options) -> None:
    """Makes the folder, or checks that what is in it was made with the same settings."""
    settings = json.loads(run_folder.json_text(options.config()))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "settings.json"
    if not path.exists():
        run_folder.write_json(path, settings)
    elif (found := json.loads(path.read_text())) != settings:
        names = sorted(name for name in settings | found if settings.get(name) != found.get(name))
        raise ValueError(
            f"{options.out} holds runs with other settings ({', '.join(names)}): choose another "
            "--out"
        )


def finished(folder: Path, wanted: Sequence[Pair]) -> dict[tuple[str, int], dict]:
    """The records of those runs that are finished, in any shard, with the settings that their
    system has today.
    """
    paths = sorted(folder.glob("results-*.jsonl"))
    lines = [line for path in paths for line in run_folder.read_lines(path)]
    found = {(line["system"], line["seed"], line["settings"]): line for line in lines}
    keys = [(system.name, seed, system.settings()) for system, seed in wanted]
    return {key[:2]: found[key] for key in keys if key in found}


def train(
    options: Options,
    todo: Sequence[Pair],
    screen: terminal.Screen,
    build: Callable[[TrainConfig], Components] = build,
) -> None:
    """Trains the pairs, a system at a time, and appends a line for each to this shard's results."""
    if not todo:
        return
    index, count = options.part
    path = options.out / f"results-{index}-of-{count}.jsonl"
    shared = build(options.config())
    starts: dict[int, tuple[Params, float]] = {}

    def accuracy(params: Params) -> float:
        return run.held_out(options.config(), shared, params)[1].accuracy

    number = itertools.count(1)
    for system, group in itertools.groupby(todo, key=lambda pair: pair[0]):
        own = specialise(system, shared, options.config(system))
        stages = stages_of(options.config(system), own)
        memory = None
        for _, seed in group:
            config = options.config(system, seed)
            if seed not in starts:
                params = starting_policy(options.out, options.config(seed=seed), shared, screen)
                starts[seed] = params, accuracy(params)
            params, before = starts[seed]
            title = f"[{next(number)}/{len(todo)}] {system.name} seed {seed}"
            with screen.phase(title, options.steps) as show:
                show(0, note="compiling" if memory is None else "")
                seeded = with_seed(stages, config, own)
                state = seeded.start(params)
                memory = memory or memory_of_update(seeded, state, own.task)
                rule = own.update_reference
                iterations = iterate(seeded, state, steps=config.steps, update_reference=rule)
                result = record(system, seeded, iterations, config, accuracy, show)
            result["curve"].insert(0, {"step": 0, "held_out": before})
            named = {"system": system.name, "seed": seed, "settings": system.settings()}
            run_folder.append_line(path, named | {"memory": memory} | result)


def main(
    argv: Sequence[str] | None = None,
    *,
    default: Options | None = None,
    build: Callable[[TrainConfig], Components] = build,
) -> None:
    """Trains what is missing of this process's part; a process that has all of it reports.

    Args:
      argv: the command line; None: that of the process.
      default: what the command line does not say.
      build: makes the model and the task that all systems share.
    """
    default = default or Options()
    try:
        options = tyro.cli(Options, args=argv, default=default, description=Options.__doc__)
        open_folder(options)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    screen = terminal.Screen()
    wanted = pairs(options)
    done = finished(options.out, wanted)
    mine = [pair for pair in share(wanted, *options.part) if (pair[0].name, pair[1]) not in done]
    if not options.merge:
        train(options, mine, screen, build)
    if options.part[1] > 1:
        return
    records = list(finished(options.out, wanted).values())
    if not records:
        sys.exit(f"{options.out} holds no finished run of these systems and seeds")
    figure = options.figure or options.out / "compare_objectives.png"
    compare_report.write(records, options.out, figure, screen)


if __name__ == "__main__":
    main()
