"""Do contestants compute the same? Log-probabilities, loss, gradient norm and one gradient of the
first step.
"""

import numpy as np

FLOAT32 = {"reference_PGT": 1e-3, "loss": 1e-3, "grad_norm": 1e-3, "gradient": 1e-3}
BFLOAT16 = {"reference_PGT": 0.5, "loss": 0.05, "grad_norm": 0.05, "gradient": 0.1}


class DisagreementError(RuntimeError):
    """Contestants that should compute one loss and gradient do not: their times say nothing about
    one another.
    """


def differences(ours: dict, theirs: dict) -> dict[str, float]:
    """The largest difference of a log-probability in nats; relative ones of the loss, the
    gradient's norm, and of the gradient of one matrix (norm of the difference over the norm, so
    direction and length both count)."""
    relative = lambda a, b: float(np.linalg.norm(np.subtract(a, b)) / max(np.linalg.norm(b), 1e-12))
    found = {name: relative(ours[name], theirs[name]) for name in ("loss", "grad_norm", "gradient")}
    return {
        "reference_PGT": float(np.abs(ours["reference_PGT"] - theirs["reference_PGT"]).max())
    } | found


def check(
    workload: str, name: str, ours: dict, theirs: dict, *, dtype: str = "float32"
) -> dict[str, float]:
    """The differences, if all are within the limits of `dtype`; else raises DisagreementError with
    the numbers.
    """
    limits = FLOAT32 if dtype == "float32" else BFLOAT16
    found = differences(ours, theirs)
    wrong = [
        f"{k} by {found[k]:.2g} (limit {limits[k]:g})" for k in limits if not found[k] <= limits[k]
    ]
    if wrong:
        raise DisagreementError(
            f"{workload}: grpo_jax and {name} do not agree on the first step: {', '.join(wrong)}; "
            f"losses {ours['loss']:.6g} and {theirs['loss']:.6g}. No table is printed."
        )
    return found
