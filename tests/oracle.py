"""Every formula again, in loops over Python floats. Shares no code with grpo_jax.

A batch is a dict of nested lists indexed [prompt][completion][token] (rewards: [prompt][completion]), only trained
tokens present. A loss is a function of `logp` and of `at`, the same numbers held fixed: what a paper writes as
sg[·] is computed from `at`, so that a central difference in `logp` is the gradient that the paper means.
"""

import itertools
import math

# --- advantages of one group ------------------------------------------------------------------------------------


def pairs(*rows):
    return zip(*rows, strict=True)


def mean(xs):
    return sum(xs) / len(xs)


def std(xs, ddof=0):
    m = mean(xs)
    return math.sqrt(sum((x - m) ** 2 for x in xs) / (len(xs) - ddof))


def scored(rewards):
    return [r for r in rewards if not math.isnan(r)]


def is_constant(rewards):
    good = scored(rewards)
    return len(good) < 2 or max(good) - min(good) <= 1e-6 * max(1.0, abs(mean(good)))


def by_group(formula):
    """An advantage function from a formula of (reward, scored rewards): 0 for NaN and for constant groups."""

    def advantages(rewards, **options):
        if is_constant(rewards):
            return [0.0] * len(rewards)
        good = scored(rewards)
        return [0.0 if math.isnan(r) else formula(r, good, **options) for r in rewards]

    return advantages


standardize = by_group(lambda r, good, ddof=0, eps=0.0: (r - mean(good)) / (std(good, ddof) + eps))
center = by_group(lambda r, good: r - mean(good))
leave_one_out = by_group(lambda r, good: r - (sum(good) - r) / (len(good) - 1))
over_mean = by_group(lambda r, good: (r - mean(good)) / mean(good) if mean(good) > 0 else 0.0)


def pass_at_k(rewards, k):
    """Every subset of k completions is one draw; a completion gets the mean z-score of the draws it is in."""
    places = [i for i, r in enumerate(rewards) if not math.isnan(r)]
    draws = list(itertools.combinations(places, k))
    best = [max(float(rewards[i] > 0.5) for i in draw) for draw in draws]
    if len(places) < k or not draws or std(best) == 0:
        return [0.0] * len(rewards)
    z = [(b - mean(best)) / std(best) for b in best]
    return [
        mean([z[d] for d, draw in enumerate(draws) if i in draw]) if i in places else 0.0 for i in range(len(rewards))
    ]


def batch_scale(groups):
    spread = std([r for rewards in groups for r in scored(rewards)])
    return [[a / spread for a in center(rewards)] for rewards in groups]


def batch_whiten(groups, advantages):
    kept = [a for rewards, advs in pairs(groups, advantages) for r, a in pairs(rewards, advs) if not math.isnan(r)]
    m, s = mean(kept), std(kept)
    if s <= 1e-6 * max(1.0, abs(m)):
        return [[0.0 for _ in rewards] for rewards in groups]
    return [
        [0.0 if math.isnan(r) else (a - m) / s for r, a in pairs(rewards, advs)]
        for rewards, advs in pairs(groups, advantages)
    ]


def gdpo(groups_by_reward, weights):
    """groups_by_reward[n][p][g]; each reward standardized in its group, summed by weight, z-scored over the batch."""
    P, G = len(groups_by_reward[0]), len(groups_by_reward[0][0])
    summed = [[0.0] * G for _ in range(P)]
    known = [[False] * G for _ in range(P)]
    for weight, groups in pairs(weights, groups_by_reward):
        for p, rewards in enumerate(groups):
            for g, a in enumerate(standardize(rewards)):
                summed[p][g] += weight * a
                known[p][g] |= not math.isnan(rewards[g])
    marks = [[1.0 if ok else math.nan for ok in row] for row in known]
    return batch_whiten(marks, summed)


def length_weighted(rewards, lengths):
    if is_constant(rewards):
        return [0.0] * len(rewards)
    weighted = [(r, n) for r, n in pairs(rewards, lengths) if not math.isnan(r)]
    baseline = sum(r * n for r, n in weighted) / sum(n for _, n in weighted)
    return [0.0 if math.isnan(r) else r - baseline for r in rewards]


# --- rewards of tokens ------------------------------------------------------------------------------------------


def outcome_rewards(reward, length):
    return [math.nan] * (length - 1) + [reward]


