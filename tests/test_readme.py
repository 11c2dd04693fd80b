"""What the README files show runs as it stands, and what they say of the project is so."""

import contextlib
import dataclasses
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from grpo_jax.cli.arguments import TRL_NAMES, check_trl_names
from grpo_jax.cli.entry import parsed
from grpo_jax.cli.evaluate import Eval
from grpo_jax.cli.plan import Plan
from grpo_jax.cli.sample import Sample
from grpo_jax.cli.train import Train, narrowed
from grpo_jax.config import TrainConfig
from grpo_jax.named_options import flag, option_paths
from grpo_jax.objectives import PRESETS, Objective, reads
from grpo_jax.plan.config import PlanConfig
from grpo_jax.runs.folder import write_json

ROOT = Path(__file__).parent.parent
ROOMS = sorted((ROOT / "grpo_jax").glob("*/README.md"))
DOCUMENTS = [ROOT / "README.md", *ROOMS, ROOT / "experiments" / "README.md"]
PROSE = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
LONGEST = 150

name_of = lambda path: str(path.relative_to(ROOT))
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
each_page = pytest.mark.parametrize("page", PROSE, ids=name_of)


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def run_blocks(document: Path) -> dict:
    """The names that a document's Python leaves behind, block after block in one namespace."""
    names = {}
    for block in blocks(document, "python"):
        exec(compile(block, str(document), "exec"), names)
    return names


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Blocks write into the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if blocks(path, "python")], ids=name_of)
def test_python_runs(document, elsewhere):
    names = run_blocks(document)
    if "metrics" in names:
        assert names["metrics"]["iteration"] >= 2
    if document == DOCUMENTS[0]:
        assert isinstance(names["mine"], Objective)
        assert int(names["state"].train.step) == 5
        lines = (elsewhere / "runs" / "soft-gate" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 5


def test_the_three_levels_give_objectives_that_see_what_they_should(elsewhere):
    names = run_blocks(ROOT / "grpo_jax" / "objectives" / "README.md")
    bound, written, wrapped = (names[name] for name in ("bound", "written", "wrapped"))
    assert {"ref_logp_T", "sampler_logp_T"} <= reads(bound)
    assert reads(written) >= {"adv"}
    assert not {"ref_logp_T", "old_logp_T"} & reads(written)
    assert reads(wrapped) == reads(bound) | {"stopped"}
    assert {"age", "stopped"} <= reads(names["corrected"])


def test_the_readme_is_read_to_its_end():
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST


def test_a_loss_of_ones_own_is_under_ten_lines():
    definition = blocks(DOCUMENTS[0], "python")[1].split("keep_programs()")[0]
    assert len([line for line in definition.splitlines() if line.strip() and "import" not in line]) < 10


# Commands and options.


def commands(document: Path) -> list[list[str]]:
    """The arguments of every `grpo-jax` command, in blocks and in the text."""
    text = document.read_text()
    shell = "\n".join(blocks(document, "bash")).replace("\\\n", " ")
    found = [line.split("#")[0] for line in shell.splitlines() if not line.lstrip().startswith("#")]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found += [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", prose)]
    # A command inside the quotes of another one ends with them.
    told = [re.split(r' && |"$', code.strip())[0] for line in found for code in re.findall(r"grpo-jax (\w.*)", line)]
    return [shlex.split(code) for code in told]


@each_document
def test_commands_are_understood(document, tmp_path):
    config = tmp_path / "config.json"
    write_json(config, dataclasses.asdict(TrainConfig.of()))
    for arguments in commands(document):
        if "--config" in arguments:  # that file is read at once
            arguments[arguments.index("--config") + 1] = str(config)
        if "--help" in arguments:
            continue
        if arguments in (["eval"], ["sample"]):  # the command by its name alone
            arguments = [*arguments, "RUN", "TEXT"][: 2 + (arguments == ["sample"])]
        check_trl_names(arguments, {*option_paths(Train), *option_paths(Plan)})
        shown = io.StringIO()
        try:
            with contextlib.redirect_stderr(shown):
                command = parsed(arguments)
        except SystemExit:
            pytest.fail(f"grpo-jax {shlex.join(arguments)}: {shown.getvalue()}")
        kind = {Train: TrainConfig, Plan: PlanConfig}.get(type(command))
        if kind is TrainConfig or (kind is PlanConfig and command.topology):
            narrowed(command, kind)


def known_flags() -> set[str]:
    kinds = (Train, Eval, Sample, Plan)
    return {flag(name) for kind in kinds for name in option_paths(kind)} | {"--help"}


def sources() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "experiments").rglob("*.py"))


@each_document
def test_options_exist(document):
    """Those of the command line, and in experiments/README.md those of the studies."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = {found for code in re.findall(r"`([^`]+)`", prose) for found in re.findall(r"(?<!\w)--[a-z][a-z-]+", code)}
    unknown = named - known_flags()
    if document.parent.name == "experiments":
        text = sources()
        unknown = {name for name in unknown if name[2:].replace("-", "_") not in text}
    assert not unknown


def test_the_table_for_trl_has_options_of_both():
    table = (ROOT / "README.md").read_text().split("| TRL | command line | program |")[1].split("\n\n")[0]
    for row in table.strip().splitlines()[1:]:
        theirs, ours, _ = (cell.strip() for cell in row.strip("|").split("|"))
        for name in re.findall(r"`(\w+)`", theirs):
            same = name in option_paths(Train)
            assert name in TRL_NAMES or same, name
        assert set(re.findall(r"--[a-z-]+", ours)) <= known_flags()


# Names and files.


def test_every_preset_is_in_the_table():
    text = (ROOT / "grpo_jax" / "objectives" / "README.md").read_text()
    table = text.split("| preset | what it is | paper |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(PRESETS)


@each_page
def test_files_that_it_names_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for module in re.findall(r"python -m (experiments[\w.]*)", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
    for path in re.findall(r"`((?:grpo_jax|tests|experiments)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path


def test_every_room_and_every_example_is_linked():
    text = (ROOT / "README.md").read_text()
    examples = (ROOT / "experiments" / "examples").glob("*.py")
    for path in [*ROOMS, *examples, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        assert f"]({name_of(path)})" in text, name_of(path)


def test_importing_needs_no_torch():
    code = "import sys, grpo_jax; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'trl')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_requirements_for_tpus_are_those_of_the_project():
    lines = [x for x in (ROOT / "requirements-tpu.txt").read_text().splitlines() if x and not x.startswith("#")]
    assert lines == ["-e .[tpu]"]
