"""The cost of an update against its formula, by XLA's own counts."""

import pytest

from experiments.cost import BASE, flops, formula


@pytest.mark.parametrize("grown", [{"G": 32}, {"S": 1024}, {"T": 1024}, {"V": 16384}], ids=str)
def test_flops_are_those_of_the_formula(grown, optimized):
    sizes = BASE | grown
    counted = flops(**sizes)
    assert counted == pytest.approx(formula(**sizes), rel=0.1)
    assert formula(**sizes, prompts=sizes["G"]) > (1.0 if "T" in grown else 1.5) * counted
