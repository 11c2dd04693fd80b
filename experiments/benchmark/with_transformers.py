"""The plain PyTorch loop: transformers' model and `generate`, logits of completions alone, a fused
AdamW.
"""

from types import SimpleNamespace

import numpy as np
import torch

from experiments.benchmark.torch_parts import (
    compared_gradient,
    device,
    device_peak_bytes,
    force_lengths,
    generation_cache,
    load,
    synchronize,
    use_all_cores,
)


def build(spec: SimpleNamespace, inputs: dict, cache: dict | None = None) -> "Loop":
    return Loop(spec, inputs, generation_cache(device()) if cache is None else cache)


def completion_logp(model, ids, completion_length: int):
    """Log-probabilities of the last `completion_length` tokens; no mask, for no prompt is
    padded.
    """
    logits = (
        model(ids, use_cache=False, logits_to_keep=completion_length + 1).logits[:, :-1].float()
    )
    chosen = logits.gather(-1, ids[:, -completion_length:, None])[..., 0]
    return chosen - logits.logsumexp(-1)


class Loop:
    def __init__(self, spec, inputs, cache: dict):
        use_all_cores()
        torch.manual_seed(0)
        self.spec = spec
        self.cache = cache
        self.inputs = inputs
        dtype = "bfloat16" if spec.contestant.endswith("_bf16") else spec.dtype
        self.model = load(
            spec, dtype
        ).eval()  # no dropout in these models: only the KV cache depends on it
        self.frozen = (
            load(spec, dtype).eval().requires_grad_(False) if spec.workload.beta else self.model
        )
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(
            parameters, lr=spec.learning_rate, weight_decay=0.0, fused=True
        )
        rows = np.repeat(inputs["prompt_PS"], spec.workload.group_size, axis=0)
        self.prompts = torch.tensor(rows, dtype=torch.long, device=device())
        self.mask = self.rows("mask_PGT")

    def rows(self, name: str):
        array = self.inputs[name]
        return torch.tensor(array.reshape(-1, *array.shape[2:]), device=device())

    def sample(self, clock):
        work = self.spec.workload
        options = {
            "max_new_tokens": work.max_new_tokens,
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 0,
        }
        options |= {"top_p": 1.0, "use_cache": True} | self.cache
        options |= {"pad_token_id": self.spec.stop_id, "eos_token_id": self.spec.stop_id}
        if work.ragged:
            options["logits_processor"] = force_lengths(self.spec, self.inputs)
        else:
            options["min_new_tokens"] = work.max_new_tokens
        with clock("sample"), torch.inference_mode():
            ids = self.model.generate(
                self.prompts, attention_mask=torch.ones_like(self.prompts), **options
            )
            synchronize()
        return ids.clone()  # out of inference mode, so that training may use it

    @torch.no_grad()
    def score(self, clock, ids):
        parts = ids.chunk(self.spec.workload.peer_microbatches)
        T = ids.shape[1] - self.spec.workload.prompt_length
        with clock("reference"):
            logp = torch.cat([completion_logp(self.frozen, part, T) for part in parts])
            synchronize()
        return logp

    def train(self, clock, ids, mask, advantage, old=None, reference=None) -> tuple[float, float]:
        """One update of GRPO's loss, eq. 3 of 2402.03300; returns the loss and the norm before
        clipping.
        """
        cuts = self.spec.workload.peer_microbatches
        total = 0.0
        count = len(ids) // cuts
        with clock("train"):
            for rows in (slice(i * count, (i + 1) * count) for i in range(cuts)):
                logp = completion_logp(self.model, ids[rows], mask.shape[1])
                before = logp.detach() if old is None else old[rows]
                ratio = (logp - before).exp()
                adv = advantage[rows, None]
                cost = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
                if reference is not None:
                    gap = reference[rows] - logp
                    cost = cost + self.spec.workload.beta * (gap.exp() - gap - 1)
                loss = (torch.where(mask[rows], cost, 0).sum(1) / mask[rows].sum(1)).mean() / cuts
                loss.backward()
                total += float(loss.detach())
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip_norm)
            self.optimizer.step()
            synchronize()
        return total, float(norm)

    def first(self, clock) -> dict:
        self.sample(clock)
        ids = torch.cat([self.prompts, self.rows("tokens_PGT").long()], 1)
        logp = self.score(clock, ids)
        old = logp + self.rows("old_noise_PGT")
        reference = logp + self.rows("reference_noise_PGT") if self.spec.workload.beta else None
        loss, norm = self.train(clock, ids, self.mask, self.rows("advantage_PG"), old, reference)
        gradient = max(1.0, norm / self.spec.clip_norm) * compared_gradient(self.model)
        self.optimizer.zero_grad()
        logp = torch.where(self.mask, logp, 0).reshape(self.inputs["mask_PGT"].shape)
        return {
            "loss": loss,
            "grad_norm": norm,
            "reference_PGT": logp.cpu().numpy(),
            "gradient": gradient,
        }

    def step(self, clock) -> np.ndarray:
        ids = self.sample(clock)
        tokens = ids[:, self.spec.workload.prompt_length :]
        stops = (tokens == self.spec.stop_id).int()
        mask = stops.cumsum(1) - stops == 0
        length_PG = mask.sum(1).cpu().numpy().reshape(self.inputs["length_PG"].shape)
        reward = self.rows("reward_PG").view(-1, self.spec.workload.group_size)
        spread = reward.std(1, keepdim=True)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (spread + 1e-4)).view(-1)
        reference = self.score(clock, ids) if self.spec.workload.beta else None
        self.train(clock, ids, mask, advantage, reference=reference)
        self.optimizer.zero_grad()
        return length_PG

    def reference(self, clock) -> None:
        self.score(clock, torch.cat([self.prompts, self.rows("tokens_PGT").long()], 1))

    def temp_bytes(self) -> None:
        return None

    def platform(self) -> str:
        return "gpu" if device() == "cuda" else "cpu"

    def device_peak_bytes(self) -> int | None:
        return device_peak_bytes()
