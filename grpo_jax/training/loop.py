"""Training as a generator of (state, metrics): logging, evaluation and saving stand in the caller's
own `for` loop.

Everything random is a function of the root key and the iteration, and the rows of an iteration are
a function of the seed and its number: what continues from a saved state equals what was never
interrupted.

Left out on purpose: callbacks, a trainer class, files.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.inference.critic import Critic, policy_of, with_critic
from grpo_jax.inference.generate import generate
from grpo_jax.inference.logprobs import Sampling, tokens_at_once
from grpo_jax.inference.text import completion_texts, encode, prompt_texts, step_rewards
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import Objective, batch_advantages, reads, reads_in_prepare
from grpo_jax.parallel.backends import SINGLE, Devices, Program, listed, shapes_of
from grpo_jax.rewards import score as score_rewards
from grpo_jax.runs.checkpoint import RunState
from grpo_jax.tasks import Task
from grpo_jax.training.batch import (
    GatheredScores,
    assemble,
    cut,
    lengths,
    masks_together,
    score,
    score_and_gather,
    trim,
    untold,
)
from grpo_jax.training.checks import check_gap, check_parts, check_stale, check_train
from grpo_jax.training.metrics import group_statistics
from grpo_jax.training.packing import pack, packings
from grpo_jax.training.train_step import init_state, make_train_step
from grpo_jax.training.zero_variance import drop_zero_variance_groups, without_idle
from grpo_jax.types import Batch, Params, Prompts, Rollout, TrainState

ON_ERROR = ("raise", "none")


def rows_of(iteration: int, rows: Sequence[dict], size: int, seed: int) -> list[dict]:
    """The rows of an iteration: `size` consecutive places in an endless sequence of shuffled
    epochs.

    Every epoch is a new permutation of all rows; none is skipped or repeated within it.
    """
    places = range(iteration * size, (iteration + 1) * size)
    orders = {
        e: np.random.default_rng([seed, e]).permutation(len(rows))
        for e in {p // len(rows) for p in places}
    }
    return [rows[orders[p // len(rows)][p % len(rows)]] for p in places]


def prompt_width(task: Task, tokenizer: Tokenizer, multiple: int = 16) -> int:
    """A width that every prompt of a task fits, rounded up: with one width, one program is
    compiled.
    """
    longest = max(
        len(tokenizer.render(task.prompt(row)))
        for rows in (task.train, task.held_out)
        for row in rows
    )
    return -(-longest // multiple) * multiple


def begin(
    params: Params,
    optimizer: optax.GradientTransformation,
    seed: int,
    critic: Critic | None = None,
    devices: Devices = SINGLE,
) -> RunState:
    """The state before the first iteration, in buffers of its own, and the root key."""
    key, critic_key = jax.random.split(jax.random.key(seed))
    state = init_state(
        with_critic(critic, critic_key, copy(devices.put("state", params))), optimizer
    )
    return RunState(devices.put("state", state), devices.put("whole", key))


def copy(params: Params) -> Params:
    """Own buffers: the train step donates the state it is given."""
    return jax.tree.map(jnp.copy, params)


def train(
    model: LanguageModel,
    params: Params,
    task: Task,
    tokenizer: Tokenizer,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    steps: int,
    prompts_per_step: int = 8,
    group_size: int = 8,
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    epochs: int = 1,
    microbatches: int = 1,
    group_microbatches: int = 1,
    old_logp: str = "sampler",
    critic: Critic | None = None,
    length_buckets: int = 4,
    pack_tokens: bool = False,
    drop_zero_variance: bool = False,
    compact: int = 0,
    decode_slots: int | None = None,
    stale: int = 0,
    compile_ahead: Callable[[list[Program]], None] | None = None,
    reward_weights: Sequence[float] | None = None,
    on_error: str = "raise",
    reference: Params | None = None,
    update_reference: Callable[[int, Params, Params], Params] | None = None,
    saved: RunState | None = None,
    prompt_length: int | None = None,
    chunk: int | None = None,
    devices: Devices = SINGLE,
) -> Iterator[tuple[RunState, dict]]:
    """GRPO, one yield of `(saved, metrics)` an iteration: sample, score, update.

    Each iteration draws `group_size` completions for each of `prompts_per_step` rows of
    `task.train`, scores them with the task's reward, and makes `epochs` updates. `steps` counts
    iterations from the very beginning; with `saved` (what an earlier call yielded, or a checkpoint)
    the run continues behind it. `saved.state` holds parameters and optimiser state; its arrays are
    consumed by the next iteration, so copy what must outlive it.

    The reference policy is that of `saved`, else `reference`, else `params`, and is evaluated only
    if the objective reads it; `update_reference(iteration, params, reference) -> reference`, as
    `objectives.every` and `ema` are, moves it after each iteration (the moving reference is then
    part of `saved`). `reward_weights` weigh several reward functions, `on_error="none"` counts
    failing rewards as unscorable. A `critic` serves objectives that read values; the state's
    parameters are then `{"policy": …, "critic": …}`, while `params` is the policy alone.
    `length_buckets` is the number of completion lengths the update is compiled for. `pack_tokens`
    computes a batch's real tokens and not the padding between them (`rollout.pack`; not with
    `group_microbatches`), `drop_zero_variance` leaves out groups without a gradient
    (`rollout.drop_zero_variance_groups`); both change no gradient and compile the update for a few
    more shapes. `compact` and `decode_slots` are those of `sampler.generate`. With `stale` k, the
    policy before iteration i − k samples iteration i: devices sample while the host decodes and
    scores, and the ratio to that policy corrects for its age (`age` counts its updates;
    `saved.pending` holds what is sampled already). `compile_ahead` is given, before anything runs,
    every program that the iterations may run (`devices.Program`; not the small ones that cut and
    move arrays): those that it compiles stall no iteration later, and change no number. `devices`
    says where all of it runs; the numbers do not depend on it. Of several processes each samples
    and scores its own prompts.

    Metrics: those of `make_train_step`, of `rollout.group_statistics`, `iteration` (from 1),
    `seconds/...` of sampling, scoring and updating, and `completions`: prompt, completion, reward
    of each of this process, as rows.
    """
    check_train(steps, prompts_per_step, group_size, max_new_tokens, length_buckets, sampling, task)
    check_parts("prompts_per_step", prompts_per_step, microbatches, devices)
    check_stale(stale, old_logp, objective)
    model, chunk = devices.for_training(model), chunk_of(model, devices) if chunk is None else chunk

    def compiled(parts: int) -> Callable:
        step = make_train_step(
            model,
            objective,
            optimizer,
            microbatches=parts,
            group_microbatches=group_microbatches,
            epochs=epochs,
            sampling=sampling,
            old_logp=old_logp,
            critic=critic,
            chunk=chunk,
            axis_name=devices.axis_name,
        )
        return devices.per_prompt(step, ("state", "rows"), ("state", "whole"), donate=(0,))

    step = _of_any_size(compiled, prompts_per_step, microbatches)
    pack_rows = pack_tokens and group_microbatches == 1
    draw = devices.per_prompt(
        partial(
            generate,
            model,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            pad_id=tokenizer.pad_id,
            compact=compact,
            decode_slots=decode_slots,
            **sampling._asdict(),
        ),
        ("decode", "prompts", "whole", "first"),
        "rows",
    )
    gather = devices.whole_batch(partial(assemble, objective), ("rows", "rows"), "rows")
    measure, judge = _fields(
        model, tokenizer, objective, critic, sampling, reward_weights, chunk, devices
    )
    width = prompt_width(task, tokenizer) if prompt_length is None else prompt_length
    state, key, moved, pending = (
        begin(params, optimizer, seed, critic, devices) if saved is None else saved
    )
    if "ref_logp_T" not in reads(objective):
        reference = None
    elif moved is not None:
        reference = moved
    elif reference is None:
        reference = copy(devices.put("state", params))
    else:
        reference = devices.put("state", reference)
    held = devices.held(prompts_per_step)
    own = devices.own(prompts_per_step)
    fewer = _fewer(prompts_per_step, microbatches, devices.parts)

    def batch_of(
        rollout: Rollout, measured: dict, drawn: Rollout, told: GatheredScores, age: int
    ) -> Batch:
        rewards = (
            np.moveaxis(told.reward_PGN, -1, 1) if takes_several(objective) else told.reward_PG
        )
        samples = measured | judge(drawn, told.at(held), age)
        return gather(rollout, devices.put("rows", rewards.astype(np.float32)), **samples)

    def prompts_of(iteration: int) -> Prompts:
        rows = rows_of(iteration, task.train, prompts_per_step, seed)
        return devices.put_rows(
            encode(tokenizer, task.prompt, [rows[i] for i in held], length=width)
        )

    def programs() -> list[Program]:
        """All that an iteration may run, found by going through one on shapes, with every size that
        it may have.
        """
        shapes = shapes_of(state)
        known = shapes_of(reference)
        functions = 1 if callable(task.reward) else len(task.reward)
        with listed() as found:
            weights = devices.for_decoding(policy_of(critic, shapes.params))
            drawn = draw(weights, prompts_of(0), jax.random.fold_in(key, 0), 0)
            for size in lengths(max_new_tokens, length_buckets):
                trimmed = jax.eval_shape(partial(cut, size=size), drawn)
                for rollout in packings(trimmed) if pack_rows else [trimmed]:
                    measured = measure(shapes.params, known, rollout)
                    batch = batch_of(rollout, measured, *untold(trimmed, functions, held), 0)
                    for part in (
                        without_idle(objective, batch, fewer, devices)
                        if drop_zero_variance
                        else [batch]
                    ):
                        step(shapes, part)
        return list(found.values())

    if compile_ahead is not None and int(state.step) // epochs < steps:
        compile_ahead(programs())

    def iterations(state: TrainState, reference: Params | None) -> Iterator[tuple[RunState, dict]]:
        ahead = deque(pending)  # what is sampled for this iteration and those behind it
        for iteration in range(int(state.step) // epochs, steps):
            started = time.perf_counter()
            numbers = range(iteration + len(ahead), min(iteration + stale + 1, steps))
            weights = devices.for_decoding(policy_of(critic, state.params)) if numbers else None
            for number in numbers:
                ahead.append(draw(weights, prompts_of(number), jax.random.fold_in(key, number), 0))
            del weights  # the layout of decoding is not kept during the update
            rollout = trim(jax.block_until_ready(ahead.popleft()), length_buckets)
            age = epochs * min(stale, iteration)
            sampled = time.perf_counter()
            rows = rows_of(iteration, task.train, prompts_per_step, seed)
            # The host sees tokens, masks and which completions have stopped.
            drawn = devices.fetch(rollout._replace(prompts=None, logp_PGT=None))
            rows = [rows[i] for i in own]
            mine = jax.tree.map(lambda x: x[np.isin(held, own)], drawn)
            mask_PGT = masks_together(mine, own)
            if pack_rows:  # by what every process knows
                token_index_PN = pack(drawn._replace(mask_PGT=mask_PGT)).token_index_PN
                rollout = rollout._replace(token_index_PN=devices.put("rows", token_index_PN))
            # What needs no reward is begun now: devices compute it while the host decodes and
            # scores.
            measured = measure(state.params, reference, rollout)
            texts = completion_texts(tokenizer, mine)
            questions = prompt_texts(task, rows)
            scores = partial(
                score_rewards,
                task.reward,
                rows,
                questions,
                texts,
                weights=reward_weights,
                on_error=on_error,
            )
            told = score_and_gather(scores, mine, own, mask_PGT)
            scored = time.perf_counter()
            batch = batch_of(rollout, measured, drawn, told, age)
            if drop_zero_variance:
                batch = drop_zero_variance_groups(objective, batch, fewer, devices)
            state, metrics = step(state, batch)
            metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
            if age == 0:
                check_gap(metrics, model.config)
            if reference is not None and update_reference is not None:
                policy = policy_of(critic, state.params)
                moved = update_reference(iteration + 1, policy, reference)
                # The next update consumes the parameters: a reference that is them needs buffers of
                # its own.
                reference = jax.tree.map(
                    lambda new, own: jnp.copy(new) if new is own else new, moved, policy
                )
            done = time.perf_counter()
            metrics = (
                {"iteration": iteration + 1} | group_statistics(told, told.reward_PG) | metrics
            )
            metrics |= _rate(state) | {
                "seconds/sample": sampled - started,
                "seconds/score": scored - sampled,
                "seconds/update": done - scored,
                "completions": _completions(rows, questions, texts, told.at(own).reward_PG),
            }
            yield (
                RunState(state, key, None if update_reference is None else reference, tuple(ahead)),
                metrics,
            )

    return iterations(state, reference)


def _of_any_size(compiled: Callable, prompts: int, microbatches: int) -> Callable:
    """The update of a batch of `prompts` prompts or fewer: micro-batches keep their size, fewer
    prompts have fewer.
    """
    made = {microbatches: compiled(microbatches)}

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        parts = -(-len(batch.samples.mask_T) * microbatches // prompts)
        if parts not in made:
            made[parts] = compiled(parts)
        return made[parts](state, batch)

    return update


def _fewer(prompts: int, microbatches: int, parts: int) -> list[int]:
    """The numbers of prompts an update is made with once idle groups are left out: whole
    micro-batches, or quarters, up to what is spread evenly over `parts` devices."""
    cuts = microbatches if microbatches > 1 else 4
    return sorted({-(-prompts * k // cuts // parts) * parts for k in range(1, cuts)} - {0, prompts})


def _fields(
    model, tokenizer, objective, critic, sampling, reward_weights, chunk, devices
) -> tuple[Callable, Callable]:
    """Two functions for the fields of `Sample` that the objective reads, and none that it does not:
    those that models compute, and those that follow from the host's scores."""
    fields = reads(objective)
    before = reads_in_prepare(objective)
    if critic is None and fields & {"value_T", "old_value_T"}:
        raise ValueError("the objective reads values of a critic: pass critic=value_network(model)")
    scorer = partial(score, model, sampling=sampling, chunk=chunk)
    logp = devices.per_prompt(scorer, ("state", "rows"), ("rows", "rows"))
    entropies = devices.per_prompt(
        partial(scorer, with_entropy=True), ("state", "rows"), ("rows", "rows")
    )
    if critic is not None:
        values = devices.per_prompt(critic.values, ("state", "rows", "rows"), "rows")

    def measure(params: Params, reference: Params | None, rollout: Rollout) -> dict:
        policy = policy_of(critic, params)
        samples = {}
        if "ref_logp_T" in fields:
            samples["ref_logp_T"], _ = logp(reference, rollout)
        if "entropy_T" in before:
            _, samples["entropy_T"] = entropies(policy, rollout)
        if "old_value_T" in fields:
            samples["old_value_T"] = values(params["critic"], rollout.prompts, rollout.tokens_PGT)
        return samples

    def judge(drawn: Rollout, told: GatheredScores, age: int) -> dict:
        samples = {}
        if "reward_T" in fields:
            samples["reward_T"] = devices.put_rows(
                step_rewards(tokenizer, drawn, told, reward_weights)
            )
        if "age" in fields:
            samples["age"] = devices.put_rows(np.full(drawn.stopped_PG.shape, age, np.int32))
        return samples

    return measure, judge


