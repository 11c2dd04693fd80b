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
from grpo_jax.options import Batching, Generation
from grpo_jax.parallel.backends import sharded
from grpo_jax.parallel.programs import listed
from grpo_jax.parallel.sharding import make_mesh
from grpo_jax.runs import run
from grpo_jax.runs.terminal import Screen
from grpo_jax.training.loop import train
from grpo_jax.training.optimizers import adamw
from rich.console import Console

from toy import ascii_share, bigram, compilations, install, letters

NAMES = ("generate", "infer_logp", "assemble", "busy_and_tokens", "part_and_rest", "step")
MODEL = bigram(stop_share=0.3)


def counts(names):
    return {name: names.count(name) for name in NAMES if name in names}


def some_without_spread(prompt, completion):
    return 1.0 if prompt[0] in "abcdef" else ascii_share(completion)


def iterations(beta, batching, generation, **options):
    task = letters(train_size=10)._replace(reward=some_without_spread)
    return train(
        MODEL, MODEL.init(jax.random.key(0)), task, ByteTokenizer(), grpo(beta=beta), adamw(0.05), steps=6, seed=5,
        batching=batching, generation=generation, **options,
    )  # fmt: skip


# A group of 7 is in no other test: a program that one of them has made already would not be listed.
SAMPLED = Generation(7, 8)
BATCHING = Batching(2, 16)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 3 packed sizes and none; of one prompt in place of two, as many or fewer tokens.
        (
            (0.0, BATCHING._replace(length_buckets=1, pack_tokens=True, drop_zero_variance=True), SAMPLED),
            {"generate": 1, "assemble": 4, "busy_and_tokens": 1, "part_and_rest": 7, "step": 8},
        ),
        (
            (0.1, BATCHING._replace(length_buckets=2), Generation(7, 12)),
            {"generate": 1, "infer_logp": 2, "assemble": 2, "step": 2},
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
    started = iterations(*options, compile_ahead=compile_ahead)
    assert counts(programs) == expected
    with compilations() as later:
        ahead = kept(started)
    assert counts(later) == {}
    with compilations() as names:
        late = kept(iterations(*options))
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


class Marking(io.StringIO):
    """What is written, and a mark among the names of what is compiled where a line says that it was done ahead."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def write(self, text):
        if "compiled ahead" in text:
            self.names.append("ahead")
        return super().write(text)


def test_a_run_compiles_ahead_and_says_so(tmp_path):
    """A whole run and a resumed one: no program is compiled in an iteration or an evaluation, and one line tells."""
    install()
    config = TrainConfig.of(
        task="letters", model="bigram", steps=3, prompts_per_step=2, group_size=7, max_new_tokens=6, sft_steps=0,
        eval_rows=3, eval_batch_size=3, eval_every=1, save_every=1, keep_checkpoints=3, length_buckets=2,
        pack_tokens=False, drop_zero_variance=False, objective_args=("beta=0.1",), out=str(tmp_path / "ahead"),
        compile_ahead=True,
    )  # fmt: skip

    def go(config, **options):
        names.clear()
        run.train(config, screen=screen, **options)
        return counts(names[names.index("ahead") :]) if "ahead" in names else None

    with compilations() as names:
        written = Marking(names)
        screen = Screen(Console(file=written, width=200), interval=0.0)
        assert go(config) == {}
        text = written.getvalue()
        assert re.findall(r"(\d+) programs compiled ahead in [\d.]+ s", text) == ["7"], "generate, 2 × 3 of an update"
        assert "compiling 7/7" in text
        shutil.rmtree(tmp_path / "ahead" / "checkpoints" / "3")
        before = (tmp_path / "ahead" / "metrics.jsonl").read_bytes()
        # Its evaluation has a shape of its own, that nothing has compiled.
        other = dataclasses.replace(config, eval_batch_size=2)
        assert go(other, resume=True, overrides=("eval_batch_size",)) == {}
        assert "5 programs compiled ahead" in written.getvalue(), "those of its own objective, and the evaluation"
        assert (tmp_path / "ahead" / "metrics.jsonl").read_bytes() == before
        late = dataclasses.replace(config, compile_ahead=False, out=str(tmp_path / "late"))
        assert go(late) is None
        assert counts(names)["step"] >= 1
    assert (tmp_path / "late" / "metrics.jsonl").read_bytes() == before
