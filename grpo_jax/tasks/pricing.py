"""A bike shop's questions that need arithmetic, made from a seed, in five levels of difficulty.

Every price is `days · Σ count·rate`, less a percentage, plus a fee; a level says which of these a
question has. All amounts are whole cents in integer arithmetic, so an answer is exact. The numbers
of a question depend on the seed and the level alone: both wordings ask the same ones. Left out on
purpose: sizes drawn from a hidden pool on disk, and `random` methods other than `random()`, whose
sequence alone is the same in every Python version.
"""

from collections.abc import Callable
from math import prod
from random import Random
from typing import NamedTuple

from grpo_jax.rewards.answers import number_reward
from grpo_jax.tasks.task import Message, Row, Task

# fmt: off
VEHICLES = (
    "bike", "trike", "tandem", "scooter", "cruiser", "hybrid", "e-bike", "BMX", "unicycle",
    "handbike", "trailer", "wagon", "kart", "rickshaw", "moped", "skateboard", "surrey",
    "sidecar", "quad", "kickbike",
)
NAMES = (
    "Ana", "Ben", "Chloe", "Dev", "Elif", "Femi", "Grace", "Hugo", "Ines", "Jun", "Kofi",
    "Lena", "Mateo", "Nadia", "Omar", "Priya", "Rosa", "Sven", "Tariq", "Yuki",
)
# fmt: on


class Item(NamedTuple):
    count: int
    vehicle: str
    rate: int  # cents a day


class Problem(NamedTuple):
    items: tuple[Item, ...]
    days: int
    percent: int = 0  # discount
    fee: int = 0  # cents, once, after the discount


class Form(NamedTuple):
    """One kind of problem: the range of each of its numbers, and how they make a problem for given
    vehicles.
    """

    ranges: tuple[range, ...]
    build: Callable[..., Problem]
    vehicle_is_content: bool = False


def _one(numbers, vehicles) -> Problem:
    days, rate = numbers
    return Problem((Item(1, vehicles[0], 100 * rate),), days)


def _several(numbers, vehicles) -> Problem:
    days, count, rate, *percent = numbers
    return Problem((Item(count, vehicles[0], 100 * rate),), days, *percent)


def _two_kinds(numbers, vehicles) -> Problem:
    # The second kind costs `more` than the first, so that no problem is another one in a different
    # order.
    days, count, rate, other_count, more, *percent = numbers
    items = (
        Item(count, vehicles[0], 100 * rate),
        Item(other_count, vehicles[1], 100 * (rate + more)),
    )
    return Problem(items, days, *percent)


def _everything(numbers, vehicles) -> Problem:
    days, count, half_dollars, other_count, more, percent, fee = numbers
    rates = 50 * half_dollars, 50 * (half_dollars + more)
    items = (Item(count, vehicles[0], rates[0]), Item(other_count, vehicles[1], rates[1]))
    return Problem(items, days, percent, 100 * fee)


PERCENTS = range(5, 55, 5)
LEVELS: dict[int, tuple[Form, ...]] = {
    1: (Form((range(2, 13), range(2, 16)), _one, vehicle_is_content=True),),
    2: (Form((range(2, 32), range(11, 100)), _one),),
    3: (
        Form((range(2, 15), range(2, 10), range(3, 41)), _several),
        Form((range(2, 11), range(1, 5), range(3, 21), range(1, 5), range(1, 13)), _two_kinds),
    ),
    4: (
        Form((range(2, 15), range(1, 7), range(3, 41), PERCENTS), _several),
        Form(
            (range(2, 11), range(1, 5), range(3, 21), range(1, 5), range(1, 13), PERCENTS),
            _two_kinds,
        ),
    ),
    # Half dollars less a multiple of ten per cent are whole cents.
    5: (
        Form(
            (
                range(2, 15),
                range(1, 7),
                range(7, 61),
                range(1, 7),
                range(1, 31),
                range(10, 60, 10),
                range(2, 21),
            ),
            _everything,
        ),
    ),
}


