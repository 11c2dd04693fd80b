"""The comparison: its list is complete, its runs are the library's, a small run of the real program leaves it all."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments import compare_objectives, compare_report
from experiments.compare_objectives import (
    BETA,
    SYSTEMS,
    Options,
    format_reward,
    pairs,
    record,
    share,
    specialise,
    with_seed,
    working_reward,
)
from experiments.compare_report import LADDER
from grpo_jax.components import Components, objective_of, optimizer_of, stages_of, task_of
from grpo_jax.config import TrainConfig
from grpo_jax.inference.critic import policy_of
from grpo_jax.inference.text import completion_texts
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.named_options import option, option_paths
from grpo_jax.objectives import PRESETS, grpo, kl_in_reward, ppo
from grpo_jax.rewards import number_reward
from grpo_jax.runs import terminal
from grpo_jax.runs.folder import read_lines
from grpo_jax.training.batch import assemble
from grpo_jax.training.loop import collect, iterate, iteration_key, sampled, train, weights_of
from grpo_jax.training.rows import prompt_width

import toy

MODEL = toy.bigram()._replace(config=toy.BigramConfig(max_position_embeddings=64))
BY_NAME = {system.name: system for system in SYSTEMS}
SMALL = {
    "prompts_per_step": 2,
    "group_size": 4,
    "max_new_tokens": 6,
    "sft_steps": 1,
    "eval_batch_size": 4,
    "task_args": ("wording=terse", "train_size=64", "held_out_size=4"),
}


def build(config: TrainConfig) -> Components:
    """What the real program builds, with a model that compiles quickly."""
    task, tokenizer = task_of(config), ByteTokenizer()
    params = MODEL.init(jax.random.key(3))
    parts = (objective_of(config), optimizer_of(config), None, None)
    return Components(MODEL, params, tokenizer, task, *parts, prompt_width(task, tokenizer))


def small(**options) -> Options:
    return Options(**options, shared=SMALL)


def command(folder, *options: str) -> list[str]:
    names = ("--only", "ppo", "process_grpo", "--seeds", "0", "1", "--steps", "2", "--eval-every", "1")
    return [*names, "--out", str(folder), *options]


def flat(config: TrainConfig) -> dict:
    return {name: option(config, name) for name in option_paths(TrainConfig)}


def test_every_preset_and_every_step_of_the_ladder_is_a_system():
    assert set(PRESETS) <= set(BY_NAME)
    assert len(BY_NAME) == len(SYSTEMS)
    assert {name for names in LADDER.values() for name in names} <= set(BY_NAME)
    own = {name: compare_objectives.Options().config(system) for name, system in BY_NAME.items()}
    assert own["reinforce"].objective_options() == {"beta": 0.0}
    assert own["reinforce_discounted"].objective_options()["gamma"] < 1
    assert {own[name].update.epochs for name in ("grpo", "grpo_2_epochs", "grpo_4_epochs")} == {1, 2, 4}
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
    shared = flat(Options().config())
    for system in SYSTEMS:
        own = flat(Options().config(system))
        assert {name for name in own if own[name] != shared[name]} <= allowed, system.name
    assert Options(epochs=2).config(BY_NAME["gspo"]).update.epochs == 2
    assert Options(sft_target_loss=0.5).config(BY_NAME["gspo"]).sft_target_loss == 0.5
    assert Options(epochs=2).config(BY_NAME["grpo_4_epochs"]).update.epochs == 4


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
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"seeds": ()}, "at least one seed"),
        ({"seeds": (-1,)}, "seeds must be an integer of at least 0"),
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


def somewhat_right(completion: str) -> float:
    """A reward that random bytes earn in all kinds of amounts."""
    return sum(character < "@" for character in completion) / 6


def specialised(system, options, **task) -> Components:
    own = specialise(system, build(options.config()), options.config(system))
    return own._replace(task=own.task._replace(**task))


def one_run(system, options, built, stages, seed):
    """A run's record, and its policy after the last step."""
    seen = []

    def evaluate(params):
        seen.append(jax.device_get(params))
        return 0.5

    config = options.config(system, seed)
    stages = with_seed(stages, config, built)
    state = stages.start(built.params)
    iterations = iterate(stages, state, steps=config.steps, update_reference=built.update_reference)
    return record(system, stages, iterations, config, evaluate, lambda step, **numbers: None), seen[-1]


@pytest.mark.parametrize("name", ["ppo", "grpo_ema"])
def test_runs_of_all_seeds_are_those_of_the_library(name):
    options, system = small(steps=2, eval_every=2), BY_NAME[name]
    built = specialised(system, options, reward=somewhat_right)
    stages = stages_of(options.config(system), built)
    for seed in (0, 1):
        result, policy = one_run(system, options, built, stages, seed)
        own = options.config(system, seed)
        *_, (state, metrics) = train(
            built.model, built.params, built.task, built.tokenizer, built.objective, built.optimizer, steps=2,
            seed=seed, generation=own.generation, update=own.update, batching=own.batching, critic=built.critic,
            update_reference=built.update_reference,
        )  # fmt: skip
        expected = policy_of(built.critic, state.train.params)
        jax.tree.map(lambda own, other: np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7), policy, expected)
        assert result["curve"][-1]["reward"] == pytest.approx(metrics["reward"])
        changed = jax.tree.map(lambda a, b: np.abs(a - b).max(), policy, built.params)
        assert max(jax.tree.leaves(changed)) > 1e-5


