"""Runs training, sampling and scoring on eight simulated devices in every layout, and prints how far from one device.

`JAX_NUM_CPU_DEVICES=8 python tests/device_table.py` prints one JSON object a line; parallel/test_backends.py reads
them. With the argument `full` it prints every layout × cut into micro-batches × normaliser: 270 compilations of the
quick model.
"""

import json
import sys
import time
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from grpo_jax.components import devices_of as devices_of_config
from grpo_jax.config import TrainConfig
from grpo_jax.inference.critic import value_network
from grpo_jax.inference.generate import generate
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.models import DecoderConfig, decoder, from_nnx
from grpo_jax.objectives import PRESETS, batch_loss, diagnostics, ema, reads
from grpo_jax.options import Batching, Generation, Sampling, Update
from grpo_jax.parallel.backends import SINGLE, pmapped, sharded
from grpo_jax.parallel.sharding import make_mesh
from grpo_jax.plan import hlo
from grpo_jax.training.batch import assemble, infer_logp
from grpo_jax.training.evaluate import evaluate
from grpo_jax.training.loop import train
from grpo_jax.training.packing import pack
from grpo_jax.training.sft import sft
from grpo_jax.training.start import start
from grpo_jax.training.train_step import make_train_step
from grpo_jax.training.zero_variance import drop_zero_variance_groups
from grpo_jax.types import Prompts, Rollout

from nnx_toy import Averager
from objective_batches import REQUIRED
from toy import V as BYTES
from toy import bigram, compilations, letters

P, G, S, T, V = 32, 3, 5, 4, 16  # few tokens: a ratio is as exact as its log-probabilities are small
MODEL = decoder(DecoderConfig(V, 16, 32, 1, 8, 8, 2, tie_word_embeddings=False, attention_bias=True), remat="none")
# Most rows are of a model that compiles quickly, with axes for every axis of a mesh.
QUICK = bigram(vocab=V)._replace(axes=(("embed", "vocab embed"), ("out", "embed vocab"), ("bias", "vocab")))
MODELS = {"decoder": MODEL, "quick": QUICK}
SAMPLING = Sampling(temperature=0.9, top_p=0.95)

PMAP = {f"pmap {n}": (n,) for n in (1, 2, 4, 8)}
MESHES = {f"{axis} {n}": {axis: n} for axis in ("data", "fsdp", "tensor") for n in (2, 4, 8)} | {
    "data 1": {"data": 1},
    "data 2 fsdp 2": {"data": 2, "fsdp": 2},
    "fsdp 2 tensor 2": {"fsdp": 2, "tensor": 2},
    "data 2 tensor 4": {"data": 2, "tensor": 4},
    "data 2 fsdp 2 tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
}
MIXED = "data 2 fsdp 2 tensor 2"
LAYOUTS = (*PMAP, *MESHES)
# One preset for each normaliser: sequences, tokens, a fixed length, tokens of groups with signal, sequences (sums).
NORMALISERS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
MICROBATCHES = (1, 2, 4)
ROWS = [
    ("quick", layout, MICROBATCHES[(i + j) % 3], NORMALISERS[(i + j) % len(NORMALISERS)])
    for i, layout in enumerate(LAYOUTS)
    for j in (range(3) if layout in ("pmap 4", "fsdp 4", MIXED) else (0,))
]  # every layout, cuts and normalisers going round, and all cuts on three of them
ROWS += [("decoder", "pmap 4", 2, "grpo"), ("decoder", "tensor 4", 1, "bnpo"), ("decoder", MIXED, 4, "dapo")]
SAMPLED = [("quick", n, "gather") for n in ("pmap 2", "data 4", "fsdp 8", "tensor 2")]
SAMPLED += [("decoder", n, "gather") for n in ("pmap 8", "tensor 8", MIXED)]
SAMPLED += [("quick", "fsdp 4", "split"), ("decoder", MIXED, "split")]
DROPPED = {"pmap 4": 12, "data 8": 16, MIXED: 12}  # prompts that stay of 32, 12 of which are needed
WRONG = ("bnpo", "dapo")  # presets whose devices have unequal weights


