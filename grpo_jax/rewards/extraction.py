r"""Where the final answer of a completion stands: a box, `####`, "the answer is", or the end.

What is written while thinking is no answer, and what is not closed is none either. Left out on
purpose: choosing among several answers by what the right one is.
"""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_HASHES = re.compile(r"####[ \t]*(?P<rest>[^\n]*)")
_SAID = re.compile(
    r"\banswers?\b(?:[ \t]+(?:is|are)\b)?[ \t]*[:=]?[ \t*]*(?P<rest>[^\n]*)", re.IGNORECASE
)
_VERB = re.compile(r"\banswers?\b[ \t]*(?:(?:is|are)\b|[:=]|\*+[ \t]*:)", re.IGNORECASE)
_REASON = re.compile(r",?\s(?:because|since|so|which|where|when|as)\b.*", re.IGNORECASE)
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)", re.DOTALL
)
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])[-\u2212]?(?:\\?\$\s?)?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?(?:\s?\\?%)?"
)
SHORT = 60  # characters of a completion that may be an answer as a whole


def after_thinking(text: str) -> str | None:
    """What follows the last `</think>`; None if a `<think>` is not closed."""
    before, closed, rest = text.rpartition("</think>")
    said = rest if closed else before + rest
    return None if "<think>" in said else said


def last_box(text: str) -> str | None:
    r"""What the last `\boxed{…}` or `\fbox{…}` holds, of nested ones the innermost.

    None if there is none, or if the last one is not closed.
    """
    found = list(_BOX.finditer(text))
    if not found:
        return None
    held = _boxed(text, found[-1].end())
    return None if held is None else held.strip()


def after_hashes(text: str) -> str | None:
    """The rest of the last line that has `####` in it; None if there is none."""
    found = list(_HASHES.finditer(text))
    return found[-1]["rest"].strip() if found else None


def final_answer(text: str) -> str | None:
    r"""The answer that a completion ends in, as it is written; None if it gives none.

    The last box or `####` after the thinking, else what "the answer is" is followed by, else a
    short completion as a whole, else its last formula or number. A last box that is not closed
    gives none.
    """
    said = after_thinking(text)
    if said is None:
        return None
    boxes = [box.start() for box in _BOX.finditer(said)]
    hashes = [line.start() for line in _HASHES.finditer(said)]
    if boxes and (not hashes or boxes[-1] > hashes[-1]):
        return last_box(said)
    if hashes:
        return _formula(after_hashes(said) or "") or None
    told = list(_SAID.finditer(said))
    told = [one for one in told if _VERB.match(said, one.start())]
    if told:
        return _formula(_sentence(told[-1]["rest"])) or None
    return _end(said.strip()) or None


def _boxed(text: str, start: int) -> str | None:
    """The argument of a command that ends at `start`, as TeX reads it; None if it is not closed."""
    while start < len(text) and text[start].isspace():
        start += 1
    if start == len(text):
        return None
    if text[start] != "{":
        return text[start] if text[start].isalnum() else None
    depth = 0
    for i in range(start, len(text)):
        if i and text[i - 1] == "\\" and text[i] in "{}":
            continue
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 1 : i]
    return None


def _sentence(text: str) -> str:
    """The first sentence of a text, without the reason that it gives."""
    first = re.split(r"[.!?](?:\s|\*|$)", text.strip(), maxsplit=1)[0]
    return _REASON.sub("", first).strip()


def _formula(text: str) -> str:
    """The one formula in a text, or all of it without the marks of Markdown."""
    bare = text.replace("**", "").strip()
    found = [next(filter(None, one.groups())) for one in _FORMULA.finditer(bare)]
    if len(found) == 1 and not re.search(r"\w", _FORMULA.sub("", bare)):
        return found[0].strip()
    return bare.rstrip(".").strip()


def _end(text: str) -> str:
    """The answer of a completion that marks none."""
    if len(text) <= SHORT and "\n" not in text and not re.search(r"[.!?,]\s", text):
        whole = _formula(text)
        if (
            not re.search(r"[A-Za-z]{2,}\s+.*[A-Za-z$]", _FORMULA.sub("$", whole))
            or " or " in whole
        ):
            return whole
    formulas = list(_FORMULA.finditer(text))
    numbers = list(_NUMBER.finditer(_FORMULA.sub(lambda one: " " * len(one[0]), text)))
    if formulas and (not numbers or formulas[-1].start() > numbers[-1].start()):
        return next(filter(None, formulas[-1].groups())).strip()
    return numbers[-1][0] if numbers else ""
