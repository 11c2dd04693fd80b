"""Hugging Face folders: config.json and safetensors, to and from a decoder's parameters.

A folder's tensors are torch's: one a layer, matrices (out, in). Ours are stacked over layers,
matrices (in, out), so reading is a transpose into place and writing the transpose back. Both go
through NumPy; PyTorch is not needed. Left out on purpose: other architectures, quantised weights,
`.bin` files, and a sharded writer.
"""

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import snapshot_download
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpo_jax.models.decoder import DecoderConfig, decoder
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.options import Precision
from grpo_jax.types import Params

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"
TOKENIZER += (
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
SPECIAL_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
MODEL_TYPES = "llama", "qwen2"  # Qwen 2 is Llama with a bias on q, k and v
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"

NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
}
O_BIAS = "model.layers.{}.self_attn.o_proj.bias"


def load_pretrained(
    path_or_id: str | Path, *, precision: Precision = Precision(), remat: str = "layer"
) -> tuple[LanguageModel, Params]:
    """The decoder and the parameters of a Hugging Face folder, or of a Hub id (`owner/name`).

    The folder holds config.json and model.safetensors, or the shards that
    model.safetensors.index.json lists; weights are converted to `precision.params`; `remat` is that
    of `decoder`. Raises FileNotFoundError for what is missing on disk, ValueError for a model
    that the decoder does not compute exactly and for tensors that do not match it, naming the field
    or the tensor.
    """
    folder = find_folder(path_or_id, (CONFIG, "model*.safetensors", INDEX))
    settings = json.loads(_existing(folder, CONFIG).read_text())
    config = config_from_hf(settings, precision.check())
    model = decoder(config, remat=remat)
    with ExitStack() as stack:
        tensors = _open_tensors(folder, stack)
        params = _read_params(model, tensors)
        _refuse_leftovers(config, params, tensors)
    return model, params


def save_pretrained(
    folder: str | Path,
    model: LanguageModel | DecoderConfig,
    params: Params,
    tokenizer_source: str | Path | None = None,
) -> Path:
    """Writes a folder that `load_pretrained` and transformers' LlamaForCausalLM read; returns its
    path.

    `tokenizer_source` is a folder or a Hub id whose tokenizer files, chat template, generation
    settings and special ids go along. The folder appears whole or not at all: it is written beside
    its place and renamed. A folder that already holds something raises FileExistsError. Weights
    keep the dtype of `params`.
    """
    config = model if isinstance(model, DecoderConfig) else model.config
    if not isinstance(config, DecoderConfig):
        raise TypeError(
            "only a decoder has Hugging Face's layout; the parameters of another model can be "
            f"written with Orbax or safetensors, got a model of {type(config).__name__}"
        )
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} exists and is not empty: remove it or choose another folder"
        )
    _check_params(config, params)
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)  # what a killed save left behind
    partial.mkdir(parents=True)
    special_ids = dict.fromkeys(SPECIAL_IDS)  # stated, or transformers would fill in ids of Llama 2
    if tokenizer_source is not None:
        special_ids |= _copy_tokenizer(find_folder(tokenizer_source, (CONFIG, *TOKENIZER)), partial)
    settings = config_to_hf(config, str(params["embed"].dtype)) | special_ids
    (partial / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    save_file(_hf_tensors(config, params), partial / WEIGHTS, metadata={"format": "pt"})
    (partial / WEIGHTS).chmod(
        (partial / CONFIG).stat().st_mode
    )  # safetensors makes it private to the user
    partial.rename(folder)
    return folder


def find_folder(path_or_id: str | Path, patterns: tuple[str, ...]) -> Path:
    """The folder itself, or the Hub snapshot of an id, of which only the files that match
    `patterns` are fetched.
    """
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    wanted = f"a folder with Hugging Face files ({', '.join(patterns)}), or a Hub id (owner/name)"
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path_or_id)):
        raise FileNotFoundError(f"{path_or_id!s} is not a folder: expected {wanted}")
    try:
        return Path(snapshot_download(str(path_or_id), allow_patterns=list(patterns)))
    except OSError as error:  # what huggingface_hub raises, offline and for an unknown id
        raise FileNotFoundError(
            f"{path_or_id!s} is not a folder here, and the Hub did not give it: expected {wanted}. "
            f"The Hub: {error}"
        ) from error


