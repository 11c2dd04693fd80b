"""What columns mean: where the question is, what the right answer is, and how a row is asked.

Recognised are GSM8K (`question`, `answer` that ends in `#### 72`) and MATH (`problem`, `solution`
that holds `\\boxed{…}`): their answers become the column `answer`, their worked solutions the
column `solution`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_jax.tasks.task import Message, Row
from grpo_jax.tasks.user_code import nearest

PROMPTS = ("prompt", "messages", "question", "problem", "instruction")  # the first that is there
TARGETS = ("solution", "answer", "completion")
ROLES = ("system", "user", "assistant", "tool", "developer")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<one>\w))")


class Layout(NamedTuple):
    """A known layout: the column of the question, and `shape(row)`, the row with its answer.

    `needs` are the columns that `shape` reads, `adds` those that it makes, `reward` what scores its
    answers.
    """

    name: str
    column: str
    shape: Callable[[Row], Row]
    needs: frozenset[str] = frozenset()
    adds: frozenset[str] = frozenset()
    reward: str | None = None


def gsm8k(row: Row) -> Row:
    """The number behind `####` is the answer, the whole text the solution."""
    _, mark, answer = str(row["answer"]).rpartition("####")
    if not (mark and answer.strip()):
        raise ValueError("has no '#### …' at the end of its answer, as other rows have")
    return {"solution": str(row["answer"]), **row, "answer": answer.strip()}


def competition(row: Row) -> Row:
    """The last `\\boxed{…}` of the solution is the answer, where there is no such column."""
    if "answer" in row:
        return row
    if (answer := last_boxed(str(row["solution"]))) is None:
        raise ValueError(r"has no \boxed{…} in its solution, as other rows have")
    return {**row, "answer": answer}


def as_it_is(row: Row) -> Row:
    return row


def last_boxed(text: str) -> str | None:
    """The last `\\boxed{…}` of a text, with balanced braces; None where there is none."""
    marks = list(_BOXED.finditer(text))
    if not marks:
        return None
    if marks[-1]["one"]:
        return marks[-1]["one"]
    begin = marks[-1].end()
    depth = 1
    for place in range(begin, len(text)):
        escaped = text[place - 1] == "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return None


def is_gsm8k(row: Row) -> bool:
    return {"question", "answer"} <= row.keys() and "####" in str(row["answer"])


def is_competition(row: Row) -> bool:
    return {"problem", "solution"} <= row.keys() and last_boxed(str(row["solution"])) is not None


GSM8K = Layout(
    "GSM8K",
    "question",
    gsm8k,
    needs=frozenset({"answer"}),
    adds=frozenset({"answer", "solution"}),
    reward="number_reward",
)
COMPETITION = Layout(
    "MATH",
    "problem",
    competition,
    needs=frozenset({"solution"}),
    adds=frozenset({"answer"}),
    reward="math_reward",
)
PLAIN = Layout("", "", as_it_is)


def layout_of(rows: Sequence[Row]) -> Layout:
    """The layout that most of the first rows of a source have."""
    for layout, known in ((GSM8K, is_gsm8k), (COMPETITION, is_competition)):
        if 2 * sum(map(known, rows)) > len(rows):
            return layout
    return PLAIN


def prompt_column(name: str, columns: Sequence[str], asked: str | None) -> str:
    """The column that holds the question. Raises ValueError where there is none."""
    if asked is not None:
        if asked not in columns:
            raise ValueError(f"{name} has no column {asked!r}{nearest(asked, columns)}")
        return asked
    for column in PROMPTS:
        if column in columns:
            return column
    raise ValueError(
        f"{name} has none of the columns {', '.join(PROMPTS)}: name the one that holds the "
        f"question (prompt_column), or write a prompt_template; there are: {', '.join(columns)}"
    )


def messages_of(value: Any, *, prefill: bool) -> list[Message]:
    """A prompt as messages: text is what the user says, a list is a chat.

    Raises ValueError for anything else, and for a chat that the assistant has answered already
    unless it is meant to go on (`prefill`).
    """
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("is empty")
        return [{"role": "user", "content": value}]
    good = isinstance(value, list) and all(
        isinstance(one, Mapping) and one.get("role") in ROLES and one.get("content") is not None
        for one in value
    )
    if not value or not good:
        raise ValueError(
            f'must be text, or a list of {{"role", "content"}} with roles of {", ".join(ROLES)}; '
            f"got {str(value)[:60]!r}"
        )
    if value[-1]["role"] == "assistant" and not prefill:
        raise ValueError(
            "ends with an answer of the assistant, which would be shown to the model; name the "
            "column (prompt_column) if the model is to go on with it"
        )
    return [dict(one) for one in value]


def template_of(text: str) -> tuple[Callable[[Row], str], set[str]]:
    """A jinja2 template of a row's columns, and the columns that it names.

    Raises ValueError where it is no template, or names no column.
    """
    import jinja2
    from jinja2 import meta
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    try:
        names = meta.find_undeclared_variables(environment.parse(text))
        template = environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"is no jinja2 template: line {error.lineno}: {error.message}") from error
    if not names:
        raise ValueError(f"names no column; write one as {{{{ question }}}}; got {text!r}")

    def render(row: Row) -> str:
        try:
            return template.render(row)
        except Exception as error:  # whatever a template's own expressions raise
            raise ValueError(f"cannot be written into the template: {error}") from error

    return render, names