@cache
def devices_of(layout: str, decode: str = "gather", axes=MODEL.axes):
    if layout == "single":
        return SINGLE
    if layout in PMAP:
        return pmapped(*PMAP[layout])
    return sharded(make_mesh(**MESHES[layout]), axes, decode)


def expose() -> optax.GradientTransformation:
    """Keeps the gradient in the optimiser's state."""
    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), lambda g, *_: (g, g))


OPTIMIZER = optax.chain(expose(), optax.sgd(0.1, momentum=0.9))


@cache
def parameters(model=MODEL):
    params = jax.jit(model.init)(jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), params)


@cache
def prompts() -> Prompts:
    rng = np.random.default_rng(0)
    mask = np.arange(S) >= rng.integers(0, S, (P, 1))
    return Prompts(rng.integers(0, V, (P, S)).astype(np.int32), mask)


@cache
def material(model=MODEL):
    """A rollout with uneven lengths, an old policy that is not the current one, rewards with gaps, and every field."""
    rng = np.random.default_rng(1)
    mask = np.arange(T) < rng.integers(1, T + 1, (P, G))[..., None]
    tokens = rng.integers(0, V, (P, G, T)).astype(np.int32)
    rollout = Rollout(prompts(), tokens, mask, np.zeros((P, G, T), np.float32), rng.random((P, G)) < 0.7)
    logp = np.asarray(infer_logp(model, parameters(model), rollout, sampling=SAMPLING)[0])
    noise = lambda scale: np.where(mask, rng.normal(0, scale, mask.shape), 0).astype(np.float32)
    rollout = rollout._replace(logp_PGT=logp + noise(0.3))
    reward = rng.normal(size=(P, G)).astype(np.float32)
    reward[3, 1], reward[5] = np.nan, 0.5
    last = np.arange(T) == mask.sum(-1, keepdims=True) - 1
    fields = {
        "ref_logp_T": logp + noise(0.5),
        "reward_T": np.where(last, reward[..., None], np.nan).astype(np.float32),
        "entropy_T": np.abs(noise(1.0)),
        "old_value_T": noise(1.0),
        "age": np.zeros((P, G), np.int32),
    }
    return rollout, reward, fields


def dropped(layout: str) -> dict:
    """An update without the groups that have no spread, 20 of 32, against one of them all on one device."""
    devices, objective = devices_of(layout, axes=QUICK.axes), objective_of("dapo")
    rollout, reward, _ = material(QUICK)
    rollout = rollout._replace(token_index_PN=pack(rollout.mask_PGT, (0.9,)))
    reward = np.where(np.arange(P)[:, None] % 8 < 3, reward, 0.5).astype(np.float32)
    found = {}
    for name, where in (("part", devices), ("whole", SINGLE)):
        rows = where.put_rows(rollout)
        batch = where.whole_batch(partial(assemble, objective), ("rows", "rows"), "rows")(rows, where.put_rows(reward))
        if name == "part":
            batch = drop_zero_variance_groups(objective, batch, (12, 16, 24), where)
        update = Update(logit_chunk=8)
        step = make_train_step(QUICK, objective, OPTIMIZER, update=update, sampling=SAMPLING, axis_name=where.axis_name)
        step = where.per_prompt(step, ("state", "rows"), ("state", "whole"))
        state, metrics = step(start(objective, OPTIMIZER, 0, None, where, parameters(QUICK)).train, batch)
        metrics = {key: metrics[key] for key in ("loss", "grad_norm")}
        found[name] = jax.device_get((state.opt_state[0], metrics, state.params))
        found[name + " prompts"] = batch.samples.adv.shape[0]
    return {"layout": layout, "prompts": found["part prompts"], "of": found["whole prompts"]} | {
        kind: far(*pair)
        for kind, *pair in zip(("grads", "metrics", "params"), found["part"], found["whole"], strict=True)
    }


