"""The same decisions and outputs as cache-dit 1.5.3, in one process, in float32.

Both run eagerly on the same weights and inputs; blocks are counted around their own forward.

Defects of the original that are not copied, so that the runs here avoid them:

* a threshold of 1 or more reuses every step without a look; stepfx compares;
* in transformer-only mode the first steps of a second request are served from the first
  (its counter is raised only behind the first blocks); here each run has a fresh model;
* the first derivative exists after four computed steps; stepfx needs two. Warm-up is longer;
* pruning: once the first block of a step has used up `max_cached_steps`, the others of that
  step run; stepfx counts the steps before. The threshold of the second branch follows the
  scores of the first; each branch has its own here. The sum of scores is not kept there, so
  `max_accumulated_threshold` does nothing; here it counts for each block;
* up to August 2026 `max_continuous_cached_steps` counted oddly (tests/test_policy.py has its
  schedules, `continuous_counter="cache-dit"` copies it); 1.5.3 counts steps in a row.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import stepfx
from stepfx import testing

cache_dit = pytest.importorskip("cache_dit")

NAMES = [
    "Flux",
    "Wan",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("CogVideoX", "DiT", "QwenImage")),
]

# Distances of timesteps at which the scores of these weights are well below 1.
WIDTHS = {"Flux": 1.0, "Wan": 15.0, "CogVideoX": 15.0, "DiT": 1.5, "QwenImage": 1.0}

SETTINGS: list[dict[str, Any]] = [
    {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 1},
    {
        "Fn_compute_blocks": 2,
        "Bn_compute_blocks": 1,
        "max_warmup_steps": 4,
        "max_continuous_cached_steps": 2,
    },
    {
        "Fn_compute_blocks": 1,
        "Bn_compute_blocks": 1,
        "max_warmup_steps": 6,
        "warmup_interval": 2,
        "max_cached_steps": 12,
    },
    {"Fn_compute_blocks": 1, "max_warmup_steps": 3, "scm": "medium"},
    {"Fn_compute_blocks": 2, "max_warmup_steps": 8, "scm": "fast", "policy": "static"},
]


def trajectory(tiny: Any, model: Any, steps: int, ran: Any) -> Any:
    """Denoise; return how many blocks ran at each step, and every velocity."""
    x, counts, velocities = tiny.inputs["hidden_states"], [], []
    for t in tiny.times(steps, width=WIDTHS[tiny.name]):
        before = ran()
        velocity = tiny.call(model, x, t)
        counts.append(ran() - before)
        velocities.append(velocity)
        x = x + velocity / steps
    return counts, velocities


def original(
    tiny: Any, steps: int, setting: dict[str, Any], order: int = 0, kind: str = "DBCacheConfig"
) -> Any:
    """Run a model under cache-dit."""
    count = 0

    def counting(forward: Any) -> Any:
        @functools.wraps(forward)  # cache-dit reads the signature
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return forward(*args, **kwargs)

        return run

    for name in tiny.expected.blocks:
        for block in getattr(tiny.model, name):
            block.forward = counting(block.forward)
    setting = dict(setting)
    if "scm" in setting:
        setting["steps_computation_mask"] = cache_dit.steps_mask(
            total_steps=steps, mask_policy=setting.pop("scm")
        )
        setting["steps_computation_policy"] = setting.pop("policy", "dynamic")
    calibrator = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
    cache_dit.enable_cache(
        tiny.model,
        cache_config=getattr(cache_dit, kind)(enable_separate_cfg=False, **setting),
        calibrator_config=calibrator,
    )
    return trajectory(tiny, tiny.model, steps, lambda: count)


def ours(tiny: Any, model: Any, steps: int, setting: dict[str, Any], order: int = 0) -> Any:
    """Run a compiled model with the options of one request: nothing is compiled again."""
    setting = dict(setting)
    if "scm" in setting:
        setting["steps_mask"] = setting.pop("scm")
        setting["steps_mask_policy"] = setting.pop("policy", "dynamic")
    with stepfx.request(
        cache=setting.pop("cache", "dbcache"),
        bn_compute_blocks=setting.pop("Bn_compute_blocks", 0),
        num_inference_steps=steps,
        taylor_order=order,
        **setting,
    ):
        return trajectory(tiny, model, steps, lambda: testing._counts[0])


def compiled(tiny: Any) -> Any:
    return stepfx.compile(tiny.model, inner="eager", batch="mean", compute_last_step=False)


def assert_equal(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert len(set(found[0])) == 2, "a cache test needs computed and reused steps"
    for a, b in zip(found[1], expected[1], strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def thresholds(tiny: Any, model: Any, steps: int) -> list[float]:
    """Return five thresholds below 1 that lie among the scores of a run."""
    ours(tiny, model, steps, {**SETTINGS[0], "residual_diff_threshold": 1e-30})
    (branch,) = stepfx.stats(tiny.model)[-1].branches.values()
    scores = sorted(score for score in branch.scores if score is not None)
    middle = scores[len(scores) // 2]
    chosen = [factor * middle for factor in (1.0, 1.4, 2.2, 3.0, 4.0)]
    assert max(chosen) < 1
    return chosen


@pytest.mark.parametrize("name", NAMES)
def test_dbcache_and_step_masks(tiny: Any, name: str) -> None:
    one = tiny(name)
    model = compiled(one)
    for steps in (28, 50):
        for i, threshold in enumerate(thresholds(one, model, steps)):
            for setting in (SETTINGS[i], SETTINGS[(i + 2) % len(SETTINGS)]):
                setting = {**setting, "residual_diff_threshold": threshold}
                found = ours(one, model, steps, setting)
                assert_equal(found, original(tiny(name), steps, setting))


@pytest.mark.parametrize("name", ["Flux", "Wan"])
@pytest.mark.parametrize("order", [1, 2])
def test_taylor_seer(tiny: Any, name: str, order: int) -> None:
    """Forecasts on evenly spaced times, where a step and a timestep are one distance."""
    one = tiny(name)
    model = compiled(one)
    threshold = thresholds(one, model, 28)[2]
    setting = {
        "Fn_compute_blocks": 1,
        "max_warmup_steps": 6,
        "max_continuous_cached_steps": 3,
        "residual_diff_threshold": threshold,
    }
    found = ours(one, model, 28, setting, order)
    assert_equal(found, original(tiny(name), 28, setting, order))
    plain = ours(one, model, 28, setting)
    assert any(not torch.allclose(a, b) for a, b in zip(found[1], plain[1], strict=True))


PRUNING: list[dict[str, Any]] = [
    {"Fn_compute_blocks": 1, "max_warmup_steps": 1},
    {"Fn_compute_blocks": 1, "Bn_compute_blocks": 1, "max_warmup_steps": 4},
    {"Fn_compute_blocks": 1, "max_warmup_steps": 2, "enable_dynamic_prune_threshold": True},
    {
        "Fn_compute_blocks": 1,
        "max_warmup_steps": 2,
        "enable_dynamic_prune_threshold": True,
        "max_dynamic_prune_threshold": 0.9,
        "dynamic_prune_threshold_relax_ratio": 1.1,
        "non_prune_block_ids": [2],
    },
    {"Fn_compute_blocks": 1, "max_warmup_steps": 2, "max_continuous_cached_steps": 2},
]


@pytest.mark.parametrize(
    "name", ["Wan", *(pytest.param(n, marks=pytest.mark.slow) for n in ("Flux", "CogVideoX"))]
)
def test_pruning(tiny: Any, name: str) -> None:
    """How many blocks ran at each step, and outputs; DiT's pattern 3 fails in cache-dit."""
    one = tiny(name)
    model = compiled(one)
    for steps in (28, 50):
        loose = {**PRUNING[0], "cache": "dbprune", "residual_diff_threshold": 1e-30}
        ours(one, model, steps, loose)
        (branch,) = stepfx.stats(one.model)[-1].branches.values()
        middle = sorted(score for score in branch.scores if score is not None)[steps // 2]
        for i, factor in enumerate((0.7, 1.0, 1.5, 2.5, 4.0)):
            setting = {**PRUNING[i], "residual_diff_threshold": factor * middle}
            found = ours(one, model, steps, {**setting, "cache": "dbprune"})
            expected = original(tiny(name), steps, setting, kind="DBPruneConfig")
            assert found[0] == expected[0]
            assert len(set(found[0])) > 1, "a cache test needs computed and reused steps"
            for a, b in zip(found[1], expected[1], strict=True):
                assert (a - b).norm() <= 1e-4 * b.norm()
