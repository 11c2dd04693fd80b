"""The stages of one training batch, as NamedTuples of arrays.

An array carries its axes as a suffix of its name:

    P  prompts in a batch            V  vocabulary
    G  completions of each prompt    L  layers
    S  prompt length, left-padded    H  attention heads
    T  completion length,            K  key/value heads
       right-padded                  D  hidden size

`logp_PGT` has three axes, `reward_PG` two, a name without a suffix is a scalar. A field below is
named for the smallest thing that is meaningful (`mask_T` of one sequence); a batch of them has the
leading axes P and G.

A NamedTuple is a pytree without registration, so `jax.vmap`, `jax.jit` and `jax.tree.map` take
these as they are. Left out on purpose: methods that hide work, a base class, and a second
annotation system.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
Params = Any  # a pytree of arrays


class Mean(NamedTuple):
    """A mean that has not been divided yet: `total / weight`.

    Pairs are added over sequences, micro-batches, devices and processes, and divided once at the
    end, so that the value never depends on how the work was cut up.
    """

    total: Array
    weight: Array

    def value(self) -> Array:
        """`total / weight`; 0 where the weight is 0 (nothing was there to average), with a zero
        gradient.
        """
        empty = self.weight == 0
        return jnp.where(empty, 0.0, self.total / jnp.where(empty, 1.0, self.weight))


def add_means(left: Any, right: Any) -> Any:
    """Adds two pytrees of `Mean`, pair by pair."""
    return jax.tree.map(jnp.add, left, right)


class Prompts(NamedTuple):
    """One row a prompt, never repeated for its group. Left-padded, so that every prompt ends at S −
    1.
    """

    tokens_PS: Array  # int32
    mask_PS: Array  # bool, true on real tokens


class Rollout(NamedTuple):
    """What a sampler returns, and what a training loop adds to it.

    `mask_PGT` is true up to and including the stop token and comes from lengths, never from
    comparing ids. `logp_PGT` is the log-probability of each token under the distribution it was
    drawn from (temperature and filters included). `stopped_PG` is false where the length limit cut
    the completion off ("truncated").

    The loop adds `row_P`, the index of each prompt's row in the task, and `update_P`, how many
    updates the policy had behind it that sampled the prompt's completions. None: unknown.

    `token_index_PN`, made by `training.packing.pack`, holds the indices g·T + t of a prompt's
    trained tokens in ascending order, then G·T as often as needed: training then computes these N
    tokens a prompt instead of G·T. None: all of them.
    """

    prompts: Prompts
    tokens_PGT: Array  # int32
    mask_PGT: Array  # bool
    logp_PGT: Array  # float32
    stopped_PG: Array  # bool
    token_index_PN: Array | None = None  # int32
    row_P: Array | None = None  # int32
    update_P: Array | None = None  # int32


class Sample(NamedTuple):
    """What a loss sees of one completion. Fields that an objective does not read stay `None`.

    Fixed for the batch: `mask_T` (bool, true on trained tokens), `old_logp_T` (log π_old),
    `ref_logp_T` (log π_ref), `sampler_logp_T` (log-probability under the program that sampled),
    `weight_T` (detached weight of each token's surrogate), `adv` (a scalar, or one advantage a
    token), `reward_T` (NaN where no step ends), `stopped` (false if truncated), `age` (updates
    between the sampling policy and this batch's first), `old_value_T` and `return_T` (of a critic),
    `group_tokens` (trained tokens of its whole group). Of the current parameters, filled in by the
    train step and differentiable: `entropy_T`, `value_T`.
    """

    mask_T: Array
    old_logp_T: Array
    ref_logp_T: Array | None = None
    sampler_logp_T: Array | None = None
    weight_T: Array | None = None
    adv: Array | float = 0.0
    reward_T: Array | None = None
    stopped: Array | None = None
    age: Array | None = None
    old_value_T: Array | None = None
    return_T: Array | None = None
    entropy_T: Array | None = None
    value_T: Array | None = None
    group_tokens: Array | None = None


class Batch(NamedTuple):
    """A rollout and its samples; every leaf has the leading axes P, G (prompts: P).

    `rest`, made by `training.zero_variance`, holds the loss and the diagnostics of
    groups that are not here because they have no gradient: named `Mean`s that are added to those of
    the batch.
    """

    rollout: Rollout
    samples: Sample
    rest: dict[str, Mean] | None = None


class TrainState(NamedTuple):
    """Arrays only: no functions, no optimiser inside. `step` counts optimiser updates."""

    step: Array
    params: Params
    opt_state: Any


class Weights(NamedTuple):
    """The parameters that the stages of an iteration read.

    `params` are those that are trained, `step` counts the updates they have behind them, and
    `reference` is the reference policy, where the objective reads one.
    """

    params: Params
    step: Array | int
    reference: Params | None = None


class RunState(NamedTuple):
    """All that moves in a run: with it, a run goes on as if it had never stopped.

    `iteration` counts finished iterations. `reference` is the reference policy, moving or not;
    None where the objective reads none. `queue` holds what was sampled ahead for the next
    iterations. `data` is where the task's rows stand, and whatever a `collect` of one's own keeps
    between iterations: a tree of dicts, lists and arrays. `objective` is the state of an objective
    that has one.
    """

    iteration: int
    train: TrainState
    key: Array
    reference: Params | None = None
    queue: tuple[Rollout, ...] = ()
    data: Any = None
    objective: Any = None
