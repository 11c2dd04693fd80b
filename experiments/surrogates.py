"""Every surrogate as a picture: cost and gradient against the ratio, for advantages of both signs.

    python -m experiments.surrogates --out experiments/figures/surrogates.png

The gradient is −∂cost/∂log r: how hard the token is pushed up. Where it is 0, the token is clipped.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.objectives import (
    clipped,
    floored,
    gamma_weighted,
    mirror,
    soft_gated,
    tapered,
    unclipped,
    weighted,
)

PPO_CLIP = functools.partial(clipped, low=0.2, high=0.2)
SURROGATES = {
    "unclipped (REINFORCE, RLOO)": unclipped,
    "clipped ±.2 (PPO, GRPO)": PPO_CLIP,
    "clipped −.2, +.28 (DAPO)": functools.partial(clipped, low=0.2, high=0.28),
    "dual clip, c = 2": functools.partial(floored, surrogate=PPO_CLIP, c=2.0),
    "weighted, w ≤ 1.5 (CISPO)": functools.partial(weighted, low=1.0, high=0.5),
    "soft gate (SAPO)": soft_gated,
    "gamma weight (VESPO)": gamma_weighted,
    "tapered (TOPR)": tapered,
    "mirror, τ = 1 (Kimi k1.5)": functools.partial(mirror, tau=1.0),
}


def curves(surrogate, adv: float, ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cost and push (−∂cost/∂log r) of a token of advantage `adv` at each ratio."""
    log_ratio = jnp.log(jnp.asarray(ratio))
    cost = functools.partial(surrogate, adv=jnp.asarray(adv))
    return np.asarray(jax.vmap(cost)(log_ratio)), -np.asarray(jax.vmap(jax.grad(cost))(log_ratio))


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ratio = np.linspace(0.05, 2.6, 800)
    columns = 3
    rows = -(-len(SURROGATES) // columns)
    figure = plt.figure(figsize=(13, 2.6 * rows + 0.4), layout="constrained")
    for place, (panel, (name, surrogate)) in enumerate(
        zip(figure.subfigures(rows, columns).flat, SURROGATES.items(), strict=True)
    ):
        panel.suptitle(name, fontsize=11, fontweight="bold")
        pair = panel.subplots(1, 2, sharex=True, sharey=True)
        for adv, colour in ((1.0, "tab:blue"), (-1.0, "tab:red")):
            for axes, values in zip(pair, curves(surrogate, adv, ratio), strict=True):
                axes.plot(
                    ratio,
                    values,
                    color=colour,
                    linewidth=2,
                    label=f"A = {adv:+.0f}".replace("-", "−"),
                )
        for axes, title in zip(pair, ("cost", "push −∂cost/∂log r"), strict=True):
            axes.set_title(title, fontsize=9)
            axes.set(ylim=(-2.7, 2.7), xticks=(0, 1, 2), yticks=(-2, 0, 2))
            axes.axvline(1.0, color="0.85", linewidth=1, zorder=0)
            axes.axhline(0.0, color="0.85", linewidth=1, zorder=0)
            axes.spines[["top", "right"]].set_visible(False)
            if place >= len(SURROGATES) - columns:
                axes.set_xlabel("ratio r")
    handles, labels = pair[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("experiments/figures/surrogates.png"),
        help="PNG file to write",
    )
    arguments = parser.parse_args(argv)
    draw(arguments.out)
    print(f"picture: {arguments.out}")


if __name__ == "__main__":
    main()
