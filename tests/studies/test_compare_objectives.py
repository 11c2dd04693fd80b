"""The comparison: its list is complete, its loop is the library's, a small run of the real program leaves it all."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from experiments import compare_objectives, compare_report
from experiments.compare_objectives import SYSTEMS, Options, format_reward, pairs, share, working_reward
from experiments.compare_report import LADDER
from grpo_jax import config
from grpo_jax.objectives import PRESETS, grpo, kl_in_reward, ppo
from grpo_jax.rewards import number_reward
from grpo_jax.runs import run, terminal
from grpo_jax.training import loop

import toy

MODEL = toy.bigram()
BY_NAME = {system.name: system for system in SYSTEMS}


@pytest.fixture
def small(monkeypatch):
    """The real program with a model and batches that compile quickly."""
    numbers = {"prompts": 2, "group_size": 4, "max_new_tokens": 6, "warm_up": 1, "eval_batch": 4}
    task = {"wording": "terse", "train_size": 64, "held_out_size": 4}
    monkeypatch.setattr(run, "decoder", lambda config, **options: MODEL)
    monkeypatch.setitem(config.BY_MODEL, True, config.BY_MODEL[True] | numbers | {"task_args": task})


def command(folder, *options: str) -> list[str]:
    names = ("--only", "ppo", "process_grpo", "--seeds", "0", "1", "--steps", "2", "--eval-every", "1")
    return [*names, "--out", str(folder), *options]


def test_every_preset_and_every_step_of_the_ladder_is_a_system():
    assert set(PRESETS) <= set(BY_NAME)
    assert len(BY_NAME) == len(SYSTEMS)
    assert {name for names in LADDER.values() for name in names} <= set(BY_NAME)
    own = {name: compare_objectives.Options().config(system) for name, system in BY_NAME.items()}
    assert own["reinforce"].objective_options() == {"beta": 0.0}
    assert own["reinforce_discounted"].objective_options()["gamma"] < 1
    assert {own[name].epochs for name in ("grpo", "grpo_2_epochs", "grpo_4_epochs")} == {1, 2, 4}
    assert own["grpo_iterative"].ref_every == 10
    assert own["grpo_ema"].ref_ema == 0.9
    fixed, moving = BY_NAME["grpo_kl_in_reward"], BY_NAME["grpo_adaptive_beta"]
    assert (fixed.kl_reward, fixed.kl_target) == (moving.kl_reward, None)
    assert moving.kl_target > 0
    assert BY_NAME["process_grpo"].rewards == (working_reward,)
    assert len(BY_NAME["gdpo"].rewards) == 2
    ladder_only = set(BY_NAME) - set(PRESETS)
    assert ladder_only <= {name for names in LADDER.values() for name in names}


def test_everything_else_is_equal():
    allowed = {"objective", "objective_args", "epochs", "ref_every", "ref_ema"}
    shared = dataclasses.asdict(Options().config())
    for system in SYSTEMS:
        own = dataclasses.asdict(Options().config(system))
        assert {name for name in own if own[name] != shared[name]} <= allowed, system.name
    assert Options(epochs=2).config(BY_NAME["gspo"]).epochs == 2
    assert Options(warm_up_loss=0.5).config(BY_NAME["gspo"]).warm_up_loss == 0.5
    assert Options(epochs=2).config(BY_NAME["grpo_4_epochs"]).epochs == 4


@pytest.mark.parametrize("count", [1, 3, 8, 200])
def test_shards_partition_the_runs(count):
    runs = pairs(Options(seeds=(0, 1, 5)))
    assert len(runs) == 3 * len(SYSTEMS)
    parts = [share(runs, index, count) for index in range(count)]
    assert [pair for part in parts for pair in part] == runs
    costs = [sum(system.cost for system, _ in part) for part in parts]
    assert max(costs) - min(costs) <= 2 * max(system.cost for system in SYSTEMS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ("grpoo",)}, "did you mean 'grpo'"),
        ({"shard": "3/3"}, "I/N"),
        ({"shard": "one"}, "I/N"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"seeds": ()}, "at least one seed"),
        ({"seeds": (-1,)}, "--seeds must be at least 0"),
    ],
)
def test_a_bad_option_says_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        Options(**options)


def test_the_working_is_rewarded_step_by_step():
    one, two = "7*3=21", "4*9=36 36*2=72"
    assert working_reward("", "7*3=21", one) == [(4, 1.0), (6, 1.0)]
    assert working_reward("", "3*7=22", one) == [(4, 1.0), (6, 0.0)]
    assert working_reward("", "7*4=21", one) == [(4, 0.0), (6, 1.0)]
    assert working_reward("", "4*9=36 3*2=72", two) == [(4, 1.0), (6, 1.0), (11, 0.0), (13, 1.0)]
    assert working_reward("", "7*3=21 1*1=1", one)[2:] == [(11, 0.0), (12, 0.0)]
    assert working_reward("", "21", one) == [(2, 0.0)]
    assert working_reward("", "7*3=", one) == [(4, 0.0)], "half a step does not pay"
    assert working_reward("", "8-3=5", "3-8=5") == [(4, 0.0), (5, 1.0)]
    assert working_reward("", "3+8=11", "8+3=11") == [(4, 1.0), (6, 1.0)]
    assert working_reward("", "", one) == working_reward("", " ", one) == 0.0


def test_the_form_is_rewarded_whatever_the_numbers():
    for text in ("7*3=21", "7*3=99", "4*9=36 36*2=72", "72*10%=7.20", "1+2+3=6"):
        assert format_reward("", text) == 1.0, text
    for text in ("", "21", "7*3", "7*3=", "7*3=21 ", " 7*3=21", "4*9=36  36*2=72", "7**3=21", "x7*3=21"):
        assert format_reward("", text) == 0.0, text


def build(system, options, **fields):
    parts = run.build(options.config())
    own = compare_objectives.specialise(system, parts, options.config(system))
    return own._replace(params=jax.jit(parts.model.init)(jax.random.key(3)), **fields)


def last_update(system, options, parts):
    """A run's record, and its policy after the last step."""
    seen = []

    def evaluate(params):
        seen.append(jax.device_get(params))
        return 0.5

    made = compare_objectives.programs(system, parts, options.config(system))
    result = compare_objectives.iterate(
        system, parts, made, options.config(system), evaluate, lambda *steps, **numbers: None
    )
    return result, seen[-1]