def kl_rewards(steps, old, ref, beta):
    if all(math.isnan(r) for r in steps):
        return steps
    return [(0.0 if math.isnan(r) else r) - beta * (o - f) for r, o, f in pairs(steps, old, ref)]


def returns_to_go(steps, gamma):
    clean = [0.0 if math.isnan(r) else r for r in steps]
    return [sum(gamma ** (k - t) * clean[k] for k in range(t, len(clean))) for t in range(len(clean))]


def gae(steps, values, gamma, lam):
    clean = [0.0 if math.isnan(r) else r for r in steps]
    after = [*values[1:], 0.0]
    delta = [r + gamma * n - v for r, v, n in pairs(clean, values, after)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


def process_advantages(group_steps):
    """group_steps[g][t], NaN where no step ends: all step rewards of a group standardized together, then summed."""
    flat = [r for steps in group_steps for r in steps]
    normal = iter(standardize(flat))
    normal = [[next(normal) for _ in steps] for steps in group_steps]
    return [[sum(row[t:]) for t in range(len(row))] for row in normal]


def whiten_tokens(adv, known):
    """adv[p][g][t]; sequences that are not known get 0 and do not count."""
    kept = [a for rows, ks in pairs(adv, known) for row, k in pairs(rows, ks) if k for a in row]
    m, s = mean(kept), std(kept)
    if s <= 1e-6 * max(1.0, abs(m)):
        return [[[0.0 for _ in row] for row in rows] for rows in adv]
    return [[[(a - m) / s if k else 0.0 for a in row] for row, k in pairs(rows, ks)] for rows, ks in pairs(adv, known)]


# --- surrogates of one token, as functions of numbers -------------------------------------------------------------


def clip(x, low, high):
    return max(low, min(high, x))


def ppo_cost(r, a, low, high):
    return -min(r * a, clip(r, 1 - low, 1 + high) * a)


def sapo_cost(r, a, tau_pos, tau_neg):
    tau = tau_pos if a > 0 else tau_neg
    return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))


def k3(logp, ref):
    return math.exp(ref - logp) - (ref - logp) - 1


def k2(logp, ref):
    return (logp - ref) ** 2 / 2


# --- losses of a batch --------------------------------------------------------------------------------------------


def sequences(batch):
    """Every (p, g) with its length."""
    return [(p, g, len(row)) for p, rows in enumerate(batch["old"]) for g, row in enumerate(rows)]


def tokenwise(batch, advantages, cost, norm, max_length=None):
    """Σ cost(p, g, t, A) under one of the normalisers of the papers."""
    total, weight = 0.0, 0.0
    for p, g, n in sequences(batch):
        row = advantages[p][g]
        costs = [cost(p, g, t, row[t] if isinstance(row, list) else row) for t in range(n)]
        if norm == "token":
            total, weight = total + sum(costs), weight + n
        elif norm == "sequence":
            total, weight = total + sum(costs) / n, weight + 1
        elif norm == "sum":
            total, weight = total + sum(costs), weight + 1
        elif norm == "fixed":
            total, weight = total + sum(costs), weight + max_length
    return total / weight


def log_ratio(batch, logp, p, g):
    return [x - o for x, o in pairs(logp[p][g], batch["old"][p][g])]


def groups_of(function, batch, **options):
    return [function(rewards, **options) for rewards in batch["reward"]]


def step_rewards(batch, beta=0.0):
    return [
        [kl_rewards(s, o, f, beta) if beta else s for s, o, f in pairs(steps, old, ref)]
        for steps, old, ref in pairs(batch["steps"], batch["old"], batch["ref"])
    ]


def known(batch):
    return [[not all(math.isnan(r) for r in steps) for steps in rows] for rows in batch["steps"]]


def ppo_loss(batch, logp, advantages, norm, low=0.2, high=0.2, beta=0.0, kl=k3, max_length=None):
    def cost(p, g, t, a):
        r = math.exp(log_ratio(batch, logp, p, g)[t])
        penalty = beta * kl(logp[p][g][t], batch["ref"][p][g][t]) if beta else 0.0
        return ppo_cost(r, a, low, high) + penalty

    return tokenwise(batch, advantages, cost, norm, max_length)


def grpo(batch, logp, at):
    return ppo_loss(batch, logp, groups_of(standardize, batch), "sequence", beta=0.04)


