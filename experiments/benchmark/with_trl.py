"""TRL: a `GRPOTrainer` with a real model, its own generation, log-probabilities, loss and
optimiser.

A step is what the trainer does between two logs: `_prepare_inputs` (generate, decode, reward,
advantages, reference), then for each micro-batch `compute_loss` and backward, clip, AdamW. Only the
loop around it, with its data loader, scheduler, logs and checkpoints, is left out.
"""

import tempfile
from types import SimpleNamespace

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

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


def build(spec: SimpleNamespace, inputs: dict, cache: dict | None = None) -> "Trl":
    return Trl(spec, inputs, generation_cache(device()) if cache is None else cache)


def word(token_id: int) -> str:
    """A token's text; none is part of another, because special tokens are found inside words
    too.
    """
    return f"<{token_id}>"


def number_tokenizer(vocab_size: int, stop_id: int) -> PreTrainedTokenizerFast:
    """Text is words of ids, so that prompts are exactly the ids that everyone gets."""
    tokenizer = Tokenizer(WordLevel({word(i): i for i in range(vocab_size)}, unk_token=word(0)))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    names = {"eos_token": word(stop_id), "pad_token": word(stop_id), "unk_token": word(0)}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)


class Trl:
    def __init__(self, spec, inputs, cache: dict):
        use_all_cores()
        self.spec = spec
        self.inputs = inputs
        work = spec.workload
        self.cuts = work.peer_microbatches
        self.clock = None
        dtype = "bfloat16" if spec.contestant.endswith("_bf16") else spec.dtype
        model = load(spec, dtype)
        model.generation_config.eos_token_id = spec.stop_id
        if work.ragged:
            plain = model.generate
            forced = force_lengths(spec, inputs)
            model.generate = lambda *args, **options: plain(
                *args, logits_processor=forced, **options
            )
        texts = [" ".join(map(word, row)) for row in inputs["prompt_PS"]]
        self.examples = [
            {"prompt": text, "reward": float(reward)}
            for text, rewards in zip(texts, inputs["reward_PG"], strict=True)
            for reward in rewards
        ]
        args = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=len(self.examples) // self.cuts,
            gradient_accumulation_steps=self.cuts,
            num_generations=work.group_size,
            max_completion_length=work.max_new_tokens,
            generation_kwargs=None if work.ragged else {"min_new_tokens": work.max_new_tokens},
            beta=work.beta,
            epsilon=0.2,
            loss_type="grpo",
            use_bias_correction_kl=False,
            learning_rate=spec.learning_rate,
            weight_decay=0.0,
            max_grad_norm=spec.clip_norm,
            gradient_checkpointing=False,
            bf16=dtype == "bfloat16",
            use_cpu=device() == "cpu",
            report_to="none",
            **cache,
        )
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, reward, **_: reward,
            args=args,
            train_dataset=Dataset.from_list(self.examples),
            processing_class=number_tokenizer(spec.vocab_size, spec.stop_id),
        )
        self.model = self.trainer.model.train()
        self.frozen = self.trainer.ref_model or self.model
        self.optimizer = self.trainer.create_optimizer()
        if cache:  # TRL forbids what such a cache is for
            self.trainer.generation_config.disable_compile = False
        self.trainer.current_gradient_accumulation_steps = self.cuts
        self.watch()

    def watch(self) -> None:
        """Times the trainer's own generation, and its log-probabilities where they are not those of
        the loss.
        """
        generate = self.trainer._generate_single_turn
        logp = self.trainer._get_per_token_logps_and_entropies

        prompts = np.repeat(
            self.inputs["prompt_PS"], self.spec.workload.group_size, axis=0
        ).tolist()

        def timed_generate(prompt_ids, *args, **options):
            if prompt_ids != prompts:
                raise RuntimeError("the trainer's prompts are not the given ones")
            with self.clock("sample"):
                completions, extra = generate(prompt_ids, *args, **options)
                synchronize()
            self.lengths = [len(ids) for ids in completions]
            return completions, extra

        def timed_logp(*args, **options):
            if torch.is_grad_enabled():
                return logp(*args, **options)
            with self.clock("reference"):
                result = logp(*args, **options)
                synchronize()
            return result

        self.trainer._generate_single_turn = timed_generate
        self.trainer._get_per_token_logps_and_entropies = timed_logp

    def given(self) -> dict[str, torch.Tensor]:
        """The given batch under the trainer's names, without log-probabilities."""
        flat = lambda name: self.inputs[name].reshape(-1, *self.inputs[name].shape[2:])
        tensor = lambda array: torch.tensor(np.ascontiguousarray(array), device=device())
        prompts = np.repeat(self.inputs["prompt_PS"], self.spec.workload.group_size, axis=0)
        return {
            "prompt_ids": tensor(prompts).long(),
            "prompt_mask": torch.ones(prompts.shape, dtype=torch.long, device=device()),
            "completion_ids": tensor(flat("tokens_PGT")).long(),
            "completion_mask": tensor(flat("mask_PGT")).long(),
            "advantages": tensor(flat("advantage_PG")),
        }

    @torch.no_grad()
    def score(self, batch):
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        size = len(ids) // self.cuts
        T = batch["completion_ids"].shape[1]
        return self.trainer._get_per_token_logps_and_entropies(
            self.frozen, ids, mask, T, batch_size=size
        )[0]

    def train(self, clock, parts) -> tuple[float, float]:
        with clock("train"):
            total = 0.0
            for part in parts:
                loss = self.trainer.compute_loss(self.model, part)
                self.trainer.accelerator.backward(loss)
                total += float(loss.detach())
            norm = self.trainer.accelerator.clip_grad_norm_(
                self.model.parameters(), self.spec.clip_norm
            )
            self.optimizer.step()
            synchronize()
        return total, float(norm)

    def first(self, clock) -> dict:
        self.clock = clock
        self.trainer._prepare_inputs(self.examples)
        clock.laps.pop("reference", None)
        batch = self.given()
        logp = self.score(batch).float()
        noise = lambda name: torch.tensor(self.inputs[name].reshape(logp.shape), device=device())
        batch["num_items_in_batch"] = batch["completion_mask"].sum()
        batch["old_per_token_logps"] = logp + noise("old_noise_PGT")
        if self.spec.workload.beta:
            batch["ref_per_token_logps"] = logp + noise("reference_noise_PGT")
        total = batch.pop("num_items_in_batch")
        split = {name: tensor.chunk(self.cuts) for name, tensor in batch.items()}
        parts = [{name: chunks[i] for name, chunks in split.items()} for i in range(self.cuts)]
        loss, norm = self.train(clock, [part | {"num_items_in_batch": total} for part in parts])
        gradient = max(1.0, norm / self.spec.clip_norm) * compared_gradient(self.model)
        self.optimizer.zero_grad()
        logp = torch.where(batch["completion_mask"].bool(), logp, 0).reshape(
            self.inputs["mask_PGT"].shape
        )
        return {
            "loss": loss,
            "grad_norm": norm,
            "reference_PGT": logp.cpu().numpy(),
            "gradient": gradient,
        }

    def step(self, clock) -> np.ndarray:
        self.clock = clock
        self.trainer._step = 0
        self.trainer._buffered_inputs = None
        self.trainer._prepare_inputs(self.examples)
        self.train(clock, self.trainer._buffered_inputs)
        self.optimizer.zero_grad()
        return np.array(self.lengths).reshape(self.inputs["length_PG"].shape)

    def reference(self, clock) -> None:
        self.clock = clock
        self.score(self.given())

    def temp_bytes(self) -> None:
        return None

    def platform(self) -> str:
        return "gpu" if device() == "cuda" else "cpu"

    def device_peak_bytes(self) -> int | None:
        return device_peak_bytes()
