"""The cost of an update against its formula, by XLA's own counts."""

import pytest
from experiments.cost import BASE, cost, flops, formula


@pytest.mark.parametrize("grown", [{"G": 32}, {"S": 1024}, {"T": 1024}, {"V": 16384}, {"L": 4}], ids=str)
def test_flops_are_those_of_the_formula(grown, optimized):
    sizes = BASE | grown
    counted = flops(**sizes)
    assert counted == pytest.approx(formula(**sizes), rel=0.1)
    assert formula(**sizes, prompts=sizes["G"]) > (1.0 if "T" in grown else 1.5) * counted


@pytest.mark.parametrize(
    ("grown", "times"), [({"G": 32}, 4), ({"S": 1024}, 4), ({"T": 256}, 5), ({"V": 16384}, 4), ({"L": 8}, 1.2)], ids=str
)
def test_temporaries_grow_no_faster_than_what_they_hold(grown, times, optimized):
    """With G, S and V at most in proportion, with T hardly faster as long as attention is small; hardly with L."""
    before, after = (cost(**BASE | sizes).temporaries for sizes in ({}, grown))
    assert before < after <= times * before
