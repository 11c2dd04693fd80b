"""What every contestant is given: shapes of models, workloads, and the arrays of a batch. NumPy
only.
"""

import dataclasses
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, int | float]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
    },
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
    },
    # Without the biases on q, k and v, which no contestant's time depends on.
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_theta": 1000000.0,
    },
}
# What marks second rows: PyTorch in bfloat16, grpo_jax with the least memory.
SECOND_ROWS = ("_bf16", "_layer")
RESERVED = 3  # ids below it (padding and the stop token among them) stand in no prompt


@dataclasses.dataclass(frozen=True)
class Workload:
    """P `prompts` of S `prompt_length` tokens, G `group_size` completions of T `max_new_tokens`
    tokens each.

    With `min_new_tokens` lengths are drawn from `min_new_tokens` … T and a stop token ends each
    completion. The share `equal` of the groups has equal rewards. `beta` weighs the KL; 0 leaves
    the reference out of the step. `microbatches` cuts the update of grpo_jax, `peer_microbatches`
    that of the others, whose memory grows with it. `seed` draws tokens, lengths and rewards. Of
    random tokens one in thousands may be so ill-conditioned that float32 programs which sum in
    another order differ by 1e-3 nats there: such a batch cannot tell who is right.
    """

    prompts: int
    group_size: int
    prompt_length: int
    max_new_tokens: int
    min_new_tokens: int | None = None
    equal: float = 0.0
    beta: float = 0.04
    microbatches: int = 1
    peer_microbatches: int = 1
    seed: int = 0

    @property
    def ragged(self) -> bool:
        return self.min_new_tokens is not None

    @property
    def title(self) -> str:
        """One line that says what it is."""
        T = (
            self.max_new_tokens
            if not self.ragged
            else f"{self.min_new_tokens} to {self.max_new_tokens}"
        )
        prompts = f"{self.prompts} prompt" + ("s" if self.prompts > 1 else "")
        title = f"{prompts} × G {self.group_size}, S {self.prompt_length}, T {T}, β {self.beta:g}"
        cuts = max(self.microbatches, self.peer_microbatches)
        title += (
            f", {cuts} micro-batches" + (" (peers)" if self.microbatches == 1 else "")
            if cuts > 1
            else ""
        )
        return title + (f", {self.equal:.0%} of the groups without spread" if self.equal else "")


WORKLOADS = {
    "W1": Workload(2, 8, 64, 64),
    "W2": Workload(1, 8, 512, 64),
    "W3": Workload(4, 16, 128, 128, microbatches=4, peer_microbatches=4, seed=2),
    "W4": Workload(4, 8, 64, 128, min_new_tokens=4, equal=0.5, beta=0.0, peer_microbatches=2),
    "T1": Workload(2, 2, 8, 4),
    "T3": Workload(2, 2, 8, 4, microbatches=2, peer_microbatches=2),
    "T4": Workload(2, 4, 8, 8, min_new_tokens=2, equal=0.5, beta=0.0, peer_microbatches=2),
}


def named(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The names of a list by commas; raises ValueError for one that is not known."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"{option} has unknown names {', '.join(unknown)}: expected some of {', '.join(known)}"
        )
    return names


def family(contestant: str) -> str:
    """The contestant without what marks its second row."""
    for suffix in SECOND_ROWS:
        contestant = contestant.removesuffix(suffix)
    return contestant


def make_inputs(
    workload: Workload, vocab_size: int, stop_id: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """The batch that every contestant trains on first, and the prompts, lengths and rewards of all
    that follow.

    `old_noise_PGT` and `reference_noise_PGT` are added to the log-probabilities under the given
    weights to make π_old and π_ref, so that clipping and the KL take part in the first loss and not
    only in later ones.
    """
    rng = np.random.default_rng([seed + workload.seed, *dataclasses.astuple(workload)[:4]])
    P = workload.prompts
    G = workload.group_size
    S = workload.prompt_length
    T = workload.max_new_tokens
    low = workload.min_new_tokens if workload.ragged else T
    length_PG = rng.integers(low, T + 1, (P, G))
    mask_PGT = np.arange(T) < length_PG[..., None]
    tokens_PGT = rng.integers(RESERVED, vocab_size, (P, G, T))
    if workload.ragged:
        np.put_along_axis(tokens_PGT, length_PG[..., None] - 1, stop_id, -1)
        tokens_PGT = np.where(mask_PGT, tokens_PGT, stop_id)
    reward_PG = rng.uniform(size=(P, G))
    reward_PG[P - round(workload.equal * P) :] = 0.5
    spread = reward_PG.std(1, keepdims=True)
    advantage_PG = (reward_PG - reward_PG.mean(1, keepdims=True)) / np.where(
        spread > 1e-6, spread, 1.0
    )
    return {
        "prompt_PS": rng.integers(RESERVED, vocab_size, (P, S)).astype(np.int32),
        "tokens_PGT": tokens_PGT.astype(np.int32),
        "mask_PGT": mask_PGT,
        "length_PG": length_PG.astype(np.int32),
        "reward_PG": reward_PG.astype(np.float32),
        "advantage_PG": np.where(spread > 1e-6, advantage_PG, 0.0).astype(np.float32),
        "old_noise_PGT": rng.normal(0, 0.2, (P, G, T)).astype(np.float32),
        "reference_noise_PGT": rng.normal(0, 0.2, (P, G, T)).astype(np.float32),
    }


def necessary_work(
    workload: Workload, config: dict[str, Any], inputs: dict[str, np.ndarray]
) -> dict[str, float]:
    """What a step cannot do without, the same for every contestant: tokens, FLOPs, and reads of the
    weights.

    `train_flops`: 6 a parameter and computed token; a prompt is computed once, its completions'
    tokens once each, the vocabulary for completion tokens alone, and no group that has no gradient.
    `decode_flops`: 2 a parameter and token. `decode_reads`: the weights are read once a token step,
    whatever the number of sequences.
    """
    D = config["hidden_size"]
    d = config["head_dim"]
    F = config["intermediate_size"]
    H = config["num_attention_heads"]
    K = config["num_key_value_heads"]
    body = config["num_hidden_layers"] * (2 * D * H * d + 2 * D * K * d + 3 * D * F)
    vocabulary = config["vocab_size"] * D
    length_PG = inputs["length_PG"].astype(np.int64)
    trained = (
        np.full(workload.prompts, True) if workload.beta else (inputs["advantage_PG"] != 0).any(1)
    )
    prompt = workload.prompt_length * int(trained.sum())
    completion = int(length_PG[trained].sum())
    sampled = int(length_PG.sum())
    return {
        "tokens": sampled,
        "train_flops": 6.0 * (body * (prompt + completion) + vocabulary * completion),
        "decode_flops": 2.0
        * (body * (workload.prompt_length * workload.prompts + sampled) + vocabulary * sampled),
        "decode_reads": float((body + vocabulary) * length_PG.max()),
    }
