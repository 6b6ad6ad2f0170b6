"""The cache methods: each a choice of signal, score, policy and reuse.

| choice | what it says |
|---|---|
| signal | the tensor that is watched |
| score | how its change becomes the number that is compared with the threshold |
| policy | warm-up, limits, masks: `stepfx.policy`, the same for every method |
| reuse | the last residual or its forecast, the same for every method |

A new method is an entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# residual: of the first blocks, on the image stream. modulated: the operand of the first
# matrix product of the first block that reads the image stream. timestep: the embedding of
# the timestep. input: the image stream where the skipped blocks begin. none: nothing.
Signal = Literal["residual", "modulated", "timestep", "input", "none"]
# change: relative L1 against the last computed step. accumulated: a polynomial of relative
# L1 against the previous step, summed since the last computed step. magnitude: a recorded
# curve, no look at the tensors. none: the mask alone decides.
Score = Literal["change", "accumulated", "magnitude", "none"]


@dataclass(frozen=True)
class Preset:
    """The values that a cache method gives to options left open."""

    threshold: float
    signal: Signal = "residual"
    score: Score = "change"
    strict: bool = False
    fn_compute_blocks: int = 1
    bn_compute_blocks: int = 0
    max_warmup_steps: int = 0
    warmup_interval: int = 1
    max_continuous_cached_steps: int | None = None
    retention_ratio: float = 0.0
    steps_mask_policy: str = "dynamic"
    per_block: bool = False


PRESETS: dict[str, Preset] = {
    # ParaAttention (strict comparison) and diffusers (not strict, the default here).
    "fbcache": Preset(threshold=0.08),
    # cache-dit's DBCacheConfig and its defaults.
    "dbcache": Preset(0.08, strict=True, fn_compute_blocks=8, max_warmup_steps=8),
    # arXiv 2411.19108; 0.2 is vllm-omni's default.
    "teacache": Preset(0.2, "modulated", "accumulated", strict=True, fn_compute_blocks=0),
    # MagCache as diffusers' MagCacheConfig defines it.
    "magcache": Preset(
        0.06,
        "none",
        "magnitude",
        fn_compute_blocks=0,
        max_continuous_cached_steps=3,
        retention_ratio=0.2,
    ),
    # A step mask that decides alone; with the policy "dynamic" it is fbcache under a mask.
    "mask": Preset(0.08, "none", "none", fn_compute_blocks=0, steps_mask_policy="static"),
    # cache-dit's DBPruneConfig: every block between Fn and Bn has a gate of its own.
    "dbprune": Preset(
        0.08, "input", strict=True, fn_compute_blocks=8, max_warmup_steps=8, per_block=True
    ),
}
