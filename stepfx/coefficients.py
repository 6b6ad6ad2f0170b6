"""Published numbers: polynomials of TeaCache and magnitude curves of MagCache, by name.

TeaCache (github.com/ali-vilab/TeaCache, arXiv 2411.19108) fits, for each model, the change of
the output as a polynomial of degree 4 in the change of the watched signal; highest power
first. Entries that vllm-omni alone publishes say so. MagCache (github.com/Zehong-Ma/MagCache)
records how the norm of the whole stack's residual changes from step to step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Polynomial = tuple[float, ...]

IDENTITY: Polynomial = (0.0, 0.0, 0.0, 1.0, 0.0)

_FLUX = (4.98651651e2, -2.83781631e2, 5.58554382e1, -3.82021401, 2.64230861e-1)
_LUMINA_NEXT = (393.76566581, -603.50993606, 209.10239044, -23.00726601, 0.86377344)
_QWEN_IMAGE = (-450.0, 280.0, -45.0, 3.2, -0.02)
_COGVIDEOX_5B = (-1.53880483e3, 8.43202495e2, -1.34363087e2, 7.97131516, -5.23162339e-2)

COEFFICIENTS: dict[str, Polynomial] = {
    "flux": _FLUX,
    "tangoflux": _FLUX,
    "hunyuan_video": (7.33226126e2, -4.01131952e2, 6.75869174e1, -3.14987800, 9.61237896e-2),
    "cogvideox_2b": (-3.10658903e1, 2.54732368e1, -5.92380459, 1.75769064, -3.61568434e-3),
    "cogvideox_5b": _COGVIDEOX_5B,
    "cogvideox_5b_i2v": _COGVIDEOX_5B,
    "consisid": _COGVIDEOX_5B,
    "cogvideox1.5_5b": (
        2.50210439e2,
        -1.65061612e2,
        3.57804877e1,
        -7.81551492e-1,
        3.58559703e-2,
    ),
    "cogvideox1.5_5b_i2v": (
        1.22842302e2,
        -1.04088754e2,
        2.62981677e1,
        -3.06009921e-1,
        3.71213220e-2,
    ),
    "cosmos": (2.71156237e2, -9.19775607e1, 2.24437250, 2.08355751, 1.41776330e-1),
    "mochi": (-3.51241319e3, 8.11675948e2, -6.09400215e1, 2.42429681, 3.05291719e-3),
    "ltx_video": (2.14700694e1, -1.28016453e1, 2.31279151, 7.92487521e-1, 9.69274326e-3),
    "lumina_next": _LUMINA_NEXT,
    "lumina2_v1": _LUMINA_NEXT,
    "lumina2": (
        225.7042019806413,
        -608.8453716535591,
        304.1869942338369,
        124.21267720116742,
        -1.4089066892956552,
    ),
    "hidream": (-3.13605009e4, -7.12425503e2, 4.91363285e1, 8.26515490, 1.08053901e-1),
    "wan_t2v_1.3b": (2.39676752e3, -1.31110545e3, 2.01331979e2, -8.29855975, 1.37887774e-1),
    "wan_t2v_14b": (
        -5784.54975374,
        5449.50911966,
        -1811.16591783,
        256.27178429,
        -13.02252404,
    ),
    "wan_i2v_480p": (-3.02331670e2, 2.23948934e2, -5.25463970e1, 5.87348440, -2.01973289e-1),
    "wan_i2v_720p": (-114.36346466, 65.26524496, -18.82220707, 4.91518089, -0.23412683),
    "wan_ret_t2v_1.3b": (
        -5.21862437e4,
        9.23041404e3,
        -5.28275948e2,
        1.36987616e1,
        -4.99875664e-2,
    ),
    "wan_ret_t2v_14b": (
        -3.03318725e5,
        4.90537029e4,
        -2.65530556e3,
        5.87365115e1,
        -3.15583525e-1,
    ),
    "wan_ret_i2v_480p": (
        2.57151496e5,
        -3.54229917e4,
        1.40286849e3,
        -1.35890334e1,
        1.32517977e-1,
    ),
    "wan_ret_i2v_720p": (
        8.10705460e3,
        2.13393892e3,
        -3.72934672e2,
        1.66203073e1,
        -4.17769401e-2,
    ),
    "open_sora_1.2": (
        2.17546007e2,
        -1.18329252e2,
        2.68662585e1,
        -4.59364272e-2,
        4.84426240e-2,
    ),
    "open_sora_plan": (
        2.05943668e5,
        -1.48759286e4,
        3.06085986e2,
        1.31418080,
        2.39658469e-3,
    ),
    "latte": (-2.46434137e3, 3.08044764e2, 8.07447667e1, -4.11385132, 1.11001402e-1),
    # From vllm-omni.
    "qwen_image": _QWEN_IMAGE,
    "z_image": _QWEN_IMAGE,
    "flux2": _QWEN_IMAGE,
    "flux2_klein": _FLUX,
    "bagel": (1.33313129e6, -1.68644226e5, 7.95050740e3, -1.63747873e2, 1.26352397),
    "stable_audio": (
        121.77490545701518,
        -153.7449426160371,
        68.05368574596551,
        -12.281286412689623,
        1.0733905006198015,
    ),
    "hunyuan_image3": (
        1.04117826e2,
        -1.26848482e2,
        5.68168652e1,
        -1.04182570e1,
        6.78098549e-1,
    ),
    "longcat_image": (652.5980, -424.1615, 84.5526, -4.5923, 0.1694),
    "identity": IDENTITY,
}


def polynomial(coefficients: Sequence[float], x: float) -> float:
    """Return the value at `x` of a polynomial given by coefficients, highest power first."""
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


@dataclass(frozen=True)
class MagnitudeCurve:
    """How the norm of the stack's residual changes along a run.

    `ratios[i]` is the norm at step i over that at step i - 1 of the run that was recorded.
    `levels[i]` is the noise level of that step, from 1 (noise) down to 0; without levels the
    steps are taken to be spread as those of the run that asks.
    """

    ratios: tuple[float, ...]
    levels: tuple[float, ...] | None = None

    def ratio(self, step: int, steps: int | None, before: float, now: float) -> float:
        """Return the ratio that step `step` of `steps` brings, from level `before` to `now`.

        The logarithms of the ratios are summed along the curve and interpolated, so that a
        longer stride takes the product of the ratios it passes. (diffusers takes the nearest
        entry whatever the stride; for the recorded number of steps the two agree.)
        """
        count = len(self.ratios)
        if self.levels is not None:
            return math.exp(self._at(-now) - self._at(-before))
        if steps is None or steps == count:
            return self.ratios[step] if step < count else 1.0
        here, there = (i * (count - 1) / max(steps - 1, 1) for i in (step - 1, step))
        return math.exp(self._at(there) - self._at(here))

    def _at(self, position: float) -> float:
        if self.levels is None:
            places = np.arange(len(self.ratios), dtype=float)
        else:
            places = -np.asarray(self.levels)
        return float(np.interp(position, places, np.cumsum(np.log(self.ratios))))


def _flux_levels(steps: int = 28, shift: float = 1.15) -> tuple[float, ...]:
    """Return the noise levels of FLUX.1-dev at 1024x1024, where its curve was recorded."""
    plain = (1 - i * (1 - 1 / steps) / (steps - 1) for i in range(steps))
    return tuple(math.exp(shift) / (math.exp(shift) + 1 / s - 1) for s in plain)


# fmt: off
MAGNITUDES: dict[str, MagnitudeCurve] = {
    "flux": MagnitudeCurve(
        (1.0, 1.21094, 1.11719, 1.07812, 1.0625, 1.03906, 1.03125, 1.03906, 1.02344, 1.03125,
         1.02344, 0.98047, 1.01562, 1.00781, 1.0, 1.00781, 1.0, 1.00781, 1.0, 1.0, 0.99609,
         0.99609, 0.98047, 0.98828, 0.96484, 0.95703, 0.93359, 0.89062),
        _flux_levels(),
    ),
}
# fmt: on


def magnitude_curve(value: Any) -> MagnitudeCurve:
    """Return a curve from ratios, or from a mapping with `ratios` and `levels`.

    Raises:
        ValueError: it is empty, a ratio is not positive, or the levels do not fit.
    """
    levels = None
    if isinstance(value, MagnitudeCurve):
        return value
    if isinstance(value, Mapping):
        if set(value) - {"ratios", "levels"} or "ratios" not in value:
            raise ValueError("a mapping with 'ratios' and 'levels'")
        value, levels = value["ratios"], value.get("levels")
    ratios = tuple(float(ratio) for ratio in value)
    if not ratios or not all(math.isfinite(r) and r > 0 for r in ratios):
        raise ValueError("at least one ratio, each above 0")
    if levels is None:
        return MagnitudeCurve(ratios)
    levels = tuple(float(level) for level in levels)
    if len(levels) != len(ratios) or any(a <= b for a, b in itertools.pairwise(levels)):
        raise ValueError("one noise level for each ratio, falling")
    return MagnitudeCurve(ratios, levels)
