"""AdamW with a schedule and a clip of the global norm; any Optax transformation serves instead.

An optimiser whose schedule decays must know how many updates a run makes. It may be given as a
function of that number, `total_updates -> GradientTransformation`, which `train` calls.

Left out on purpose: other optimisers; they are Optax's.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from grpo_jax.options import AdamW

Optimizer = optax.GradientTransformation | Callable[[int], optax.GradientTransformation]


def adamw(
    learning_rate: float,
    *,
    total_updates: int | None = None,
    schedule: str = "constant",
    lr_warmup: int = 0,
    weight_decay: float = 0.0,
    clip_norm: float | None = 1.0,
    b1: float = 0.9,
    b2: float = 0.999,
    moments: str = "float32",
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, 1711.05101) behind a clip of the global norm.

    `rate_i = peak · (i + 1) / lr_warmup` for the first `lr_warmup` updates; after them "constant"
    keeps the peak, "linear" and "cosine" lower it to 0 at the last of `total_updates`. Without that
    number a schedule that decays gives a function of it, which `train` calls. The rate in use is
    kept in the state as a float32 hyper-parameter, for the log.

    Args:
      learning_rate: the peak of the rate.
      total_updates: optimiser updates of the whole run: iterations × epochs.
      schedule: "constant", "linear" or "cosine".
      lr_warmup: updates until the peak.
      weight_decay: applied to matrices only; norms, biases and scales are left alone.
      clip_norm: the largest global norm of a gradient; None: no clipping.
      b1: decay of the first moment.
      b2: decay of the second moment, which is float32.
      moments: the type of the first moment.

    Raises:
      OptionError: an option is out of its range.
    """
    clip = float("inf") if clip_norm is None else clip_norm
    options = AdamW(learning_rate, schedule, lr_warmup, weight_decay, clip).check()
    if total_updates is None and schedule != "constant":
        return lambda total: _adamw(options, total, b1, b2, moments)
    return _adamw(options, total_updates or max(lr_warmup, 1), b1, b2, moments)


def optimizer_for(optimizer: Optimizer, total_updates: int) -> optax.GradientTransformation:
    """The optimiser of a run that makes so many updates."""
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    if not callable(optimizer):
        raise TypeError(
            "optimizer must be an Optax transformation, or a function of the run's total updates "
            f"that gives one; got {optimizer!r}"
        )
    return optimizer(total_updates)


def _adamw(
    options: AdamW, total: int, b1: float, b2: float, moments: str
) -> optax.GradientTransformation:
    rule = optax.inject_hyperparams(
        optax.adamw, static_args=("b1", "b2", "mask", "mu_dtype"), hyperparam_dtype=jnp.float32
    )(
        learning_rate=rates(options, total),
        b1=b1,
        b2=b2,
        weight_decay=options.weight_decay,
        mask=matrices,
        mu_dtype=moments,
    )
    if options.clip_norm == float("inf"):
        return rule
    return optax.chain(clip_global_norm(options.clip_norm), rule)


def rates(options: AdamW, total: int) -> optax.Schedule:
    """The learning rate of each update, counted from 0."""
    peak = options.learning_rate
    warmup = min(options.lr_warmup, total)
    # The warm-up starts at 1/warmup of the peak: no update is wasted on a rate of 0.
    warm = lambda i: peak * (i + 1) / max(warmup, 1)
    left = max(total - warmup, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, left),
        "cosine": optax.cosine_decay_schedule(peak, left),
    }
    return optax.join_schedules([warm, after[options.schedule]], [warmup])


def matrices(params) -> object:
    """Which parameters weight decay applies to: not those named as norms, biases or scales."""
    spared = ("norm", "bias", "scale")

    def decays(path: tuple, _) -> bool:
        last = path[-1] if path else ""  # parameters may be a single array
        name = str(getattr(last, "key", getattr(last, "name", last)))
        return not name.endswith(spared)

    return jax.tree_util.tree_map_with_path(decays, params)


def clip_global_norm(limit: float) -> optax.GradientTransformation:
    """`g · min(1, limit / ‖g‖)` (Pascanu et al. 2013, 1211.5063), as `optax.clip_by_global_norm`.

    One scalar is divided and not every entry of g: XLA computes a division once for all that read
    it, which would be a second copy of the whole gradient.
    """

    def update(grads, state, params=None):
        scale = jnp.minimum(1.0, limit / jnp.maximum(optax.tree.norm(grads), 1e-30))
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
