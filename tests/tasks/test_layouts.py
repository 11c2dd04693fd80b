"""What columns mean: layouts that are recognised, prompts as text and as chats, templates."""

import pytest
from grpo_jax.tasks.layouts import COMPETITION, GSM8K, PLAIN, last_boxed, layout_of, messages_of, template_of

WORDS = {"question": "How many?", "answer": "She has 2+3=<<2+3=5>>5.\n#### 1,005"}
SUMS = {"problem": "What?", "solution": r"It is \boxed{\frac{1}{2}}.", "level": "Level 1"}


def test_layouts_are_recognised_by_most_of_the_rows():
    plain = {"question": "How many?", "answer": "5"}
    assert layout_of([WORDS, WORDS, plain]) is GSM8K
    assert layout_of([plain, plain, WORDS]) is PLAIN
    assert layout_of([SUMS]) is COMPETITION
    assert layout_of([SUMS | {"solution": "It is 3."}]) is PLAIN
    assert layout_of([{"prompt": "a", "answer": "#### 5"}]) is PLAIN


def test_answers_are_taken_out():
    assert GSM8K.shape(WORDS) == WORDS | {"answer": "1,005", "solution": WORDS["answer"]}
    assert GSM8K.shape(WORDS | {"solution": "own"})["solution"] == "own"
    assert COMPETITION.shape(SUMS) == SUMS | {"answer": r"\frac{1}{2}"}
    assert COMPETITION.shape(SUMS | {"answer": "0.5"})["answer"] == "0.5", "an answer of its own is kept"
    with pytest.raises(ValueError, match="has no '#### …'"):
        GSM8K.shape({"question": "q", "answer": "5 #### "})
    with pytest.raises(ValueError, match=r"has no \\boxed"):
        COMPETITION.shape({"problem": "q", "solution": "5"})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{5} or \boxed{6}", "6"),
        (r"so $\boxed{\frac{a}{b^{2}}}$, {done}", r"\frac{a}{b^{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{ x }", "x"),
        (r"\boxed 7", "7"),
        (r"\boxed{5", None),
        (r"\boxed{\left\{ 5 \right\}", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_box(text, answer):
    assert last_boxed(text) == answer


def test_prompts():
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert messages_of("u", prefill=False) == chat[1:]
    assert messages_of(chat, prefill=False) == chat
    begun = [*chat, {"role": "assistant", "content": "It is"}]
    assert messages_of(begun, prefill=True) == begun
    with pytest.raises(ValueError, match="ends with an answer of the assistant"):
        messages_of(begun, prefill=False)


@pytest.mark.parametrize("value", [3, None, [], {}, ["u"], [{"role": "user"}], [{"role": "me", "content": "u"}]])
def test_what_is_no_prompt(value):
    with pytest.raises(ValueError, match="must be text, or a list of"):
        messages_of(value, prefill=False)
    with pytest.raises(ValueError, match="is empty"):
        messages_of(" \n", prefill=False)


def test_templates():
    """jinja2: braces of LaTeX and JSON stay, and a text's own braces are not read."""
    render, names = template_of(r'{{ question }} {"a": \boxed{}}{% if hint is defined %} {{ hint }}{% endif %}' + "\n")
    assert names == {"question", "hint"}
    assert render({"question": "{{ answer }}", "answer": "7"}) == r'{{ answer }} {"a": \boxed{}}' + "\n"
    assert render({"question": "q", "hint": "h"}).endswith("}} h\n")
    with pytest.raises(ValueError, match="cannot be written into the template: 'question' is undefined"):
        render({"hint": "h"})
    with pytest.raises(ValueError, match=r"is no jinja2 template: line 2"):
        template_of("{{ a }}\n{{ b")
    with pytest.raises(ValueError, match=r"names no column; write one as \{\{ question \}\}"):
        template_of("Q: {question}")
    with pytest.raises(ValueError, match=r"cannot be written into the template: .*unsafe"):
        template_of("{{ question.__class__.__mro__ }}")[0]({"question": "q"})
