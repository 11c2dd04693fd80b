"""The stages of a toy run. Those of equal settings share their update's program, over all tests of a process."""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.objectives import grpo
from grpo_jax.options import Batching, Generation, Scoring, Update
from grpo_jax.parallel.backends import SINGLE
from grpo_jax.training.loop import iterate
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.stages import Stages, make_stages

from toy import bigram, letters

MODEL = bigram(stop_share=0.7)
TASK = letters(train_size=10)
BYTES = ByteTokenizer()
P, G, T, STEPS, BUCKETS, SEED = 3, 4, 8, 6, 2, 5
GENERATION = Generation(G, T)
BATCHING = Batching(P, 16, BUCKETS)
PLAIN, WITH_KL = grpo(beta=0.0), grpo(beta=0.1)  # made once: a new objective is a new program
SGD, STILL, ADAMW = optax.sgd(0.5), optax.sgd(0.0), adamw(0.05)

_updates: dict = {}


@cache
def params():
    return MODEL.init(jax.random.key(0))


def stages_of(
    objective=PLAIN,
    optimizer=SGD,
    task=TASK,
    *,
    model=MODEL,
    generation=GENERATION,
    update=Update(),
    batching=BATCHING,
    scoring=Scoring(),
    devices=SINGLE,
    **options,
) -> Stages:
    """`make_stages` with the settings of these tests, `options` in their place."""
    made = make_stages(
        model, task, BYTES, objective, optimizer, **{"seed": SEED} | options, generation=generation, update=update,
        batching=batching, scoring=scoring, devices=devices,
    )  # fmt: skip
    # All that an update depends on; its program is the one that takes long to compile.
    known = (model, objective, optimizer, generation.sampling, update, batching.prompts_per_step, devices)
    known = (*known, options.get("critic"), scoring.weights and tuple(scoring.weights))
    return made._replace(update=_updates.setdefault(known, made.update))


def run(stages=None, state=None, *, reference=None, **options) -> Iterator:
    """`iterate` from the beginning, or from a copy of a state."""
    stages = stages_of() if stages is None else stages
    state = stages.start(params(), reference) if state is None else copied(state)
    return iterate(stages, state, **{"steps": STEPS} | options)


def copied(tree: Any) -> Any:
    """Buffers of its own: what an iteration yields is consumed by the next one."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else copy.copy(x), tree)


def kept(iterations) -> list:
    """Everything that is yielded, with buffers of its own."""
    return [(copied(state), metrics) for state, metrics in iterations]


def timeless(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if not name.startswith("seconds/")}
