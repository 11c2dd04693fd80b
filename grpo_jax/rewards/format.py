r"""Rewards for the form of a completion: tags in their order, a box, `####`, script, repeats.

Each is 0 or 1, or a share, and says nothing of whether an answer is right.
"""

import re
import unicodedata
from collections.abc import Sequence

from grpo_jax.rewards.extraction import after_hashes, after_thinking, last_box


def tag_format(completion: str, *, tags: Sequence[str] = ("think", "answer")) -> float:
    """1 if a completion is `<think>…</think><answer>…</answer>` and no more, with each of `tags`
    once, in this order, and something within each (DeepSeek-R1, arXiv 2501.12948, §2.2.2).
    """
    if not tags or not all(re.fullmatch(r"[A-Za-z][\w-]*", tag) for tag in tags):
        raise ValueError(f"tags must be names, at least one, got {tags!r}")
    whole = r"\s*".join(rf"<{tag}>(?P<{_group(tag)}>.*?)</{tag}>" for tag in tags)
    found = re.fullmatch(rf"\s*{whole}\s*", completion, re.DOTALL)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    once = all(completion.count(mark) == 1 for mark in marks)
    return float(bool(found) and once and all(found[_group(tag)].strip() for tag in tags))


def _group(tag: str) -> str:
    return "tag_" + tag.replace("-", "_")


def boxed_format(completion: str) -> float:
    r"""1 if the last `\\boxed{…}` after the thinking is closed and holds something, else 0."""
    said = after_thinking(completion)
    return float(bool(said is not None and last_box(said)))


def hash_format(completion: str) -> float:
    """1 if a completion ends in the one line `#### answer` that it has, as GSM8K's do, else 0."""
    lines = completion.strip().splitlines()
    last = lines[-1] if lines else ""
    right = last.startswith("####") and completion.count("####") == 1 and after_hashes(last)
    return float(bool(right))


def repetition(completion_ids: Sequence[int], *, n: int = 3) -> float:
    """Minus the share of n-grams of tokens that have been there before: `unique/all − 1`, within
    (−1, 0]; 0 for completions of fewer than `n` tokens (as arXiv 2502.03373, §4.3, uses it).
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    ids = [int(token) for token in completion_ids]
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def language(completion: str, *, scripts: Sequence[str] = ("LATIN",)) -> float | None:
    """The share of a completion's letters that are of `scripts`, as Unicode names them (`LATIN`,
    `CYRILLIC`, `CJK`, `HIRAGANA`, …); `None` if it has no letters (the language reward of
    DeepSeek-R1, arXiv 2501.12948, §2.3.2, by script and not by word).
    """
    unknown = [script for script in scripts if script not in SCRIPTS]
    if unknown or not scripts or isinstance(scripts, str):
        raise ValueError(f"scripts must be some of {', '.join(SCRIPTS)}; got {scripts!r}")
    letters = [mark for mark in completion if mark.isalpha()]
    if not letters:
        return None
    return sum(_script(mark) in scripts for mark in letters) / len(letters)


SCRIPTS = (
    "LATIN", "CYRILLIC", "GREEK", "CJK", "HIRAGANA", "KATAKANA", "HANGUL", "ARABIC", "HEBREW",
    "DEVANAGARI", "BENGALI", "TAMIL", "TELUGU", "THAI", "GEORGIAN", "ARMENIAN", "ETHIOPIC", "KHMER",
)  # fmt: skip


def _script(letter: str) -> str:
    words = unicodedata.name(unicodedata.normalize("NFKC", letter)[0], "").split()
    return next((word for word in words if word in SCRIPTS), "")