def process_grpo(batch, logp, at):
    return ppo_loss(batch, logp, [process_advantages(rows) for rows in batch["steps"]], "sequence", beta=0.04)


def bnpo(batch, logp, at):
    return ppo_loss(batch, logp, groups_of(standardize, batch), "token")


def dr_grpo(batch, logp, at, max_length=8):
    return ppo_loss(batch, logp, groups_of(center, batch), "fixed", max_length=max_length)


def dapo(batch, logp, at):
    advantages = groups_of(standardize, batch)
    keep = [p for p, advs in enumerate(advantages) if any(advs)]
    part = {name: [rows[p] for p in keep] for name, rows in batch.items() if name != "rewards"}
    return ppo_loss(part, [logp[p] for p in keep], [advantages[p] for p in keep], "token", high=0.28)


def lite_ppo(batch, logp, at):
    return ppo_loss(batch, logp, batch_scale(batch["reward"]), "token")


def maxrl(batch, logp, at):
    return ppo_loss(batch, logp, groups_of(over_mean, batch), "token")


def pass_at_2(batch, logp, at):
    return ppo_loss(batch, logp, groups_of(pass_at_k, batch, k=2), "token")


def gdpo_loss(batch, logp, at):
    return ppo_loss(batch, logp, gdpo([batch["reward"]], [1.0]), "sequence", beta=0.04)


def reinforce_pp_baseline(batch, logp, at):
    centered = groups_of(center, batch)
    adv = [[[a] * len(row) for row, a in pairs(rows, advs)] for rows, advs in pairs(batch["old"], centered)]
    return ppo_loss(batch, logp, whiten_tokens(adv, known(batch)), "token", beta=0.01, kl=k2)


def reinforce_pp(batch, logp, at):
    adv = [[returns_to_go(row, 1.0) for row in rows] for rows in step_rewards(batch, 0.01)]
    return ppo_loss(batch, logp, whiten_tokens(adv, known(batch)), "token")


def sequence_cost(batch, logp, norm, cost_of_mean, advantages):
    """Losses whose token costs are one number for the whole sequence."""
    return tokenwise(batch, advantages, lambda p, g, t, a: cost_of_mean(log_ratio(batch, logp, p, g), a), norm)


def gspo(batch, logp, at):
    cost = lambda x, a: ppo_cost(math.exp(mean(x)), a, 3e-4, 4e-4)
    return sequence_cost(batch, logp, "sequence", cost, groups_of(standardize, batch))


def luspo(batch, logp, at):
    cost = lambda x, a: ppo_cost(math.exp(mean(x)), a, 3e-4, 4e-4)
    return sequence_cost(batch, logp, "sum", cost, groups_of(standardize, batch))


def gspo_token(batch, logp, at):
    def cost(p, g, t, a):
        s = math.exp(mean(log_ratio(batch, at, p, g))) * math.exp(logp[p][g][t] - at[p][g][t])
        return ppo_cost(s, a, 3e-4, 4e-4)

    return tokenwise(batch, groups_of(standardize, batch), cost, "sequence")


def gmpo(batch, logp, at):
    def cost(x, a):
        clipped = [min(v, 0.4) if a > 0 else max(v, -0.4) for v in x]
        return -a * math.exp(mean(clipped))

    return sequence_cost(batch, logp, "sequence", cost, groups_of(standardize, batch))


def scored_token(weight):
    """−w(at)·A·exp(logπ − sg logπ): the score function with a detached weight."""

    def build(batch, logp, at):
        def cost(p, g, t, a):
            return -weight(log_ratio(batch, at, p, g), t, a) * a * math.exp(logp[p][g][t] - at[p][g][t])

        return cost

    return build


def cispo(batch, logp, at):
    cost = scored_token(lambda x, t, a: clip(math.exp(x[t]), 0.0, 5.0))(batch, logp, at)
    return tokenwise(batch, groups_of(standardize, batch), cost, "token")


def vespo_weight(x, t, a):
    k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    w = math.exp(clip(sum(x), math.log(1e-8), 20.0))
    return w**k * math.exp(lam * (1 - w))


def vespo(batch, logp, at):
    return tokenwise(batch, groups_of(standardize, batch), scored_token(vespo_weight)(batch, logp, at), "token")


def topr(batch, logp, at):
    cost = scored_token(lambda x, t, a: 1.0 if a >= 0 else min(math.exp(sum(x)), 1.0))(batch, logp, at)
    return tokenwise(batch, groups_of(center, batch), cost, "sum")


