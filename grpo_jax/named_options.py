"""Options by the names of their flags, and as JSON: what makes a configuration of tuples flat.

`--top-k` is `config.generation.sampling.top_k`; NAME=VALUE is a keyword argument of a function.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from grpo_jax.options import OptionError, did_you_mean


@cache
def option_paths(cls: type) -> dict[str, tuple[str, ...]]:
    """Where each option is, such as `{"top_k": ("generation", "sampling", "top_k"), …}`."""
    found: dict[str, tuple[str, ...]] = {}
    for name, kind in get_type_hints(cls).items():
        if hasattr(kind, "_fields"):  # a tuple of options
            found |= {own: (name, *path) for own, path in option_paths(kind).items()}
        else:
            found[name] = (name,)
    return found


def with_options(cls: type, options: Mapping[str, Any]) -> Any:
    """An instance of a configuration (or tuple) with some options, by the names of their flags.

    A whole tuple may be given under its own name.
    """
    values: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        if name in options:
            values[name] = options[name]
        elif hasattr(kind, "_fields"):
            values[name] = with_options(kind, options)
    return cls(**values)


def option(config: Any, name: str) -> Any:
    """The value of an option, by the name of its flag."""
    for part in option_paths(type(config))[name]:
        config = getattr(config, part)
    return config


def from_json(cls: type, values: Any, where: str) -> Any:
    """A configuration or tuple from what JSON has of it; `where` names it in an error."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be an object with named fields, got {values!r}")
    kinds = get_type_hints(cls)
    if unknown := sorted(set(values) - set(kinds)):
        raise ValueError(
            f"{where} holds options that this version does not know: {', '.join(unknown)}"
        )
    made = {}
    for name, value in values.items():
        if hasattr(kinds[name], "_fields"):
            made[name] = from_json(kinds[name], value, f"{where}: {name}")
            continue
        if name == "clip_norm" and value is None:
            value = math.inf  # which JSON does not have
        if not is_a(value, kinds[name]):
            kind = getattr(kinds[name], "__name__", kinds[name])
            raise ValueError(f"{where}: {name} must be of type {kind}, got {value!r}")
        made[name] = tuple(value) if isinstance(value, list) else value
    return cls(**made)


def missing_options(cls: type, values: Mapping[str, Any], within: str = "") -> list[str]:
    """The options that JSON of a configuration does not say, such as `optimizer.clip_norm`."""
    missing = []
    for name, kind in get_type_hints(cls).items():
        if name not in values:
            missing.append(within + name)
        elif hasattr(kind, "_fields"):
            missing += missing_options(kind, values[name], f"{within}{name}.")
    return missing


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value that JSON holds is of an annotated type."""
    if isinstance(kind, UnionType):
        return any(is_a(value, one) for one in get_args(kind))
    if get_origin(kind) is not None:  # tuple[str, ...] or Sequence[float]
        return isinstance(value, list) and all(is_a(one, get_args(kind)[0]) for one in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")


def choose(name: str, value: str, known: Mapping | tuple) -> None:
    """Raises an `OptionError` with the nearest known name, and all of them."""
    if value not in known:
        hint = did_you_mean(str(value), known) or "."
        raise OptionError(name, f"{value!r} is not known{hint} Known: {', '.join(known)}")


def keyword_arguments(function: Callable, pairs: tuple[str, ...], option: str) -> dict[str, Any]:
    """`("beta=0.02", …)` as keyword arguments of `function`; values are JSON where they parse.

    Raises an `OptionError` for a name that the function does not take, and for text where its
    default is a number.
    """
    known = inspect.signature(function).parameters
    values: dict[str, Any] = {}
    for pair in pairs:
        name, value = named_value(option, pair)
        if name not in known:
            hint = did_you_mean(name, known) or "."
            takes = f"It takes: {', '.join(known)}"
            raise OptionError(option, f"{function.__name__} takes no {name!r}{hint} {takes}")
        if isinstance(value, str) and isinstance(known[name].default, int | float):
            example = f"as {known[name].default}, got {value!r}"
            raise OptionError(option, f"{name} takes a number, {example}")
        values[name] = value
    return values


def named_value(option: str, pair: str) -> tuple[str, Any]:
    """`"beta=0.02"` as a name and a value."""
    name, equals, text = pair.partition("=")
    if not (name and equals):
        raise OptionError(option, f"takes NAME=VALUE, got {pair!r}")
    return name, json_value(text)


def written(value: Any) -> str:
    """The text that `json_value` reads as this value: a string as it is, where that is so."""
    plain = isinstance(value, str) and json_value(value) == value
    return value if plain else json.dumps(value)


def json_value(text: str) -> Any:
    """A value as JSON or Python writes it, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)
