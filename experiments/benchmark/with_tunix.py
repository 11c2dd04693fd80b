"""Tunix: its Llama, sampler, log-probabilities, GRPO loss and jitted train step, in an environment
of its own.

Tunix 0.1.7 gives its Llama one RoPE base whatever the configuration says; here it gets the model's.
Runs without grpo_jax: nothing but NumPy, JAX and Tunix is imported.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import algo_core, common
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig

PAD_ID = 0  # Tunix masks every token that equals it, so it must not be the stop token


def build(spec: SimpleNamespace, inputs: dict) -> "Tunix":
    return Tunix(spec, inputs)


class Numbers:
    """A tokenizer whose text is ids in decimals."""

    def __init__(self, stop_id: int):
        self.stop_id = stop_id

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids) -> str:
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return self.stop_id

    def pad_id(self) -> int:
        return PAD_ID


def load(spec):
    """Tunix's Llama of the folder's shape, with the folder's weights."""
    settings = json.loads((Path(spec.folder) / "config.json").read_text())
    config = llama.ModelConfig(
        num_layers=settings["num_hidden_layers"],
        vocab_size=settings["vocab_size"],
        embed_dim=settings["hidden_size"],
        hidden_dim=settings["intermediate_size"],
        num_heads=settings["num_attention_heads"],
        head_dim=settings.get("head_dim")
        or settings["hidden_size"] // settings["num_attention_heads"],
        num_kv_heads=settings["num_key_value_heads"],
        rope_theta=int((settings.get("rope_parameters") or settings)["rope_theta"]),
        norm_eps=settings["rms_norm_eps"],
        weight_tying=settings["tie_word_embeddings"],
    )
    llama.apply_rope.__defaults__ = (config.rope_theta,)
    return llama_params.create_model_from_safe_tensors(
        spec.folder, config, dtype=jnp.dtype(spec.dtype)
    )


def forced(lengths, prompt_length: int, stop_id: int) -> type:
    """Tunix's Llama, with the stop token exactly where row b has `lengths[b]` tokens."""
    length_B = jnp.asarray(lengths)

    class Forced(llama.Llama3):
        def __call__(self, input_tokens, positions, cache, attention_mask):
            logits, cache = super().__call__(input_tokens, positions, cache, attention_mask)
            ends_B = positions[:, -1] + 2 - prompt_length == length_B
            stop_V = jnp.arange(logits.shape[-1]) == stop_id
            last_BV = jnp.where(ends_B[:, None] == stop_V, logits[:, -1], -1e30)
            return logits.at[:, -1].set(last_BV), cache

    return Forced