def kimi(batch, logp, at):
    cost = lambda x, a: -a * sum(x) + 0.5 * sum(x) ** 2
    return sequence_cost(batch, logp, "sequence", cost, groups_of(center, batch))


def sapo(batch, logp, at):
    cost = lambda p, g, t, a: sapo_cost(math.exp(log_ratio(batch, logp, p, g)[t]), a, 1.0, 1.05)
    return tokenwise(batch, groups_of(standardize, batch), cost, "sequence")


def dppo(batch, logp, at, delta=0.15, bound=20.0):
    weigh = scored_token(lambda x, t, a: min(math.exp(x[t]), bound))(batch, logp, at)

    def cost(p, g, t, a):
        moved = math.exp(at[p][g][t]) - math.exp(batch["old"][p][g][t])
        dropped = (a > 0 and moved > delta) or (a < 0 and moved < -delta)
        return 0.0 if dropped else weigh(p, g, t, a)

    return tokenwise(batch, groups_of(standardize, batch), cost, "token")


def reinforce_cost(batch, logp, at):
    return scored_token(lambda x, t, a: 1.0)(batch, logp, at)


def rloo(batch, logp, at):
    return tokenwise(batch, groups_of(leave_one_out, batch), reinforce_cost(batch, logp, at), "sum")


def opo(batch, logp, at):
    advantages = [length_weighted(r, [len(row) for row in rows]) for r, rows in pairs(batch["reward"], batch["old"])]
    return tokenwise(batch, advantages, reinforce_cost(batch, logp, at), "sum")


def reinforce(batch, logp, at):
    adv = [[returns_to_go(row, 1.0) for row in rows] for rows in batch["steps"]]
    return tokenwise(batch, adv, reinforce_cost(batch, logp, at), "sum")


def reinforce_baseline(batch, logp, at):
    target = [[returns_to_go(row, 1.0) for row in rows] for rows in batch["steps"]]
    adv = [
        [[x - v for x, v in pairs(row, values)] if k else [0.0] * len(row) for row, values, k in pairs(rows, vs, ks)]
        for rows, vs, ks in pairs(target, batch["old_value"], known(batch))
    ]
    policy = tokenwise(batch, adv, reinforce_cost(batch, logp, at), "sum")
    critic = lambda p, g, t, a: 0.5 * 0.5 * (batch["value"][p][g][t] - target[p][g][t]) ** 2
    return policy + tokenwise(batch, adv, critic, "sum")


def ppo(batch, logp, at):
    adv = [
        [gae(row, values, 1.0, 0.95) if k else [0.0] * len(row) for row, values, k in pairs(rows, vs, ks)]
        for rows, vs, ks in pairs(step_rewards(batch, 0.05), batch["old_value"], known(batch))
    ]

    def critic(p, g, t, a):
        new, old = batch["value"][p][g][t], batch["old_value"][p][g][t]
        target = adv[p][g][t] + old
        near = old + clip(new - old, -0.2, 0.2)
        return 0.1 * 0.5 * max((new - target) ** 2, (near - target) ** 2)

    return ppo_loss(batch, logp, whiten_tokens(adv, known(batch)), "token") + tokenwise(batch, adv, critic, "token")


LOSSES = {
    "grpo": grpo,
    "process_grpo": process_grpo,
    "dr_grpo": dr_grpo,
    "bnpo": bnpo,
    "dapo": dapo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": luspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo": dppo,
    "topr": topr,
    "kimi": kimi,
    "lite_ppo": lite_ppo,
    "maxrl": maxrl,
    "pass_at_k": pass_at_2,
    "gdpo": gdpo_loss,
    "opo": opo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_baseline": reinforce_baseline,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "ppo": ppo,
}


def gradient(loss, x, step=1e-6):
    """∂loss/∂x[p][g][t] by central differences; `loss` is a function of nested lists."""
    out = [[[0.0] * len(row) for row in rows] for rows in x]
    for p, rows in enumerate(x):
        for g, row in enumerate(rows):
            for t in range(len(row)):
                kept = row[t]
                row[t] = kept + step
                above = loss(x)
                row[t] = kept - step
                below = loss(x)
                row[t] = kept
                out[p][g][t] = (above - below) / (2 * step)
    return out
