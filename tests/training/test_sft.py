"""The supervised start: what it teaches, what its loss is, and that it leaves everything else alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grpo_jax.inference.logprobs import completion_logp
from grpo_jax.inference.text import encode
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.objectives import grpo
from grpo_jax.runs.checkpoint import RunState
from grpo_jax.training.loop import rows_of, train
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.sft import warm_up
from grpo_jax.training.train_step import init_state

from toy import bigram, compilations, letters

MODEL, TASK, BYTES = bigram(stop_share=0.7), letters(train_size=10), ByteTokenizer()
SGD, STILL = optax.sgd(0.5), optax.sgd(0.0)


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def warmed(params):
    optimizer = adamw(0.1, total_updates=20)
    return [
        (jax.tree.map(jnp.copy, state), metrics)
        for state, metrics in warm_up(
            MODEL, params, TASK, BYTES, optimizer, steps=20, batch_size=6, seed=5, prompt_length=16
        )
    ]


def test_warm_up_teaches_the_targets(warmed):
    losses = [float(metrics["loss"]) for _, metrics in warmed]
    assert [metrics["iteration"] for _, metrics in warmed] == list(range(1, 21))
    assert [int(state.step) for state, _ in warmed] == list(range(1, 21))
    assert losses[-1] < 0.2 * losses[0]


def test_the_first_loss_of_warm_up_is_the_cross_entropy_of_the_targets(warmed, params):
    """−mean log π over the target's tokens, the stop token among them, computed one row at a time."""
    total, count = 0.0, 0
    for row in rows_of(0, TASK.train, 6, 5):
        ids = [*BYTES.encode(TASK.target(row)), BYTES.stop_ids[0]]
        prompts = encode(BYTES, TASK.prompt, [row])
        tokens = jnp.array(ids)[None, None]
        total += completion_logp(MODEL, params, prompts, tokens, jnp.ones(tokens.shape, bool)).sum()
        count += len(ids)
    assert float(warmed[0][1]["loss"]) == pytest.approx(-float(total) / count, rel=1e-5)


def test_targets_of_different_lengths_count_by_their_tokens(params):
    """A long target has as much weight as its tokens; padding has none."""
    task = TASK._replace(train=TASK.train[:2], target=lambda row: "a" * (1 if row is TASK.train[0] else 9))
    _, metrics = next(warm_up(MODEL, params, task, BYTES, STILL, steps=1, batch_size=2, prompt_length=16))
    total = 0.0
    for row in task.train:
        tokens = jnp.array([*BYTES.encode(task.target(row)), BYTES.stop_ids[0]])[None, None]
        prompts = encode(BYTES, task.prompt, [row])
        total += completion_logp(MODEL, params, prompts, tokens, jnp.ones(tokens.shape, bool)).sum()
    assert float(metrics["loss"]) == pytest.approx(-float(total) / 12, rel=1e-5)


def test_warm_up_compiles_one_step_and_leaves_the_callers_parameters(params):
    before = jax.tree.map(np.array, params)
    with compilations() as compiled:
        list(warm_up(MODEL, params, TASK, BYTES, SGD, steps=3, batch_size=4, seed=1))
    assert compiled.count("step") == 1
    chex.assert_trees_all_equal(params, before)


def test_warm_up_options(params):
    def go(**options):
        defaults = {"steps": 1, "batch_size": 6, "seed": 5, "prompt_length": 16}
        return list(warm_up(MODEL, params, TASK, BYTES, SGD, **defaults | options))

    base = float(go()[0][1]["loss"])
    assert float(go(seed=6)[0][1]["loss"]) != base
    assert float(go(batch_size=5)[0][1]["loss"]) != base
    assert float(go(chunk=3)[0][1]["loss"]) == pytest.approx(base, rel=1e-5)
    assert go(steps=0) == []
    with pytest.raises(ValueError, match="tokens, more than the 2 allowed"):
        go(prompt_length=2)
    with pytest.raises(ValueError, match="steps must be at least 0 and batch_size at least 1, got -1 and 6"):
        go(steps=-1)


def test_training_from_a_warm_start_counts_from_zero(warmed, params):
    """The warm-up's optimiser and its updates are no part of the run that follows."""
    start = RunState(init_state(jax.tree.map(jnp.copy, warmed[-1][0].params), SGD), jax.random.key(1))
    saved, metrics = next(
        train(
            MODEL, params, TASK, BYTES, grpo(beta=0.0), SGD, steps=6, prompts_per_step=3, group_size=4,
            max_new_tokens=8, seed=5, prompt_length=16, saved=start,
        )
    )  # fmt: skip
    assert (metrics["iteration"], int(saved.state.step)) == (1, 1)
    assert {c["completion"] for c in metrics["completions"]} & {"aaa", "bbb", "ccc"}