def somewhat_right(completion: str) -> float:
    """A reward that random bytes earn in all kinds of amounts."""
    return sum(character < "@" for character in completion) / 6


@pytest.mark.parametrize("name", ["ppo", "grpo_ema"])
def test_the_loop_is_that_of_the_library(small, name):
    options, system = Options(steps=2, eval_every=2), BY_NAME[name]
    parts = build(system, options)
    parts = parts._replace(task=parts.task._replace(reward=somewhat_right))
    result, policy = last_update(system, options, parts)
    own = options.config(system)
    *_, (saved, metrics) = loop.train(
        parts.model, parts.params, parts.task, parts.tokenizer, parts.objective, parts.optimizer, steps=2,
        prompts_per_step=own.prompts, group_size=own.group_size, max_new_tokens=own.max_new_tokens,
        critic=parts.critic, update_reference=parts.update_reference, length_buckets=1,
        prompt_length=parts.prompt_length,
    )  # fmt: skip
    expected = loop.policy_of(parts.critic, saved.state.params)
    jax.tree.map(lambda own, other: np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7), policy, expected)
    assert result["curve"][-1]["reward"] == pytest.approx(metrics["reward"])
    changed = jax.tree.map(lambda a, b: np.abs(a - b).max(), policy, parts.params)
    assert max(jax.tree.leaves(changed)) > 1e-5