def config_from_hf(settings: dict[str, Any], precision: Precision = Precision()) -> DecoderConfig:
    """The decoder's configuration from a parsed config.json; anything that would change the numbers
    is refused.
    """
    kind = settings.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"model_type {kind!r} is not supported: expected one of {', '.join(MODEL_TYPES)}"
        )
    if missing := [name for name in REQUIRED if name not in settings]:
        raise ValueError(f"{CONFIG} lacks {', '.join(missing)}")
    only = {
        "hidden_act": "silu",
        "mlp_bias": False,
        "use_sliding_window": False,
        "quantization_config": None,
    }
    for name, supported in only.items():
        if settings.get(name, supported) != supported:
            raise ValueError(f"{name} {settings[name]!r} is not supported: expected {supported!r}")
    rope_theta, rope_scaling = _rope_from_hf(settings)
    heads = settings["num_attention_heads"]
    # Absent keys have transformers' defaults, not the decoder's.
    return DecoderConfig(
        **{name: settings[name] for name in REQUIRED},
        num_key_value_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
        rms_norm_eps=settings.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=settings.get("tie_word_embeddings", False),
        attention_bias=kind == "qwen2" or settings.get("attention_bias", False),
        max_position_embeddings=settings.get(
            "max_position_embeddings", {"llama": 2048, "qwen2": 32768}[kind]
        ),
        dtype=precision.computed,
        param_dtype=precision.params,
    )