@pytest.mark.parametrize(("target", "factor"), [(1e-9, 1.02), (1e9, 0.98)])
def test_beta_moves_toward_the_target_and_recompiles_nothing(target, factor):
    options, system = small(steps=3, eval_every=1), BY_NAME["grpo_adaptive_beta"]._replace(kl_target=target)
    built = specialised(system, options, reward=somewhat_right)
    stages = stages_of(options.config(system), built)
    with toy.compilations() as names:
        for seed in (0, 1):
            result, _ = one_run(system, options, built, stages, seed)
            betas = [point["beta"] for point in result["curve"]]
            # At the first step the policy is the reference.
            np.testing.assert_allclose(betas, system.kl_reward * np.cumprod([0.98, factor, factor]), rtol=1e-5)
    assert (names.count("assemble"), names.count("step")) == (1, 1)


def test_beta_in_the_reward_is_an_input():
    """The advantages of the compiled batch are those of `kl_in_reward` with that β bound."""
    options, system = small(), BY_NAME["grpo_adaptive_beta"]
    built = specialised(system, options, reward=somewhat_right)
    stages = stages_of(options.config(system), built)
    state = stages.start(built.params, jax.tree.map(lambda x: 1.5 * x, built.params))
    weights = weights_of(state)
    rollout, data = sampled(stages, stages.publish(weights), weights, iteration_key(state, 1), state.data)
    found, _ = collect(stages, weights, rollout, None, data)
    advantages = {}
    for beta in (0.0, 0.5):
        batch = stages.assemble(*found, jnp.float32(beta))
        bound = kl_in_reward(grpo(beta=0.0), beta=beta)
        texts = completion_texts(built.tokenizer, batch.rollout)
        rewards = np.array([[somewhat_right(text) for text in group] for group in texts], np.float32)
        fields = {name: getattr(batch.samples, name) for name in ("ref_logp_T", "old_logp_T")}
        fields["reward_T"] = np.where(
            np.arange(6) == np.asarray(batch.rollout.mask_PGT).sum(-1, keepdims=True) - 1, rewards[..., None], np.nan
        )
        expected = assemble(bound, batch.rollout, rewards, **fields)
        np.testing.assert_allclose(batch.samples.adv, expected.samples.adv, rtol=1e-5, atol=1e-6)
        advantages[beta] = np.asarray(batch.samples.adv)
    assert np.abs(advantages[0.0] - advantages[0.5]).max() > 1e-3


def never(config):
    raise AssertionError("nothing is to be trained")


def test_the_whole_program_with_a_critic_and_process_rewards(tmp_path, capsys):
    folder, figure = tmp_path / "study", tmp_path / "figures" / "picture.png"
    main = lambda *options, build=build: compare_objectives.main(
        command(folder, *options), default=small(), build=build
    )
    main("--shard", "0/2")
    assert not (folder / "summary.json").exists()
    first = read_lines(folder / "results-0-of-2.jsonl")
    assert [(line["system"], line["seed"]) for line in first] == [("process_grpo", 0), ("process_grpo", 1)]
    assert "process_grpo seed 1" in capsys.readouterr().out
    main("--merge", build=never)
    assert [row["system"] for row in json.loads((folder / "summary.json").read_text())["systems"]] == ["process_grpo"]

    main("--figure", str(figure))
    assert read_lines(folder / "results-0-of-2.jsonl") == first
    second = read_lines(folder / "results-0-of-1.jsonl")
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

    main(build=never)  # everything is finished
    assert read_lines(folder / "results-0-of-1.jsonl") == second
    with pytest.raises(SystemExit, match="other settings \\(steps\\)"):
        main("--steps", "3")


def test_processes_start_from_the_first_policy_that_was_kept(tmp_path):
    """A process that trained its own while another one finished throws it away."""
    options = small(out=tmp_path)
    built, screen = build(options.config()), terminal.Screen()
    ones = jax.tree.map(np.ones_like, built.params)

    def start_elsewhere(config, built, screen):
        np.savez(tmp_path / "start-0.npz", *jax.tree.leaves(ones))
        return built.params

    for start in (start_elsewhere, never):
        got = compare_objectives.starting_policy(tmp_path, options.config(), built, screen, start)
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


def test_ppo_needs_the_critic_that_its_system_gets():
    built = specialised(BY_NAME["ppo"], Options())
    assert built.critic is not None
    assert repr(built.objective) == repr(ppo(beta=BETA))
    assert specialised(BY_NAME["gdpo"], Options()).task.reward == [number_reward, format_reward]
