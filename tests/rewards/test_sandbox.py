"""Where a program cannot be shut in, nothing is run, and the reason is said."""

import pytest
from grpo_jax.rewards import Limits, SandboxError, python_tests


def test_where_a_program_cannot_be_isolated_the_reward_refuses_to_be():
    with pytest.raises(SandboxError, match="cannot isolate it: no namespaces here"):
        python_tests(probe=lambda: "no namespaces here")
    assert python_tests(probe=lambda: None)


@pytest.mark.parametrize(
    "wrong", [{"seconds": 0}, {"memory": -1}, {"processes": 1.5}, {"output": True}, {"seconds": float("inf")}]
)
def test_limits_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        python_tests(limits=Limits(**wrong))
