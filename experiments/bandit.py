"""The smallest policy that GRPO can train: one parameter θ, one question, P(right) = σ(θ).

    python -m experiments.bandit --out experiments/figures/bandit.png

Every step draws a group of G answers, compares them, and follows the gradient of the library's own
loss. The four variations show what a group needs: a start from which something succeeds, siblings
to compare with, a scale, and rewards that tell answers apart.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from grpo_jax.objectives import Objective, batch_advantages, batch_loss, center, grpo
from grpo_jax.types import Sample

SHOWN = (1, 10, 20, 30, 40)  # steps of the table, each before its update


class Setting(NamedTuple):
    name: str
    theta: float = -1.5
    group: int = 8
    parts: int = 1  # a question of several parts: the reward is the share of them that is right
    objective: Objective = grpo(beta=0.0)


class Curve(NamedTuple):
    p_right: list[float]  # before each update, and after the last
    silent: list[bool]  # the groups whose advantages are all 0


SETTINGS = (
    Setting("groups of 8 from θ = −1.5"),
    Setting("start at θ = −5", theta=-5.0),
    Setting("groups of 2", group=2),
    Setting("no division by the spread", objective=grpo(beta=0.0)._replace(advantage=center)),
    Setting("partial credit (two parts)", parts=2),
)


def log_policy(theta: jax.Array, right: jax.Array) -> jax.Array:
    """log π of an answer: log σ(θ) if it is right, log σ(−θ) if it is wrong."""
    return jax.nn.log_sigmoid(jnp.where(right, theta, -theta))


def gradient(
    theta: jax.Array, right_GT: jax.Array, objective: Objective
) -> tuple[jax.Array, jax.Array]:
    """The gradient of the loss of one group, and its advantages."""
    right_PGT = right_GT[None]
    adv_PG = batch_advantages(objective, jnp.mean(right_PGT, axis=-1, dtype=jnp.float32))
    samples = Sample(jnp.ones(right_PGT.shape, bool), log_policy(theta, right_PGT), adv=adv_PG)
    loss = lambda theta: batch_loss(objective, log_policy(theta, right_PGT), samples).value()
    return jax.grad(loss)(theta), adv_PG


def train(setting: Setting, *, steps: int = 40, learning_rate: float = 0.5, seed: int = 0) -> Curve:
    step = jax.jit(lambda theta, right_GT: gradient(theta, right_GT, setting.objective))
    rng = np.random.default_rng(seed)
    theta = setting.theta
    curve = Curve([], [])
    for _ in range(steps):
        p_right = 1 / (1 + np.exp(-theta))
        slope, adv_PG = step(theta, rng.random((setting.group, setting.parts)) < p_right)
        theta = theta - learning_rate * float(slope)
        curve.p_right.append(p_right)
        curve.silent.append(not np.any(adv_PG))
    return Curve([*curve.p_right, 1 / (1 + np.exp(-theta))], curve.silent)


def table(curves: dict[str, Curve]) -> Table:
    out = Table(title="P(right) of a one-parameter policy under GRPO")
    out.add_column("variation")
    for step in SHOWN:
        out.add_column(f"step {step}", justify="right")
    out.add_column("final", justify="right")
    out.add_column("zero-variance groups", justify="right")
    for name, curve in curves.items():
        values = [curve.p_right[step - 1] for step in SHOWN] + [curve.p_right[-1]]
        silent = f"{sum(curve.silent)} of {len(curve.silent)}"
        out.add_row(name, *(f"{value:.2f}" for value in values), silent)
    return out


def draw(curves: dict[str, Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.2), width_ratios=(1.7, 1), layout="constrained"
    )
    colours = plt.get_cmap("tab10").colors
    for colour, (name, curve) in zip(colours, curves.items(), strict=False):
        left.plot(curve.p_right, color=colour, label=name, linewidth=2)
    left.set(
        xlabel="update",
        ylabel="P(right)",
        ylim=(-0.02, 1.02),
        title="What is learned in 40 updates",
    )
    left.legend(loc="center right", frameon=False, bbox_to_anchor=(1.0, 0.42))
    shares = [np.mean(curve.silent) for curve in curves.values()]
    bars = right.barh(range(len(curves)), shares, color=colours[: len(curves)])
    right.bar_label(bars, [f"{share:.0%}" for share in shares], padding=4)
    right.set(xlim=(0, 1.15), xlabel="share of groups", title="Zero-variance groups")
    right.set_yticks(range(len(curves)), list(curves))
    right.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="PNG file for the picture; without it, the table alone"
    )
    arguments = parser.parse_args(argv)
    curves = {setting.name: train(setting) for setting in SETTINGS}
    Console().print(table(curves))
    if arguments.out:
        draw(curves, arguments.out)
        print(f"picture: {arguments.out}")


if __name__ == "__main__":
    main()
