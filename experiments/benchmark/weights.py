"""The folder of weights that every contestant reads, as the last line of the output; made if it is
not there.

python -m experiments.benchmark.weights SHAPE FOLDER
"""

import os
import sys
from pathlib import Path

from experiments.benchmark.workloads import SHAPES

SMOLLM2 = "SmolLM2-135M-Instruct"


def pretrained(shape: str) -> Path | None:
    """The real model that `python -m experiments.smollm2` has left in its cache, if it has."""
    cache = Path(os.environ.get("GRPO_JAX_CACHE") or "~/.cache/grpo_jax").expanduser()
    folder = cache / SMOLLM2
    found = shape == "smollm2" and all(
        (folder / name).is_file() for name in ("config.json", "model.safetensors")
    )
    return folder if found else None


def write_random(shape: str, folder: Path) -> None:
    """Seeded random weights of a shape as a Hugging Face folder."""
    import jax

    from grpo_jax.models import DecoderConfig, decoder, save_pretrained

    config = DecoderConfig(**SHAPES[shape])
    params = jax.jit(decoder(config).init)(jax.random.key(0))
    save_pretrained(folder, config, params)


def main() -> None:
    shape = sys.argv[1]
    folder = Path(sys.argv[2])
    found = pretrained(shape)
    if found is None and not (folder / "model.safetensors").is_file():
        write_random(shape, folder)
    print(found or folder)


if __name__ == "__main__":
    main()
