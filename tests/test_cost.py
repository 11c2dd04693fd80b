"""The cost of an update against its formula, by XLA's own counts."""

import pytest

from experiments.cost import BASE, cost, formula


@pytest.mark.parametrize("grown", [{}, {"G": 32}, {"S": 1024}, {"V": 16384}], ids=str)
def test_flops_are_those_of_the_formula(grown, optimized):
    sizes = BASE | grown
    found = cost(**sizes)
    assert found.flops == pytest.approx(found.formula, rel=0.1)
    assert formula(**sizes, prompts=sizes["G"]) > found.flops
