"""What the two PyTorch contestants share: threads, devices, generation, and the gradient that is
compared.
"""

import os

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList


def use_all_cores() -> None:
    """As many threads as this process may use cores; PyTorch's own guess counts others' cores
    too.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_peak_bytes() -> int | None:
    """The most of a GPU's memory that tensors held so far."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def load(spec, dtype: str):
    """The model with PyTorch's fused attention."""
    dtype = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(
        spec.folder, dtype=dtype, attn_implementation="sdpa"
    ).to(device())


def generation_cache(kind: str) -> dict:
    """On GPUs ("cuda") a cache of fixed shape, for which `generate` compiles decoding; on CPUs it
    compiles nothing.
    """
    return {"cache_implementation": "static"} if kind == "cuda" else {}


class ForcedLengths(LogitsProcessor):
    """Row b ends with the stop token exactly when it has `lengths[b]` tokens."""

    def __init__(self, lengths, prompt_length: int, stop_id: int):
        self.lengths = torch.tensor(lengths, device=device())
        self.prompt_length = prompt_length
        self.stop_id = stop_id

    def __call__(self, input_ids, scores):
        ends = input_ids.shape[1] - self.prompt_length + 1 == self.lengths
        stop = torch.arange(scores.shape[1], device=scores.device) == self.stop_id
        return scores.masked_fill(ends[:, None] != stop, -torch.inf)


def force_lengths(spec, inputs) -> LogitsProcessorList:
    """The processor of a ragged workload, one row a completion."""
    lengths = inputs["length_PG"].reshape(-1)
    return LogitsProcessorList([ForcedLengths(lengths, spec.workload.prompt_length, spec.stop_id)])


def compared_gradient(model):
    """The gradient of q in the middle layer, `[H·d, D]`, as float32 on the host."""
    layers = model.model.layers
    return layers[len(layers) // 2].self_attn.q_proj.weight.grad.float().cpu().numpy()