def test_beta_moves_toward_the_target_and_recompiles_nothing(small, monkeypatch):
    options, system = Options(steps=3, eval_every=1), BY_NAME["grpo_adaptive_beta"]
    parts = build(system, options)
    parts = parts._replace(task=parts.task._replace(reward=somewhat_right))
    traces, assemble = [], compare_objectives.assemble
    monkeypatch.setattr(
        compare_objectives, "assemble", lambda *args, **more: traces.append(1) or assemble(*args, **more)
    )
    for count, (target, factor) in enumerate(((1e-9, 1.02), (1e9, 0.98)), 1):
        result, _ = last_update(system._replace(kl_target=target), options, parts)
        betas = [point["beta"] for point in result["curve"]]
        # At the first step the policy is the reference.
        np.testing.assert_allclose(betas, system.kl_reward * np.cumprod([0.98, factor, factor]), rtol=1e-5)
        assert len(traces) == count


def test_beta_in_the_reward_is_an_input(small):
    """The advantages of the compiled batch are those of `kl_in_reward` with that β bound."""
    options, system = Options(), BY_NAME["grpo_kl_in_reward"]
    parts = build(system, options)
    parts = parts._replace(task=parts.task._replace(reward=somewhat_right))
    made = compare_objectives.programs(system, parts, options.config(system))
    rows, key = loop.rows_of(0, parts.task.train, 2, 0), jax.random.key(1)
    reference = jax.tree.map(lambda x: 1.5 * x, parts.params)
    advantages = {}
    for beta in (0.0, 0.5):
        batch, _ = made.collect(parts.params, reference, jax.numpy.float32(beta), key, rows)
        bound = kl_in_reward(grpo(beta=0.0), beta=beta)
        texts = compare_objectives.completion_texts(parts.tokenizer, batch.rollout)
        rewards = np.array([[somewhat_right(text) for text in group] for group in texts], np.float32)
        fields = {"ref_logp_T": batch.samples.ref_logp_T}
        fields["reward_T"] = np.where(
            np.arange(6) == np.asarray(batch.rollout.mask_PGT).sum(-1, keepdims=True) - 1, rewards[..., None], np.nan
        )
        expected = compare_objectives.assemble(bound, batch.rollout, rewards, **fields)
        np.testing.assert_allclose(batch.samples.adv, expected.samples.adv, rtol=1e-5, atol=1e-6)
        advantages[beta] = np.asarray(batch.samples.adv)
    assert np.abs(advantages[0.0] - advantages[0.5]).max() > 1e-3


def test_the_whole_program_with_a_critic_and_process_rewards(small, tmp_path, capsys, monkeypatch):
    folder, figure = tmp_path / "study", tmp_path / "figures" / "picture.png"
    compare_objectives.main(command(folder, "--shard", "0/2"))
    assert not (folder / "summary.json").exists()
    first = folder.read_lines(folder / "results-0-of-2.jsonl")
    assert [(line["system"], line["seed"]) for line in first] == [("process_grpo", 0), ("process_grpo", 1)]
    assert "process_grpo seed 1" in capsys.readouterr().out
    with monkeypatch.context() as patch:  # --merge trains nothing
        patch.setattr(compare_objectives, "iterate", None)
        compare_objectives.main(command(folder, "--merge"))
    assert [row["system"] for row in json.loads((folder / "summary.json").read_text())["systems"]] == ["process_grpo"]

    compare_objectives.main(command(folder, "--figure", str(figure)))
    assert folder.read_lines(folder / "results-0-of-2.jsonl") == first
    second = folder.read_lines(folder / "results-0-of-1.jsonl")
    assert [(line["system"], line["seed"]) for line in second] == [("ppo", 0), ("ppo", 1)]
    summary = json.loads((folder / "summary.json").read_text())
    assert {row["system"]: row["seeds"] for row in summary["systems"]} == {"ppo": [0, 1], "process_grpo": [0, 1]}
    for line in first + second:
        assert [point["step"] for point in line["curve"]] == [0, 1, 2]
        assert 2 * 2 * 4 <= line["sampled_tokens"] <= 2 * 2 * 4 * 6
    memory = {line["system"]: line["memory"] for line in first + second}
    assert memory["ppo"]["arguments"] > 1.3 * memory["process_grpo"]["arguments"]
    assert memory["ppo"]["temporaries"] > memory["process_grpo"]["temporaries"] > 0
    assert "| ppo | " in (folder / "summary.md").read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "ppo" in capsys.readouterr().out

    with monkeypatch.context() as patch:  # everything is finished: nothing is trained
        patch.setattr(compare_objectives, "iterate", None)
        compare_objectives.main(command(folder))
    assert folder.read_lines(folder / "results-0-of-1.jsonl") == second
    with pytest.raises(SystemExit, match="other settings \\(steps\\)"):
        compare_objectives.main([*command(folder), "--steps", "3"])


