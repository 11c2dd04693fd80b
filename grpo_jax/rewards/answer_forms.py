r"""Answers as exact values: numbers as fractions, lists, sets, tuples, intervals, units, words.

What a form of this kind cannot hold stays an expression, which `mathematics` compares. No float is
ever made, and nothing is evaluated as a program.
"""

import re
from fractions import Fraction
from typing import NamedTuple

LONGEST = 2000  # characters of an answer
LARGEST_POWER = 1000
DEEPEST = 20  # brackets within brackets


class Number(NamedTuple):
    """A rational number, with its unit where it has one."""

    value: Fraction
    unit: str = ""


class Several(NamedTuple):
    """Items between brackets; `kind` is the pair of them, `set` or `list`, where order is none."""

    kind: str
    items: tuple


class Relation(NamedTuple):
    """Two sides and what stands between them, of `=`, `<`, `<=`."""

    sign: str
    left: str
    right: str


class Words(NamedTuple):
    """Plain text."""

    text: str


class Expression(NamedTuple):
    """What only a computer algebra system can read, with the unit that follows it."""

    latex: str
    unit: str = ""


Form = Number | Several | Relation | Words | Expression

_REPLACED = {
    "\u2212": "-",
    "\u2013": "-",
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u222a": r"\cup ",
    "\u00b0": "",
    "\u00a0": " ",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\leq": "\\le",
    "\\geq": "\\ge",
    "\\varnothing": "\\emptyset",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "{,}": ",",
    "\\%": "%",
    "\\$": "",
    "$": "",
    "\\!": "",
    "\\,": " ",
    "\\;": " ",
    "\\:": " ",
    "~": " ",
}
_TEXT = r"\\(?:text|mathrm|mbox|textbf|mathbf|textit|operatorname|rm)\s*\{([^{}]*)\}"
_DIGITS = r"(?:[0-9]{1,3}(?:[, ][0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_DECIMAL = re.compile(rf"({_DIGITS})(?:[eE]([-+]?[0-9]{{1,4}}))?")
_ARGUMENT = r"(?:\{\s*([-+]?[0-9. ,]+?)\s*\}|([0-9]))"
_FRACTION = re.compile(rf"\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}")
_POWER = re.compile(r"([0-9.]+)\s*\^\s*(?:\{\s*([-+]?[0-9]+)\s*\}|([0-9]))")
_WORD_UNIT = re.compile(r"^(?P<number>.*[0-9}!])\s*(?P<unit>[A-Za-z]{2,}[A-Za-z ]*)$", re.DOTALL)
_LETTER_UNIT = re.compile(r"^(?P<number>.*[0-9}])\s+(?P<unit>[A-Za-z])$", re.DOTALL)
_TEXT_UNIT = re.compile(
    rf"^(?P<number>.*[0-9}})!a-z])\s*{_TEXT}(?P<power>\s*\^\s*\{{?[0-9]\}}?)?$", re.DOTALL
)
_NAME = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?|\\[a-z]+(?:_\{?\w+\}?)?")
_SIGNS = re.compile(r"\\neq?(?![a-z])|\\le(?![a-z])|\\ge(?![a-z])|<=|>=|<|>|=")
_MATRIX = re.compile(r"\s*\\begin\{([pbB]?matrix)\}(.*?)\\end\{\1\}\s*", re.DOTALL)


def normal(text: str) -> str:
    """The same answer with one way of writing signs, spaces and fractions."""
    for written, meant in _REPLACED.items():
        text = text.replace(written, meant)
    text = re.sub(r"(?<!\\)\\ ", " ", text)
    text = re.sub(r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle)(?![a-z])\s*", "", text)
    text = re.sub(r"\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})|\\degrees?(?![a-z])", "", text)
    text = re.sub(r"\s+", " ", text).strip()
    while text[-1:] in (".", ",", ";") or text[-2:] == "\\\\":
        text = text.rstrip(".,;\\ ")
    while _encloses(text, "{", "}"):
        text = text[1:-1].strip()
    return text


