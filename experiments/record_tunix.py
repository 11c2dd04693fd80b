"""Records what Tunix's GRPO loss makes of given log-probabilities, for a test that does not need
Tunix.

    python -m venv tunix-venv && tunix-venv/bin/pip install google-tunix==0.1.7
    tunix-venv/bin/python experiments/record_tunix.py --out tests/objectives/data/tunix_grpo.json

The loss is Tunix's own `grpo_loss_fn`; only the forward pass in front of it is replaced, by one
that returns the log-probabilities that the file holds. Of every case the file has the options, the
loss and its gradient.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl import algo_core, common

P = 2
G = 4
T = 6
CASES = {
    "grpo": {},
    "grpo, no kl": {"beta": 0.0},
    "token mean": {"loss_agg_mode": "token-mean"},
    "fixed length": {"loss_agg_mode": "sequence-mean-token-scale"},
    "sequence sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "wide upper clip": {"epsilon_high": 0.28, "loss_agg_mode": "token-mean", "beta": 0.0},
    "k2": {"kl_loss_mode": "mse_kl"},
    "gspo-token": {"loss_algo": "gspo-token", "epsilon": 0.05, "epsilon_high": 0.08},
    "dual clip": {"epsilon_c": 1.4},
    "sampler weights": {"sampler": True},
}


def make_inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    lengths = np.array([[6, 1, 4, 3], [2, 5, 6, 3]])
    old = -rng.uniform(0.1, 2.0, (P, G, T))
    return {
        "mask": np.arange(T) < lengths[..., None],
        "old": old,
        "logp": old + rng.normal(0, 0.35, old.shape),
        "ref": old + rng.normal(0, 0.4, old.shape),
        "weight": np.minimum(np.exp(rng.normal(0, 0.4, old.shape)), 1.3),
        "reward": np.array([[1.0, 0.0, 0.25, 0.0], [0.5, 0.75, 0.1, 0.0]]),
    }


def run(inputs: dict[str, np.ndarray], case: dict) -> tuple[float, np.ndarray]:
    flat = {name: jnp.asarray(x.reshape(P * G, -1), jnp.float32) for name, x in inputs.items()}
    options = {
        "beta": 0.04,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "loss_algo": "grpo",
        "kl_loss_mode": "low_var_kl",
    }
    options |= {
        "loss_agg_mode": "sequence-mean-token-mean",
        "temperature": 1.0,
        "kl_clamp_value": None,
    } | case
    example = SimpleNamespace(
        prompt_ids=jnp.zeros((P * G, 1), jnp.int32),
        completion_ids=jnp.zeros((P * G, T), jnp.int32),
        completion_mask=flat["mask"],
        advantages=jnp.asarray(algo_core.compute_advantages(inputs["reward"].reshape(-1), G)),
        old_per_token_logps=flat["old"],
        ref_per_token_logps=flat["ref"],
        sampler_is_weights=flat["weight"] if case.get("sampler") else None,
    )

    def loss(logp):
        common.compute_per_token_logps = lambda *args, **kwargs: (logp, jnp.zeros((P * G, T, 2)))
        return algo_core.grpo_loss_fn(nnx.Module(), example, SimpleNamespace(**options), 0, 1)[0]

    value, slope = jax.value_and_grad(loss)(flat["logp"])
    return float(value), np.asarray(slope).reshape(P, G, T)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    inputs = make_inputs()
    cases = {}
    for name, case in CASES.items():
        value, slope = run(inputs, case)
        cases[name] = {
            "options": case,
            "loss": value,
            "gradient": np.round(slope.astype(float), 9).tolist(),
        }
    recorded = {
        "inputs": {name: np.round(x.astype(float), 9).tolist() for name, x in inputs.items()},
        "cases": cases,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(recorded) + "\n")
    print(f"{len(cases)} cases: {arguments.out}")


if __name__ == "__main__":
    main()