def objective_of(name: str):
    return PRESETS[name](**REQUIRED.get(name, {}))


def update(layout: str, name: str, microbatches: int, model=MODEL, build=make_train_step) -> dict:
    """Two updates: loss, gradients, parameters, momentum and metrics."""
    devices, objective = devices_of(layout, axes=model.axes), objective_of(name)
    critic = value_network(devices.for_training(model)) if "value_T" in reads(objective) else None
    rollout, reward, fields = material(model)
    if name == "gdpo":
        reward = np.stack([reward, reward**2], axis=1)
    used = {field: x for field, x in fields.items() if field in reads(objective)}
    batch = devices.whole_batch(partial(assemble, objective), ("rows", "rows"), "rows")(
        devices.put_rows(rollout), devices.put_rows(reward), **devices.put_rows(used)
    )
    step = build(
        devices.for_training(model), objective, OPTIMIZER, update=Update(microbatches=microbatches, logit_chunk=8),
        sampling=SAMPLING, critic=critic, axis_name=devices.axis_name,
    )  # fmt: skip
    step = devices.per_prompt(step, ("state", "rows"), ("state", "whole"), donate=(0,))
    state, metrics = step(start(objective, OPTIMIZER, 0, critic, devices, parameters(model)).train, batch)
    first = jax.device_get({"grads": state.opt_state[0], "metrics": metrics})
    state, _ = step(state, batch)
    return first | jax.device_get({"params": state.params, "momentum": state.opt_state[1]})


reference = cache(partial(update, "single", microbatches=1))


def norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree))))


def far(got, wanted) -> float:
    """‖got − wanted‖ / ‖wanted‖."""
    return norm(jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, got, wanted)) / norm(wanted)


