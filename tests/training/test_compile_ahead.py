"""Programs compiled before the first iteration: all that the iterations need, and the same numbers."""

import dataclasses
import io
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import pytest
from grpo_jax.config import TrainConfig
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.objectives import grpo
from grpo_jax.parallel.backends import listed, sharded
from grpo_jax.parallel.sharding import make_mesh
from grpo_jax.runs import plots, run
from grpo_jax.runs.terminal import Screen
from grpo_jax.training.loop import train
from grpo_jax.training.optimizers import adamw
from rich.console import Console

from toy import ascii_share, bigram, compilations, install, letters

NAMES = ("generate", "score", "assemble", "busy_and_tokens", "part_and_rest", "step")
MODEL = bigram(stop_share=0.3)


def counts(names):
    return {name: names.count(name) for name in NAMES if name in names}


def some_idle(prompt, completion):
    return 1.0 if prompt[0] in "abcdef" else ascii_share(completion)


def iterations(beta=0.0, **options):
    # A group of 7 is in no other test: a program that one of them has made already would not be listed.
    sizes = {"prompts_per_step": 2, "group_size": 7, "max_new_tokens": 8, "seed": 5, "prompt_length": 16, "steps": 6}
    return train(
        MODEL, MODEL.init(jax.random.key(0)), letters(train_size=10)._replace(reward=some_idle), ByteTokenizer(),
        grpo(beta=beta), adamw(0.05, total_updates=6), **sizes | options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 3 packed sizes and none; of one prompt in place of two, as many or fewer tokens.
        (
            {"pack_tokens": True, "drop_zero_variance": True, "length_buckets": 1},
            {"generate": 1, "assemble": 4, "busy_and_tokens": 1, "part_and_rest": 7, "step": 8},
        ),
        (
            {"beta": 0.1, "length_buckets": 2, "max_new_tokens": 12},
            {"generate": 1, "score": 2, "assemble": 2, "step": 2},
        ),
    ],
)
def test_no_iteration_compiles_what_was_compiled_ahead(options, expected):
    """Law: iterations compile none of the programs, where they would compile several; and nothing else changes."""
    programs = []

    def compile_ahead(found):
        programs.extend(program.name for program in found)
        for program in found:
            program.compile()

    kept = lambda results: [(jax.tree.map(jnp.copy, saved), metrics["loss"]) for saved, metrics in results]
    started = iterations(compile_ahead=compile_ahead, **options)
    assert counts(programs) == expected
    with compilations() as later:
        ahead = kept(started)
    assert counts(later) == {}
    with compilations() as names:
        late = kept(iterations(**options))
    assert counts(names)["step"] > 1, "sizes that occur: one shows little"
    chex.assert_trees_all_equal(ahead, late)


def test_a_mesh_runs_what_was_compiled():
    """A program without shapes compiles when it is called; with some, where and when it is told to."""
    devices = sharded(make_mesh(data=1))
    double = devices.per_prompt(lambda x: 2 * x, ("rows",), "rows")
    with listed() as found, compilations() as names:
        out = double(jax.ShapeDtypeStruct((4, 3), jnp.float32))
        assert double(jax.ShapeDtypeStruct((4, 3), jnp.float32)) == out, "listed once"
        assert (out.shape, out.dtype) == ((4, 3), jnp.float32)
    (program,) = found.values()
    assert names == []
    program.compile()
    with compilations() as names:
        chex.assert_trees_all_equal(double(jnp.ones((4, 3))), jnp.full((4, 3), 2.0))
    assert program.name.strip("<>") not in names
    with listed() as found:
        double(jax.ShapeDtypeStruct((4, 3), jnp.float32))
    assert not found, "made already"


def test_a_run_compiles_ahead_and_says_so(tmp_path, monkeypatch):
    """A whole run and a resumed one: no program is compiled in an iteration or an evaluation, and one line tells."""
    install(monkeypatch)
    monkeypatch.setattr(plots, "plot_curves", lambda rows, path: None)
    compile_them, written = run._compile, io.StringIO()
    screen = Screen(Console(file=written, width=200), interval=0.0)
    config = TrainConfig(
        task="letters", steps=3, prompts=2, group_size=7, max_new_tokens=6, warm_up=0, eval_rows=3, eval_batch=3,
        eval_every=1, save_every=1, keep=3, length_buckets=2, out=str(tmp_path / "ahead"), compile_ahead=True,
    ).resolved()  # fmt: skip

    def marked(*args):
        compile_them(*args)
        names.append("ahead")

    def go(config, **options):
        names.clear()
        run.train(config, screen=screen, **options)
        return counts(names[names.index("ahead") :]) if "ahead" in names else None

    monkeypatch.setattr(run, "_compile", marked)
    with compilations() as names:
        assert go(config) == {}
        text = written.getvalue()
        assert re.findall(r"(\d+) programs compiled ahead in [\d.]+ s", text) == ["7"], "generate, 2 × 3 of an update"
        assert "compiling 7/7" in text
        shutil.rmtree(tmp_path / "ahead" / "checkpoints" / "3")
        before = (tmp_path / "ahead" / "metrics.jsonl").read_bytes()
        # Its evaluation has a shape of its own, that nothing has compiled.
        assert go(dataclasses.replace(config, eval_batch=2), resume=True) == {}
        assert "5 programs compiled ahead" in written.getvalue(), "those of its own objective, and the evaluation"
        assert (tmp_path / "ahead" / "metrics.jsonl").read_bytes() == before
        late = dataclasses.replace(config, compile_ahead=False, out=str(tmp_path / "late"))
        assert go(late) is None
        assert counts(names)["step"] >= 1
    assert (tmp_path / "late" / "metrics.jsonl").read_bytes() == before
