"""Scores, policy and forecasts, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfx.coefficients import COEFFICIENTS, MAGNITUDES, magnitude_curve, polynomial
from stepfx.config import Config, ConfigError
from stepfx.policy import Policy, Verdict, taylor_coefficients
from stepfx.requests import Branch, Request


def policy(batch: str = "worst", **options: object) -> Policy:
    return Policy(Config.build(batch=batch, **options))


def test_score_of_the_worst_sample_and_of_the_mean() -> None:
    changes, sizes = [1.0, 3.0], [10.0, 10.0]
    assert policy().score(changes, sizes, 1) == 0.3
    assert policy("mean").score(changes, sizes, 1) == 0.2


def test_score_of_two_signals_is_the_worse() -> None:
    assert policy().score([1.0, 1.0, 5.0, 1.0], [10.0] * 4, 2) == 0.5
    assert policy("mean").score([1.0, 1.0, 5.0, 1.0], [10.0] * 4, 2) == pytest.approx(0.3)


def test_score_of_a_signal_that_is_zero() -> None:
    assert policy().score([0.0], [0.0], 1) == 0.0
    assert policy().score([1.0], [0.0], 1) > 1e30


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_score_that_is_not_finite_stays_so(bad: float) -> None:
    assert not math.isfinite(policy().score([0.1, bad], [1.0, 1.0], 1))
    assert math.isnan(policy().score([math.nan, 0.1], [1.0, 1.0], 1))


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0.1, 50), st.floats(0.1, 50))
def test_first_order_is_exact_on_a_line(a: float, b: float, w: float, u: float) -> None:
    times = [1000 - w, 1000.0]
    now = times[0] - u
    forecast = sum(
        c * (a + b * t) for c, t in zip(taylor_coefficients(times, now), times, strict=True)
    )
    assert forecast == pytest.approx(a + b * now, rel=1e-6, abs=1e-4 * max(1, abs(b) * 1000))


def test_second_order_is_the_published_recursion() -> None:
    times, values, now = [4.0, 7.0, 12.0], [2.0, 5.0, -1.0], 1.5
    d1_new = (values[0] - values[1]) / (times[0] - times[1])
    d1_old = (values[1] - values[2]) / (times[1] - times[2])
    d2 = (d1_new - d1_old) / (times[0] - times[1])
    u = now - times[0]
    expected = values[0] + u * d1_new + u * u / 2 * d2
    coefficients = taylor_coefficients(times, now)
    assert sum(c * v for c, v in zip(coefficients, values, strict=True)) == pytest.approx(
        expected
    )
    assert sum(coefficients) == pytest.approx(1)


def test_one_residual_is_reused_as_it_is() -> None:
    assert taylor_coefficients([3.0], 1.0) == [1.0]


def schedule(
    steps: int,
    request_steps: int | None = None,
    changes: Sequence[float] = (),
    times: Sequence[float] = (),
    **options: object,
) -> str:
    """Return the schedule of a request whose signal changes by `changes`, then by 0."""
    rules, request = policy(**options), Request("r", steps=request_steps)
    branch = Branch("b", None, None)
    request.branches.append(branch)
    for i in range(steps):
        time = times[i] if times else float(steps - i)
        if rules.refreshes(branch):
            branch.refresh()
        (state,) = branch.gates
        trial = rules.trial(request, branch, state)
        if trial.verdict is Verdict.ASK and rules.preset.score == "magnitude":
            trial = rules.judge_magnitude(trial, state, request, branch, time)
        elif trial.verdict is Verdict.ASK:
            change = changes[i] if i < len(changes) else 0.0
            trial = rules.judge(trial, change, state, request, branch)
        computed = not trial.close
        if computed:
            state.kept = object()  # type: ignore[assignment]
        rules.commit(state, trial, computed)
        branch.record(time, computed, trial.score)
    return "".join("1" if computed else "0" for computed in branch.schedule)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "1000000000"),
        ({"threshold": 0}, "1111111111"),
        ({"cache": None}, "1111111111"),
        ({"max_warmup_steps": 4}, "1111000000"),
        ({"max_warmup_steps": 4, "warmup_interval": 2}, "1010000000"),
        ({"max_warmup_steps": 20}, "1111111111"),
        ({"max_cached_steps": 3}, "1000111111"),
        ({"max_cached_steps": 0}, "1111111111"),
        ({"max_continuous_cached_steps": 2}, "1001001001"),
        ({"max_continuous_cached_steps": 0}, "1111111111"),
        ({"max_continuous_cached_steps": -1}, "1000000000"),
        ({"force_refresh_step": 4}, "1000100000"),
        ({"force_refresh_step": 4, "force_refresh_policy": "repeat"}, "1000100010"),
        ({"cache": "mask", "steps_mask": "1101001"}, "1101001000"),
        ({"steps_mask": "1101001"}, "1101001000"),
    ],
)
def test_policies(options: dict[str, object], expected: str) -> None:
    assert schedule(10, **options) == expected


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_first_and_last_steps_are_computed(steps: int) -> None:
    found = schedule(steps, request_steps=steps)
    assert found[0] == found[-1] == "1"
    assert found.count("1") == min(steps, 2)
    if steps > 2:
        assert schedule(steps, request_steps=steps, compute_last_step=False)[-1] == "0"


CACHE_DIT: dict[str, object] = {
    "cache": "dbcache",
    "fn_compute_blocks": 1,
    "max_warmup_steps": 1,
    "continuous_counter": "cache-dit",
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_continuous_cached_steps": 0}, "1111111111111111"),
        ({"max_continuous_cached_steps": 1}, "1010010010010010"),
        ({"max_continuous_cached_steps": 2}, "1001001001001001"),
        ({"max_continuous_cached_steps": 3}, "1000100010001000"),
        ({"max_cached_steps": 5, "max_warmup_steps": 2}, "1100000111111111"),
        ({"max_warmup_steps": 8, "warmup_interval": 2}, "1010101000000000"),
        ({"max_warmup_steps": 8, "warmup_interval": 4}, "1000100000000000"),
        ({"steps_mask": "1110010001"}, "1110010001000000"),
    ],
)
def test_schedules_of_cache_dit(options: dict[str, object], expected: str) -> None:
    """What cache-dit of August 2026 did on a constant input of 16 steps (DBCacheConfig)."""
    assert schedule(16, **{**CACHE_DIT, **options}) == expected


def test_counters_of_reused_steps_in_a_row() -> None:
    """cache-dit did not clear its counter at a step that the score computed."""
    jump = [0.0, 0.0, 0.0, 9.0]
    options = {**CACHE_DIT, "max_continuous_cached_steps": 3}
    assert schedule(16, changes=jump, **options) == "1001001000100010"
    options["continuous_counter"] = "consecutive"
    assert schedule(16, changes=jump, **options) == "1001000100010001"


def test_a_jump_under_a_dynamic_mask_is_computed_and_under_a_static_one_is_not() -> None:
    jump = [0.0, 0.0, 0.0, 0.0, 9.0]
    assert schedule(10, changes=jump, steps_mask="1110010001") == "1110110001"
    static = {"steps_mask": "1110010001", "steps_mask_policy": "static"}
    assert schedule(10, changes=jump, **static) == "1110010001"


def test_accumulated_threshold_ends_reuse_for_good() -> None:
    changes = [0.0, 0.02, 0.02, 0.02, 0.02, 0.02]
    # The test precedes the addition: the sum is 0.06 when the fifth step asks.
    found = schedule(8, changes=changes, max_accumulated_threshold=0.05)
    assert found == "10001111"


def test_a_threshold_of_its_own_for_the_second_branch() -> None:
    rules, request = policy(threshold=0.1, alternate_threshold=0.3), Request("r")
    first, second = Branch("a", None, None), Branch("b", None, None)
    request.branches += [first, second]
    assert rules.threshold(request, first) == 0.1
    assert rules.threshold(request, second) == 0.3
    assert policy(threshold=0.1).threshold(request, second) == 0.1


@pytest.mark.parametrize(("strict", "expected"), [(True, "11"), (False, "10")])
def test_a_score_equal_to_the_threshold(strict: bool, expected: str) -> None:
    assert schedule(2, changes=[0, 0.25], threshold=0.25, strict=strict) == expected


@pytest.mark.parametrize(
    ("options", "earlier", "expected"),
    [
        ({"enable_dynamic_prune_threshold": False}, [0.1], 0.08),
        ({}, [], 0.08),
        ({}, [0.1], 0.125),
        ({}, [0.02], 0.08),  # never below the static one
        ({}, [0.2], 0.08),  # 0.25 is above twice the threshold
        ({"max_dynamic_prune_threshold": 0.3}, [0.2], 0.25),
        ({"dynamic_prune_threshold_relax_ratio": 1.5}, [0.1], 0.15),
        ({}, [0.0, 0.1], 0.125),  # what did not change does not count
        ({}, [0.1] * 5 + [9.0], 0.125),  # nor does what is behind the first five
    ],
)
def test_dynamic_threshold_of_pruning(
    options: dict[str, object], earlier: list[float], expected: float
) -> None:
    rules = policy(cache="dbprune", **{"enable_dynamic_prune_threshold": True, **options})
    assert rules.pruning_threshold(0.08, earlier) == pytest.approx(expected)


def test_comparisons_of_the_originals() -> None:
    assert not policy(cache="fbcache").preset.strict
    for cache in ("dbcache", "teacache", "dbprune"):
        assert policy(cache=cache).preset.strict


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "1111110101000100010001001011"),
        ({"threshold": 0.12}, "1111110010010001000100010010"),
        ({"threshold": 0.24, "max_skip_steps": 5}, "1111110001000001000001000010"),
    ],
)
def test_schedules_of_magcache_on_flux(options: dict[str, object], expected: str) -> None:
    """What diffusers' MagCache does in 28 steps with the published curve of FLUX."""
    ratios = MAGNITUDES["flux"].ratios
    options = {"cache": "magcache", "magnitudes": ratios, "compute_last_step": False, **options}
    assert schedule(28, request_steps=28, **options) == expected


