"""AdamW with a schedule and a clip of the global norm."""

import jax
import jax.numpy as jnp
import optax


def adamw(
    learning_rate: float,
    *,
    steps: int,
    warmup_steps: int = 0,
    schedule: str = "constant",
    weight_decay: float = 0.0,
    clip_norm: float | None = 1.0,
    b1: float = 0.9,
    b2: float = 0.999,
) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm, its rate warmed up linearly and decayed over `steps`
    updates.

    `learning_rate` is the peak. After `warmup_steps` updates the "constant" schedule keeps it,
    "linear" and "cosine" lower it to 0 at the last of `steps` updates (epochs included: the real
    number of optimiser updates). Weight decay (Loshchilov & Hutter 2019, 1711.05101) leaves norms
    and biases alone. `clip_norm` None switches clipping off. The rate in use is kept in the state
    as a hyper-parameter, for the log.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {tuple(SCHEDULES)}, got {schedule!r}")
    if not learning_rate >= 0:
        raise ValueError(f"learning_rate must be at least 0, got {learning_rate}")
    if not 0 <= warmup_steps <= steps:
        raise ValueError(
            f"warmup_steps must be between 0 and the {steps} updates of the run, got {warmup_steps}"
        )
    if weight_decay < 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be above 0, or None for no clipping, got {clip_norm}")
    # Update number i (from 0) uses rate(i): the warm-up starts at 1/warmup of the peak, not at an
    # update wasted on 0.
    warm = lambda i: learning_rate * (i + 1) / max(warmup_steps, 1)
    after = SCHEDULES[schedule](learning_rate, max(steps - warmup_steps, 1))
    rate = optax.join_schedules([warm, after], [warmup_steps])
    decayed = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: _is_matrix(path), params
    )
    rule = optax.inject_hyperparams(optax.adamw, static_args=("b1", "b2", "mask"))(
        learning_rate=rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decayed
    )
    return rule if clip_norm is None else optax.chain(clip_global_norm(clip_norm), rule)


def clip_global_norm(limit: float) -> optax.GradientTransformation:
    """`g · min(1, limit / ‖g‖)` (Pascanu et al. 2013, 1211.5063), as `optax.clip_by_global_norm`.

    One scalar is divided and not every entry of g: XLA computes a division once for all that read
    it, which would be a second copy of the whole gradient.
    """

    def update(grads, state, params=None):
        scale = jnp.minimum(1.0, limit / jnp.maximum(optax.tree.norm(grads), 1e-30))
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


SCHEDULES = {
    "constant": lambda peak, steps: optax.constant_schedule(peak),
    "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
    "cosine": lambda peak, steps: optax.cosine_decay_schedule(peak, steps),
}


def _is_matrix(path: tuple) -> bool:
    name = str(getattr(path[-1], "key", path[-1]))
    return not (name.endswith("norm") or name.endswith("bias"))
