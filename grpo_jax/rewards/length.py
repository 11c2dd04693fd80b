"""Rewards for the length of a completion, in tokens."""


def overlong(completion_length: int, *, max_length: int, buffer: int) -> float:
    """A soft penalty for the last `buffer` tokens before the limit.

    `0` if `|o| ≤ Lmax − Lc`; `((Lmax − Lc) − |o|)/Lc` up to `Lmax`; `−1` above (DAPO, arXiv
    2503.14476, eq. 13), with `|o|` the `completion_length`, `Lmax` the `max_length` and `Lc` the
    `buffer`, all in tokens. Bind the last two with `functools.partial` to have a reward function;
    the length is a column that differs between completions.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be within 1 … max_length ({max_length}), got {buffer}")
    if completion_length > max_length:
        return -1.0
    return min(0.0, (max_length - buffer - completion_length) / buffer)
