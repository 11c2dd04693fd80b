"""Every preset and every step from the vanilla policy gradient to GRPO, as systems that train,
compared.

    python -m experiments.compare_objectives                       # all of it, then the table and the picture
    python -m experiments.compare_objectives --only grpo ppo --seeds 0 --steps 20
    python -m experiments.compare_objectives --shard 3/8           # an eighth of the runs; a last call without reports

The tiny model on the pricing task with the settings of `grpo-jax train`. All systems start, for
each seed, from the same policy after one supervised warm-up, see the same prompts, and sample as
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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments import compare_report
from grpo_jax.config import BY_MODEL, TrainConfig, at_least, choose
from grpo_jax.inference.critic import policy_of, value_network
from grpo_jax.inference.generate import generate
from grpo_jax.inference.text import completion_texts, encode, prompt_texts, step_rewards
from grpo_jax.objectives import PRESETS, Objective, adaptive_beta, kl_in_reward, reads
from grpo_jax.rewards import number_reward, score
from grpo_jax.runs import folder, run, terminal
from grpo_jax.training import loop
from grpo_jax.training.batch import assemble
from grpo_jax.training.batch import score as score_policy
from grpo_jax.training.train_step import make_train_step
from grpo_jax.types import Batch, Params

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

    `options` are fields of `TrainConfig`; `rewards` stand in for the task's own; `kl_reward` is the
    β of a KL inside the reward, which `kl_target` (nats a token) moves after every step. `cost` is
    the time of a step; GRPO's is 1.
    """

    name: str
    options: dict[str, Any]
    rewards: tuple[Callable, ...] = ()
    kl_reward: float | None = None
    kl_target: float | None = None
    cost: float = 1.0

    def settings(self) -> str:
        """What is said of it in the table: everything that is not the default."""
        config = TrainConfig(**self.options).resolved()
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