def test_processes_start_from_the_first_policy_that_was_kept(small, tmp_path, monkeypatch):
    """A process that warmed up while another one finished throws its own away."""
    options = Options(out=tmp_path)
    parts, screen = run.build(options.config()), terminal.Screen()
    ones = jax.tree.map(np.ones_like, parts.params)

    def start_elsewhere(config, parts, screen):
        np.savez(tmp_path / "start-0.npz", *jax.tree.leaves(ones))
        return parts.params

    monkeypatch.setattr(run, "start", start_elsewhere)
    got = compare_objectives.starting_policy(tmp_path, options.config(), parts, screen)
    jax.tree.map(np.testing.assert_array_equal, got, ones)
    monkeypatch.setattr(run, "start", None)
    got = compare_objectives.starting_policy(tmp_path, options.config(), parts, screen)
    jax.tree.map(np.testing.assert_array_equal, got, ones)
    assert [path.name for path in tmp_path.iterdir()] == ["start-0.npz"]


def made_up(system: str, seed: int, *accuracies: float, memory: float = 1e6) -> dict:
    curve = [{"step": 5 * i, "held_out": accuracy} for i, accuracy in enumerate(accuracies)]
    numbers = {"sampled_tokens": 1000 + seed, "seconds_per_step": 0.1 * (1 + seed)}
    needs = {"arguments": memory, "temporaries": 3 * memory}
    return {"system": system, "seed": seed, "settings": "", "curve": curve, "memory": needs} | numbers


def test_a_row_is_the_mean_and_deviation_over_seeds():
    records = [
        made_up("grpo", 0, 0.2, 0.8, 0.9, memory=5e5),
        made_up("grpo", 1, 0.4, 0.7, 0.8, memory=5e5),
        made_up("grpo", 2, 0.3, 0.5, 0.7, memory=5e5),
        made_up("ppo", 0, 0.2, 0.5, 0.95),
    ]
    best, other = compare_report.summarise(records)
    assert (best["system"], other["system"]) == ("ppo", "grpo")
    assert other["before"] == pytest.approx({"mean": 0.3, "std": 0.1})
    assert other["after"] == pytest.approx({"mean": 0.8, "std": 0.1})
    assert other["steps_to_levels"] == [5, 10]  # of 5, 5 and 10; of 5, 10 and never
    assert best["after"]["std"] == 0.0
    assert best["memory_of_grpo"] == 2.0
    assert other["sampled_tokens"] == 1001
    assert other["seconds_per_step"] == pytest.approx(0.2)
    assert compare_report.cells(other)[1:6] == ("30.0 ± 10.0", "80.0 ± 10.0", "5", "10", "1k")
    assert compare_report.cells(best) == ("ppo", "20.0", "95.0", "10", "10", "1k", "0.10", "1.0 + 3.0", "2.00")
    assert "over 1 to 3 seeds" in compare_report.markdown([best, other])
    assert "over 3 seeds" in compare_report.markdown([other])
    never = compare_report.summarise([made_up("bnpo", 0, 0.2, 0.79)])[0]
    assert compare_report.cells(never)[3:5] == ("5", "–")
    assert compare_report.cells(never)[8] == "–"


def test_ppo_needs_the_critic_that_its_system_gets(small):
    parts = build(BY_NAME["ppo"], Options())
    assert parts.critic is not None
    assert repr(parts.objective) == repr(ppo(beta=config.BY_MODEL[True]["objective_args"]["beta"]))
    assert build(BY_NAME["gdpo"], Options()).task.reward == [number_reward, format_reward]
