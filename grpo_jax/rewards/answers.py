"""Rewards that compare an answer with the right one, exactly.

Numbers are `Decimal`s made from the text itself, so that 18.0 equals 18, 0.1 + 0.2 plays no part,
and the last of eighteen digits counts. Floats never take part in a comparison.
"""

import re
from decimal import Decimal

# A run of digits with its points and commas, not glued to a word (the 3 of "v3" is a name; that of
# "7x3" is not). A minus is a sign only where nothing stands before it to subtract from: "10-3" ends
# in 3.
_RUN = re.compile(
    r"(?:(?<![A-Za-z0-9_.])|(?<=[0-9][xX]))"
    r"(?P<sign>(?<![)\]%])[-\u2212])?(?:\$\s?(?P<inner>[-\u2212])?)?"
    r"(?P<digits>[0-9][0-9.,]*|\.[0-9][0-9.,]*)(?P<exponent>[eE][-+]?[0-9]+)?(?P<percent>\s?\\?%)?"
)
_DIGITS = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")


def last_number(text: str) -> Decimal | None:
    """The last number of a text: `1,000` and `$1,000.00` and `1000.` are 1000; `-5`, `-$5` and `−5`
    (U+2212) are −5.

    A percentage is not a price and is passed over. `None` if there is no number, or if the last one
    is malformed (`1,00`, `1.2.3`): a guess at what was meant could reward a wrong answer.
    """
    runs = [run for run in _RUN.finditer(text) if not run["percent"]]
    return _value(runs[-1]) if runs else None


def parse_number(text: str) -> Decimal | None:
    """The number that a text consists of, written in any of the ways `last_number` knows; `None` if
    it is not one.
    """
    run = _RUN.fullmatch(text.strip())
    return _value(run) if run and not run["percent"] else None


def number_reward(prompt: str, completion: str, answer: str | int | Decimal) -> float | None:
    """1 if the completion's last number equals `answer` exactly, 0 if not, `None` if `answer` is
    not a number.
    """
    gold = parse_number(str(answer))
    if gold is None:
        return None
    return 1.0 if last_number(completion) == gold else 0.0


def exact_reward(completion: str, answer: object) -> float | None:
    """1 if a completion is `answer`, character for character but for space at its ends, 0 if not,
    `None` if there is no answer.
    """
    gold = "" if answer is None else str(answer).strip()
    return float(completion.strip() == gold) if gold else None


def _value(run: re.Match) -> Decimal | None:
    # the point may end a sentence
    digits = run["digits"].rstrip(".,")
    exponent = run["exponent"] or ""
    both_signs = run["sign"] and run["inner"]
    huge = len(exponent) > 4
    if both_signs or huge or not _DIGITS.fullmatch(digits):
        return None
    sign = "-" if run["sign"] or run["inner"] else ""
    return Decimal(
        sign + digits.replace(",", "") + exponent
    )  # one construction: arithmetic rounds to 28 digits
