"""Options check themselves: every value that none can have, and a message that begins with the option's name."""

import inspect
import math

import pytest
from grpo_jax import options
from grpo_jax.options import (
    AdamW,
    Batching,
    Data,
    Generation,
    OptionError,
    Precision,
    Sampling,
    Scoring,
    Update,
    check_cuts,
    flag,
    instance,
    number,
    whole,
)

nan, inf = math.nan, math.inf
NO_COUNT = (0, -1, 1.5, 2.0, "1", True, None)
NO_COUNT_OR_NONE = NO_COUNT[:-1]
NO_FLAG = (0, 1, None, "yes")
NO_AMOUNT = (-0.1, nan, inf, "1", True, None)

AT_LEAST_1 = "must be an integer of at least 1, got {!r}"
AT_LEAST_1_OR_NONE = "must be an integer of at least 1, or None, got {!r}"
AT_LEAST_0 = "must be an integer of at least 0, got {!r}"
FINITE = "must be a finite number of at least 0, got {!r}"
TRUE_OR_FALSE = "must be True or False, got {!r}"
TYPES = "must be one of ('float32', 'bfloat16', 'float16'), got {!r}"

# Of each tuple's fields: the values that it cannot have, and what is said of them.
NO_TEXT = (1, True, ("a",))
TEXT_OR_NONE = "must be text or None, got {!r}"
WRONG = {
    Sampling: {
        "temperature": (NO_AMOUNT, FINITE),
        "top_k": (NO_COUNT_OR_NONE, AT_LEAST_1_OR_NONE),
        "top_p": ((0, 0.0, -0.5, 1.5, nan), "must be in (0, 1] or None, got {!r}"),
        "min_p": ((-0.1, 1.5, nan), "must be in [0, 1] or None, got {!r}"),
    },
    Generation: {
        "group_size": (NO_COUNT, AT_LEAST_1),
        "max_new_tokens": (NO_COUNT, AT_LEAST_1),
        "sampling": (({"top_k": 3}, None, 0.7), "must be a Sampling(…), got {!r}"),
        "decode_slots": (NO_COUNT_OR_NONE, AT_LEAST_1_OR_NONE),
        "compactions": ((-1, 1.5, True, None), AT_LEAST_0),
    },
    Update: {
        "epochs": (NO_COUNT, AT_LEAST_1),
        "microbatches": (NO_COUNT, AT_LEAST_1),
        "group_microbatches": (NO_COUNT, AT_LEAST_1),
        "old_logp": (("samplr", None, 1), "must be one of ('auto', 'sampler', 'first_epoch'), got {!r}"),
        "logit_chunk": (NO_COUNT_OR_NONE, AT_LEAST_1_OR_NONE),
    },
    Batching: {
        "prompts_per_step": (NO_COUNT, AT_LEAST_1),
        "prompt_length": (NO_COUNT_OR_NONE, AT_LEAST_1_OR_NONE),
        "length_buckets": (NO_COUNT, AT_LEAST_1),
        "pack_tokens": (NO_FLAG, TRUE_OR_FALSE),
        "drop_zero_variance": (NO_FLAG, TRUE_OR_FALSE),
    },
    Scoring: {
        "weights": (((1.0, nan), (inf,), ("1",), "12"), "must be {count} finite weights, one for each reward function"),
        "on_error": (("rais", None, True), "must be one of ('raise', 'skip'), got {!r}"),
        "workers": (NO_COUNT[1:], AT_LEAST_0),
        "timeout": (NO_AMOUNT[:-1], FINITE),
    },
    Data: {
        "data": (NO_TEXT, TEXT_OR_NONE),
        "reward": (("near", (1,)), "must be names of functions, such as ('rewards.py:near',), got {!r}"),
        "split": (NO_TEXT, TEXT_OR_NONE),
        "subset": (NO_TEXT, TEXT_OR_NONE),
        "eval_data": (NO_TEXT, TEXT_OR_NONE),
        "eval_split": (NO_TEXT, TEXT_OR_NONE),
        "eval_share": ((0, -0.1, 1.1, nan, "half", None, True), "must be in (0, 1], got {!r}"),
        "prompt_column": (NO_TEXT, TEXT_OR_NONE),
        "prompt_template": (NO_TEXT, TEXT_OR_NONE),
        "system_prompt": (NO_TEXT, TEXT_OR_NONE),
        "target_column": (NO_TEXT, TEXT_OR_NONE),
        "on_bad_row": (("drop", None, True), "must be one of ('raise', 'skip'), got {!r}"),
    },
    Precision: {
        "params": (("float23", None, 32), TYPES),
        "compute": (("float23", 32), TYPES),
        "moments": (("float23", None), TYPES),
    },
    AdamW: {
        "learning_rate": (NO_AMOUNT, FINITE),
        "schedule": (("cosin", None), "must be one of ('constant', 'linear', 'cosine'), got {!r}"),
        "lr_warmup": ((-1, 1.5, True, None), AT_LEAST_0),
        "weight_decay": (NO_AMOUNT, FINITE),
        "clip_norm": ((0, 0.0, -1.0, nan), "must be above 0, or inf for no clipping, got {!r}"),
    },
}
# Values at the edge of what a field may have.
RIGHT = {
    Sampling: {"temperature": (0, 0.0, 2), "top_k": (1, None), "top_p": (1, 1e-9, None), "min_p": (0, 1, None)},
    Generation: {"group_size": (1, 8), "max_new_tokens": (1,), "decode_slots": (1, 8, None), "compactions": (0, 99)},
    Update: {
        "epochs": (1,), "microbatches": (1,), "group_microbatches": (1,), "logit_chunk": (1, None),
        "old_logp": ("auto", "sampler", "first_epoch"),
    },
    Batching: {"prompts_per_step": (1,), "prompt_length": (1, None), "length_buckets": (1,), "pack_tokens": (True,)},
    Scoring: {"weights": (None, (0.5, -1), [1.0]), "on_error": ("raise", "skip"), "workers": (0, 1)},
    Data: {"data": (None, "rows.jsonl"), "reward": ((), ("near", "rewards.py:near"))},
    Precision: {"params": ("bfloat16", "float16"), "compute": (None, "bfloat16"), "moments": ("bfloat16",)},
    AdamW: {
        "learning_rate": (0, 1e-9), "schedule": ("constant", "linear", "cosine"), "lr_warmup": (0,),
        "weight_decay": (0, 1), "clip_norm": (1e-9, inf),
    },
}  # fmt: skip
CASES = [
    (kind, name, value, text)
    for kind, fields in WRONG.items()
    for name, (values, text) in fields.items()
    for value in values
]