def test_a_flat_magnitude_curve() -> None:
    options = {"cache": "magcache", "magnitudes": [1.0] * 8, "compute_last_step": False}
    assert schedule(8, request_steps=8, **options) == "11000100"


@pytest.mark.parametrize("steps", [14, 28, 50, 100])
def test_a_magnitude_curve_over_noise_levels_fits_any_number_of_steps(steps: int) -> None:
    """The product of the ratios along a run is that of the curve, whatever the stride."""
    levels = np.linspace(1, 0.02, 28)
    curve = magnitude_curve({"ratios": MAGNITUDES["flux"].ratios, "levels": list(levels)})
    times = np.linspace(1, 0.02, steps)
    product = math.prod(curve.ratio(i, steps, times[i - 1], times[i]) for i in range(1, steps))
    assert product == pytest.approx(math.prod(MAGNITUDES["flux"].ratios), rel=1e-9)


def test_a_magnitude_curve_without_levels_is_spread_over_the_steps() -> None:
    curve = magnitude_curve(MAGNITUDES["flux"].ratios)
    for steps in (9, 28, 61):
        product = math.prod(curve.ratio(i, steps, 0, 0) for i in range(1, steps))
        assert product == pytest.approx(math.prod(curve.ratios), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "flux": (0.1805, 0.20685, 0.262),
        "hunyuan_video": (0.062038, 0.1292, 0.13373),
        "cogvideox_2b": (0.072449, 0.13528, 0.26505),
        "cogvideox_5b": (0.10612, 0.090506, 0.45096),
        "cogvideox1.5_5b": (0.067161, 0.17547, 0.39061),
        "cosmos": (0.24176, 0.30771, 0.34629),
        "mochi": (0.051425, 0.096517, -1.0761),
        "ltx_video": (0.053633, 0.10141, 0.19264),
        "lumina_next": (0.16319, 0.089937, 0.42836),
        "hidream": (0.3591, -2.42, -52),
        "wan_t2v_1.3b": (0.077381, 0.24992, -0.12256),
        "wan_t2v_14b": (-4.09, -0.636, 0.126),
        "wan_i2v_480p": (-0.01356, 0.0536, 0.1787),
        "wan_i2v_720p": (-0.02798, 0.123, 0.33516),
        "qwen_image": (0.059688, 0.085, 0.34),
        "longcat_image": (0.10223, 0.19679, 0.28391),
        "open_sora_1.2": (0.09988, 0.21594, 0.51535),
        "latte": (0.13027, 0.56867, 1.0394),
    }.items(),
)
def test_values_of_published_polynomials(name: str, expected: tuple[float, ...]) -> None:
    """Values at 0.05, 0.1 and 0.2, to the digits that they are given with."""
    for x, value in zip((0.05, 0.1, 0.2), expected, strict=True):
        found = polynomial(COEFFICIENTS[name], x)
        digits = len(str(abs(value)).replace(".", "").lstrip("0"))
        assert found == pytest.approx(value, rel=0.6 * 10 ** (1 - digits))


