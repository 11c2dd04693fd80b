"""Hugging Face folders: models are loaded from them and saved to them.

What config.json says is for `hf_config`, where tensors lie for `hf_tensors`; `families` has the
names. Left out on purpose: `.bin` files, and a sharded writer.
"""

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpo_jax.models.decoder import DecoderConfig, decoder
from grpo_jax.models.hf_config import config_from_hf, config_to_hf
from grpo_jax.models.hf_tensors import check_params, hf_tensors, read_params
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
TEMPLATES = "additional_chat_templates"
SPECIAL_IDS = "bos_token_id", "eos_token_id", "pad_token_id"


def load_pretrained(
    path_or_id: str | Path, *, precision: Precision = Precision(), remat: str = "layer"
) -> tuple[LanguageModel, Params]:
    """The decoder and the parameters of a Hugging Face folder, or of a Hub id (`owner/name`).

    The folder holds config.json and model.safetensors, or the shards that
    model.safetensors.index.json lists; weights are converted to `precision.params`; `remat` is that
    of `decoder`. Raises FileNotFoundError for what is missing on disk, ValueError for a model
    that the decoder does not compute exactly and for tensors that do not match it, naming the file
    and the field or the tensor.
    """
    folder = find_folder(path_or_id, (CONFIG, "model*.safetensors", INDEX))
    config = read_config(_existing(folder, CONFIG), precision.check())
    model = decoder(config, remat=remat)
    with ExitStack() as stack:
        tensors = _open_tensors(folder, stack)
        try:
            params = read_params(config, tensors)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
    return model, params


def save_pretrained(
    folder: str | Path,
    model: LanguageModel | DecoderConfig,
    params: Params,
    tokenizer_source: str | Path | None = None,
) -> Path:
    """Writes a folder that `load_pretrained` and transformers read; returns its path.

    The model goes back as the architecture that it was loaded as (`DecoderConfig.model_type`).
    `tokenizer_source` is a folder or a Hub id whose tokenizer files, chat template, generation
    settings and special ids go along; where its config.json describes the same model, that goes
    along too, and only its dtype is changed. The folder appears whole or not at all: it is written
    beside its place and renamed. A folder that already holds something raises FileExistsError.
    Weights keep the dtype of `params`.
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
    check_params(config, params)
    settings: dict[str, Any] = config_to_hf(config, str(params["embed"].dtype))
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)  # what a killed save left behind
    partial.mkdir(parents=True)
    special_ids = dict.fromkeys(SPECIAL_IDS)  # stated, or transformers would fill in ids of its own
    settings |= special_ids
    if tokenizer_source is not None:
        source = find_folder(tokenizer_source, (CONFIG, *TOKENIZER, f"{TEMPLATES}/*"))
        _copy_tokenizer(source, partial)
        settings = _with_source(source, config, settings)
    (partial / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    tensors = hf_tensors(settings["model_type"], params)
    save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    # safetensors makes it private to the user
    (partial / WEIGHTS).chmod((partial / CONFIG).stat().st_mode)
    partial.rename(folder)
    return folder


def _with_source(source: Path, config: DecoderConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a saved model beside the source of its tokenizer: the source's own, where
    it describes the same model, else `settings` with the source's special ids.
    """
    if not (source / CONFIG).is_file():
        return settings
    theirs = read_json(source / CONFIG)
    if not isinstance(theirs, dict):
        raise ValueError(f"{source / CONFIG}: expected an object of settings")
    precision = Precision(params=config.stored_dtype, compute=config.dtype)
    try:
        same = config_from_hf(theirs, precision) == config
    except ValueError:
        same = False  # of another model, or of none
    if not same:
        return settings | {name: theirs[name] for name in SPECIAL_IDS if name in theirs}
    dtype = settings["torch_dtype"]
    stated = [name for name in ("dtype", "torch_dtype") if name in theirs] or ["torch_dtype"]
    return theirs | dict.fromkeys(stated, dtype)


def read_json(path: Path) -> Any:
    """A parsed JSON file; ValueError names it where it is none."""
    try:
        # A byte order mark, which some editors write, is not part of JSON and says nothing.
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not whole JSON: {error}") from error


def read_config(path: Path, precision: Precision = Precision()) -> DecoderConfig:
    """The decoder's configuration from a config.json; ValueError names file and field."""
    settings = read_json(path)
    try:
        return config_from_hf(settings, precision)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


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


def _existing(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise FileNotFoundError(
            f"{folder} has no {name}; it holds {sorted(p.name for p in folder.iterdir())}"
        )
    return folder / name


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Each tensor's name and the open file that holds it. Files are mapped, not read."""
    indexed = (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file()
    files = _shards(folder / INDEX) if indexed else [WEIGHTS]
    tensors = {}
    for file in files:
        try:
            handle = stack.enter_context(safe_open(_existing(folder, file), framework="numpy"))
        except SafetensorError as error:
            raise ValueError(f"{folder / file} is not a whole safetensors file: {error}") from error
        tensors |= dict.fromkeys(handle.keys(), handle)
    return tensors


def _shards(index: Path) -> list[str]:
    """The files that an index names. They lie beside it: a path to elsewhere is refused."""
    settings = read_json(index)
    files = settings.get("weight_map") if isinstance(settings, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{index}: weight_map must be an object of tensors and their files")
    for tensor, file in files.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file):
            raise ValueError(
                f"{index}: weight_map must name .safetensors files of the same folder, got "
                f"{file!r} for {tensor}"
            )
    return sorted(set(files.values()))


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the tokenizer's files."""
    found = [name for name in TOKENIZER if (source / name).is_file()]
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(found):
        raise FileNotFoundError(
            f"{source} holds no tokenizer: expected tokenizer.json, tokenizer.model or vocab.json"
        )
    for name in found:
        shutil.copyfile(source / name, target / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES)
