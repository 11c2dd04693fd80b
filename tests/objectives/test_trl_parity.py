"""TRL 1.16's own losses, run on the same log-probabilities: values and gradients to 1e-5.

A trainer object is made without its constructor, with the attributes that `_compute_loss` reads, and its forward pass
is replaced by one that returns given log-probabilities. What differs by design is in the table of `presets`.
"""

import functools
import types
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    Objective,
    batch_advantages,
    batch_loss,
    batch_scale,
    bnpo,
    center,
    cispo,
    compose,
    dapo,
    dr_grpo,
    drop_off_policy,
    drop_truncated,
    dual_clip,
    entropy_bonus,
    fixed_length,
    from_sampler,
    gmpo,
    grpo,
    gspo,
    k3,
    leave_one_out,
    luspo,
    masked_is,
    per_reward,
    per_sequence,
    per_token,
    product,
    rloo,
    sapo,
    sequence_mean,
    sequence_sum,
    standardize,
    token_mean,
    top_entropy,
    truncated_is,
    vespo,
    weighted_k3,
)
from grpo_jax.types import Mean, Sample

torch = pytest.importorskip("torch")
trl_grpo = pytest.importorskip("trl.trainer.grpo_trainer")

P, G, T, MAX_LENGTH = 2, 4, 6, 8
B = P * G


def make():
    rng = np.random.default_rng(3)
    old = -rng.uniform(0.1, 2.0, (P, G, T)).astype(np.float32)
    lengths = np.array([[6, 1, 4, 3], [2, 5, 6, 3]])
    return {
        "mask": np.arange(T) < lengths[..., None],
        "stopped": np.array([[True, True, False, True], [False, True, True, True]]),
        "old": old,
        "logp": old + rng.normal(0, 0.35, old.shape).astype(np.float32),
        "ref": old + rng.normal(0, 0.4, old.shape).astype(np.float32),
        "sampler": old + rng.normal(0, 0.4, old.shape).astype(np.float32),
        "entropy": rng.uniform(0, 2, old.shape).astype(np.float32),
        "adv": rng.normal(0, 1.2, (P, G)).astype(np.float32),
    }


DATA = make()


class Accelerator:
    """One process: gathering and reducing return what they are given."""

    num_processes = 1
    sync_gradients = True

    def gather(self, x):
        return x

    gather_for_metrics = gather

    def reduce(self, x, reduction):
        return x

    def pad_across_processes(self, x, dim, pad_index):
        return x


def trainer(kind=None, **options):
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    attributes = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "max_completion_length": MAX_LENGTH,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "aux_loss_enabled": False,
    }
    self = object.__new__(kind or trl_grpo.GRPOTrainer)
    for name, value in attributes.items():
        self.__dict__[name] = options.pop(name, value)
    self.__dict__["entropy_coef"] = options.pop("entropy_coef", 0.0)
    assert set(options) <= set(args)
    self.args = types.SimpleNamespace(**(args | options))
    self.model = types.SimpleNamespace(training=True)
    self.accelerator = Accelerator()
    self._metrics = {"train": defaultdict(list)}
    return self


def flat(x):
    return torch.tensor(np.asarray(x).reshape(B, *np.shape(x)[2:]))


def run_trl(self, *, mask_truncated=False, importance=None, sampler=False, **inputs):
    mask = DATA["mask"] & DATA["stopped"][..., None] if mask_truncated else DATA["mask"]
    logps = flat(DATA["logp"]).requires_grad_()
    self._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logps, flat(DATA["entropy"]), None)
    batch = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": flat(mask).long(),
        "advantages": flat(DATA["adv"]),
        "old_per_token_logps": flat(DATA["old"]),
        "ref_per_token_logps": flat(DATA["ref"]),
        "num_items_in_batch": flat(mask).sum(),
    }
    if importance is not None:
        batch["importance_sampling_ratio"] = importance
    if sampler:
        batch["sampling_per_token_logps"] = flat(DATA["sampler"])
    loss = self._compute_loss(self.model, batch | inputs)
    loss.backward()
    return loss.item(), logps.grad.numpy().reshape(P, G, T)