@cache
def takes_several(objective: Objective) -> bool:
    """Whether the objective's advantage takes the rewards of several functions apart (reward_NG)
    and not their sum.
    """
    rewards = jax.ShapeDtypeStruct((2, 2, 3), jnp.float32)
    try:
        return jax.eval_shape(partial(batch_advantages, objective), rewards).shape == (2, 3)
    except (TypeError, ValueError, AssertionError):  # chex refuses the rank
        return False


def _rate(state: TrainState) -> dict[str, float]:
    """The learning rate in use, where the optimiser keeps it."""
    hyperparams = optax.tree_utils.tree_get(state.opt_state, "hyperparams")
    return {} if hyperparams is None else {"learning_rate": float(hyperparams["learning_rate"])}


def chunk_of(model: LanguageModel, devices: Devices) -> int:
    """Tokens projected on the vocabulary at a time: a program of pmap sees its own prompts, one
    over a mesh all.
    """
    return tokens_at_once(model, devices.parts if devices.axis_name is None else 1)


def _completions(rows, questions, texts, reward_PG) -> list[dict]:
    return [
        {
            "prompt": question,
            "completion": text,
            "reward": None if np.isnan(reward) else float(reward),
        }
        | ({"answer": row["answer"]} if "answer" in row else {})
        for row, question, group, rewards in zip(rows, questions, texts, reward_PG, strict=True)
        for text, reward in zip(group, rewards, strict=True)
    ]