class Tunix:
    def __init__(self, spec, inputs):
        self.spec = spec
        self.inputs = inputs
        work = spec.workload
        self.cuts = work.peer_microbatches
        self.compiled = None
        self.seed = 0
        self.model = load(spec)
        self.tokenizer = Numbers(spec.stop_id)
        self.frozen = load(spec) if work.beta else self.model
        self.texts = [
            self.tokenizer.decode(row)
            for row in inputs["prompt_PS"]
            for _ in range(work.group_size)
        ]
        self.algorithm = SimpleNamespace(
            beta=work.beta,
            epsilon=0.2,
            epsilon_high=0.2,
            loss_algo="grpo",
            kl_loss_mode="low_var_kl",
            loss_agg_mode="sequence-mean-token-mean",
            temperature=1.0,
            kl_clamp_value=None,
        )
        optimizer = optax.chain(
            optax.clip_by_global_norm(spec.clip_norm),
            optax.adamw(spec.learning_rate, b2=0.999, weight_decay=0.0),
        )
        cuts = self.cuts if self.cuts > 1 else None
        config = TrainingConfig(
            eval_every_n_steps=10**6, max_steps=10**6, gradient_accumulation_steps=cuts
        )
        self.trainer = Trainer(self.model, optimizer, config, custom_checkpoint_metadata_fn=dict)
        self.trainer.with_loss_fn(self.loss, has_aux=True)
        self.trainer.with_gen_model_input_fn(lambda example: {"train_example": example})
        settings = self.model.config
        cache = CacheConfig(
            cache_size=work.prompt_length + work.max_new_tokens + 1,
            num_layers=settings.num_layers,
            num_kv_heads=settings.num_kv_heads,
            head_dim=settings.head_dim,
        )
        sampled = self.model
        if work.ragged:
            graph, state = nnx.split(self.model)
            sampled = nnx.merge(graph, state)
            sampled.__class__ = forced(
                inputs["length_PG"].reshape(-1), work.prompt_length, spec.stop_id
            )
        self.sampler = Sampler(sampled, self.tokenizer, cache)

    def loss(self, model, train_example):
        return algo_core.grpo_loss_fn(
            model, train_example, self.algorithm, PAD_ID, self.spec.stop_id
        )

    def sample(self, clock) -> list[np.ndarray]:
        work = self.spec.workload
        self.sampler.transformer_state = nnx.variables(
            self.model, nnx.Param
        )  # the trainer's arrays, not copies
        self.seed += 1
        with clock("sample"):
            return self.sampler(
                self.texts,
                max_generation_steps=work.max_new_tokens,
                max_prompt_length=work.prompt_length,
                temperature=1.0,
                top_p=1.0,
                seed=self.seed,
                eos_tokens=[self.spec.stop_id] if work.ragged else [-1],
            ).tokens

    def score(self, clock, tokens_BT):
        graph, state = nnx.split(self.frozen)
        parts = zip(
            np.split(self.prompts(), self.cuts), np.split(tokens_BT, self.cuts), strict=True
        )
        with clock("reference"):
            logp = [
                common.compute_per_token_logps(
                    graph, state, jnp.asarray(x), jnp.asarray(y), PAD_ID, self.spec.stop_id
                )
                for x, y in parts
            ]
            return np.concatenate([np.asarray(x) for x in logp])

    def prompts(self) -> np.ndarray:
        return np.repeat(self.inputs["prompt_PS"], self.spec.workload.group_size, axis=0)

    def examples(
        self, tokens_BT, mask_BT, advantage_B, old_BT, reference_BT
    ) -> list[common.TrainExample]:
        fields = {
            "prompt_ids": self.prompts(),
            "prompt_mask": np.ones_like(self.prompts(), bool),
            "completion_ids": tokens_BT,
            "completion_mask": mask_BT,
            "advantages": advantage_B,
            "old_per_token_logps": old_BT,
            "ref_per_token_logps": reference_BT,
        }
        cut = lambda x, i: None if x is None else jnp.asarray(np.split(x, self.cuts)[i])
        return [
            common.TrainExample(**{k: cut(x, i) for k, x in fields.items()})
            for i in range(self.cuts)
        ]

    def train(self, clock, examples) -> tuple[float, float]:
        with clock("train"):
            if self.compiled is None:
                bound = self.trainer.jit_train_and_eval_step()[0]
                self.compiled = bound.func.lower(*bound.args, examples[0]).compile()
            outs = [
                self.compiled(self.model, self.trainer.optimizer, example) for example in examples
            ]
            losses, norms = zip(
                *[(float(loss), float(norm)) for loss, _, norm in outs], strict=True
            )
        return float(np.mean(losses)), float(np.mean(norms))

    def first(self, clock) -> dict:
        flat = {
            name: x.reshape(-1, *x.shape[2:]) for name, x in self.inputs.items() if "_PG" in name
        }
        self.sample(clock)
        tokens = np.where(flat["mask_PGT"], flat["tokens_PGT"], PAD_ID)
        logp = self.score(clock, tokens)
        reference = logp + flat["reference_noise_PGT"] if self.spec.workload.beta else None
        examples = self.examples(
            tokens, flat["mask_PGT"], flat["advantage_PG"], logp + flat["old_noise_PGT"], reference
        )
        loss, norm = self.train(clock, examples)
        scale = max(1.0, norm / self.spec.clip_norm)
        logp = np.where(flat["mask_PGT"], logp, 0).reshape(self.inputs["mask_PGT"].shape)
        return {
            "loss": loss,
            "grad_norm": norm,
            "reference_PGT": logp,
            "gradient": scale * self.gradient(),
        }

    def gradient(self) -> np.ndarray:
        """The clipped gradient of q in the middle layer: AdamW's first moment after one update is
        0.1 of it.
        """
        middle = str(self.model.config.num_layers // 2)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(self.trainer.optimizer)):
            names = re.findall(r"\w+", jax.tree_util.keystr(path))
            if {"mu", "q_proj"} <= set(names) and names[names.index("layers") + 1] == middle:
                return np.asarray(leaf, np.float32).reshape(leaf.shape[0], -1).T / 0.1
        raise LookupError("the optimiser's state has no first moment of q in the middle layer")

    def step(self, clock) -> np.ndarray:
        completions = self.sample(clock)
        work = self.spec.workload
        if work.ragged:  # Tunix cuts the stop token off; it belongs to the completion
            completions = [np.append(ids, self.spec.stop_id) for ids in completions]
        lengths = [len(ids) for ids in completions]
        tokens = np.full((len(lengths), work.max_new_tokens), PAD_ID, np.int32)
        for row, ids in zip(tokens, completions, strict=True):
            row[: len(ids)] = ids
        mask = np.arange(work.max_new_tokens) < np.array(lengths)[:, None]
        advantage = algo_core.compute_advantages(
            self.inputs["reward_PG"].reshape(-1), work.group_size
        )
        reference = self.score(clock, tokens) if work.beta else None
        # Some π_old, so that the program compiled for the given batch serves; what it holds costs
        # no time.
        old = np.zeros(tokens.shape, np.float32) if reference is None else reference
        self.train(clock, self.examples(tokens, mask, np.asarray(advantage), old, reference))
        return np.array(lengths).reshape(self.inputs["length_PG"].shape)

    def reference(self, clock) -> None:
        tokens = self.inputs["tokens_PGT"]
        self.score(clock, tokens.reshape(-1, tokens.shape[-1]))

    def temp_bytes(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes

    def platform(self) -> str:
        return jax.local_devices()[0].platform

    def device_peak_bytes(self) -> int | None:
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
