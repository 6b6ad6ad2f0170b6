"""Telling callers apart, without a model: times and conditioning in, branches out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepfx
from stepfx.config import StepfxWarning
from stepfx.requests import Branch, Conditioning, current_scope
from stepfx.session import MAX_BRANCHES, Caller, Session, Sessions

A, B = torch.zeros(2), torch.ones(2)


def step(session: Session, time: float, *conditioning: torch.Tensor) -> tuple[Branch, bool]:
    """Make one step and return its branch and whether anything kept may be used."""
    caller = Caller(current_scope(), "graph", conditioning)
    request, branch = session.candidate(caller)
    settled = session.settle(caller, request, branch, time)
    usable = settled is branch and settled.kept is not None
    settled.record(time, computed=not usable, score=None)
    settled.kept = object()  # type: ignore[assignment]
    return settled, usable


def run(session: Session, *times: float) -> str:
    return "".join("0" if step(session, t, A)[1] else "1" for t in times)


def test_time_turning_back_is_a_new_request() -> None:
    session = Session()
    assert run(session, 900, 800, 700, 900, 800, 700) == "100100"
    assert len(session.requests) == 2


def test_a_shorter_and_a_longer_request() -> None:
    session = Session()
    assert run(session, 900, 600, 300, 950, 500, 940, 930, 920) == "10010100"


def test_the_first_step_twice_is_two_requests_and_then_caution() -> None:
    # A run cut off at once, or two runs side by side: the second step cannot tell.
    session = Session()
    assert run(session, 900, 900, 800, 700) == "1110"


def test_two_runs_in_lockstep_are_computed() -> None:
    session = Session()
    assert run(session, 9, 9, 8, 8, 7, 7, 6, 6) == "11111111"


def test_branches_by_object_by_value_and_by_version() -> None:
    session = Session()
    a, b = A.clone(), B.clone()
    first, _ = step(session, 9, a)
    second, _ = step(session, 9, b)
    assert first is not second
    assert step(session, 8, a) == (first, True)
    assert step(session, 8, b.clone()) == (second, True)
    a.add_(1)  # the same object now says what b says
    assert step(session, 7, a)[0] is second
    assert len(session.requests) == 1


def test_a_new_prompt_is_a_new_request() -> None:
    session = Session()
    run(session, 9, 8, 7)
    step(session, 9, B)
    assert len(session.requests) == 2
    assert session.requests[0].branches[0].kept is None


def test_branches_that_keep_are_bounded() -> None:
    session = Session()
    for i in range(3 * MAX_BRANCHES):
        step(session, 9.0, torch.full((2,), float(i)))
    (request,) = session.requests
    assert sum(b.kept is not None for b in request.branches) <= MAX_BRANCHES + 1


def test_inference_tensors_are_compared_by_value() -> None:
    with torch.inference_mode():
        a = torch.zeros(2)
        known = Conditioning.of([a])
        assert known.matches([a])
        a.add_(1)
        assert not known.matches([a])


def test_conditioning_of_other_shape_or_dtype_is_other() -> None:
    known = Conditioning.of([A])
    assert not known.matches([torch.zeros(3)])
    assert not known.matches([torch.zeros(2, dtype=torch.float64)])
    assert not known.matches([A, A])


def test_sessions_go_with_their_weights() -> None:
    sessions = Sessions()
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    session = sessions.of(weights)
    assert sessions.of(weights) is session
    assert sessions.of(weights[:2]) is not session
    assert sessions.holding(weights[:1]) == [session, sessions.of(weights[:2])]
    del weights[2]
    assert len(sessions._sessions) == 1
    weights.clear()
    assert not sessions._sessions


def test_scopes_nest() -> None:
    with stepfx.request(steps=3, name="outer"):
        outer = current_scope()
        with stepfx.request(branch="cond"):
            inner = current_scope()
            assert inner is not None
            assert inner.root is outer
            assert inner.branch == "cond"
        with stepfx.request(name="other"):
            other = current_scope()
            assert other is not None
            assert other.root is other
    assert current_scope() is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": 0}, "'steps' must be a positive integer, not 0"),
        ({"steps": -1}, "'steps'"),
        ({"steps": 2.5}, "'steps'"),
        ({"steps": True}, "'steps'"),
        ({"name": ""}, "'name' must be a non-empty string"),
        ({"branch": 3}, "'branch' must be a non-empty string"),
    ],
)
def test_bad_requests(options: dict[str, Any], text: str) -> None:
    with pytest.raises(stepfx.ConfigError, match=text), stepfx.request(**options):
        pass


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), st.booleans()
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=200, deadline=None)
def test_requests_in_a_row_never_share(runs: list[tuple[list[int], bool]]) -> None:
    """Runs go down in time; the first step of each must not use what the last one kept.

    Left out is what time cannot tell: a run that starts below where the last one stopped
    looks like its next step, and a single step has no direction.
    """
    session, last = Session(), None
    for times, switch in runs:
        conditioning = B if switch else A
        ordered = sorted(times, reverse=True)
        if last is not None and (len(last) == 1 or ordered[0] <= last[0]):
            continue
        for i, time in enumerate(ordered):
            _, usable = step(session, float(time), conditioning)
            assert not (i == 0 and usable)
        last = ordered


class TestClocks:
    """Inputs that tell branches apart where they stand still, and may move."""

    @staticmethod
    def step(session: Session, t: float, clock: float) -> tuple[Branch, bool]:
        caller = Caller(None, "shape", [A], [torch.tensor([clock])])
        request, branch = session.candidate(caller)
        settled = session.settle(caller, request, branch, t)
        settled.record(t, True, None)
        return settled, settled is branch

    def test_a_second_timestep_that_moves_is_one_branch(self) -> None:
        session = Session()
        branches = [self.step(session, t, t - 0.1)[0] for t in (1.0, 0.9, 0.8)]
        assert branches[0] is branches[1] is branches[2]

    def test_two_guidances_in_turn_are_two_branches(self) -> None:
        session = Session()
        found = [self.step(session, t, g)[0] for t in (1.0, 0.9, 0.8) for g in (1.0, 5.0)]
        assert found[0] is found[2] is found[4]
        assert found[1] is found[3] is found[5]
        assert found[0] is not found[1]

    def test_branches_that_differ_in_moving_clocks_alone_are_computed(self) -> None:
        session = Session()
        for g in (0.0, 5.0):
            self.step(session, 1.0, 0.9 + g)
        with pytest.warns(StepfxWarning, match="differ only in inputs that move"):
            _, known = self.step(session, 0.9, 0.8)
        assert not known
