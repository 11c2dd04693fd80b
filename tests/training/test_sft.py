"""Supervised fine-tuning before GRPO: what it teaches, what its loss is, and that it leaves everything else alone."""

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
from grpo_jax.options import Batching, Generation, OptionError
from grpo_jax.training.loop import train
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.rows import row_indices
from grpo_jax.training.sft import SUPERVISED, sft, target_ids
from grpo_jax.training.stages import make_stages

from toy import bigram, compilations, letters

MODEL, TASK, BYTES = bigram(stop_share=0.7), letters(train_size=10), ByteTokenizer()
SGD, STILL = optax.sgd(0.5), optax.sgd(0.0)


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def tuned(params):
    optimizer = adamw(0.1)
    return [
        (jax.tree.map(jnp.copy, state), metrics)
        for state, metrics in sft(
            MODEL, params, TASK, BYTES, optimizer, steps=20, batch_size=6, seed=5, prompt_length=16
        )
    ]


def test_sft_teaches_the_targets(tuned):
    losses = [float(metrics["loss"]) for _, metrics in tuned]
    assert [metrics["iteration"] for _, metrics in tuned] == list(range(1, 21))
    assert [int(state.step) for state, _ in tuned] == list(range(1, 21))
    assert losses[-1] < 0.2 * losses[0]


def test_the_first_loss_is_the_cross_entropy_of_the_targets(tuned, params):
    """−mean log π over the target's tokens, the stop token among them, computed one row at a time."""
    total, count = 0.0, 0
    for row in (TASK.train[i] for i in row_indices(0, 6, len(TASK.train), 5)):
        ids = [*BYTES.encode(TASK.target(row)), BYTES.stop_ids[0]]
        prompts = encode(BYTES, TASK.prompt, [row])
        tokens = jnp.array(ids)[None, None]
        total += completion_logp(MODEL, params, prompts, tokens, jnp.ones(tokens.shape, bool)).sum()
        count += len(ids)
    assert float(tuned[0][1]["loss"]) == pytest.approx(-float(total) / count, rel=1e-5)


def test_targets_of_different_lengths_count_by_their_tokens(params):
    """A long target has as much weight as its tokens; padding has none."""
    task = TASK._replace(train=TASK.train[:2], target=lambda row: "a" * (1 if row is TASK.train[0] else 9))
    _, metrics = next(sft(MODEL, params, task, BYTES, STILL, steps=1, batch_size=2, prompt_length=16))
    total = 0.0
    for row in task.train:
        tokens = jnp.array([*BYTES.encode(task.target(row)), BYTES.stop_ids[0]])[None, None]
        prompts = encode(BYTES, task.prompt, [row])
        total += completion_logp(MODEL, params, prompts, tokens, jnp.ones(tokens.shape, bool)).sum()
    assert float(metrics["loss"]) == pytest.approx(-float(total) / 12, rel=1e-5)


def test_sft_compiles_one_step_and_leaves_the_callers_parameters(params):
    before = jax.tree.map(np.array, params)
    with compilations() as compiled:
        list(sft(MODEL, params, TASK, BYTES, SGD, steps=3, batch_size=4, seed=1))
    assert compiled.count("step") == 1
    chex.assert_trees_all_equal(params, before)


def test_sft_options(params):
    def go(**options):
        defaults = {"steps": 1, "batch_size": 6, "seed": 5, "prompt_length": 16}
        return list(sft(MODEL, params, TASK, BYTES, SGD, **defaults | options))

    base = float(go()[0][1]["loss"])
    assert float(go(seed=6)[0][1]["loss"]) != base
    assert float(go(batch_size=5)[0][1]["loss"]) != base
    assert float(go(logit_chunk=3)[0][1]["loss"]) == pytest.approx(base, rel=1e-5)
    assert go(steps=0) == []
    with pytest.raises(ValueError, match="tokens, more than the 2 allowed"):
        go(prompt_length=2)
    wrong = {
        "steps": (-1, "steps must be an integer of at least 0, got -1"),
        "batch_size": (0, "batch_size must be an integer of at least 1, got 0"),
        "seed": (-1, "seed must be an integer of at least 0, got -1"),
        "logit_chunk": (0, "logit_chunk must be an integer of at least 1, or None, got 0"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(OptionError, match=f"^{message}"):
            go(**{name: value})
    with pytest.raises(ValueError, match="task 'letters' has no training rows"):
        list(sft(MODEL, params, TASK._replace(train=[]), BYTES, SGD, steps=1))


def test_a_target_ends_with_the_stop_token():
    assert target_ids(TASK, BYTES, TASK.train[0]) == [*BYTES.encode(TASK.target(TASK.train[0])), BYTES.stop_ids[0]]
    assert SUPERVISED.prepare is None


def test_training_after_sft_counts_from_zero(tuned):
    """Its optimiser and its updates are no part of the run that follows."""
    sizes = {"generation": Generation(4, 8), "batching": Batching(3, 16), "seed": 5}
    objective = grpo(beta=0.0)
    start = make_stages(MODEL, TASK, BYTES, objective, SGD, **sizes).start(tuned[-1][0].params)
    state, metrics = next(train(MODEL, tuned[0][0].params, TASK, BYTES, objective, SGD, steps=6, state=start, **sizes))
    assert (metrics["iteration"], int(state.train.step)) == (1, 1)
    assert {row["completion"] for row in metrics["completions"]} & {"aaa", "bbb", "ccc"}