@pytest.mark.parametrize(("kind", "name", "value", "text"), CASES)
def test_a_value_that_an_option_cannot_have_is_named(kind, name, value, text):
    with pytest.raises(OptionError) as raised:
        kind(**{name: value}).check()
    error = raised.value
    assert isinstance(error, ValueError)
    assert error.name == name
    assert error.text.startswith(text.format(value, count=len(value) if name == "weights" else None))
    assert str(error) == f"{name} {error.text}"


@pytest.mark.parametrize("kind", RIGHT)
def test_a_value_at_the_edge_is_accepted(kind):
    assert kind().check() == kind(), "defaults are"
    for name, values in RIGHT[kind].items():
        for value in values:
            made = kind(**{name: value})
            assert made.check() is made


def test_every_option_has_a_case():
    """Of every tuple in the module, and of every field that has values it cannot have."""
    kinds = {kind for _, kind in inspect.getmembers(options, inspect.isclass) if hasattr(kind, "check")}
    assert kinds == set(WRONG) == set(RIGHT)
    for kind in kinds:
        assert set(WRONG[kind]) == set(kind._fields)


def test_the_first_wrong_value_is_told():
    with pytest.raises(OptionError, match=r"^group_size"):
        Generation(0, 0).check()
    with pytest.raises(OptionError, match=r"^top_k must be an integer of at least 1, or None, got 0"):
        Generation(sampling=Sampling(top_k=0)).check()


def test_slots_are_at_most_the_group():
    with pytest.raises(OptionError, match=r"^decode_slots must be at most group_size \(4\), got 5"):
        Generation(4, decode_slots=5).check()
    assert Generation(4).slots == 4
    assert Generation(4, decode_slots=3).check().slots == 3


def test_greedy_sampling_is_no_training():
    assert Sampling(0.0).check() == Sampling(0.0)
    assert Sampling(0.5).check_training() == Sampling(0.5)
    with pytest.raises(OptionError, match=r"^temperature must be above 0 in training"):
        Sampling(0.0).check_training()
    with pytest.raises(OptionError, match=r"^top_p must be in"):
        Sampling(0.0, top_p=2.0).check_training()


def test_float16_is_no_type_of_training():
    assert Precision("bfloat16", "float32").check_training().computed == "float32"
    assert Precision("bfloat16").computed == "bfloat16"
    for name in Precision._fields:
        with pytest.raises(OptionError, match=rf"^{name} must not be float16 in training"):
            Precision(**{name: "float16"}).check_training()


@pytest.mark.parametrize(("weights", "functions"), [((1.0,), 2), ((1.0, 2.0), 1), ((), 1)])
def test_there_are_as_many_weights_as_rewards(weights, functions):
    expected = rf"^weights must be {functions} finite weights, one for each reward function, got "
    with pytest.raises(OptionError, match=expected):
        Scoring(weights).check(functions)
    assert Scoring((1.0,) * functions).check(functions)


def test_a_batch_must_be_cut_evenly():
    """Prompts over devices and micro-batches, groups into theirs."""
    check_cuts(Generation(6), Update(1, 2, 3), Batching(8), parts=4)
    with pytest.raises(
        OptionError, match=r"^prompts_per_step must be a multiple of 8, .*: 4 devices × 2 micro"
    ) as raised:
        check_cuts(Generation(), Update(1, 2), Batching(12), parts=4)
    assert str(raised.value).endswith("got 12")
    with pytest.raises(OptionError, match=r"^prompts_per_step must be a multiple of 3,"):
        check_cuts(Generation(), Update(1, 3), Batching(8))
    with pytest.raises(OptionError, match=r"^group_microbatches must divide group_size \(6\), got 4"):
        check_cuts(Generation(6), Update(1, 1, 4), Batching(8))


def test_the_checks_that_tuples_are_made_of():
    assert instance("sampling", Sampling(), Sampling) == Sampling()
    number("limit", inf, 0, infinite=True)
    whole("steps", 0, 0)
    whole("size", None, 1, or_none=True)
    flag("on", False)
    for check, arguments, message in (
        (number, ("limit", inf, 0), "limit must be a finite number of at least 0, got inf"),
        (number, ("limit", nan, 2), "limit must be a finite number of at least 2, got nan"),
        (whole, ("steps", None, 0), "steps must be an integer of at least 0, got None"),
        (flag, ("on", 1), "on must be True or False, got 1"),
        (instance, ("update", {}, Update), "update must be a Update(…), got {}"),
    ):
        with pytest.raises(OptionError) as raised:
            check(*arguments)
        assert str(raised.value) == message
