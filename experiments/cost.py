"""What an update costs as the work grows: FLOPs and temporaries of the compiled program against a
formula.

`python -m experiments.cost` compiles, and does not run, the loss and its gradient of one prompt
with its group while G, S, T, V and L grow one at a time, and prints a table in Markdown. FLOPs are
XLA's own count of the unrolled form, temporaries those of the form that runs (layers scanned and
rematerialised). The formula, p parameters a layer:

    FLOPs = 6 p L (S + G·T) + 12 L H d (S (S + b)/2 + G·T (S + (T + c)/2)) + 6 D V G·T

products with weights, forward and backward; scores and values, in blocks of b = min(S, 256) and c =
min(T, 256); the vocabulary. As it runs, a quarter to a third of this is computed twice to save
memory. A trainer that repeats the prompt for each completion pays G (S + T) where this pays S +
G·T.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.progress import track

from grpo_jax.inference.logprobs import completion_logp
from grpo_jax.models import DecoderConfig, LanguageModel, decoder
from grpo_jax.types import Prompts

BASE = {"G": 8, "S": 256, "T": 64, "V": 4096, "L": 2}
GROWN = {
    "G": (4, 8, 16, 32, 64),
    "S": (64, 256, 1024, 4096),
    "T": (64, 256, 1024, 4096),
    "V": (4096, 16384, 65536),
    "L": (2, 4, 8),
}
CHUNK = 256
BLOCK = 256  # of causal attention


class Cost(NamedTuple):
    """Of loss and gradient: counted FLOPs, those of the formula, those with a repeated prompt,
    temporaries in bytes.
    """

    flops: float
    formula: float
    repeated: float
    temporaries: int


def shape(V: int, L: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=V,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=L,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )


def formula(G: int, S: int, T: int, V: int, L: int, prompts: int = 1) -> float:
    """FLOPs of loss and gradient, see the top of this file; `prompts` is how often the prompt is
    computed.
    """
    c = shape(V, L)
    D = c.hidden_size
    F = c.intermediate_size
    heads = c.num_attention_heads * c.head_dim
    layer = D * heads * 2 + 2 * D * c.num_key_value_heads * c.head_dim + 3 * D * F
    tokens = prompts * S + G * T
    attention = prompts * S * (S + min(S, BLOCK)) / 2 + G * T * (S + (T + min(T, BLOCK)) / 2)
    return 6 * layer * L * tokens + 12 * L * heads * attention + 6 * D * V * G * T


def _compiled(model: LanguageModel, chunk: int, G: int, S: int, T: int):
    """Loss and gradient of one prompt and its group."""
    prompts = Prompts(
        jax.ShapeDtypeStruct((1, S), jnp.int32), jax.ShapeDtypeStruct((1, S), jnp.bool_)
    )
    tokens = jax.ShapeDtypeStruct((1, G, T), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, G, T), jnp.bool_)
    loss = lambda params, *x: completion_logp(model, params, *x, logit_chunk=chunk).mean()
    params = jax.eval_shape(model.init, jax.random.key(0))
    return jax.jit(jax.value_and_grad(loss)).lower(params, prompts, tokens, mask).compile()


def flops(G: int, S: int, T: int, V: int, L: int) -> float:
    """XLA's count, of unrolled layers and one chunk: the body of a loop would be counted once."""
    model = decoder(shape(V, L), remat="none", scan=False)
    return _compiled(model, G * T, G, S, T).cost_analysis()["flops"]


def cost(G: int, S: int, T: int, V: int, L: int) -> Cost:
    """Compiles loss and gradient of one prompt and its group, twice: to count, and as it runs."""
    return Cost(
        flops(G, S, T, V, L),
        formula(G, S, T, V, L),
        formula(G, S, T, V, L, prompts=G),
        _compiled(decoder(shape(V, L)), CHUNK, G, S, T).memory_analysis().temp_size_in_bytes,
    )


def cases() -> Iterator[tuple[str, dict[str, int]]]:
    for name, values in GROWN.items():
        for value in values:
            yield name, BASE | {name: value}


def table(rows: list[tuple[str, dict[str, int], Cost]]) -> str:
    lines = [
        "| grown | G | S | T | V | L | GFLOP | formula | prompt repeated | temporaries, MB |",
        "|---" * 10 + "|",
    ]
    for name, sizes, found in rows:
        numbers = " | ".join(f"**{v}**" if k == name else str(v) for k, v in sizes.items())
        lines.append(
            f"| {name} | {numbers} | {found.flops / 1e9:.2f} | {found.formula / 1e9:.2f} | "
            f"{found.repeated / 1e9:.2f} | {found.temporaries / 1e6:.1f} |"
        )
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Options:
    """Count FLOPs and temporaries of an update as G, S, T, V and L grow."""

    out: Path | None = None
    """Also write the figures to this file, as JSON."""


def main(options: Options) -> None:
    rows = [(name, sizes, cost(**sizes)) for name, sizes in track(list(cases()), "compiling")]
    if options.out:
        figures = [{"grown": name} | sizes | found._asdict() for name, sizes, found in rows]
        options.out.write_text(json.dumps(figures, indent=2))
    Console().print(table(rows), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
