"""grpo_jax: its own loop and stages, one iteration a step, each stage timed by itself."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmark.workloads import Workload
from grpo_jax.inference.text import encode
from grpo_jax.models import LanguageModel, decoder, load_pretrained
from grpo_jax.objectives import grpo
from grpo_jax.options import Batching, Generation, Precision, Update
from grpo_jax.parallel.backends import SINGLE
from grpo_jax.parallel.memory import remat_by_memory
from grpo_jax.parallel.programs import Program, listed, shapes_of
from grpo_jax.rewards import batched
from grpo_jax.tasks import Task
from grpo_jax.training.collecting import inference_stage, sampling_stage
from grpo_jax.training.loop import Collected, collect, iterate, weights_of
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.stages import Stages, make_stages
from grpo_jax.types import Rollout


def generation_of(work: Workload) -> Generation:
    """How a workload is sampled; completions of equal length leave nothing to shrink."""
    return Generation(work.group_size, work.max_new_tokens, compactions=3 if work.ragged else 0)


def batching_of(work: Workload) -> Batching:
    """As `grpo-jax train` cuts the batches of a pretrained model, with the buckets of `train`."""
    return Batching(work.prompts, work.prompt_length, pack_tokens=True, drop_zero_variance=True)


def update_of(work: Workload) -> Update:
    """π_old is what the batch says: that of the first step is given."""
    return Update(microbatches=work.microbatches, old_logp="sampler")


class Ids:
    """A tokenizer whose text is ids."""

    pad_id = 0

    def __init__(self, vocab_size: int, stop_ids: tuple[int, ...]):
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids

    def encode(self, text: str) -> list[int]:
        return [int(word[1:-1]) for word in text.split()]

    def decode(self, ids) -> str:
        return " ".join(f"<{i}>" for i in ids)

    def render(self, messages) -> list[int]:
        return [i for message in messages for i in self.encode(message["content"])]


def given_rewards(tokenizer: Ids, inputs: dict) -> Task:
    """The prompts of a batch, and a reward that gives what the batch has, whatever was written."""

    def given(completion: list[str]) -> list[float]:
        return inputs["reward_PG"].reshape(len(completion)).tolist()

    return Task(
        name="given",
        train=[{"question": tokenizer.decode(ids)} for ids in inputs["prompt_PS"]],
        held_out=[],
        prompt=lambda row: [{"role": "user", "content": row["question"]}],
        reward=batched(given),
        target=lambda row: "",
    )


def build(spec: SimpleNamespace, inputs: dict) -> "GrpoJax":
    return GrpoJax(spec, inputs)


class GrpoJax:
    def __init__(self, spec, inputs):
        self.spec = spec
        self.inputs = inputs
        work = spec.workload
        # Parameters and the first moment in the type that the others keep them in.
        model, params = load_pretrained(spec.folder, precision=Precision(spec.dtype))
        if not spec.contestant.endswith("_layer"):  # the default of `grpo-jax train`: by memory
            prompts = work.prompts // work.microbatches
            lengths = work.prompt_length, work.group_size, work.max_new_tokens
            remat = remat_by_memory(model.config, params, prompts, *lengths)
            model = decoder(model.config, remat=remat)
        plain = model
        model = SINGLE.for_training(model)
        self.attention = "einsums" if model is plain else "the platform's fused kernel"
        self.stages = stages_of(spec, inputs, model)
        # Without a KL the step needs no reference: the weights themselves then serve to time that
        # stage.
        self.state = self.stages.start(params, params)._replace(reference=params)
        self.infer = self.stages.infer
        if not work.beta:
            sampling = generation_of(work).sampling
            self.infer = inference_stage(model, grpo(), None, sampling, update_of(work), SINGLE)
        self.update: Program | None = None

    def timed(self, clock, infer: Callable | None = None) -> Stages:
        """The stages, with another `infer` if one is given, timed until their arrays are there.

        Groups without a gradient are left out in `assemble`, so that it is a part of training.
        """

        def until_ready(name: str, stage: Callable) -> Callable:
            def run(*args):
                with clock(name):
                    return jax.block_until_ready(stage(*args))

            return run

        return self.stages._replace(
            publish=until_ready("sample", self.stages.publish),
            generate=until_ready("sample", self.stages.generate),
            infer=until_ready("reference", infer or self.stages.infer),
            assemble=until_ready("train", self.stages.assemble),
            update=until_ready("train", self.noted(self.stages.update)),
        )

    def noted(self, update: Callable) -> Callable:
        """The update; which program it is, is noted before it first runs."""

        def run(*args):
            if self.update is None:
                with listed() as found:
                    update.on_shapes(*shapes_of(args))
                (self.update,) = found.values()
            return update(*args)

        return run

    def given(self) -> Rollout:
        """The given batch, as if sampled by a policy before this one."""
        prompts, row_P, _ = self.stages.prompts(self.state.data)
        mask_PGT = self.inputs["mask_PGT"]
        rollout = Rollout(
            prompts=prompts,
            tokens_PGT=self.inputs["tokens_PGT"],
            mask_PGT=mask_PGT,
            logp_PGT=np.zeros(mask_PGT.shape, np.float32),
            stopped_PG=np.full(mask_PGT.shape[:2], self.spec.workload.ragged),
            row_P=row_P,
            update_P=np.full(len(mask_PGT), -1, np.int32),
        )
        return SINGLE.put("rows", rollout)

    def first(self, clock) -> dict:
        seen = {}

        def collect_given(stages: Stages, weights, rollout, more, data) -> tuple[Collected, Any]:
            found, data = collect(stages, weights, self.given(), more, data)
            logp = seen["logp"] = found.fields["ref_logp_T"]
            noise = lambda name: self.inputs[name][..., : logp.shape[-1]]
            rollout = found.rollout._replace(logp_PGT=logp + noise("old_noise_PGT"))
            fields = {"ref_logp_T": logp + noise("reference_noise_PGT")}
            fields = fields if self.spec.workload.beta else {}
            return found._replace(rollout=rollout, fields=fields), data

        metrics = self.iteration(self.timed(clock, self.infer), collect_given)
        logp = np.asarray(seen["logp"], np.float32)
        scale = max(1.0, metrics["grad_norm"] / self.spec.clip_norm)
        cut = self.spec.workload.max_new_tokens - logp.shape[-1]
        return {
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            "reference_PGT": np.pad(logp, [(0, 0), (0, 0), (0, cut)]),
            "gradient": scale * compared_gradient(self.state.train.opt_state),
        }

    def step(self, clock) -> np.ndarray:
        self.iteration(self.timed(clock))
        return self.state.data["length_PG"]

    def iteration(self, stages: Stages, collect: Callable = collect) -> dict:
        """The next iteration of the loop, and its metrics."""
        steps = self.state.iteration + 1
        ((self.state, metrics),) = iterate(stages, self.state, steps=steps, collect=collect)
        return metrics

    def reference(self, clock) -> None:
        stages = self.timed(clock, self.infer)
        rollout, _ = stages.shrink(self.given())
        stages.infer(weights_of(self.state), rollout)

    def temp_bytes(self) -> int:
        return self.update.lower().compile().memory_analysis().temp_size_in_bytes

    def platform(self) -> str:
        return jax.local_devices()[0].platform

    def device_peak_bytes(self) -> int | None:
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def stages_of(spec, inputs: dict, model: LanguageModel) -> Stages:
    """The stages of a workload: every iteration asks the given prompts, in their order."""
    work = spec.workload
    tokenizer = Ids(spec.vocab_size, (spec.stop_id,) if work.ragged else ())
    task = given_rewards(tokenizer, inputs)
    generation = generation_of(work)
    stages = make_stages(
        model,
        task,
        tokenizer,
        grpo(low=0.2, high=0.2, beta=work.beta),
        adamw(spec.learning_rate, clip_norm=spec.clip_norm, moments=spec.dtype),
        generation=generation,
        update=update_of(work),
        batching=batching_of(work),
    )
    prompts = encode(tokenizer, task.prompt, task.train, length=work.prompt_length)
    row_P = SINGLE.put("rows", np.arange(work.prompts, dtype=np.int32))
    stages = stages._replace(
        prompts=lambda data: (SINGLE.put_rows(prompts), row_P, data),
        observe=lambda data, host, scores: data | {"length_PG": host.mask_PGT.sum(-1)},
    )
    if not work.ragged:
        return stages
    forced = force_lengths(model, inputs["length_PG"], spec.stop_id)
    return stages._replace(
        generate=sampling_stage(forced, tokenizer, generation, SINGLE),
        # What is forced is not what the policy would have sampled, so that it is not fresh.
        shrink=lambda rollout: stages.shrink(rollout._replace(update_P=rollout.update_P - 1)),
    )


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