def pricing(
    *,
    level: int = 1,
    seed: int = 0,
    train_size: int = 2048,
    held_out_size: int = 512,
    wording: str = "natural",
) -> Task:
    """A bike shop's questions: level 1 is days × rate with small numbers, 2 with larger ones, 3 has
    several vehicles, 4 a percentage discount, 5 everything, with a fee, cents, and sentences that
    do not matter.

    No two rows, trained or held out, have the same content: the kind of problem and all its numbers
    (at level 1, where there are just 154 pairs of numbers, also the vehicle). Held-out rows are
    drawn first, so that they do not depend on `train_size`. `wording` is "natural", for a language
    model, or "terse", a few dozen bytes for a model of bytes. A row has question, answer (dollars,
    as a string), working and level. Raises ValueError for a level or wording that does not exist
    and for more rows than a level has.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(map(str, LEVELS))}, got {level!r}")
    if wording not in WORDINGS:
        raise ValueError(f"wording must be one of {', '.join(WORDINGS)}, got {wording!r}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    if train_size < 1 or held_out_size < 0:
        raise ValueError(
            "train_size must be at least 1 and held_out_size 0, got "
            f"{train_size} and {held_out_size}"
        )
    size = train_size + held_out_size
    if size > capacity(level):
        raise ValueError(
            f"level {level} has {capacity(level)} distinct problems, fewer than the {size} asked "
            f"for (train_size {train_size} + held_out_size {held_out_size})"
        )
    problems = _problems(level, size, Random(10 * seed + level))
    words = Random(10 * seed)
    rows = [_row(problem, level, words, wording) for problem in problems]
    prompt = WORDINGS[wording].prompt
    target = WORDINGS[wording].target
    return Task(
        "pricing", rows[held_out_size:], rows[:held_out_size], prompt, number_reward, target
    )


def capacity(level: int) -> int:
    """The number of problems of a level that differ in content."""
    return sum(_size(form) for form in LEVELS[level])


def price(problem: Problem) -> int:
    """`days · Σ count·rate · (100 − percent)/100 + fee`, in cents, exactly."""
    full = problem.days * sum(item.count * item.rate for item in problem.items)
    discounted, remainder = divmod(full * (100 - problem.percent), 100)
    assert remainder == 0, problem
    return discounted + problem.fee


def money(cents: int) -> str:
    """Dollars without a sign: `21`, or `37.80` where there are cents."""
    return str(cents // 100) if cents % 100 == 0 else f"{cents // 100}.{cents % 100:02d}"


def working(problem: Problem) -> list[str]:
    """The price in steps of one operation, each `left=right`; the last right side is the price."""
    steps = []
    subtotals = []
    for item in problem.items:
        subtotals.append(item.count * item.rate)
        if item.count > 1:
            steps.append(f"{item.count}*{money(item.rate)}={money(subtotals[-1])}")
    total = sum(subtotals)
    if len(subtotals) > 1:
        steps.append(f"{'+'.join(map(money, subtotals))}={money(total)}")
    steps.append(f"{money(total)}*{problem.days}={money(problem.days * total)}")
    total *= problem.days
    if problem.percent:
        less = total * problem.percent // 100
        steps.append(f"{money(total)}*{problem.percent}%={money(less)}")
        steps.append(f"{money(total)}-{money(less)}={money(total - less)}")
        total -= less
    if problem.fee:
        steps.append(f"{money(total)}+{money(problem.fee)}={money(total + problem.fee)}")
    return steps


def _size(form: Form) -> int:
    return prod(map(len, form.ranges)) * (len(VEHICLES) if form.vehicle_is_content else 1)


def _below(rng: Random, n: int) -> int:
    return int(rng.random() * n)


def _pick(rng: Random, options):
    return options[_below(rng, len(options))]


def _problems(level: int, size: int, rng: Random) -> list[Problem]:
    """`size` problems without a repeated content; each form of the level is drawn equally often
    while it lasts.
    """
    forms = LEVELS[level]
    seen = set()
    problems = []
    while len(problems) < size:
        which = _below(rng, len(forms))
        form = forms[which]
        index = _below(rng, _size(form))
        if (which, index) in seen:
            continue
        seen.add((which, index))
        if form.vehicle_is_content:
            index, first = divmod(index, len(VEHICLES))
        else:
            first = _below(rng, len(VEHICLES))
        second = (first + 1 + _below(rng, len(VEHICLES) - 1)) % len(VEHICLES)
        numbers = []
        for values in form.ranges:
            index, digit = divmod(index, len(values))
            numbers.append(values[digit])
        problems.append(form.build(numbers, (VEHICLES[first], VEHICLES[second])))
    return problems


def _row(problem: Problem, level: int, words: Random, wording: str) -> Row:
    if len(problem.items) > 1 and words.random() < 0.5:
        problem = problem._replace(items=problem.items[::-1])
    return {
        "question": WORDINGS[wording].question(problem, level, words),
        "answer": money(price(problem)),
        "working": " ".join(working(problem)),
        "level": level,
    }


def _terse_question(problem: Problem, level: int, words: Random) -> str:
    """As short as it gets: `tandem $7/day, 3 days?`"""
    counts = any(item.count > 1 for item in problem.items)
    items = " + ".join(
        f"{item.count} {item.vehicle} ${money(item.rate)}"
        if counts
        else f"{item.vehicle} ${money(item.rate)}"
        for item in problem.items
    )
    question = _pick(
        words, ("{items}/day, {days} days", "{days} days, {items}", "{items}, {days} days")
    )
    extras = (f", {problem.percent}% off" if problem.percent else "") + (
        f", fee ${money(problem.fee)}" if problem.fee else ""
    )
    return question.format(items=items, days=problem.days) + extras + "?"


OPENINGS = {
    "one": (
        "{name} rents {a} for {days} days at {rate} per day.",
        "A bike shop charges {rate} per day for {a}. {name} keeps it for {days} days.",
        "Renting {a} costs {rate} a day. {name} needs it for {days} days.",
        "{name} wants {a} for {days} days. The shop asks {rate} for each day.",
    ),
    "more": (
        "{name} rents {these} for {days} days.",
        "A bike shop lends {these} to {name} for {days} days.",
        "For {days} days, {name} takes {these}.",
        "{name}'s family needs {these} for {days} days.",
    ),
}
DISCOUNTS = (
    "The shop takes {percent}% off the total.",
    "There is a discount of {percent}%.",
    "{name} has a coupon for {percent}% off.",
)
FEES = (
    "A delivery fee of {fee} is added after the discount.",
    "Insurance costs {fee} on top, and the discount does not apply to it.",
)
DISTRACTORS = (
    "The shop opened {n} years ago.",
    "It is {n} miles from the station.",
    "A helmet would cost {n} dollars, but {name} brings one.",
    "{n} other customers are waiting.",
    "Last year {name} cycled {n} miles.",
)
QUESTIONS = (
    "How much does it cost in total?",
    "What is the total price?",
    "What does {name} pay in total?",
)


def _natural_question(problem: Problem, level: int, words: Random) -> str:
    """Sentences with a name, several templates, and at level 5 one or two that do not matter."""
    values = {"name": _pick(words, NAMES), "days": problem.days}
    item = problem.items[0]
    if len(problem.items) == 1 and item.count == 1:
        opening = _pick(words, OPENINGS["one"])
        values |= {"a": _article(item.vehicle), "rate": f"${money(item.rate)}"}
    else:
        opening = _pick(words, OPENINGS["more"])
        values["these"] = " and ".join(map(_listed, problem.items))
    sentences = [opening.format(**values)]
    if problem.percent:
        sentences.append(_pick(words, DISCOUNTS).format(percent=problem.percent, **values))
    if problem.fee:
        sentences.append(_pick(words, FEES).format(fee=f"${money(problem.fee)}"))
    if level == 5:
        for _ in range(1 + _below(words, 2)):
            distractor = _pick(words, DISTRACTORS).format(n=3 + _below(words, 60), **values)
            sentences.insert(_below(words, len(sentences) + 1), distractor)
    return " ".join([*sentences, _pick(words, QUESTIONS).format(**values)])


def _article(vehicle: str) -> str:
    return f"{'an' if vehicle[0] in 'aeio' else 'a'} {vehicle}"


def _listed(item: Item) -> str:
    if item.count == 1:
        return f"1 {item.vehicle} at ${money(item.rate)} per day"
    return f"{item.count} {item.vehicle}s at ${money(item.rate)} per day each"


INSTRUCTION = "Answer in one short sentence with the calculation."


class Wording(NamedTuple):
    question: Callable[[Problem, int, Random], str]
    prompt: Callable[[Row], list[Message]]
    target: Callable[[Row], str]


WORDINGS = {
    "natural": Wording(
        _natural_question,
        lambda row: [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
        lambda row: f"{row['working'].replace(' ', ', ')}. The total is ${row['answer']}.",
    ),
    "terse": Wording(
        _terse_question,
        lambda row: [{"role": "user", "content": row["question"]}],
        lambda row: row["working"],
    ),
}