def sample(adv=None):
    return Sample(
        mask_T=jnp.asarray(DATA["mask"]),
        old_logp_T=jnp.asarray(DATA["old"]),
        ref_logp_T=jnp.asarray(DATA["ref"]),
        sampler_logp_T=jnp.asarray(DATA["sampler"]),
        adv=jnp.asarray(DATA["adv"] if adv is None else adv),
        stopped=jnp.asarray(DATA["stopped"]),
        entropy_T=jnp.asarray(DATA["entropy"]),
    )


def run_ours(objective, samples=None):
    samples = sample() if samples is None else samples
    if objective.prepare is not None:
        samples = objective.prepare(samples)
    value, slope = jax.value_and_grad(lambda x: batch_loss(objective, x, samples).value())(jnp.asarray(DATA["logp"]))
    return float(value), np.asarray(slope)


def agree(ours, theirs, value=True):
    assert np.abs(theirs[1]).max() > 1e-4
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-6)
    if value:
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6)


AGGREGATES = {
    "grpo": sequence_mean,
    "bnpo": token_mean,
    "dapo": token_mean,
    "dr_grpo": functools.partial(fixed_length, max_length=MAX_LENGTH),
    "luspo": sequence_sum,
}
RATIOS = {"token": per_token, "sequence": per_sequence}


def clipped_loss(loss_type, level, **divergence):
    parts = grpo(low=0.2, high=0.28, beta=0.0).loss.keywords
    return Objective(center, compose(RATIOS[level], parts["surrogate"], AGGREGATES[loss_type], **divergence))


@pytest.mark.parametrize("loss_type", AGGREGATES)
@pytest.mark.parametrize("level", RATIOS)
@pytest.mark.parametrize("kl", ["none", "k3", "r·k3"])
def test_clipped_losses(loss_type, level, kl):
    divergence = {"none": {}, "k3": {"divergence": k3, "beta": 0.1}, "r·k3": {"divergence": weighted_k3, "beta": 0.1}}[
        kl
    ]
    options = {"beta": divergence.get("beta", 0.0), "use_bias_correction_kl": kl == "r·k3"}
    theirs = run_trl(trainer(loss_type=loss_type, importance_sampling_level=level, **options))
    agree(run_ours(clipped_loss(loss_type, level, **divergence)), theirs)


@pytest.mark.parametrize(
    ("objective", "loss_type", "level", "epsilons"),
    [
        (grpo(beta=0.04), "grpo", "token", (0.2, 0.2)),
        (bnpo(), "bnpo", "token", (0.2, 0.2)),
        (dr_grpo(max_length=MAX_LENGTH), "dr_grpo", "token", (0.2, 0.2)),
        (dapo(drop_constant=False), "dapo", "token", (0.2, 0.28)),
        (gspo(), "grpo", "sequence", (3e-4, 4e-4)),
        (luspo(), "luspo", "sequence", (3e-4, 4e-4)),
    ],
)
def test_presets(objective, loss_type, level, epsilons):
    beta = 0.04 if objective.loss.keywords["divergence"] else 0.0
    names = {"epsilon_low": epsilons[0], "epsilon_high": epsilons[1], "beta": beta}
    agree(run_ours(objective), run_trl(trainer(loss_type=loss_type, importance_sampling_level=level, **names)))


@pytest.mark.parametrize("level", RATIOS)
def test_sapo(level):
    objective = Objective(center, compose(RATIOS[level], sapo().loss.keywords["surrogate"], sequence_mean))
    agree(run_ours(objective), run_trl(trainer(loss_type="sapo", importance_sampling_level=level)))


def weighted_value(weight):
    """TRL's value of a score function, −w·A·log π, from a weight of each token."""
    total = -np.sum(np.where(DATA["mask"], weight * DATA["adv"][..., None] * DATA["logp"], 0.0))
    return total / DATA["mask"].sum()


def test_cispo():
    theirs = run_trl(trainer(loss_type="cispo", epsilon_high=1.3))
    agree(run_ours(cispo(high=0.3)), theirs, value=False)
    ratio = np.exp(DATA["logp"] - DATA["old"])
    assert (ratio > 1.3).any()
    np.testing.assert_allclose(weighted_value(np.minimum(ratio, 1.3)), theirs[0], rtol=1e-5)


