r"""A reward for mathematical answers: exact, and never in doubt for the answer.

Numbers, sets, tuples, intervals, units and words are compared exactly by themselves (see
`answer_forms`); what is left is read by `math-verify` (the extra `math`) and compared by SymPy, in
a process of its own that is ended when a comparison takes too long. A decimal is the fraction that
it is written as: 0.3333333333 is not 1/3. Left out on purpose: tolerance, and guesses at what was
meant.
"""

import importlib.util
import logging
import time
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

from grpo_jax.rewards.answer_forms import (
    Expression,
    Form,
    Number,
    Relation,
    Several,
    Words,
    exact,
    is_name,
    normal,
    read,
)
from grpo_jax.rewards.extraction import after_hashes, final_answer, last_box
from grpo_jax.rewards.pool import Pool, value_of

DIGITS = 60  # that two constants must share if SymPy cannot prove that they are one


def math_reward(completion: str, answer: Any, *, timeout: float = 5.0) -> float | None:
    r"""1 if the final answer of a completion equals `answer` exactly, 0 if not.

    `None` if `answer` cannot be read. An answer is what the last `\boxed{…}`, `####` or "the answer
    is" gives (see `final_answer`); a comparison that takes longer than `timeout` seconds is 0.
    """
    _need_extra()
    gold = gold_form(str(answer))
    if gold is None or not _readable(gold, timeout):
        return None
    said = final_answer(completion)
    if said is None:
        return 0.0
    found = read(said, letter_units=_has_unit(gold))
    if found is None:
        return 0.0
    return float(equal(gold, found, partial(_in_process, time.monotonic() + timeout)))


@cache
def _need_extra() -> None:
    """Raises ImportError where an answer could seem wrong because nothing can read it."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("math_reward needs math-verify: pip install 'grpo_jax[math]'")


def gold_form(answer: str) -> Form | None:
    """What the right answer says, which may stand in a box, after `####` or by itself."""
    for place in (last_box, after_hashes):
        held = place(answer)
        if held is not None:
            return read(held)
    unclosed = "\\boxed" in answer or "\\fbox" in answer
    return None if unclosed else read(answer)


def equal(gold: Form, found: Form, algebra: Callable[[str, str], bool]) -> bool:
    """Whether two answers are the same; `algebra` says it of two expressions in LaTeX."""
    if isinstance(gold, Several) or isinstance(found, Several):
        return _same_items(gold, found, algebra)
    if isinstance(gold, Relation) or isinstance(found, Relation):
        return _same_relation(gold, found, algebra)
    if isinstance(gold, Words) or isinstance(found, Words):
        return gold == found
    if found.unit and gold.unit and gold.unit != found.unit:
        return False
    if isinstance(gold, Number) and isinstance(found, Number):
        return gold.value == found.value
    return _latex(gold) == _latex(found) or algebra(_latex(gold), _latex(found))


def _has_unit(form: Form) -> bool:
    return isinstance(form, Number | Expression) and bool(form.unit)


def _latex(form: Form) -> str:
    if isinstance(form, Number):
        return rf"\frac{{{form.value.numerator}}}{{{form.value.denominator}}}"
    assert isinstance(form, Expression)
    return form.latex.lstrip("+ ")


def _same_items(gold: Form, found: Form, algebra: Callable) -> bool:
    if isinstance(found, Relation) and is_name(found.left):  # x = (1, 2)
        inner = read(found.right)
        return inner is not None and equal(gold, inner, algebra)
    if not isinstance(gold, Several) or not isinstance(found, Several):
        return False
    kinds = {gold.kind, found.kind}
    if len(kinds) > 1 and kinds != {"set", "list"}:
        return False
    if len(gold.items) != len(found.items):
        return False
    if gold.kind in ("set", "list", "union", "cut"):
        return _same_unordered(gold.items, found.items, algebra)
    return all(map(partial(_equal_by, algebra), gold.items, found.items))


def _equal_by(algebra: Callable, gold: Form, found: Form) -> bool:
    return equal(gold, found, algebra)


def _same_unordered(gold: tuple, found: tuple, algebra: Callable) -> bool:
    left = list(found)
    for item in gold:
        match = next((i for i, other in enumerate(left) if equal(item, other, algebra)), None)
        if match is None:
            return False
        del left[match]
    return not left


def _same_relation(gold: Form, found: Form, algebra: Callable) -> bool:
    """Equations with one name on the left are their right sides; others must agree in both."""
    if isinstance(gold, Relation) and isinstance(found, Relation):
        if gold.sign != found.sign:
            return False
        sides = [(gold.left, found.left), (gold.right, found.right)]
        if all(_same_text(*side, algebra) for side in sides):
            return True
        turned = [(gold.left, found.right), (gold.right, found.left)]
        either = gold.sign in ("=", "!=")
        return either and all(_same_text(*side, algebra) for side in turned)
    relation, other = (gold, found) if isinstance(gold, Relation) else (found, gold)
    assert isinstance(relation, Relation)
    if relation.sign != "=" or not is_name(relation.left):
        return False
    value = read(relation.right)
    return value is not None and equal(value, other, algebra)


def _same_text(gold: str, found: str, algebra: Callable) -> bool:
    if normal(gold) == normal(found):
        return True
    forms = read(gold), read(found)
    return None not in forms and equal(*forms, algebra)  # type: ignore[arg-type]


# In a process of its own.


@cache
def _checker() -> Pool:
    return Pool(1)


def _readable(gold: Form, timeout: float) -> bool:
    if isinstance(gold, Several):
        return all(_readable(item, timeout) for item in gold.items)
    if isinstance(gold, Relation):
        sides = read(gold.left), read(gold.right)
        return None not in sides and all(_readable(side, timeout) for side in sides)  # type: ignore[arg-type]
    return not isinstance(gold, Expression) or _parses(gold.latex, timeout)


@lru_cache(10_000)
def _parses(latex: str, timeout: float) -> bool:
    return value_of(_checker(), can_read, {"latex": latex}, timeout) is True


def _in_process(deadline: float, gold: str, found: str) -> bool:
    left = deadline - time.monotonic()
    if left <= 0 or max(len(gold), len(found)) > 500:
        return False
    pair = {"gold": gold, "found": found}
    return value_of(_checker(), same_expression, pair, left) is True


def can_read(latex: str) -> bool:
    """Whether an expression in LaTeX is one that SymPy can hold."""
    return _parsed(latex) is not None


def same_expression(gold: str, found: str) -> bool:
    """Whether two expressions in LaTeX are equal: proved, or as constants to `DIGITS` digits."""
    import sympy

    one, other = _parsed(gold), _parsed(found)
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return False
    if one.has(sympy.nan, sympy.zoo) or other.has(sympy.nan, sympy.zoo):
        return False
    if one == other:
        return True
    imaginary = {
        name: sympy.I for name in one.free_symbols | other.free_symbols if str(name) == "i"
    }
    difference = sympy.expand((one - other).xreplace(imaginary))
    if difference.is_Rational:
        return bool(difference == 0)
    if difference.is_number:
        value = sympy.N(difference, DIGITS + 20, maxn=500)
        return bool(value.is_finite and abs(value) < sympy.Rational(1, 10**DIGITS))
    return bool(sympy.simplify(difference) == 0)


def _parsed(latex: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    found = parse(
        f"${exact(latex)}$",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return found[0] if found and not isinstance(found[0], str) else None