def read(text: str, letter_units: bool = False) -> Form | None:
    """The form of an answer; None if it is none, as where a bracket is not closed.

    `letter_units`: whether a letter after a number and a space is a unit, not a variable.
    """
    if len(text) > LONGEST:
        return None
    text = normal(text)
    whole = re.fullmatch(_TEXT, text)
    if whole:
        text = normal(whole[1])
    if not text or not _balanced(text):
        return None
    return _several(text) or _relation(text) or _single(text, letter_units)


def number(text: str) -> Fraction | None:
    """The rational number that a normal text consists of, in any of the usual ways to write it."""
    text = text.strip()
    sign = 1
    while text[:1] in ("-", "+") and text[1:2] not in ("-", "+"):
        sign = -sign if text[0] == "-" else sign
        text = text[1:].strip()
    percent = text.endswith("%")
    text = text.removesuffix("%").rstrip()
    for kind in (_decimal, _fraction, _power, _mixed, _quotient, _scientific):
        value = kind(text)
        if value is not None:
            return sign * value / (100 if percent else 1)
    return None


def split(text: str, separators: str) -> list[str]:
    """The parts of a text between separators (a pattern) that stand in no bracket."""
    parts = [""]
    i = 0
    depth = 0
    pattern = re.compile(separators)
    while i < len(text):
        found = pattern.match(text, i) if depth == 0 else None
        if found and found.end() > i:
            parts.append("")
            i = found.end()
            continue
        depth += (text[i] in "([{") - (text[i] in ")]}")
        parts[-1] += text[i]
        i += 1
    return [part.strip() for part in parts]


def exact(latex: str) -> str:
    """The expression with its decimals as fractions, so that none becomes a float."""

    def fraction(found: re.Match) -> str:
        value = Fraction(found[0].replace(",", ""))
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"

    return re.sub(r"[0-9]+\.[0-9]+|(?<![0-9])\.[0-9]+", fraction, latex)


def _decimal(text: str) -> Fraction | None:
    found = _DECIMAL.fullmatch(text)
    if not found or abs(int(found[2] or 0)) > LARGEST_POWER:
        return None
    digits = re.sub("[, ]", "", found[1]).rstrip(".")
    return Fraction(digits + (f"e{found[2]}" if found[2] else ""))


def _fraction(text: str) -> Fraction | None:
    found = _FRACTION.fullmatch(text)
    if not found:
        return None
    over = number(found[1] or found[2])
    under = number(found[3] or found[4])
    return over / under if over is not None and under else None


def _power(text: str) -> Fraction | None:
    found = _POWER.fullmatch(text)
    base = _decimal(found[1]) if found else None
    if found is None or base is None:
        return None
    power = int(found[2] or found[3])
    fits = abs(power) <= LARGEST_POWER and len(found[1]) <= 50
    return base**power if fits and (base or power > 0) else None


def _mixed(text: str) -> Fraction | None:
    found = re.fullmatch(r"([0-9]+)\s*(\\frac.+)|([0-9]+) ([0-9]+/[0-9]+)", text)
    if not found:
        return None
    part = _fraction(found[2]) if found[2] else _quotient(found[4])
    return None if part is None or not 0 <= part < 1 else int(found[1] or found[3]) + part


def _quotient(text: str) -> Fraction | None:
    over, slash, under = text.partition("/")
    if not slash:
        return None
    bare = [re.sub(r"^\{(.*)\}$|^\((.*)\)$", r"\1\2", part.strip()) for part in (over, under)]
    values = [_signed(part) for part in bare]
    return values[0] / values[1] if values[0] is not None and values[1] else None


def _signed(text: str) -> Fraction | None:
    value = _decimal(text.lstrip("-+"))
    return -value if value is not None and text.startswith("-") else value


def _scientific(text: str) -> Fraction | None:
    parts = re.split(r"\\times|\\cdot|\*|(?<=[0-9])\s*x\s*(?=10\^)", text)
    if len(parts) != 2:
        return None
    mantissa, power = _decimal(parts[0].strip()), _power(parts[1].strip())
    return None if mantissa is None or power is None else mantissa * power