def test_vespo():
    agree(run_ours(vespo()), run_trl(trainer(loss_type="vespo")), value=False)


@pytest.mark.parametrize("cap", [1.5, np.inf])
def test_vespo_with_a_sampler(cap):
    importance = importance_ratio("token_truncate", 0.0, cap)
    theirs = run_trl(trainer(loss_type="vespo"), importance=importance)
    agree(run_ours(from_sampler(vespo(), cap=cap)), theirs, value=False)


@pytest.mark.parametrize("delta", [1.4, 3.0])
def test_delta_is_a_dual_clip(delta):
    theirs = run_trl(trainer(loss_type="bnpo", delta=delta))
    objective = dual_clip(Objective(center, compose(per_token, dapo().loss.keywords["surrogate"], token_mean)), c=delta)
    agree(run_ours(objective), theirs)


@pytest.mark.parametrize("loss_type", AGGREGATES)
def test_truncated_completions_masked(loss_type):
    theirs = run_trl(trainer(loss_type=loss_type, beta=0.1), mask_truncated=True)
    aggregate = AGGREGATES[loss_type]
    if loss_type not in ("bnpo", "dapo"):
        aggregate = functools.partial(aggregate, count_empty=True)
    surrogate = dapo().loss.keywords["surrogate"]
    plain = Objective(center, compose(per_token, surrogate, aggregate, divergence=k3, beta=0.1))
    agree(run_ours(drop_truncated(plain)), theirs)
    if loss_type == "grpo":
        paper = run_ours(drop_truncated(grpo(high=0.28, beta=0.1)))
        np.testing.assert_allclose(paper[1], theirs[1] * B / DATA["stopped"].sum(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quantile", [0.2, 0.5])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_entropy_quantile(quantile, loss_type):
    theirs = run_trl(trainer(loss_type=loss_type, top_entropy_quantile=quantile, beta=0.1))
    agree(run_ours(top_entropy(clipped_loss(loss_type, "token", divergence=k3, beta=0.1), fraction=quantile)), theirs)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("sampler", [False, True])
def test_off_policy_mask(loss_type, sampler):
    theirs = run_trl(trainer(loss_type=loss_type, off_policy_mask_threshold=0.02, beta=0.1), sampler=sampler)
    objective = drop_off_policy(clipped_loss(loss_type, "token", divergence=k3, beta=0.1), delta=0.02)
    samples = sample() if sampler else sample()._replace(sampler_logp_T=None)
    ours = run_ours(objective, samples)
    agree(ours, theirs)
    without = run_ours(clipped_loss(loss_type, "token", divergence=k3, beta=0.1), samples)
    assert np.abs(ours[1] - without[1]).max() > 1e-3


def importance_ratio(mode, low, high):
    """TRL computes this while it scores; the four modes of `vllm_importance_sampling_mode`, on our numbers."""
    gap = flat((DATA["old"] - DATA["sampler"]) * DATA["mask"])
    ratio = torch.exp(gap.sum(-1, keepdim=True) if mode.startswith("sequence") else gap)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=low, max=high)
    low, high = (-np.inf if low is None else low), (np.inf if high is None else high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("bounds", [(0.0, 1.2), (0.7, 1.5)])
def test_importance_sampling_modes(mode, loss_type, bounds):
    low, high = bounds
    self = trainer(loss_type=loss_type, beta=0.1, use_vllm=True, vllm_importance_sampling_correction=True)
    theirs = run_trl(self, importance=importance_ratio(mode, low, high))
    plain = clipped_loss(loss_type, "token", divergence=k3, beta=0.1)
    ratio = product if mode.startswith("sequence") else per_token
    if mode.endswith("truncate"):
        objective = truncated_is(plain, cap=high, floor=low, ratio=ratio)
    else:
        objective = masked_is(plain, low=low, high=high, ratio=ratio)
    agree(run_ours(objective), theirs)


def test_entropy_bonus():
    """Its value; entropies have no gradient here on either side."""
    theirs = run_trl(trainer(loss_type="dapo", _entropy_bonus_enabled=True, entropy_coef=0.3))
    agree(run_ours(entropy_bonus(clipped_loss("dapo", "token"), coef=0.3)), theirs)


def test_gmpo():
    module = pytest.importorskip("trl.experimental.gmpo.gmpo_trainer")
    self = trainer(module.GMPOTrainer, epsilon_low=0.3, epsilon_high=0.25)
    agree(run_ours(gmpo(low=0.3, high=0.25)), run_trl(self))


def test_rloo():
    module = pytest.importorskip("trl.trainer.rloo_trainer")
    self = trainer(module.RLOOTrainer, epsilon_low=0.2, epsilon_high=0.2)
    old = flat((DATA["old"] * DATA["mask"]).sum(-1))
    agree(run_ours(rloo(low=0.2, high=0.2)), run_trl(self, old_logps=old))


# --- advantages: the same lines that TRL runs between scoring and training ----------------------------------------

REWARDS = np.array(
    [[[1.0, 0.0, 0.25, 0.0], [0.5, 0.75, np.nan, 0.0]], [[0.2, 0.1, 0.9, 0.4], [np.nan, 0.3, np.nan, 0.8]]]
)
WEIGHTS = (1.0, 0.5)


def trl_advantages(scale=None, aggregation="sum_then_normalize"):
    """`_generate_and_score_completions` from its rewards on, with TRL's own nanstd."""
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    per_func = torch.tensor(REWARDS.transpose(1, 2, 0).reshape(B, 2))
    unscorable = torch.isnan(per_func).all(dim=1)
    if aggregation == "normalize_then_sum":
        grouped = per_func.view(P, G, 2)
        z = (grouped - torch.nanmean(grouped, dim=1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
        rewards = (z.view(B, 2) * torch.tensor(WEIGHTS)).nansum(dim=1)
        rewards[unscorable] = torch.nan
        adv = (rewards - torch.nanmean(rewards)) / (nanstd(rewards) + 1e-4)
    else:
        rewards = (per_func * torch.tensor(WEIGHTS)).nansum(dim=1)
        rewards[unscorable] = torch.nan
        grouped = rewards.view(P, G)
        adv = (grouped - torch.nanmean(grouped, dim=1, keepdim=True)).view(B)
        if scale == "group":
            adv = adv / (nanstd(grouped, dim=1).repeat_interleave(G) + 1e-4)
        elif scale == "batch":
            adv = adv / (nanstd(rewards) + 1e-4)
    return torch.nan_to_num(adv, nan=0.0).numpy().reshape(P, G)


TRL_SPREAD = {"ddof": 1, "eps": 1e-4}


@pytest.mark.parametrize(
    ("scale", "advantage"),
    [
        ("group", functools.partial(standardize, **TRL_SPREAD)),
        ("batch", functools.partial(batch_scale, **TRL_SPREAD)),
        ("none", center),
    ],
)
def test_advantages(scale, advantage):
    from grpo_jax.objectives import weighted_sum

    objective = Objective(functools.partial(weighted_sum, weights=WEIGHTS, advantage=advantage), _no_loss)
    ours = batch_advantages(objective, jnp.asarray(REWARDS.transpose(1, 0, 2)))
    np.testing.assert_allclose(ours, trl_advantages(scale), rtol=1e-5, atol=1e-6)


def test_advantages_of_each_reward():
    objective = Objective(functools.partial(per_reward, weights=WEIGHTS, **TRL_SPREAD), _no_loss)
    ours = batch_advantages(objective, jnp.asarray(REWARDS.transpose(1, 0, 2)))
    np.testing.assert_allclose(ours, trl_advantages(aggregation="normalize_then_sum"), rtol=1e-5, atol=1e-6)


def test_leave_one_out():
    reward = torch.tensor(REWARDS[0])
    count = (~torch.isnan(reward)).sum(1, keepdim=True)
    theirs = torch.nan_to_num(reward - (torch.nansum(reward, 1, keepdim=True) - reward) / (count - 1), nan=0.0)
    ours = batch_advantages(Objective(leave_one_out, _no_loss), jnp.asarray(REWARDS[0]))
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-6)


def _no_loss(logp_T, sample):
    return Mean(jnp.zeros(()), jnp.zeros(()))
