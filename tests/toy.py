"""A toy task in which every completion earns something, toy models, and the command line on them.

`python tests/toy.py train --task letters …` is `grpo-jax train …` with this task and a bigram model. With the
environment variable DIE_AT set to a number, the process kills itself in the middle of writing that checkpoint.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from grpo_jax.models import LanguageModel
from grpo_jax.tasks import Task

if "torch" not in sys.modules:  # TensorBoard's writer would import it, for seconds and for nothing
    sys.modules["torch"] = None
    import tensorboardX  # noqa: F401

    del sys.modules["torch"]

V, STOP = 259, 257  # the byte tokenizer's


def ascii_share(completion: str) -> float | None:
    """The share of characters that are ASCII; None for an empty completion. Random bytes give all kinds of values."""
    return sum(c < "\x80" for c in completion) / len(completion) if completion else None


def letters(*, train_size: int = 10, held_out_size: int = 7) -> Task:
    """Questions `a0`, `b1`, …; the reward is `ascii_share`."""
    rows = [{"question": f"{'abcdefgh'[i % 8]}{i}", "answer": "abc"[i % 3]} for i in range(train_size + held_out_size)]
    return Task(
        "letters",
        rows[held_out_size:],
        rows[:held_out_size],
        lambda row: [{"role": "user", "content": row["question"]}],
        ascii_share,
        lambda row: row["answer"] * 3,
    )


class BigramConfig(NamedTuple):
    vocab_size: int = V
    hidden_size: int = 8
    max_position_embeddings: int = 40
    dtype: str = "float32"


@cache
def bigram(stop_share: float = 0.3, dtype: str = "float32", vocab: int = V) -> LanguageModel:
    """Logits of the last token and the prompt's mean: a language model that compiles in no time.

    `stop_share` is roughly the chance of the stop token at the start, so that completions differ in length.
    """

    config = BigramConfig(vocab, dtype=dtype)

    def init(key):
        width = config.hidden_size
        embed, out = jax.random.split(key)
        bias = jnp.zeros(vocab).at[STOP].set(jnp.log(stop_share / (1 - stop_share) * V))
        embed, out = jax.random.normal(embed, (vocab, width)), 0.5 * jax.random.normal(out, (width, vocab))
        return jax.tree.map(lambda x: x.astype(dtype), {"embed": embed, "out": out, "bias": bias})

    def hidden(params, tokens, context_D):
        return jnp.tanh(params["embed"][tokens] + context_D)

    def prefill(params, tokens_S, mask_S):
        context_D = (params["embed"][tokens_S] * mask_S[:, None]).sum(0) / mask_S.sum()
        return hidden(params, tokens_S, context_D), context_D

    logits = lambda params, hidden_D: (hidden_D @ params["out"] + params["bias"]).astype(jnp.float32)
    return LanguageModel(
        config=config,
        init=init,
        prefill=prefill,
        extend=lambda params, context_D, tokens_T: hidden(params, tokens_T, context_D),
        logits=logits,
        for_decoding=lambda params: params,
        empty=lambda max_tokens: jnp.zeros(()),
        decode=lambda params, context_D, own, index, token: (hidden(params, token, context_D), own),
        decode_logits=logits,
    )


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the functions that are compiled inside the block, as they come."""
    names: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record):
            if found := re.match(r"Compiling (?:jit\()?(\w+)", record.getMessage()):
                names.append(found[1].lstrip("_"))

    logger, handler = logging.getLogger("jax._src.interpreters.pxla"), Collect()
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield names
    finally:
        logger.removeHandler(handler)


def unscorable() -> Task:
    """The same questions, and no answer that can be scored."""
    return letters()._replace(name="unscorable", reward=lambda completion: None)


def install() -> None:
    """Makes the command line know these tasks, and the model."""
    from grpo_jax.components import MODELS
    from grpo_jax.tasks import TASKS

    TASKS.update(letters=letters, unscorable=unscorable)
    MODELS["bigram"] = lambda config, tokenizer: bigram(0.01, config.param_dtype)


# fmt: off
OPTIONS = [
    "--task", "letters", "--model", "bigram", "--steps", "7", "--prompts-per-step", "3", "--group-size", "4",
    "--max-new-tokens", "8", "--sft-steps", "3", "--learning-rate", "0.05", "--lr-warmup", "2", "--schedule", "linear",
    "--seed", "4", "--objective-args", "beta=0.1", "--eval-rows", "5", "--eval-batch-size", "3", "--eval-every", "3",
    "--save-every", "2", "--keep-checkpoints", "1", "--log-completions", "3", "--length-buckets", "2",
    "--no-pack-tokens", "--no-drop-zero-variance", "--compactions", "0",
]
# fmt: on


def launch(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    """The command line in a process of its own; processes of one `folder` share compiled programs."""
    shared = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
    }
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], env=os.environ | shared | environment, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finished_run(factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never interrupted; its parent is for `launch`.

    It is made once for all tests, by the first worker that asks; to be read only.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "runs"
    try:
        folder.mkdir()
    except FileExistsError:
        waiting = time.monotonic()
        while not (folder / "output").exists():
            assert time.monotonic() - waiting < 600, "the worker that makes the run has not finished it"
            time.sleep(0.1)
    else:
        output, _ = launch(folder, "train", *OPTIONS, "--out", "whole").communicate()
        (folder / "output").write_text(output)
    assert (folder / "whole" / "summary.json").exists(), (folder / "output").read_text()
    return folder / "whole"


def die_at(number: str) -> None:
    """Orbax writes a checkpoint into a temporary folder and renames it: the last moment before it counts."""

    def watch(event, args):
        if event == "os.rename" and os.path.basename(str(args[1])) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main() -> None:
    from grpo_jax import cli

    install()
    if "DIE_AT" in os.environ:
        die_at(os.environ["DIE_AT"])
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
