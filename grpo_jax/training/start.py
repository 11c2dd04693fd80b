"""The state before the first iteration, and the root of all noise."""

import jax
import jax.numpy as jnp
import optax

from grpo_jax.inference.critic import Critic, with_critic
from grpo_jax.objectives import (
    AdaptiveObjective,
    Objective,
    reads,
)
from grpo_jax.options import whole
from grpo_jax.parallel.backends import Devices
from grpo_jax.training.rows import begin_data
from grpo_jax.training.train_step import (
    init_state,
)
from grpo_jax.types import Params, RunState


def start(
    objective: Objective | AdaptiveObjective,
    optimizer: optax.GradientTransformation,
    seed: int,
    critic: Critic | None,
    devices: Devices,
    params: Params,
    reference: Params | None = None,
) -> RunState:
    """The state before the first iteration, in buffers of its own, and the root key.

    The reference is the policy that training starts from, unless another one is given; None where
    the objective reads none.
    """
    key, critic_key = jax.random.split(root_key(seed))
    policy = copy(devices.put("state", params))
    train = init_state(with_critic(critic, critic_key, policy), optimizer)
    if "ref_logp_T" not in reads(objective):
        reference = None
    elif reference is None:
        reference = copy(policy)
    else:
        reference = devices.put("state", reference)
    return RunState(
        iteration=0,
        train=devices.put("state", train),
        key=devices.put("whole", key),
        reference=reference,
        data=begin_data(),
        objective=objective.init() if isinstance(objective, AdaptiveObjective) else None,
    )


def root_key(seed: int) -> jax.Array:
    """The root of all noise, for an integer of any length of at least 0.

    Threefry, whatever JAX's default is: with other generators noise depends on how a batch is cut.
    """
    whole("seed", seed, 0)
    key = jax.random.key(seed % 2**32, impl="threefry2x32")
    while seed := seed >> 32:
        key = jax.random.fold_in(key, seed % 2**32)
    return key


def copy(params: Params) -> Params:
    """Own buffers: the train step consumes the state that it is given."""
    return jax.tree.map(jnp.copy, params)
