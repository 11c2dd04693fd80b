"""grpo_jax: a step as `loop.train` takes it, from the public functions."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.inference.generate import generate
from grpo_jax.models import LanguageModel, decoder, load_pretrained
from grpo_jax.objectives import grpo
from grpo_jax.parallel.backends import SINGLE
from grpo_jax.parallel.memory import remat_by_memory
from grpo_jax.training.batch import assemble, score, trim
from grpo_jax.training.loop import copy
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.packing import pack
from grpo_jax.training.train_step import init_state, make_train_step
from grpo_jax.training.zero_variance import drop_zero_variance_groups
from grpo_jax.types import Batch, Prompts, Rollout

LENGTH_BUCKETS = 4  # the default of `loop.train`
COMPACT = 3


def build(spec: SimpleNamespace, inputs: dict) -> "GrpoJax":
    return GrpoJax(spec, inputs)


class GrpoJax:
    def __init__(self, spec, inputs):
        self.spec = spec
        self.inputs = inputs
        work = spec.workload
        self.model, params = load_pretrained(spec.folder, dtype=spec.dtype)
        if not spec.contestant.endswith("_layer"):  # the default of `grpo-jax train`: by memory
            prompts = work.prompts // work.microbatches
            lengths = work.prompt_length, work.group_size, work.max_new_tokens
            self.model = decoder(
                self.model.config,
                remat=remat_by_memory(self.model.config, params, prompts, *lengths),
            )
        plain = self.model
        self.model = SINGLE.for_training(self.model)
        self.attention = "einsums" if self.model is plain else "the platform's fused kernel"
        self.objective = grpo(low=0.2, high=0.2, beta=work.beta)
        self.prompts = Prompts(
            jnp.asarray(inputs["prompt_PS"]), jnp.ones(inputs["prompt_PS"].shape, bool)
        )
        self.sampler = (
            force_lengths(self.model, inputs["length_PG"], spec.stop_id)
            if work.ragged
            else self.model
        )
        optimizer = adamw(spec.learning_rate, steps=10**6, clip_norm=spec.clip_norm)
        step = make_train_step(
            self.model, self.objective, optimizer, microbatches=work.microbatches
        )
        self.jitted = jax.jit(step, donate_argnums=0)
        self.compiled = None
        # Without a KL the step needs no reference: the weights themselves then serve to time that
        # stage.
        self.state = init_state(copy(params), optimizer)
        self.frozen = params
        self.key = jax.random.key(0)

    def sample(self, clock) -> Rollout:
        work = self.spec.workload
        with clock("sample"):
            rollout = generate(
                self.sampler,
                self.state.params,
                self.prompts,
                jax.random.fold_in(self.key, self.state.step),
                group_size=work.group_size,
                max_new_tokens=work.max_new_tokens,
                stop_ids=(self.spec.stop_id,) if work.ragged else (),
                compact=COMPACT if work.ragged else 0,
            )
            return jax.block_until_ready(rollout)

    def score(self, clock, rollout: Rollout):
        with clock("reference"):
            return jax.block_until_ready(score(self.model, self.frozen, rollout)[0])

    def train(self, clock, batch: Batch) -> dict:
        work = self.spec.workload
        with clock("train"):
            batch = drop_zero_variance_groups(
                self.objective, batch, range(work.microbatches, work.prompts, work.microbatches)
            )
            if self.compiled is None:
                self.compiled = self.jitted.lower(self.state, batch).compile()
            self.state, metrics = self.compiled(self.state, batch)
            return {name: float(value) for name, value in jax.device_get(metrics).items()}

    def prepare(self, rollout: Rollout) -> Rollout:
        """What the loop does between sampling and training."""
        return pack(trim(rollout, LENGTH_BUCKETS))

    def given(self) -> Rollout:
        mask = jnp.asarray(self.inputs["mask_PGT"])
        stopped = jnp.full(mask.shape[:2], self.spec.workload.ragged)
        tokens = jnp.asarray(self.inputs["tokens_PGT"])
        return self.prepare(
            Rollout(self.prompts, tokens, mask, jnp.zeros(mask.shape, jnp.float32), stopped)
        )

    def first(self, clock) -> dict:
        self.sample(clock)
        rollout = self.given()
        logp = self.score(clock, rollout)
        noise = lambda name: self.inputs[name][..., : logp.shape[-1]]
        rollout = rollout._replace(logp_PGT=logp + noise("old_noise_PGT"))
        fields = (
            {"ref_logp_T": logp + noise("reference_noise_PGT")} if self.spec.workload.beta else {}
        )
        batch = assemble(self.objective, rollout, self.inputs["reward_PG"], **fields)
        batch = batch._replace(
            samples=batch.samples._replace(adv=jnp.asarray(self.inputs["advantage_PG"]))
        )
        metrics = self.train(clock, batch)
        scale = max(1.0, metrics["grad_norm"] / self.spec.clip_norm)
        cut = self.spec.workload.max_new_tokens - logp.shape[-1]
        return {
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            "reference_PGT": np.pad(np.asarray(logp, np.float32), [(0, 0), (0, 0), (0, cut)]),
            "gradient": scale * compared_gradient(self.state.opt_state),
        }

    def step(self, clock) -> np.ndarray:
        rollout = self.prepare(self.sample(clock))
        length_PG, reward_PG = self.judge(rollout)
        fields = {"ref_logp_T": self.score(clock, rollout)} if self.spec.workload.beta else {}
        self.train(clock, assemble(self.objective, rollout, reward_PG, **fields))
        return length_PG

    def judge(self, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
        """Lengths and rewards: the host makes text of the tokens and calls a reward with it, as TRL
        does.
        """
        tokens_PGT = np.asarray(rollout.tokens_PGT)
        length_PG = np.asarray(rollout.mask_PGT).sum(-1)
        rows = zip(tokens_PGT.reshape(length_PG.size, -1), length_PG.reshape(-1), strict=True)
        texts = [" ".join(f"<{token}>" for token in ids[:length]) for ids, length in rows]
        given = lambda completions: self.inputs["reward_PG"].reshape(len(completions))
        return length_PG, given(texts).reshape(length_PG.shape)

    def reference(self, clock) -> None:
        self.score(clock, self.given())

    def temp_bytes(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes

    def platform(self) -> str:
        return jax.local_devices()[0].platform

    def device_peak_bytes(self) -> int | None:
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def compared_gradient(opt_state) -> np.ndarray:
    """The clipped gradient of q in the middle layer, `[H·d, D]`: AdamW's first moment after one
    update is 0.1 of it.
    """
    q_LDE = optax.tree_utils.tree_get(opt_state, "mu")["layers"]["q"]
    return np.asarray(q_LDE[q_LDE.shape[0] // 2], np.float32).T / 0.1


FIRST = 8.0  # the mark of a hidden state that predicts a completion's first token


def force_lengths(model: LanguageModel, length_PG: np.ndarray, stop_id: int) -> LanguageModel:
    """The model, with a stop token exactly where completion (p, g) has `length_PG[p, g]` tokens.

    Hidden states get one channel more, that says whether the stop token comes next. A completion is
    told from the others by its first token, which is forced to its number in the batch; its length
    then lives in its cache.
    """
    table_N = jnp.asarray(length_PG.reshape(-1), jnp.int32)
    ids_N = jnp.arange(table_N.size, dtype=jnp.int32) + stop_id + 1

    def marked(hidden, mark):
        return jnp.concatenate(
            [hidden, jnp.broadcast_to(mark, (*hidden.shape[:-1], 1)).astype(hidden.dtype)], -1
        )

    def prefill(params, tokens_S, mask_S):
        hidden_SD, cache = model.prefill(params, tokens_S, mask_S)
        return marked(hidden_SD, FIRST), cache

    def decode(weights, cache, own, index, token):
        grown, length = own
        length = jnp.where(
            index == 0, table_N[jnp.clip(token - ids_N[0], 0, table_N.size - 1)], length
        )
        hidden_D, grown = model.decode(weights, cache, grown, index, token)
        return marked(hidden_D, index + 2 == length), (grown, length)

    def decode_logits(weights, hidden):
        hidden, mark = hidden[..., :-1], hidden[..., -1]
        logits = model.decode_logits(weights, hidden)
        token = jnp.arange(logits.shape[-1])
        kept = jnp.where(mark[..., None] == 1, token == stop_id, token != stop_id)
        if mark.size == table_N.size:  # the first token is drawn for the whole batch, in its order
            own_id = token == ids_N.reshape(mark.shape)[..., None]
            kept = jnp.where(mark[..., None] == FIRST, own_id, kept)
        return jnp.where(kept, logits, -1e30)

    empty = lambda max_tokens: (model.empty(max_tokens), jnp.zeros((), jnp.int32))
    return model._replace(prefill=prefill, empty=empty, decode=decode, decode_logits=decode_logits)
