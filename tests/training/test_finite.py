"""An update that is not finite changes nothing, is counted, and ends the run with its cause where it repeats."""

from itertools import islice

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grpo_jax import train
from grpo_jax.objectives import Objective, center
from grpo_jax.options import Batching, Generation, Update
from grpo_jax.training.finite import IN_A_ROW, NonFiniteError, all_finite, check_finite
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.sft import sft
from grpo_jax.types import Mean
from toy_run import BYTES as TOKENIZER
from toy_run import TASK

import toy

MODEL = toy.bigram(stop_share=0.7)
PARAMS = jax.jit(MODEL.init)(jax.random.key(0))


def ratio_loss(logp_T, sample):
    """−Σ A·π/π_old, with an advantage that is never 0."""
    ratio_T = jnp.exp(logp_T - sample.old_logp_T)
    return -jnp.where(sample.mask_T, ratio_T * (1.0 + sample.adv), 0.0).sum()


def loss_times(factor, moved_factor=1.0):
    """The loss times one number where π is π_old, and times another where it has moved a little."""

    def loss(logp_T, sample):
        moved = jnp.abs(jnp.where(sample.mask_T, logp_T - sample.old_logp_T, 0.0)).sum()
        by = jnp.where((moved > 0) & (moved < 1e-2), moved_factor, factor)
        return Mean(ratio_loss(logp_T, sample) * by, 1.0)

    return Objective(center, loss)


def run(objective, optimizer=None, **options):
    usual = {"generation": Generation(2, 4), "batching": Batching(2, 16)}
    return train(MODEL, PARAMS, TASK, TOKENIZER, objective, optimizer or adamw(1e-2), **usual | options)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("epochs", [1, 2])
def test_nothing_moves_and_it_is_counted(bad, epochs):
    objective = loss_times(bad)
    iterations = run(objective, steps=IN_A_ROW, update=Update(epochs=epochs, old_logp="first_epoch"))
    with pytest.warns(UserWarning, match="100% of an iteration's updates were skipped: the loss is"):
        *_, (state, metrics) = islice(iterations, IN_A_ROW - 1)
    assert metrics["frac_skipped"] == 1
    assert "infinite_params" not in metrics
    chex.assert_trees_all_equal(state.train.params, PARAMS)
    assert state.train.step == 0
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.train.opt_state))
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(
            NonFiniteError, match=f"no update could be applied in {IN_A_ROW} iterations in a row: the loss is"
        ),
    ):
        next(iterations)


def test_a_gradient_that_is_not_finite_is_found_behind_a_finite_loss():
    @jax.custom_jvp
    def poisoned(x):
        return x

    poisoned.defjvp(lambda primals, tangents: (primals[0], tangents[0] * jnp.nan))

    def loss(logp_T, sample):
        return Mean(-jnp.where(sample.mask_T, poisoned(logp_T), 0.0).sum(), 1.0)

    with pytest.warns(UserWarning, match="the loss is finite and the norm of its gradient is nan"):
        state, metrics = next(run(Objective(center, loss), steps=1))
    assert metrics["frac_skipped"] == 1
    chex.assert_trees_all_equal(state.train.params, PARAMS)


@pytest.mark.parametrize("rate", [np.nan, np.inf, 1e30])
def test_parameters_that_are_not_finite_are_never_yielded(rate):
    with pytest.raises(NonFiniteError, match="made parameters that are not finite, though its gradient was"):
        list(run(loss_times(1.0), optax.sgd(rate), steps=3))


def test_one_bad_epoch_of_several_is_a_share_and_no_end():
    update = Update(epochs=2, old_logp="first_epoch")
    with pytest.warns(UserWarning, match="50% of an iteration's updates were skipped"):
        *_, (state, metrics) = run(loss_times(1.0, jnp.nan), adamw(1e-5), steps=IN_A_ROW + 1, update=update)
    assert metrics["frac_skipped"] == 0.5
    assert state.train.step == IN_A_ROW + 1


def test_supervised_updates_are_looked_at_too():
    updates = sft(MODEL, PARAMS, TASK, TOKENIZER, optax.sgd(jnp.inf), steps=9, batch_size=2)
    with pytest.raises(NonFiniteError, match="made parameters that are not finite"):
        list(updates)


def test_healthy_iterations_in_between_start_the_count_anew():
    bad = {"loss": float("nan"), "grad_norm": 1.0, "frac_skipped": 1.0}
    good = {"loss": 1.0, "grad_norm": 1.0, "frac_skipped": 0.0}
    with pytest.warns(UserWarning, match="skipped"):
        assert check_finite(dict(bad), 3) == 4
    assert check_finite(dict(good), 4) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_number_is_found_among_many(value):
    tree = {"a": jnp.ones((3, 100)), "b": jnp.zeros((), jnp.int32), "c": jnp.ones((4,), jnp.bfloat16)}
    assert all_finite(tree)
    assert not all_finite(tree | {"a": tree["a"].at[1, 7].set(value)})
    assert not all_finite(tree | {"c": tree["c"].at[3].set(value)})
