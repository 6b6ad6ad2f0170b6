"""Scores, policy and forecasts, by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfx.config import Config
from stepfx.gate import Policy, taylor_coefficients
from stepfx.requests import Branch, Request


def policy(batch: str = "worst", **options: object) -> Policy:
    config = Config.build(**options)
    return Policy(
        config.preset(),
        batch,
        config.taylor_order,
        config.max_cached_steps,
        config.max_continuous_cached_steps,
    )


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


def schedule(steps: int, request_steps: int | None = None, **options: object) -> str:
    """Return the schedule of a request whose score always allows reuse."""
    rules, request = policy(**options), Request("r", steps=request_steps)
    branch = Branch("b", None, None)
    for i in range(steps):
        compute = rules.must_compute(request, branch)
        branch.record(float(i), compute, None)
        branch.kept = object()  # type: ignore[assignment]
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
        ({"max_continuous_cached_steps": -1}, "1000000000"),
    ],
)
def test_policies(options: dict[str, object], expected: str) -> None:
    assert schedule(10, **options) == expected


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_first_and_last_steps_are_computed(steps: int) -> None:
    found = schedule(steps, request_steps=steps)
    assert found[0] == found[-1] == "1"
    assert found.count("1") == min(steps, 2)
