"""The one-parameter policy learns as it should, and the pictures are made."""

import io

import numpy as np
import pytest
from experiments import bandit, surrogates
from rich.console import Console

SETTINGS = {setting.name: setting for setting in bandit.SETTINGS}


def test_the_one_parameter_policy():
    # θ −1.5, G 8, rate .5, 40 updates, NumPy's default generator from seed 0, in float64 NumPy without this library.
    curve = bandit.train(bandit.SETTINGS[0])
    steps = [round(curve.p_right[step - 1], 2) for step in (1, 10, 20, 30, 40)]
    assert steps == [0.18, 0.57, 0.90, 0.96, 0.98]
    assert round(curve.p_right[-1], 2) == 0.98
    assert sum(curve.silent) == 13
    assert len(curve.silent) == 40


def test_four_variations_learn_less_and_say_why():
    curves = {name: bandit.train(setting) for name, setting in SETTINGS.items()}
    finals = {name: curve.p_right[-1] for name, curve in curves.items()}
    best, *others = finals
    assert len(others) == 4
    assert all(finals[best] > finals[name] for name in others)
    assert finals["start at θ = −5"] < 0.02
    assert sum(curves["start at θ = −5"].silent) > 30
    assert sum(curves["groups of 2"].silent) > sum(curves[best].silent)
    assert sum(curves["partial credit (two parts)"].silent) < sum(curves[best].silent)
    console = Console(width=140, file=io.StringIO())
    console.print(bandit.table(curves))
    text = console.file.getvalue()
    assert all(name in text for name in finals)


def test_the_pictures_are_made(tmp_path):
    bandit.draw({name: bandit.Curve([0.2, 0.4], [False, True]) for name in SETTINGS}, tmp_path / "bandit.png")
    surrogates.draw(tmp_path / "new" / "surrogates.png")
    for picture in (tmp_path / "bandit.png", tmp_path / "new" / "surrogates.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", surrogates.SURROGATES)
def test_every_surrogate_pushes_with_its_advantage(name):
    ratio = np.array([0.7, 1.0, 1.1])
    for adv in (1.0, -1.0):
        _, push = surrogates.curves(surrogates.SURROGATES[name], adv, ratio)
        np.testing.assert_allclose(push[1], adv, rtol=1e-6)
        assert np.all(push * adv >= 0)
