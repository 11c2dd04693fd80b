"""What the README shows runs as it stands, and what it says of the project is so."""

import re
from pathlib import Path

import pytest
from grpo_jax.objectives import PRESETS, Objective, reads

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def namespace():
    """The README's Python, block after block in one namespace, with fewer steps."""
    names = {}
    for block in BLOCKS:
        short = re.sub(r"steps=\d+", "steps=2", block).replace('"group_size": 8', '"group_size": 2')
        short = short.replace('"prompts_per_step": 32', '"prompts_per_step": 2')
        exec(compile(short, "README.md", "exec"), names)
    return names


def test_the_first_block_trains_in_under_thirty_lines():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) < 30
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("from", "import"))}
    assert imported <= {"grpo_jax", "jax"}


def test_the_second_block_defines_a_variant_in_under_ten_lines():
    definition = BLOCKS[1].split("for saved")[0]
    assert len([line for line in definition.splitlines() if line.strip() and "import" not in line]) < 10


def test_the_blocks_run_and_train(namespace):
    assert isinstance(namespace["mine"], Objective)
    assert namespace["metrics"]["iteration"] == 2
    assert int(namespace["saved"].state.step) == 2


def test_the_three_levels_give_objectives_that_see_what_they_should(namespace):
    bound, written, wrapped = (namespace[name] for name in ("bound", "written", "wrapped"))
    assert {"ref_logp_T", "sampler_logp_T"} <= reads(bound)
    assert reads(written) >= {"adv"}
    assert not {"ref_logp_T", "old_logp_T"} & reads(written)
    assert reads(wrapped) == reads(bound) | {"stopped"}


def test_every_preset_is_in_the_table():
    table = README.split("| preset | what | paper |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)`", table)
    assert sorted(named) == sorted(PRESETS)


def test_pictures_and_files_that_it_names_exist():
    for path in re.findall(r"\]\(([\w./-]+\.png)\)", README):
        assert (ROOT / path).is_file(), path
    for module in re.findall(r"python -m ([\w.]+)", README):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module


def test_importing_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, grpo_jax; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'trl')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_requirements_for_tpus_are_those_of_the_project():
    lines = [x for x in (ROOT / "requirements-tpu.txt").read_text().splitlines() if x and not x.startswith("#")]
    assert lines == ["-e .[tpu]"]
