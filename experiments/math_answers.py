r"""What checkers of mathematical answers say of the committed pairs.

    python -m experiments.math_answers

Each line of `tests/rewards/data/math_pairs.jsonl` is a right answer, a model's completion, and
whether it is right, written by hand; the frozen half before any checker had been asked. Prints a
table in Markdown: of the right completions how many are refused, of the wrong ones how many are
accepted, and how many cannot be scored. A checker that is not installed is said to be missing.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from grpo_jax.rewards import math_reward

PAIRS = Path(__file__).parent.parent / "tests" / "rewards" / "data" / "math_pairs.jsonl"
TIMEOUT = 60.0  # seconds: a slow machine must not change the table

Checker = Callable[[str, str], float | None]


def trl() -> Checker:
    """TRL's `accuracy_reward`, the gold answer given as a formula, as its datasets have it."""
    from trl.rewards import accuracy_reward

    def check(gold: str, completion: str) -> float | None:
        message = [{"role": "assistant", "content": completion}]
        (reward,) = accuracy_reward([message], [as_formula(gold)])
        return reward

    return check


def math_verify() -> Checker:
    """`math-verify` as its documentation calls it."""
    from math_verify import parse, verify

    def check(gold: str, completion: str) -> float | None:
        right = parse(as_formula(gold))
        return float(verify(right, parse(completion))) if right else None

    return check


def tunix() -> Checker:
    """Tunix's reward of its mathematics recipes."""
    from tunix.utils.math_rewards import math_reward as reward  # type: ignore[import-not-found]

    def check(gold: str, completion: str) -> float | None:
        (value,) = reward(prompts=[""], completions=[completion], answer=[gold])
        return float(value)

    return check


def ours() -> Checker:
    """`grpo_jax.rewards.math_reward`."""
    return lambda gold, completion: math_reward(completion, gold, timeout=TIMEOUT)


CHECKERS = {
    "`math_reward`": ours,
    "TRL's `accuracy_reward`": trl,
    "`math-verify`": math_verify,
    "Tunix": tunix,
}


def as_formula(gold: str) -> str:
    """A gold answer between dollars, unless it has a mark of its own."""
    marked = any(mark in gold for mark in ("$", "\\boxed", "####"))
    return gold if marked else f"${gold}$"


def counts(check: Checker, pairs: list[dict]) -> list[str]:
    """Refused of the right, accepted of the wrong, not scored, as text."""
    said = [(pair["right"], check(pair["gold"], pair["answer"])) for pair in pairs]
    right = [reward for known, reward in said if known]
    wrong = [reward for known, reward in said if not known]
    refused = sum(reward == 0 for reward in right)
    accepted = sum(reward == 1 for reward in wrong)
    unscored = sum(reward is None for _, reward in said)
    return [f"{refused} of {len(right)}", f"{accepted} of {len(wrong)}", str(unscored)]


def main() -> None:
    logging.disable(logging.WARNING)
    pairs = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    print("| checker | half | right refused | wrong accepted | not scored |")
    print("|---|---|---|---|---|")
    for name, make in CHECKERS.items():
        try:
            check = make()
        except ImportError:
            print(f"| {name} | not installed here | | | |")
            continue
        for half in ("frozen", "other"):
            part = [pair for pair in pairs if pair["frozen"] == (half == "frozen")]
            print(f"| {name} | {half} | {' | '.join(counts(check, part))} |")


if __name__ == "__main__":
    main()
