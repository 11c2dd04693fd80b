"""Tunix 0.1.7's own GRPO loss on the same log-probabilities, as `experiments/record_tunix.py` recorded it.

What Tunix does otherwise: the spread has ddof 1 and + 1e-6; its default KL term in the loss is k1, whose expected
gradient is 0 and which is refused here; its token-mean is taken in each micro-batch.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    Objective,
    batch_advantages,
    batch_loss,
    clipped,
    compose,
    dual_clip,
    fixed_length,
    k2,
    k3,
    per_sequence_token,
    per_token,
    sequence_mean,
    sequence_sum,
    standardize,
    token_mean,
)
from grpo_jax.types import Sample

RECORDED = json.loads((Path(__file__).parent / "data" / "tunix_grpo.json").read_text())
AGGREGATES = {
    "sequence-mean-token-mean": sequence_mean,
    "token-mean": token_mean,
    "sequence-mean-token-scale": functools.partial(fixed_length, max_length=6),
    "seq-mean-token-sum": sequence_sum,
}


def objective_of(options):
    clip = functools.partial(clipped, low=options.get("epsilon", 0.2), high=options.get("epsilon_high", 0.2))
    ratio = per_sequence_token if options.get("loss_algo") == "gspo-token" else per_token
    beta = options.get("beta", 0.04)
    divergence = {"divergence": k2 if options.get("kl_loss_mode") == "mse_kl" else k3, "beta": beta} if beta else {}
    aggregate = AGGREGATES[options.get("loss_agg_mode", "sequence-mean-token-mean")]
    loss = compose(ratio, clip, aggregate, **divergence)
    objective = Objective(functools.partial(standardize, ddof=1, eps=1e-6), loss)
    return dual_clip(objective, c=options["epsilon_c"]) if "epsilon_c" in options else objective


@pytest.mark.parametrize("name", RECORDED["cases"])
def test_the_same_loss_and_gradient(name):
    case = RECORDED["cases"][name]
    inputs = {key: jnp.asarray(value, jnp.float32) for key, value in RECORDED["inputs"].items()}
    objective = objective_of(case["options"])
    samples = Sample(
        mask_T=inputs["mask"] > 0,
        old_logp_T=inputs["old"],
        ref_logp_T=inputs["ref"],
        weight_T=inputs["weight"] if case["options"].get("sampler") else None,
        adv=batch_advantages(objective, inputs["reward"]),
    )
    value, slope = jax.value_and_grad(lambda x: batch_loss(objective, x, samples).value())(inputs["logp"])
    np.testing.assert_allclose(value, case["loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slope, case["gradient"], rtol=1e-5, atol=1e-6)
    assert np.abs(slope).max() > 1e-3


def test_the_cases_differ():
    losses = [case["loss"] for case in RECORDED["cases"].values()]
    assert len(set(losses)) == len(losses)
