"""A learned value function: what a state is worth under the policy, for baselines and for PPO.

GRPO needs none of this; the critic is here so that what it costs and what it gives can be measured.
Left out on purpose: sharing the policy's trunk, which couples two losses through one set of
weights.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.inference.logprobs import completion_hidden
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.types import Array, Params, Prompts


class ValueHead(nn.Module):
    """`V(s) = w · h(s) + b`, zero at first, in float32."""

    @nn.compact
    def __call__(self, hidden_D: Array) -> Array:
        return nn.Dense(1, kernel_init=nn.initializers.zeros)(hidden_D.astype(jnp.float32))[..., 0]


class Critic(NamedTuple):
    """Pure functions of a value network.

    ```
    init(key, policy_params)                   -> params
    values(params, prompts, tokens_PGT)  -> value_PGT   of the state before each token
    ```
    """

    init: Callable
    values: Callable


def value_network(model: LanguageModel) -> Critic:
    """A network of its own: a copy of the policy's decoder with a value head instead of the
    vocabulary.

    `V(s_t)` of the prompt and the tokens before t (Schulman et al. 2017, 1707.06347, with one more
    network). It costs the policy's parameters once more, and a forward and backward pass more an
    update.
    """
    head = ValueHead()

    def init(key: Array, policy_params: Params) -> Params:
        head_params = head.init(key, jnp.zeros(model.config.hidden_size))["params"]
        return {"body": jax.tree.map(jnp.copy, policy_params), "head": head_params}

    def values(params: Params, prompts: Prompts, tokens_PGT: Array) -> Array:
        hidden_PGTD = completion_hidden(model, model.outer(params["body"]), prompts, tokens_PGT)
        return head.apply({"params": params["head"]}, hidden_PGTD)

    return Critic(init, values)


def with_critic(critic: Critic | None, key: Array, policy_params: Params) -> Params:
    """The parameters of a train state: the policy's alone, or `{"policy": …, "critic": …}`."""
    if critic is None:
        return policy_params
    return {"policy": policy_params, "critic": critic.init(key, policy_params)}


def policy_of(critic: Critic | None, params: Any) -> Params:
    """The policy's part of the parameters of a train state."""
    return params if critic is None else params["policy"]