def test_accumulated_score() -> None:
    """TeaCache: the sum since the last computed step stays below the threshold."""
    changes = [0.0] + [0.03] * 9
    tea = {"cache": "teacache", "threshold": 0.1}
    assert schedule(10, changes=changes, **tea) == "1000100010"
    # P(0.03) = 0.1927 for FLUX: two more steps fit below 0.5.
    flux = {"cache": "teacache", "threshold": 0.5, "coefficients": "flux"}
    assert schedule(10, changes=changes, **flux) == "1001001001"


@pytest.mark.parametrize(("sign", "expected"), [("raw", -0.5), ("abs", 0.5), ("clamp", 0.0)])
def test_a_polynomial_may_be_negative(sign: str, expected: float) -> None:
    rules = policy(cache="teacache", coefficients=[0, 0, 0, 0, -0.5], coefficients_sign=sign)
    assert rules._polynomial(0.3) == expected


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"steps_mask": "11x0"}, ["'steps_mask'", "text of 1 (computed) and 0", "'11x0'"]),
        ({"steps_mask": ""}, ["'steps_mask'", "text of 1"]),
        ({"steps_mask": "fastest"}, ["'steps_mask'", "'slow', 'medium', 'fast', 'ultra'"]),
        ({"steps_mask_policy": "static"}, ["'steps_mask_policy'", "'steps_mask'"]),
        ({"cache": "mask"}, ["cache='mask'", "'steps_mask'"]),
        ({"cache": None, "taylor_order": 1}, ["'taylor_order' is 1", "cache=None"]),
        (
            {"cache": "mask", "steps_mask": "1000", "taylor_order": 1},
            ["'taylor_order' is 1", "needs 2 computed steps", "'1000' computes 1"],
        ),
        (
            {"cache": "teacache", "coefficients": [1.0, 2.0]},
            ["'coefficients'", "5 numbers", "2"],
        ),
        ({"cache": "teacache", "coefficients": "fluxx"}, ["did you mean 'flux'?"]),
        ({"cache": "teacache", "coefficients": [0, 0, 0, 1, math.nan]}, ["'coefficients'"]),
        ({"coefficients": "flux"}, ["'coefficients'", "needs cache='teacache'", "'fbcache'"]),
        ({"cache": "magcache"}, ["cache='magcache'", "'magnitudes'"]),
        ({"cache": "magcache", "magnitudes": []}, ["'magnitudes'", "at least one ratio"]),
        ({"cache": "magcache", "magnitudes": [1.0, 0.0]}, ["'magnitudes'", "above 0"]),
        (
            {"cache": "magcache", "magnitudes": {"ratios": [1, 1], "levels": [0.1, 0.9]}},
            ["'magnitudes'", "falling"],
        ),
        ({"magnitudes": "flux"}, ["'magnitudes'", "cache='magcache'"]),
        ({"cache": "dbcache", "fn_compute_blocks": 0}, ["'fn_compute_blocks'", "at least 1"]),
        ({"retention_ratio": 1.5}, ["'retention_ratio'", "at most 1"]),
        ({"downsample_factor": 0}, ["'downsample_factor'", "at least 1"]),
        ({"non_prune_block_ids": [2]}, ["'non_prune_block_ids'", "needs cache='dbprune'"]),
        ({"cache": "dbprune", "non_prune_block_ids": [-1]}, ["block numbers from 0 on"]),
        (
            {"cache": "dbprune", "dynamic_prune_threshold_relax_ratio": 0},
            ["'dynamic_prune_threshold_relax_ratio'", "above 0"],
        ),
        ({"cache": "teacache", "signal": "input"}, ["'signal' is 'input'", "'fbcache'"]),
        ({"lists": [{"treshold": 1}]}, ["'lists'[0]", "unknown option 'treshold'"]),
        ({"lists": [{"inner": "eager"}]}, ["'lists'[0]", "'inner' is fixed"]),
    ],
)
def test_bad_input(options: dict[str, object], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.build(**options)
    for text in texts:
        assert text in str(caught.value)