BETA = BY_MODEL[True]["objective_args"]["beta"]  # the default run's, wherever a KL holds the policy
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
    warm_up_loss: float = 0.2
    """Cross-entropy at which the warm-up ends: below the default run's, so that 80 % is within the
    budget's reach.
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

    def __post_init__(self):
        for name in ("steps", "eval_every", "epochs"):
            at_least(name, getattr(self, name), 1)
        if not self.seeds:
            raise ValueError("--seeds needs at least one seed")
        for seed in self.seeds:
            at_least("seeds", seed, 0)
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
        own = {"epochs": self.epochs} | ({} if system is None else system.options)
        shared = {name: getattr(self, name) for name in ("steps", "eval_every", "warm_up_loss")} | {
            "seed": seed
        }
        return TrainConfig(**shared, **own).resolved()


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


class Programs(NamedTuple):
    """What is compiled once for a system and used by all its seeds.

    `collect(params, reference, beta, key, rows) -> (batch, statistics)`; `update(state, batch) ->
    (state, metrics)`; `memory` is what the compiled update needs, in bytes: its arguments (state
    and batch) and its temporaries.
    """

    collect: Callable
    update: Callable
    memory: dict[str, int]


def programs(system: System, parts: run.Components, config: TrainConfig) -> Programs:
    """Compiles a system, β an input where it is part of the reward, so that moving it recompiles
    nothing.
    """
    objective = lambda beta: (
        parts.objective if beta is None else kl_in_reward(parts.objective, beta=beta)
    )
    fields = reads(objective(system.kl_reward))
    collect = collector(parts, config, objective, fields)
    begun = loop.begin(parts.params, parts.optimizer, config.seed, parts.critic)
    rows = loop.rows_of(0, parts.task.train, config.prompts, config.seed)
    batch, _ = collect(begun.state.params, parts.params, start_beta(system), begun.key, rows)
    step = make_train_step(
        parts.model,
        objective(system.kl_reward),
        parts.optimizer,
        epochs=config.epochs,
        critic=parts.critic,
        microbatches=config.microbatches,
        sampling=config.sampling,
        old_logp=config.old_logp,
    )
    update = jax.jit(step, donate_argnums=0).lower(begun.state, batch).compile()
    needs = update.memory_analysis()
    return Programs(
        collect,
        update,
        {"arguments": needs.argument_size_in_bytes, "temporaries": needs.temp_size_in_bytes},
    )


def start_beta(system: System) -> jax.Array | None:
    return None if system.kl_reward is None else jnp.float32(system.kl_reward)


def collector(
    parts: run.Components, config: TrainConfig, objective: Callable[[Any], Objective], fields
) -> Callable:
    """Prompts → completions → rewards → the fields that the objective reads → batch, as
    `loop.train` has it.
    """
    model = parts.model
    task = parts.task
    tokenizer = parts.tokenizer
    critic = parts.critic
    values = None if critic is None else jax.jit(critic.values)
    make = jax.jit(
        lambda beta, rollout, reward, more: assemble(objective(beta), rollout, reward, **more)
    )
    several = loop.takes_several(parts.objective)

    def collect(
        params: Params, reference: Params, beta, key, rows: list[dict]
    ) -> tuple[Batch, dict]:
        rollout = generate(
            model,
            policy_of(critic, params),
            encode(tokenizer, task.prompt, rows, length=parts.prompt_length),
            key,
            group_size=config.group_size,
            max_new_tokens=config.max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            pad_id=tokenizer.pad_id,
            **config.sampling._asdict(),
        )
        texts = completion_texts(tokenizer, rollout)
        scores = score(task.reward, rows, prompt_texts(task, rows), texts)
        more = {}
        if "reward_T" in fields:
            more["reward_T"] = step_rewards(tokenizer, rollout, scores)
        if "ref_logp_T" in fields:
            more["ref_logp_T"], _ = score_policy(
                model, reference, rollout, sampling=config.sampling
            )
        if "old_value_T" in fields:
            more["old_value_T"] = values(params["critic"], rollout.prompts, rollout.tokens_PGT)
        reward = np.moveaxis(scores.reward_PGN, -1, 1) if several else scores.reward_PG
        tokens = int(np.asarray(rollout.mask_PGT).sum())
        statistics = {"reward": float(np.nanmean(scores.reward_PG)), "tokens": tokens}
        return make(beta, rollout, reward.astype(np.float32), more), statistics

    return collect


def iterate(
    system: System,
    parts: run.Components,
    made: Programs,
    config: TrainConfig,
    evaluate: Callable,
    show: Callable,
) -> dict:
    """One run from `parts.params`: its curve of evaluations, and what it took. `evaluate(params) ->
    accuracy`.
    """
    state, root, *_ = loop.begin(parts.params, parts.optimizer, config.seed, parts.critic)
    reference = parts.params
    beta = start_beta(system)
    tokens = 0
    seconds = []
    curve = []
    for iteration in range(config.steps):
        began = time.perf_counter()
        rows = loop.rows_of(iteration, parts.task.train, config.prompts, config.seed)
        key = jax.random.fold_in(root, iteration)
        batch, seen = made.collect(state.params, reference, beta, key, rows)
        state, metrics = made.update(state, batch)
        policy = policy_of(parts.critic, state.params)
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if parts.update_reference is not None:
            reference = loop.copy(parts.update_reference(iteration + 1, policy, reference))
        if system.kl_target is not None:
            beta = adaptive_beta(beta, metrics["kl"], target=system.kl_target)
        seconds.append(time.perf_counter() - began)
        tokens += seen["tokens"]
        numbers = {"reward": seen["reward"], "kl": metrics.get("kl")}
        if (iteration + 1) % config.eval_every == 0 or iteration + 1 == config.steps:
            numbers |= {"held_out": evaluate(policy), "beta": None if beta is None else float(beta)}
            curve.append({"step": iteration + 1, **numbers})
        show(iteration + 1, **numbers)
    return {"curve": curve, "sampled_tokens": tokens, "seconds_per_step": float(np.median(seconds))}


def specialise(system: System, parts: run.Components, config: TrainConfig) -> run.Components:
    """The shared model and task with the system's objective, optimiser, critic, reference rule and
    rewards.
    """
    own = run.build(config)
    task = parts.task._replace(reward=list(system.rewards)) if system.rewards else parts.task
    return parts._replace(
        task=task,
        objective=own.objective,
        optimizer=own.optimizer,
        critic=None if own.critic is None else value_network(parts.model),
        update_reference=own.update_reference,
    )


def starting_policy(
    folder: Path, config: TrainConfig, parts: run.Components, screen: terminal.Screen
) -> Params:
    """The policy after the warm-up of a seed: computed once, kept in the folder; processes agree on
    the first one.
    """
    path = folder / f"start-{config.seed}.npz"
    params = jax.jit(parts.model.init)(jax.random.key(config.seed))
    leaves, structure = jax.tree.flatten(params)
    if not path.exists():
        started = run.start(config, parts._replace(params=params), screen)
        own = folder / f"start-{config.seed}.{os.getpid()}.npz"
        np.savez(own, *jax.tree.leaves(started))
        with contextlib.suppress(
            FileExistsError
        ):  # another process was first: its policy is everybody's
            os.link(own, path)  # whole or not at all
        own.unlink()
    with np.load(path) as kept:
        return jax.tree.unflatten(
            structure, [jnp.asarray(kept[f"arr_{i}"]) for i in range(len(leaves))]
        )


def open_folder(options: Options) -> None:
    """Makes the folder, or checks that what is in it was made with the same settings."""
    settings = json.loads(folder.json_text(options.config()))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "settings.json"
    if not path.exists():
        folder.write_json(path, settings)
    elif (found := json.loads(path.read_text())) != settings:
        names = sorted(name for name in settings | found if settings.get(name) != found.get(name))
        raise ValueError(
            f"{options.out} holds runs with other settings ({', '.join(names)}): choose another --out"
        )


def finished(folder: Path, wanted: Sequence[Pair]) -> dict[tuple[str, int], dict]:
    """The records of those runs that are finished, in any shard, with the settings that their
    system has today.
    """
    lines = [
        line for path in sorted(folder.glob("results-*.jsonl")) for line in folder.read_lines(path)
    ]
    found = {(line["system"], line["seed"], line["settings"]): line for line in lines}
    keys = [(system.name, seed, system.settings()) for system, seed in wanted]
    return {key[:2]: found[key] for key in keys if key in found}


def train(options: Options, todo: Sequence[Pair], screen: terminal.Screen) -> None:
    """Trains the pairs, a system at a time, and appends a line for each to this shard's results."""
    if not todo:
        return
    index, count = options.part
    path = options.out / f"results-{index}-of-{count}.jsonl"
    parts = run.build(options.config())
    starts: dict[int, tuple[Params, float]] = {}

    def accuracy(params: Params) -> float:
        return run.held_out(options.config(), parts, params)[1].accuracy

    number = itertools.count(1)
    for system, group in itertools.groupby(todo, key=lambda pair: pair[0]):
        made = None
        for _, seed in group:
            config = options.config(system, seed)
            if seed not in starts:
                params = starting_policy(options.out, options.config(seed=seed), parts, screen)
                starts[seed] = params, accuracy(params)
            params, before = starts[seed]
            with screen.phase(
                f"[{next(number)}/{len(todo)}] {system.name} seed {seed}", options.steps
            ) as show:
                show(0, note="compiling" if made is None else "")
                if made is None:
                    own = specialise(system, parts, config)._replace(params=params)
                    made = programs(system, own, config)
                result = iterate(system, own._replace(params=params), made, config, accuracy, show)
            result["curve"].insert(0, {"step": 0, "held_out": before})
            line = {
                "system": system.name,
                "seed": seed,
                "settings": system.settings(),
                "memory": made.memory,
            }
            folder.append_line(path, line | result)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains what is missing of this process's part; a process that has all of it reports."""
    try:
        options = tyro.cli(Options, args=argv, description=Options.__doc__)
        open_folder(options)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    screen = terminal.Screen()
    wanted = pairs(options)
    index, count = options.part
    done = finished(options.out, wanted)
    mine = [
        (system, seed)
        for system, seed in share(wanted, index, count)
        if (system.name, seed) not in done
    ]
    if not options.merge:
        train(options, mine, screen)
    if count > 1:
        return
    records = list(finished(options.out, wanted).values())
    if not records:
        sys.exit(f"{options.out} holds no finished run of these systems and seeds")
    compare_report.write(
        records, options.out, options.figure or options.out / "compare_objectives.png", screen
    )


if __name__ == "__main__":
    main()
