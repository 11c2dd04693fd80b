"""The benchmark: its batches, its refusal to compare what differs, its folder, and a small real run of the program."""

import dataclasses
import importlib
import json
import sys
from functools import cache, partial

import jax
import numpy as np
import pytest
from experiments.benchmark import __main__ as program
from experiments.benchmark import agreement, driver, weights, worker
from experiments.benchmark.agreement import DisagreementError
from experiments.benchmark.driver import Plan, WorkerError
from experiments.benchmark.report import FIELDS, STAGES, Report, ratios
from experiments.benchmark.workloads import SHAPES, WORKLOADS, Workload, make_inputs, necessary_work
from rich.console import Console

STOP = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Seeded random weights of the tiny shape."""
    path = tmp_path_factory.mktemp("weights") / "weights-tiny"
    weights.write_random("tiny", path)
    return path


# --- batches ------------------------------------------------------------------------------------------------------


def test_ragged_batches_end_with_the_stop_token_and_half_of_the_groups_teach_nothing():
    work = WORKLOADS["W4"]
    inputs = make_inputs(work, 512, STOP, seed=3)
    length = inputs["length_PG"]
    assert (length.min() >= 4, length.max() <= 128, len(np.unique(length)) > 10) == (True, True, True)
    np.testing.assert_array_equal(inputs["mask_PGT"].sum(-1), length)
    last = np.take_along_axis(inputs["tokens_PGT"], length[..., None] - 1, -1)
    assert (last == STOP).all()
    assert ((inputs["tokens_PGT"] == STOP).argmax(-1) == length - 1).all()
    assert (inputs["prompt_PS"] > STOP).all()
    np.testing.assert_array_equal((inputs["advantage_PG"] != 0).any(1), [True, True, False, False])
    again, other = make_inputs(work, 512, STOP, seed=3), make_inputs(work, 512, STOP, seed=4)
    assert all((again[name] == inputs[name]).all() for name in inputs)
    assert (other["length_PG"] != length).any()
    moved = make_inputs(dataclasses.replace(work, seed=1), 512, STOP, seed=3)
    assert all((moved[name] == other[name]).all() for name in moved)


def test_fixed_batches_have_full_lengths_and_advantages_of_the_paper():
    inputs = make_inputs(WORKLOADS["W1"], 512, STOP)
    assert inputs["mask_PGT"].all()
    np.testing.assert_allclose(inputs["advantage_PG"].mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(inputs["advantage_PG"].std(1), 1, rtol=1e-5)


def test_necessary_work_counts_prompts_once_and_no_group_without_gradient():
    config, work = SHAPES["tiny"], Workload(2, 3, 5, 4, beta=0.1)
    body, vocabulary = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128), 512 * 64
    inputs = make_inputs(work, 512, STOP)
    counted = necessary_work(work, config, inputs)
    assert counted["tokens"] == 24
    assert counted["train_flops"] == 6 * (body * (2 * 5 + 24) + vocabulary * 24)
    assert counted["decode_flops"] == 2 * (body * (2 * 5 + 24) + vocabulary * 24)
    assert counted["decode_reads"] == 4 * (body + vocabulary)
    half = dataclasses.replace(work, beta=0.0, equal=0.5)
    skipped = necessary_work(half, config, make_inputs(half, 512, STOP))
    assert skipped["train_flops"] == 6 * (body * (5 + 12) + vocabulary * 12)
    assert skipped["decode_flops"] == counted["decode_flops"]


# --- agreement ----------------------------------------------------------------------------------------------------


def first_step(**changed):
    rng = np.random.default_rng(0)
    step = {"loss": 0.5, "grad_norm": 2.0, "reference_PGT": rng.normal(size=(2, 2, 4)), "gradient": rng.normal(size=9)}
    return step | changed


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("loss", lambda x: x * 1.002),
        ("grad_norm", lambda x: x * 0.99),
        ("reference_PGT", lambda x: x + 0.01),
        ("gradient", lambda x: x * 1.01),
        ("gradient", lambda x: x[::-1]),
        ("loss", lambda x: float("nan")),
    ],
)
def test_first_steps_that_differ_are_refused(name, change):
    ours = first_step()
    close = {key: value * (1 + 1e-5) for key, value in ours.items()}
    assert max(agreement.check("W1", "trl", ours, close).values()) < 1e-4
    with pytest.raises(DisagreementError, match=rf"W1: grpo_jax and trl .*{name} by .*No table"):
        agreement.check("W1", "trl", ours, ours | {name: change(ours[name])})


def test_bfloat16_has_wider_limits():
    ours = first_step()
    theirs = ours | {"loss": ours["loss"] * 1.01}
    agreement.check("W1", "trl", ours, theirs, dtype="bfloat16")
    with pytest.raises(DisagreementError):
        agreement.check("W1", "trl", ours, theirs)


# --- the folder of results ----------------------------------------------------------------------------------------


def result(step=1.0, **changed):
    stages = {"sample": [step * 0.3], "reference": [step * 0.1], "train": [step * 0.55], "step": [step]}
    numbers = {"compile_s": 2.0, "temp_bytes": None, "peak_rss_bytes": 10**9, "loss": 0.5, "grad_norm": 2.0}
    return {"stages": stages} | numbers | changed


@pytest.fixture
def plan(tmp_path, folder):
    contestants = ("machine_jax", "grpo_jax", "trl")
    return Plan(
        ("T1",), contestants, dict.fromkeys(contestants, sys.executable), str(folder), tmp_path / "out", "tiny",
        "float32", rounds=2, repeats=1, memory_limit=2**34,
    )  # fmt: skip


class Workers:
    """Workers that answer at once; `started` says which, `answers` what instead of the usual result."""

    def __init__(self):
        self.started, self.answers = [], {}

    def run(self, python, spec, memory_limit, tell):
        self.started.append(spec["contestant"])
        tell({"stage": "step", "seconds": 1.0, "peak_rss_bytes": 1})
        answer = self.answers.get(spec["contestant"], result())
        if isinstance(answer, Exception):
            raise answer
        if spec["contestant"] == "machine_jax":
            answer = {"flops": 1e9, "bytes_per_s": 1e8}
        path = driver.Path(spec["result"])
        path.with_suffix(".spec").write_text(json.dumps(spec))
        np.savez(path.with_suffix(".npz"), reference_PGT=np.ones(3), gradient=np.ones(3))
        path.write_text(json.dumps(answer))
        return answer

    def measure(self, plan):
        return driver.measure(plan, silent, self.run)


@pytest.fixture
def workers():
    return Workers()


def silent(*_):
    pass


def test_contestants_alternate_and_what_is_measured_is_not_measured_again(plan, workers):
    results, rates, _ = workers.measure(plan)
    assert workers.started == ["machine_jax", "grpo_jax", "trl"] * 2
    assert [len(found) for found in results["T1"].values()] == [2, 2]
    assert len(rates["machine_jax"]) == 2
    workers.started.clear()
    assert workers.measure(plan)[0] == results
    assert workers.started == []
    workers.measure(dataclasses.replace(plan, rounds=3))
    assert workers.started == ["machine_jax", "grpo_jax", "trl"]
    more = driver.specs(dataclasses.replace(plan, workloads=("T1", "T4"), rounds=1))
    assert [name for workload, name, _ in more if workload == "T4"] == ["grpo_jax", "trl"]
    with pytest.raises(ValueError, match="repeats 1, now 5: choose another --out"):
        workers.measure(dataclasses.replace(plan, repeats=5))


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ({"memory_limit": 2**35}, ["machine_jax", "grpo_jax", "trl"] * 2),
        ({"versions": {"trl": {"trl": "2.0"}}}, ["trl"] * 2),
    ],
    ids=str,
)
def test_what_was_measured_otherwise_is_measured_again(plan, workers, changed, again):
    workers.measure(plan)
    workers.started.clear()
    workers.measure(dataclasses.replace(plan, **changed))
    assert workers.started == again


def test_another_batch_is_measured_again(plan, workers):
    workers.measure(plan)
    workers.started.clear()
    other = dataclasses.replace(WORKLOADS["T1"], seed=1)
    workers.measure(dataclasses.replace(plan, sizes={"T1": other}))
    assert workers.started.count("grpo_jax") == 2
    with np.load(plan.out / "T1" / "inputs.npz") as found:
        np.testing.assert_array_equal(found["tokens_PGT"], make_inputs(other, 512, STOP)["tokens_PGT"])


def test_how_an_accelerator_attends_is_said_once_and_steps_are_still_compared(plan, workers):
    workers.answers["grpo_jax"] = workers.answers["trl"] = result(attention="einsums")
    _, _, notes = workers.measure(dataclasses.replace(plan, platform="gpu"))
    assert notes.count("T1: grpo_jax attends by einsums in training") == 1  # of two rounds
    assert any(note.startswith("T1: first step of grpo_jax and trl differ") for note in notes)


def test_a_process_that_misses_the_accelerator_ends(tmp_path, folder):
    """PyTorch or JAX without CUDA on a machine with a GPU: no figures of its processor beside those of the GPU."""
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, **make_inputs(WORKLOADS["T1"], 512, STOP))
    spec = worker_spec(tmp_path, contestant="grpo_jax", inputs=str(inputs), folder=str(folder), platform="gpu")
    spec |= {"stop_id": STOP, "learning_rate": 1e-6, "clip_norm": 1.0, "repeats": 1, "vocab_size": 512}
    with pytest.raises(WorkerError, match=r"it finds a cpu on a machine with a gpu: install jax\[cuda13\]"):
        driver.run_worker(sys.executable, spec, 2**34, silent)


def test_a_wrong_loss_ends_the_run_before_more_is_measured(plan, workers):
    workers.answers["trl"] = result(loss=0.501)
    with pytest.raises(DisagreementError, match="T1: grpo_jax and trl"):
        workers.measure(plan)
    assert workers.started == ["machine_jax", "grpo_jax", "trl"]
    workers.answers.clear()
    with pytest.raises(DisagreementError):  # what lies in the folder is judged too
        workers.measure(plan)


def test_a_peer_that_fails_is_left_out_and_said_so(plan, workers):
    workers.answers["trl"] = WorkerError("trl ended with code 1: no such thing")
    results, _, notes = workers.measure(plan)
    assert workers.started.count("trl") == 1
    assert "no such thing" in notes[0]
    report = Report(
        results, {"versions": {}}, SHAPES["tiny"], {"T1": make_inputs(WORKLOADS["T1"], 512, 2)}, [], "float32"
    )
    assert list(report.rows["T1"]) == ["grpo_jax"]
    workers.answers = {"grpo_jax": WorkerError("broken")}
    with pytest.raises(WorkerError, match="broken"):
        workers.measure(dataclasses.replace(plan, rounds=3))


def worker_spec(tmp_path, **changed):
    spec = {"contestant": "machine_jax", "result": str(tmp_path / "x.0.json"), "dtype": "float32", "matrix": 8}
    work = dataclasses.asdict(WORKLOADS["T1"])
    return spec | {"copy_bytes": 64, "workload": work, "platform": "cpu"} | changed


def test_a_process_that_takes_too_much_memory_is_ended(tmp_path):
    found = driver.run_worker(sys.executable, worker_spec(tmp_path), 2**20, silent)
    assert found == {"failed": "machine_jax: out of memory, above 0 GiB resident"}
    assert json.loads((tmp_path / "x.0.json").read_text()) == found


def test_a_process_that_fails_says_why(tmp_path):
    spec = worker_spec(tmp_path, contestant="nobody", inputs=str(tmp_path / "missing.npz"))
    driver.Path(spec["result"]).write_text("{}")  # of an earlier run that was told something else
    with pytest.raises(WorkerError, match=r"nobody ended with code 1: .*missing\.npz"):
        driver.run_worker(sys.executable, spec, 2**34, silent)
    assert not driver.Path(spec["result"]).exists()


# --- figures ------------------------------------------------------------------------------------------------------


def test_json_tables_and_ratios():
    results = {
        "T1": {
            "grpo_jax": [result(1.0, temp_bytes=10**6), result(3.0, temp_bytes=10**6), result(2.0, temp_bytes=10**6)],
            "grpo_jax_layer": [result(1.0, temp_bytes=2 * 10**6)],
            "trl": [result(8.0, device_peak_bytes=3 * 10**9)],
            "tunix": [result(6.0, temp_bytes=5 * 10**6)],
            "transformers": [{"failed": "out of memory"}],
        }
    }
    machine = {
        "processor": "P", "cores": 2, "dtype": "float32", "date": "2026-01-01", "versions": {"jax": "1"},
        "matrix_flops": 1e9, "bandwidth_bytes_per_s": 1e8,
    }  # fmt: skip
    inputs = {"T1": make_inputs(WORKLOADS["T1"], 512, STOP)}
    report = Report(results, machine, SHAPES["tiny"], inputs, ["a note"], "float32")
    found = json.loads(report.json())
    assert set(found) == {"machine", "workloads"}
    assert list(found["workloads"]) == ["T1"]
    assert list(found["workloads"]["T1"]) == ["grpo_jax", "grpo_jax_layer", "trl", "tunix"]
    assert all(set(row) == set(FIELDS) for row in found["workloads"]["T1"].values())
    assert found["workloads"]["T1"]["grpo_jax"]["step_s"] == 2.0
    assert found["workloads"]["T1"]["trl"]["temp_bytes"] is None
    assert ratios(report.rows["T1"]) == {
        "grpo_jax against faster of TRL and Tunix": pytest.approx(dict.fromkeys(STAGES, 3)),
        "grpo_jax against temporaries of Tunix": {"train": 5.0},
        "grpo_jax_layer against faster of TRL and Tunix": pytest.approx(dict.fromkeys(STAGES, 6)),
        "grpo_jax_layer against temporaries of Tunix": {"train": 2.5},
    }
    ours = report.cells("T1")[0]
    work = report.work["T1"]
    assert ours[4:9] == [
        "2 (1 to 3)",
        "5.0%",
        f"{work['tokens'] / 2:.0f}",
        f"{work['train_flops'] / 1e9 / 1.1:.0%}",
        f"{max(work['decode_reads'] * 4 / 1e8, work['decode_flops'] / 1e9) / 0.6:.0%}",
    ]
    peaks = [row[-2] for row in report.cells("T1")]  # a GPU's memory where there is one
    assert peaks == ["1.00", "1.00", "3.00", "1.00"]
    markdown = report.markdown()
    assert all(text in markdown for text in ("| trl |", "step 3.00×", "2026-01-01", "- a note"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"workloads": "W9"}, "--workloads has unknown names W9"),
        ({"workloads": ""}, "--workloads names none"),
        ({"peers": "verl"}, "--peers has unknown names verl"),
        ({"rounds": 0}, "--rounds and --repeats must be at least 1"),
        ({"shape": "huge"}, "--shape must be one of tiny"),
        ({"weights": "/nowhere"}, "holds no config.json"),
    ],
)
def test_bad_options_are_refused(option, message, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        program.make_plan(program.Options(out=str(tmp_path), **({"shape": "tiny", "peers": ""} | option)), "cpu")


def test_a_peer_that_is_not_installed_is_left_out_and_said_so(folder, tmp_path):
    options = program.Options(
        peers="tunix", tunix_python=str(tmp_path / "none"), weights=str(folder), shape="tiny", out=str(tmp_path)
    )
    plan, versions, notes = program.make_plan(options, "cpu")
    assert plan.contestants == ("machine_jax", "grpo_jax", "grpo_jax_layer")
    plan, _, _ = program.make_plan(options, "gpu")
    assert (plan.contestants, plan.dtype, plan.rounds, plan.repeats) == (("machine_jax", "grpo_jax"), "bfloat16", 1, 5)
    assert "jax" in versions
    assert any("tunix is left out" in note for note in notes)


def test_progress_is_told_without_a_terminal(plan, workers, capsys):
    program.measure(plan, Console(width=100), workers.run)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("benchmark 0/6  T1 round 1 machine_jax: step 1 s")
    assert lines[-1].startswith("benchmark 6/6")


# --- contestants --------------------------------------------------------------------------------------------------


def measure(folder, contestant: str, workload: str, **options):
    """What a contestant makes of a workload of the tiny shape, in this process."""
    settings = {
        "contestant": contestant, "folder": str(folder), "workload": dataclasses.asdict(WORKLOADS[workload]),
        "dtype": "float32", "repeats": 1, "stop_id": STOP, "vocab_size": 512, "learning_rate": 1e-6, "clip_norm": 1.0,
    }  # fmt: skip
    spec = worker.spec_of(settings)
    inputs = make_inputs(spec.workload, 512, STOP)
    module = importlib.import_module(f"experiments.benchmark.{worker.MODULES[worker.family(contestant)]}")
    found, arrays = worker.measure(module.build(spec, inputs, **options), spec, inputs)
    return found, {name: found[name] for name in ("loss", "grad_norm")} | arrays


@pytest.fixture(scope="module")
def measured(folder):
    return cache(partial(measure, folder))


@pytest.mark.parametrize("peer", ["transformers", "trl"])
@pytest.mark.parametrize("workload", ["T3", "T4"])
def test_peers_take_the_same_first_step(measured, peer, workload):
    """The lengths of T4 are forced on every sampler: `measure` raises where one has others."""
    pytest.importorskip("torch")
    pytest.importorskip(peer)
    (found, theirs), (own, ours) = measured(peer, workload), measured("grpo_jax", workload)
    assert np.abs(ours["gradient"]).max() > 1e-4
    assert np.abs(ours["loss"]) > 1e-3
    agreement.check(workload, peer, ours, theirs)
    assert (found["temp_bytes"], own["temp_bytes"] > 0) == (None, True)
    assert (found["device_peak_bytes"], own["device_peak_bytes"]) == (None, None)  # of an accelerator
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found["stages"].values())


@pytest.mark.parametrize("peer", ["transformers", "trl"])
def test_peers_generate_with_a_cache_of_fixed_shape_on_gpus(folder, monkeypatch, peer):
    pytest.importorskip(peer)
    from experiments.benchmark import torch_parts
    from transformers.generation import GenerationMixin

    assert torch_parts.generation_cache("cpu") == {}
    cache, made = torch_parts.generation_cache("cuda"), []
    prepare = GenerationMixin._prepare_static_cache
    monkeypatch.setattr(
        GenerationMixin, "_prepare_static_cache", lambda *args, **given: made.append(1) or prepare(*args, **given)
    )
    compiled = []
    monkeypatch.setattr(
        GenerationMixin, "_valid_auto_compile_criteria", lambda *args: compiled.append(not args[2].disable_compile)
    )
    measure(folder, peer, "T4", cache=cache)  # which raises where the lengths are not those of the workload
    assert len(made) == 2
    assert compiled == [True, True]


def test_the_second_row_keeps_less_and_computes_the_same(measured):
    (more, ours), (less, second) = measured("grpo_jax", "T4"), measured("grpo_jax_layer", "T4")
    agreement.check("T4", "grpo_jax_layer", ours, second)
    assert more["temp_bytes"] != less["temp_bytes"]


def test_lengths_that_were_not_reached_are_an_error():
    class Short:
        first = staticmethod(lambda clock: {})
        step = staticmethod(lambda clock: np.full((2, 4), 3))

    spec = worker.spec_of({"workload": dataclasses.asdict(WORKLOADS["T4"]), "repeats": 1})
    with pytest.raises(RuntimeError, match=r"sampled lengths \[\[3, 3.*expected"):
        worker.measure(Short, spec, make_inputs(spec.workload, 512, STOP))


def test_forced_lengths_leave_the_other_tokens_to_the_model(folder):
    from experiments.benchmark.with_grpo_jax import force_lengths
    from grpo_jax.inference.generate import generate
    from grpo_jax.models import load_pretrained
    from grpo_jax.options import Generation
    from grpo_jax.types import Prompts

    model, params = load_pretrained(folder)
    lengths = np.array([[2, 6, 4], [5, 3, 6]])
    prompts = Prompts(np.arange(10, 18, dtype=np.int32).reshape(2, 4), np.ones((2, 4), bool))
    forced = force_lengths(model, lengths, STOP)
    options = {"generation": Generation(3, 6), "stop_ids": (STOP,)}
    rollout = generate(forced, params, prompts, jax.random.key(0), **options)
    np.testing.assert_array_equal(np.asarray(rollout.mask_PGT).sum(-1), lengths)
    assert np.asarray(rollout.stopped_PG).all()
    tokens = np.asarray(rollout.tokens_PGT)
    np.testing.assert_array_equal(tokens[..., 0], STOP + 1 + np.arange(6).reshape(2, 3))
    assert len(np.unique(tokens[:, :, 1])) > 3


def test_the_program(tmp_path, folder, monkeypatch):
    """Processes, progress, files: everything but the peers, which the tests above run. Compiled as users compile."""
    monkeypatch.delenv("XLA_FLAGS")
    out = tmp_path / "out"
    options = program.Options(
        workloads="T4", peers="", rounds=1, shape="tiny", weights=str(folder), out=str(out),
        json=str(tmp_path / "a.json"), figure=str(tmp_path / "a.png"), markdown=str(tmp_path / "a.md"),
    )  # fmt: skip
    program.main(options)
    found = json.loads((tmp_path / "a.json").read_text())
    assert set(found["workloads"]["T4"]) == {"grpo_jax", "grpo_jax_layer"}
    assert set(found["workloads"]["T4"]["grpo_jax"]) == set(FIELDS)
    measured = [name for name in FIELDS if name not in ("compile_s", "device_peak_bytes")]
    assert all(found["workloads"]["T4"]["grpo_jax"][name] > 0 for name in measured)
    assert found["machine"]["matrix_flops"] > 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    before = (out / "T4" / "grpo_jax.0.json").stat().st_mtime_ns
    program.main(options)
    assert (out / "T4" / "grpo_jax.0.json").stat().st_mtime_ns == before
    assert json.loads((tmp_path / "a.json").read_text())["workloads"] == found["workloads"]