def compare(layout: str, name: str, microbatches: int, model=MODEL, build=make_train_step) -> dict:
    began = time.perf_counter()
    got, wanted = update(layout, name, microbatches, model, build), reference(name, model=model)
    distances = {part: far(got[part], wanted[part]) for part in ("grads", "params", "momentum")}
    metrics = {key: abs(float(got["metrics"][key]) - float(x)) for key, x in wanted["metrics"].items()}
    sizes = {key: abs(float(x)) for key, x in wanted["metrics"].items()}
    return {
        "layout": layout, "preset": name, "microbatches": microbatches, **distances, "metrics": metrics,
        "sizes": sizes, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def build_mean_of_means(*parts, axis_name, **options):
    """What must not pass: every device divides by its own weight, and the updates are averaged."""
    step = make_train_step(*parts, **options)
    return lambda state, batch: jax.lax.pmean(step(state, batch), axis_name)


def every_preset(layout: str) -> tuple[dict, dict]:
    """For each preset the gradient of its loss in the log-probabilities, and loss and diagnostics: one program."""
    devices = devices_of(layout, axes=QUICK.axes)
    rollout, reward, fields = material(QUICK)
    move = 0.2 * np.sin(np.arange(P * G * T)).reshape(P, G, T)
    logp = rollout.logp_PGT + np.where(rollout.mask_PGT, move, 0)

    def losses(logp, rollout, reward, fields):
        gradients, values = {}, {}
        for name in PRESETS:
            objective = objective_of(name)
            rewards = jnp.stack([reward, reward**2], axis=1) if name == "gdpo" else reward
            samples = assemble(
                objective, rollout, rewards, **{k: fields[k] for k in fields if k in reads(objective)}
            ).samples
            samples = samples._replace(value_T=0.5 * fields["old_value_T"], entropy_T=fields["entropy_T"])
            loss = lambda logp, objective=objective, samples=samples: batch_loss(objective, logp, samples).value()
            value, gradients[name] = jax.value_and_grad(loss)(logp)
            seen = diagnostics(objective, logp, samples)
            values[name] = {"loss": value} | {key: mean.value() for key, mean in seen.items()}
        return gradients, values

    program = devices.whole_batch(losses, ("rows",) * 4, ("rows", "whole"))
    return jax.device_get(program(*devices.put_rows((logp.astype(np.float32), rollout, reward, fields))))


def presets(layout: str) -> list[dict]:
    (got, got_values), (wanted, values) = every_preset(layout), every_preset("single")
    return [
        {
            "layout": layout, "preset": name, "gradient": far(got[name], wanted[name]),
            "size": norm(wanted[name]),
            "metrics": {k: abs(float(got_values[name][k]) - float(x)) for k, x in values[name].items()},
            "sizes": {k: abs(float(x)) for k, x in values[name].items()},
        }
        for name in PRESETS
    ]  # fmt: skip


def drawn(model, layout: str, decode: str) -> Rollout:
    devices = devices_of(layout, decode, model.axes)
    draw = devices.per_prompt(
        partial(generate, model, generation=Generation(G, 6, SAMPLING), stop_ids=(1, 2, 3)),
        ("decode", "prompts", "whole", "first"), "rows",
    )  # fmt: skip
    weights = devices.for_decoding(devices.put("state", parameters(model)))
    return draw(weights, devices.put_rows(prompts()), jax.random.key(3), 7)


def sampled(name: str, layout: str, decode: str) -> dict:
    """Completions and what `infer_logp` says of them."""
    began, model = time.perf_counter(), MODELS[name]
    devices = devices_of(layout, decode, model.axes)
    rollout, wanted = drawn(model, layout, decode), drawn(model, "single", "gather")
    scorer = partial(infer_logp, model, sampling=SAMPLING, with_entropy=True)
    gathering = partial(infer_logp, devices.for_training(model), sampling=SAMPLING, with_entropy=True)
    on_devices = devices.per_prompt(gathering, ("state", "rows"), ("rows", "rows"))
    logp, entropy = on_devices(devices.put("state", parameters(model)), rollout)
    wanted_logp, wanted_entropy = scorer(parameters(model), wanted)
    return {
        "model": name,
        "layout": layout,
        "decode": decode,
        "different": int(np.sum(np.asarray(rollout.tokens_PGT) != np.asarray(wanted.tokens_PGT))),
        "distinct": len(np.unique(np.asarray(wanted.tokens_PGT))),
        "lengths": sorted({int(n) for n in np.asarray(wanted.mask_PGT).sum(-1).ravel()}),
        "masks": int(np.sum(np.asarray(rollout.mask_PGT) != np.asarray(wanted.mask_PGT))),
        "logp": far(rollout.logp_PGT, np.asarray(wanted.logp_PGT)),
        "score": far(logp, np.asarray(wanted_logp)),
        "entropy": far(entropy, np.asarray(wanted_entropy)),
        "seconds": time.perf_counter() - began,
    }


@cache
def loop_parts(name: str):
    """(model, parameters, objective, critic) of a whole run."""
    if name == "nnx":
        model, params = from_nnx(Averager(BYTES, 16, nnx.Rngs(0)), vocab_size=BYTES)
        return model, params, PRESETS["grpo"](), None
    model = bigram()
    return model, model.init(jax.random.key(0)), PRESETS[name](), value_network(model) if name == "ppo" else None


@cache
def run(layout: str, name: str) -> dict:
    """Supervised updates, two iterations of `train` and an evaluation, of models whose axes nobody named."""
    (model, params, objective, critic), devices = loop_parts(name), devices_of(layout, axes=None)
    task, tokenizer, rule = letters(train_size=10), ByteTokenizer(), optax.sgd(0.1, momentum=0.5)
    *_, (tuned, sft_metrics) = sft(model, params, task, tokenizer, rule, steps=2, batch_size=8, devices=devices)
    other = layout != "single"
    results = list(train(
        model, tuned.params, task, tokenizer, objective, rule, steps=2, critic=critic, devices=devices,
        generation=Generation(3, 5, compactions=int(other)), batching=Batching(8, pack_tokens=other),
        update=Update(microbatches=2), update_reference=partial(ema, decay=0.5),
    ))  # fmt: skip
    state, metrics = results[-1][0], {"sft": float(sft_metrics["loss"])}
    for _, found in results:
        completions = found.pop("completions")
        metrics |= {f"{n} {found['iteration']}": x for n, x in found.items() if not n.startswith("seconds")}
    evaluation = evaluate(
        model, params, tokenizer, task, task.held_out, generation=Generation(2, 4), key=jax.random.key(5),
        batch_size=3, devices=devices,
    )  # fmt: skip
    spread = [x for x in jax.tree.leaves(state.train.params) if not x.sharding.is_fully_replicated]
    return {
        "params": jax.device_get((state.train.params, state.reference)), "metrics": metrics, "spread": len(spread),
        "texts": [row["completion"] for row in completions], "evaluation": jax.tree.map(np.asarray, evaluation),
    }  # fmt: skip


def whole_run(layout: str, name: str) -> dict:
    began = time.perf_counter()
    got, wanted = run(layout, name), run("single", name)
    same = jax.tree.map(
        lambda a, b: np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), *(x["evaluation"] for x in (got, wanted))
    )
    return {
        "layout": layout, "model": name, "params": far(got["params"], wanted["params"]), "spread": got["spread"],
        "same texts": got["texts"] == wanted["texts"], "distinct": len(set(wanted["texts"])),
        "same evaluation": all(jax.tree.leaves(same)), "names": got["metrics"].keys() == wanted["metrics"].keys(),
        "metrics": {n: abs(x - got["metrics"][n]) / max(1.0, abs(x)) for n, x in wanted["metrics"].items()},
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def refused() -> dict:
    """The messages of what does not fit."""
    (model, params, objective, _), rule = loop_parts("grpo"), optax.sgd(0.1)
    run_ = lambda layout, **options: next(train(
        model, params, letters(), ByteTokenizer(), objective, rule, steps=1, generation=Generation(2, 2),
        devices=devices_of(layout, axes=None), **options,
    ))  # fmt: skip
    tuned = lambda: next(
        sft(model, params, letters(), ByteTokenizer(), rule, steps=1, batch_size=6, devices=devices_of("data 4"))
    )
    attempts = {
        "prompts": lambda: run_("pmap 4", batching=Batching(6)),
        "cuts": lambda: run_("data 2 fsdp 2", batching=Batching(4), update=Update(microbatches=2)),
        "sft": tuned,
        "decode": lambda: sharded(make_mesh(), None, "splt"),
        "devices": lambda: pmapped(9),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def moved() -> dict:
    """Bytes that decoding moves, as told and as the arrays on a device say; what a configuration builds."""
    devices = devices_of("fsdp 4")
    params = devices.put("state", parameters())
    on_device = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    config = TrainConfig.of(mesh="fsdp=2,tensor=2", decode_weights="split", prompts_per_step=4)
    built = devices_of_config(config, MODEL)
    split = devices_of("fsdp 2 tensor 2", "split")
    return {
        "told": devices.moved_bytes(params),
        "counted": on_device(devices.for_decoding(params)) - on_device(params),
        "built": [built.name, built.parts, built.moved_bytes(params)],
        "split": [split.name, split.parts, split.moved_bytes(params)],
        "gather": devices_of("fsdp 2 tensor 2").moved_bytes(params),
        "pmap": devices_of_config(TrainConfig.of(pmap=4, prompts_per_step=4), MODEL).name,
        "single": devices_of_config(TrainConfig.of(), MODEL) is SINGLE,
        "data": devices_of("data 4").moved_bytes(params),
    }


def gathering() -> dict:
    """Bytes of collectives, by kind, of a gradient over fsdp with and without gathered weights; those in the loop."""
    config, layout = DecoderConfig(V, 64, 128, 5, 8, 8, 8, tie_word_embeddings=False), "fsdp 8"
    row = {"layer": 4 * (4 * 64 * 64 + 3 * 64 * 128)}
    for name in ("whole", "as stated"):
        model = decoder(config)
        devices, rollout = devices_of(layout, axes=model.axes), material()[0]
        model = devices.for_training(model) if name == "whole" else model
        loss = lambda params, rollout, model=model: infer_logp(model, params, rollout)[0].sum()
        params = devices.put("state", jax.jit(model.init)(jax.random.key(0)))
        program = jax.jit(jax.grad(loss), out_shardings=jax.tree.map(lambda x: x.sharding, params))
        found = hlo.count(program.lower(params, devices.put("rows", rollout)).compile().as_text()).collectives
        row[name] = {
            kind: sum(one.bytes * one.times for one in found if one.kind == kind and one.times in (4, 5))
            for kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
        }
    return row


def ahead(layout: str) -> dict:
    """Names of the programs that iterations compile: none that were compiled ahead, else those."""
    model, devices, row = bigram(), devices_of(layout, axes=None), {"layout": layout}
    half = lambda prompt, completion: 1.0 if prompt[0] in "abcd" else float(len(completion))
    for name, compile_ahead in (
        ("ahead", lambda programs: [program.compile() for program in programs]),
        ("late", None),
    ):
        iterations = train(
            model, model.init(jax.random.key(0)), letters(train_size=10)._replace(reward=half), ByteTokenizer(),
            PRESETS["grpo"](beta=0.0), optax.sgd(0.1), steps=3, generation=Generation(3, 6),
            batching=Batching(8, length_buckets=2, drop_zero_variance=True), update=Update(microbatches=2),
            compile_ahead=compile_ahead, devices=devices,
        )  # fmt: skip
        with compilations() as names:
            row[f"{name} loss"] = [metrics["loss"] for _, metrics in iterations]
        # What runs by pmap is called "fun".
        row[name] = sorted({name for name in names if name in ("generate", "assemble", "step", "part_and_rest", "fun")})
    return row


AHEAD = ("pmap 2", "data 2")
RUNS = (("pmap 4", "ppo"), (MIXED, "ppo"), ("fsdp 4", "nnx"), ("pmap 2", "grpo"))


def main() -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    tell = lambda kind, row: print(json.dumps({"kind": kind} | row), flush=True)
    wanted = sys.argv[1:] or [
        "refused",
        "moved",
        "gathering",
        "runs",
        "ahead",
        "sampler",
        "wrong",
        "presets",
        "dropped",
        "update",
    ]
    if "refused" in wanted:
        tell("refused", refused())
    if "moved" in wanted:
        tell("moved", moved())
    if "gathering" in wanted:
        tell("gathering", gathering())
    if "runs" in wanted:
        for layout, name in RUNS:
            tell("runs", whole_run(layout, name))
    if "ahead" in wanted:
        for layout in AHEAD:
            tell("ahead", ahead(layout))
    if "sampler" in wanted:
        for name, layout, decode in SAMPLED:
            tell("sampler", sampled(name, layout, decode))
    if "wrong" in wanted:
        for name in WRONG:
            tell("wrong", compare("pmap 4", name, 1, QUICK, build_mean_of_means))
    if "presets" in wanted:
        for row in presets(MIXED):
            tell("presets", row)
    if "dropped" in wanted:
        for layout in DROPPED:
            tell("dropped", dropped(layout))
    if "update" in wanted:
        for model, layout, microbatches, name in ROWS:
            tell("update", {"model": model} | compare(layout, name, microbatches, MODELS[model]))
    if "full" in wanted:
        for layout, microbatches, name in product(LAYOUTS, MICROBATCHES, NORMALISERS):
            tell("full", compare(layout, name, microbatches, QUICK))


if __name__ == "__main__":
    main()