def _several(text: str) -> Form | None:
    """A set, a tuple, an interval, a union, a matrix or a list of answers."""
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [row.split("&") for row in matrix[2].strip().removesuffix("\\\\").split("\\\\")]
        return Several("matrix", tuple(_items("row", row) for row in rows))
    if text == "\\emptyset" or text.replace(" ", "") == "\\{\\}":
        return Several("set", ())
    for separators, kind in ((r"\\cup(?![a-z])", "union"), (r"\\cap(?![a-z])", "cut")):
        if len(split(text, separators)) > 1:
            return _items(kind, split(text, separators))
    if text.startswith("\\{") and text.endswith("\\}") and _encloses(text[1:-2] + "}", "{", "}"):
        return _items("set", split(text[2:-2], ","))
    if text[0] in "([" and text[-1] in ")]" and _encloses(text, text[0], text[-1]):
        inner = split(text[1:-1], ",")
        return _items(text[0] + text[-1], inner) if len(inner) > 1 else None
    if number(text) is not None:
        return None
    listed = split(text, r",\s*(?:and|or)\b|,|;|\s*\\text\s*\{\s*(?:and|or)\s*\}|\s(?:and|or)\s")
    if len(listed) > 1:
        return _items("list", listed)
    if text.count("\\pm") == 1:
        return _items("list", [text.replace("\\pm", "+"), text.replace("\\pm", "-")])
    return None


def _items(kind: str, parts: list[str]) -> Form | None:
    items = [read(part) for part in parts]
    return None if None in items else Several(kind, tuple(items))


def _relation(text: str) -> Form | None:
    found = list(_SIGNS.finditer(text))
    if len(found) != 1:
        return None
    left, right = text[: found[0].start()].strip(), text[found[0].end() :].strip()
    sign = {"\\le": "<=", "\\ge": ">=", "\\ne": "!=", "\\neq": "!="}.get(found[0][0], found[0][0])
    if sign in (">", ">="):
        left, right, sign = right, left, sign.replace(">", "<")
    return Relation(sign, left, right) if left and right else None


def is_name(text: str) -> bool:
    """Whether the left side of an equation only names what stands on its right."""
    return bool(_NAME.fullmatch(text)) and text not in ("\\pi", "e", "i")


def _single(text: str, letter_units: bool) -> Form | None:
    value = number(text)
    if value is not None:
        return Number(value)
    letters = re.sub(_TEXT, r"\1", text)
    choice = re.fullmatch(r"\(?([A-Z])\)?", letters)
    if choice:
        return Words(choice[1])
    if re.fullmatch(r"[^\W\d_]{3,}(?:[ '-][^\W\d_]+)*", letters):
        return Words(letters.casefold())
    for pattern in (_TEXT_UNIT, _WORD_UNIT, *([_LETTER_UNIT] if letter_units else [])):
        found = pattern.fullmatch(text)
        if found:
            return _with_unit(found, pattern)
    if re.search(r"[^\W\d_]{4,}", re.sub(r"\\[A-Za-z]+", " ", letters)):
        return Words(letters.casefold())
    return Expression(text)


def _with_unit(found: re.Match, pattern: re.Pattern) -> Form | None:
    if pattern is _TEXT_UNIT:
        power = re.sub(r"[\s{}]", "", found["power"] or "")
        unit = found[2].strip() + power
    else:
        unit = found["unit"].strip()
    singular = unit[:-1] if len(unit) > 3 and unit.endswith("s") else unit
    value = number(found["number"])
    if value is not None:
        return Number(value, singular)
    return Expression(found["number"].strip(), singular)


def _balanced(text: str) -> bool:
    """Whether every bracket is closed, be it by one of another kind, as in half-open intervals."""
    depth = 0
    for mark in text:
        depth += (mark in "([{") - (mark in ")]}")
        if not 0 <= depth <= DEEPEST:
            return False
    return depth == 0 and text.count("{") == text.count("}")


def _encloses(text: str, opening: str, closing: str) -> bool:
    """Whether the first bracket of a text is closed by its last."""
    if len(text) < 2 or text[0] != opening or text[-1] != closing:
        return False
    depth = 0
    for i, mark in enumerate(text):
        depth += (mark in "([{") - (mark in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False