def _rope_from_hf(settings: dict[str, Any]) -> tuple[float, tuple | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`
    (before).
    """
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or settings.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    rotated = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise ValueError(f"partial_rotary_factor {rotated} is not supported: expected 1.0")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope type {kind!r} is not supported: expected 'default' or 'llama3'")
    if missing := [name for name in LLAMA3 if name not in rope]:
        raise ValueError(f"rope type 'llama3' lacks {', '.join(missing)}")
    return theta, ("llama3", *(rope[name] for name in LLAMA3))


def config_to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The config.json of LlamaForCausalLM, in the form that transformers 4 and 5 both read."""
    fields = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    fields += " num_key_value_heads head_dim rms_norm_eps rope_theta tie_word_embeddings"
    fields += " attention_bias max_position_embeddings"
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in fields.split()},
        "rope_scaling": scaling
        and {"rope_type": scaling[0], **dict(zip(LLAMA3, scaling[1:], strict=True))},
        "hidden_act": "silu",
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


def _existing(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise FileNotFoundError(
            f"{folder} has no {name}; it holds {sorted(p.name for p in folder.iterdir())}"
        )
    return folder / name


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Each tensor's name and the open file that holds it. Files are mapped, not read."""
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        files = [WEIGHTS]
    tensors = {}
    for file in files:
        try:
            handle = stack.enter_context(safe_open(_existing(folder, file), framework="numpy"))
        except SafetensorError as error:
            raise ValueError(f"{folder / file} is not a whole safetensors file: {error}") from error
        tensors |= dict.fromkeys(handle.keys(), handle)
    return tensors


def _take(tensors: dict[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Reads a tensor and removes it from `tensors`, so that what nobody asked for is left at the
    end.
    """
    if name not in tensors:
        raise ValueError(f"tensor {name} is missing")
    stored = tensors[name].get_slice(name)
    if stored.get_dtype() not in ("F32", "F16", "BF16", "F64"):
        raise ValueError(f"tensor {name} is {stored.get_dtype()}: expected unquantised floats")
    if tuple(stored.get_shape()) != shape:
        raise ValueError(f"tensor {name} has shape {tuple(stored.get_shape())}: expected {shape}")
    return tensors.pop(name).get_tensor(name)


def _read_params(model: LanguageModel, tensors: dict[str, Any]) -> Params:
    """One stacked parameter at a time, so that the host holds the model once and a single parameter
    twice.
    """

    def read(path, leaf):
        *group, key = [entry.key for entry in path]
        if not group:
            stored = _take(tensors, NAMES[key], leaf.shape if key != "head" else leaf.shape[::-1])
            return jnp.array(stored.T if key == "head" else stored, leaf.dtype)
        stacked = np.empty(leaf.shape, leaf.dtype)
        for layer, out in enumerate(stacked):
            out[...] = _take(tensors, f"model.layers.{layer}.{LAYER_NAMES[key]}", out.shape[::-1]).T
        return jnp.array(stacked)

    return tree_map_with_path(read, jax.eval_shape(model.init, jax.random.key(0)))


def _refuse_leftovers(config: DecoderConfig, params: Params, tensors: dict[str, Any]) -> None:
    """Tensors that the decoder would ignore are refused, unless ignoring them changes nothing."""
    for name in list(tensors):
        if name.endswith(
            "rotary_emb.inv_freq"
        ):  # old checkpoints store what the configuration says
            del tensors[name]
    if config.tie_word_embeddings and NAMES["head"] in tensors:
        head_VD = _take(tensors, NAMES["head"], params["embed"].shape)
        if not np.array_equal(head_VD.astype(config.stored_dtype), np.asarray(params["embed"])):
            raise ValueError(
                f"tensor {NAMES['head']} differs from {NAMES['embed']}, though tie_word_embeddings "
                "is true"
            )
    if config.attention_bias:
        for layer in range(config.num_hidden_layers):
            name = O_BIAS.format(layer)
            if name in tensors and np.any(_take(tensors, name, (config.hidden_size,))):
                raise ValueError(
                    f"tensor {name} is not zero: a bias on attention's output is not supported"
                )
    if tensors:
        names = sorted(tensors)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(f"tensors that the decoder has no place for: {', '.join(names[:5])}{more}")


def _check_params(config: DecoderConfig, params: Params) -> None:
    """Raises where `params` is not the tree that `decoder(config).init` gives."""
    flat = lambda tree: {
        keystr(path): tuple(leaf.shape) for path, leaf in tree_leaves_with_path(tree)
    }
    expected = flat(jax.eval_shape(decoder(config).init, jax.random.key(0)))
    got = flat(params)
    wrong = [name for name in sorted(expected | got) if expected.get(name) != got.get(name)]
    if wrong:
        lines = [
            f"{name} has shape {got.get(name)}, expected {expected.get(name)}" for name in wrong
        ]
        raise ValueError(f"params do not fit the configuration: {'; '.join(lines)}")


def _copy_tokenizer(source: Path, target: Path) -> dict[str, Any]:
    """Copies the tokenizer's files; returns the special ids that the source's config.json
    states.
    """
    found = [name for name in TOKENIZER if (source / name).is_file()]
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(found):
        raise FileNotFoundError(
            f"{source} holds no tokenizer: expected tokenizer.json, tokenizer.model or vocab.json"
        )
    for name in found:
        shutil.copyfile(source / name, target / name)
    settings = json.loads((source / CONFIG).read_text()) if (source / CONFIG).is_file() else {}
    return {name: settings[name] for name in SPECIAL_IDS if name in settings}


def _hf_tensors(config: DecoderConfig, params: Params) -> dict[str, np.ndarray]:
    """The parameters under torch's names and in its layout."""
    tensors = {name: np.asarray(params[key]) for key, name in NAMES.items() if key in params}
    if "head" in params:
        tensors[NAMES["head"]] = np.ascontiguousarray(tensors[NAMES["head"]].T)
    for key, stacked in params["layers"].items():
        for layer, value in enumerate(np.asarray(stacked)):
            tensors[f"model.layers.{layer}.{LAYER_NAMES[key]}"] = np.ascontiguousarray(value.T)
    if config.attention_bias:  # Llama's flag puts one on the output too
        zero_D = np.zeros((config.hidden_size,), params["embed"].dtype)
        tensors |= {O_BIAS.format(layer): zero_D for layer in range(config.num_hidden_layers)}
    return tensors
