"""Step masks: which denoising steps must be computed, as text of 1 and 0.

A named mask is `ones, zeros, ones, zeros, ...` with run lengths from a table, stretched or
trimmed to the number of steps; the last step is computed. The tables and the rule are those
of cache-dit's step computation masks (SCM), so that one name means one mask in both.
"""

from __future__ import annotations

import itertools

MASK_NAMES = ("slow", "medium", "fast", "ultra")

Bins = tuple[tuple[int, ...], tuple[int, ...]]

# (runs of computed steps, runs of reused steps) by the number of steps they were made for.
BINS: dict[int, dict[str, Bins]] = {
    28: {
        "slow": ((8, 3, 3, 2, 1, 1), (1, 2, 2, 2, 3)),
        "medium": ((6, 2, 2, 2, 2, 1), (1, 3, 3, 3, 3)),
        "fast": ((6, 1, 1, 1, 1, 1), (1, 3, 4, 5, 4)),
        "ultra": ((4, 1, 1, 1, 1), (2, 5, 6, 7)),
    },
    15: {
        "slow": ((4, 2, 2, 2, 1), (1, 1, 1, 1)),
        "medium": ((4, 2, 1, 1, 1), (1, 1, 2, 2)),
        "fast": ((3, 1, 1, 1, 1), (1, 2, 2, 3)),
        "ultra": ((2, 1, 1, 1, 1), (1, 2, 3, 3)),
    },
    9: {
        "slow": ((5, 2, 1), (1,)),
        "medium": ((5, 1, 1), (1, 1)),
        "fast": ((4, 1, 1), (1, 2)),
        "ultra": ((3, 1, 1), (2, 2)),
    },
    8: {
        "slow": ((5, 1, 1), (1,)),
        "medium": ((4, 1, 1), (1, 1)),
        "fast": ((3, 1, 1), (1, 2)),
        "ultra": ((2, 1, 1), (2, 2)),
    },
    6: dict.fromkeys(MASK_NAMES, ((3, 1), (2,))),
    4: dict.fromkeys(MASK_NAMES, ((2, 1), (1,))),
}


def step_mask(name: str, steps: int) -> str:
    """Return the mask called `name` for `steps` steps; below 4 steps all are computed.

    For 1, 2, 3, 5 and 7 steps, where cache-dit has no mask, the next larger one is trimmed.
    """
    if steps < 4:
        return "1" * steps
    base = 28 if steps >= 16 else min(size for size in BINS if size >= steps)
    ones, zeros = (list(runs) for runs in BINS[base][name])
    if steps > base:
        _stretch(ones, zeros, steps)
    _trim(ones, zeros, steps)
    runs = itertools.zip_longest(ones, zeros, fillvalue=0)
    mask = "".join("1" * one + "0" * zero for one, zero in runs)[:steps]
    return mask[:-1] + "1"


def _stretch(ones: list[int], zeros: list[int], steps: int) -> None:
    """Lengthen the runs from the front, each by half its share, until `steps` are covered."""
    half = steps / 28 * 0.5
    growth = [[max(int(run * half), 1) for run in runs] for runs in (ones, zeros)]
    while True:
        for i, kind in itertools.product(range(len(zeros)), (0, 1)):
            if sum(ones) + sum(zeros) >= steps:
                return
            (ones, zeros)[kind][i] += growth[kind][i]
        if sum(ones) + sum(zeros) >= steps:
            return
        ones[-1] += 1


def _trim(ones: list[int], zeros: list[int], steps: int) -> None:
    """Shorten the last run of zeros and the last of ones in turn."""
    for runs in itertools.cycle((zeros, ones)):
        if sum(ones) + sum(zeros) <= steps:
            return
        if runs:
            runs[-1] -= 1
            if not runs[-1]:
                runs.pop()
