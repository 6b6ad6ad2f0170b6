"""The gates of one call: ask who is calling, decide, reuse, keep.

The outer graph calls `decide` where a gate's watched tensors are known and `cond` in place of
the blocks that may be skipped. All state is in the session; the graph holds none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepfx.policy import Policy, Trial, Verdict, taylor_coefficients
from stepfx.requests import Branch, GateState, Kept, Request
from stepfx.session import Caller, Session

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """The gates of a graph, in the order they decide.

    Attributes:
        layout: names the placement; what was kept under another is of no use.
        policies: the rules of each gate.
        widths: how many blocks each gate may skip.
        signals: how many tensors each gate compares.
        history: how many computed residuals a forecast takes.
        stride: every how many channels of a watched tensor are kept.
        has_time: whether the graph has a timestep input.
    """

    layout: object
    policies: tuple[Policy, ...]
    widths: tuple[int, ...]
    signals: tuple[int, ...]
    history: int
    stride: int = 1
    has_time: bool = True


class Gate:
    """The decisions of one call and what follows from them."""

    def __init__(
        self,
        session: Session,
        caller: Caller,
        plan: Plan,
        outer_time: torch.Tensor | None = None,
    ) -> None:
        self.session, self.caller, self.plan = session, caller, plan
        # Behind a graph break the timestep is an input of the graph before it.
        self.outer_time = None if plan.has_time else outer_time
        self.has_time = plan.has_time or outer_time is not None
        self.request: Request | None = None
        self.branch: Branch | None = None
        self.time = 0.0
        self._trials: list[Trial] = []
        self._skipped = 0

    @property
    def is_blind(self) -> bool:
        """Without a timestep and without `stepfx.request` requests cannot be told apart."""
        return not self.has_time and self.caller.scope is None

    def decide(
        self,
        number: int,
        score: Callable[..., Any] | None,
        seen: Tensors,
        time: torch.Tensor | None,
        sizes: Sequence[int] = (),
    ) -> bool:
        """Return whether the blocks of gate `number` must run; reads the device at most once.

        `seen` are the watched tensors (for a residual, what is before and what is behind the
        first blocks), `time` the model's timestep input of any shape, `sizes` what dynamic
        shapes are made of. Only the first gate of a call is given `score` with the time in it.
        """
        if self.is_blind:
            self.session.warn_once(
                "no timestep input was found in the graph, so requests "
                "cannot be told apart: every step is computed; name requests with "
                "stepfx.request(steps=...)"
            )
            return True
        policy, first = self.plan.policies[number], number == 0
        request, branch = self.request, self.branch
        if first:
            request, branch = self.session.candidate(self.caller)
            if branch is not None:
                branch.fit(self.plan.layout, len(self.plan.widths))
        state = branch.gates[number] if branch is not None else None
        trial = policy.trial(request, branch, state)
        change, sound = 0.0, True
        times = (time,) if first and time is not None else ()
        if trial.verdict is Verdict.COMPUTE:
            now = self._read_time(time, branch) if first else self.time
        else:
            assert branch is not None and state is not None and state.kept is not None
            if trial.verdict is Verdict.ASK and score is not None:
                kept = state.kept
                values = score(*seen, *kept.signals, kept.ok, *times, *sizes)[0].tolist()
            else:
                values = _read(times, state.kept.ok)
            if times:
                now = values.pop(0)
            else:
                now = self._read_time(None, branch) if first else self.time
            sound, values = bool(values[0]), values[1:]
            if values:
                half, signals = len(values) // 2, self.plan.signals[number]
                change = policy.score(values[:half], values[half:], signals)
                sound = sound and math.isfinite(change)
        if first:
            self._settle(request, branch, now)
        assert self.branch is not None and self.request is not None
        state = self.branch.gates[number]
        if self.branch is not branch:
            trial = Trial(Verdict.COMPUTE)
        elif first and policy.refreshes(self.branch):
            self.branch.refresh()
            state = self.branch.gates[number]
        elif not sound:
            state.kept = None
            trial = Trial(Verdict.COMPUTE)
        elif trial.verdict is Verdict.ASK and score is not None:
            earlier = self._scores_of(policy)
            trial = policy.judge(trial, change, state, self.request, self.branch, earlier)
        elif trial.verdict is Verdict.ASK:
            trial = policy.judge_magnitude(trial, state, self.request, self.branch, now)
        self._trials.append(trial)
        return not trial.close or state.kept is None

    def _scores_of(self, policy: Policy) -> list[float]:
        """Return the scores that gates of `policy` had in this call so far."""
        asked = zip(self.plan.policies, self._trials, strict=False)
        return [t.score for own, t in asked if own is policy and t.score is not None]

    def _read_time(self, time: torch.Tensor | None, branch: Branch | None) -> float:
        return read_time(self.outer_time if time is None else time, branch)

    def _settle(self, request: Request | None, branch: Branch | None, now: float) -> None:
        self.branch = self.session.settle(self.caller, request, branch, now)
        self.request = self.session.request_of(self.branch)
        self.branch.fit(self.plan.layout, len(self.plan.widths))
        self.time = now
        if self.branch.ambiguous:
            self.session.warn_once(
                "the same timestep came twice under the same conditioning, so the calls "
                "cannot be told apart: they are computed in full; name them with "
                "stepfx.request(branch=...)"
            )
        if self.plan.policies[0].lacks_steps(self.request):
            self.session.warn_once(
                "a named step mask needs the number of steps: every step is computed; give it "
                "with stepfx.request(steps=...) or option 'num_inference_steps'"
            )

    def cond(
        self,
        number: int,
        compute: bool,
        blocks: Callable[..., Any],
        reuse: Callable[..., Any],
        keep: Callable[..., Any],
        *,
        operands: Sequence[Any],
        bases: Tensors,
        seen: Tensors,
        sizes: Sequence[int] = (),
    ) -> Sequence[Any]:
        """Return what the skipped blocks return: computed, or made from what is kept."""
        if self.branch is None:
            outs: Sequence[Any] = blocks(*operands)
            return outs
        policy, state = self.plan.policies[number], self.branch.gates[number]
        if compute:
            outs = blocks(*operands)
            if not policy.is_off:
                kept = keep(*seen, *bases, *outs)
                self._keep(policy, state, kept, self.plan.signals[number])
        else:
            outs = self._reuse(state, reuse, bases, sizes)
            self._skipped += self.plan.widths[number]
            if policy.preset.score == "accumulated":
                self._follow(state, seen)
        # Last: a step that fails on the way is not one.
        trial = self._trials[number]
        policy.commit(state, trial, compute)
        if number == len(self.plan.widths) - 1:
            score = _largest([one.score for one in self._trials])
            self.branch.record(self.time, not self._skipped, score, self._skipped)
        return outs

    def _reuse(
        self,
        state: GateState,
        reuse: Callable[..., Any],
        bases: Tensors,
        sizes: Sequence[int],
    ) -> Sequence[Any]:
        assert state.kept is not None
        history, length = state.kept.history, self.plan.history
        # The forecast takes a fixed number of residuals: the newest fills in, with weight 0.
        filled = [history[min(j, len(history) - 1)][1] for j in range(length)]
        residuals = [kept[i] for i in range(len(filled[0])) for kept in filled]
        if length == 1:
            out: Sequence[Any] = reuse(*bases, *residuals, *sizes)
            return out
        weights = taylor_coefficients([time for time, _ in history], self.time)
        weights += [0.0] * (length - len(weights))
        coefficients = torch.tensor(weights, device=residuals[0].device)
        out = reuse(*bases, *residuals, coefficients, *sizes)
        return out

    def _keep(
        self, policy: Policy, state: GateState, kept: Sequence[torch.Tensor], signals: int
    ) -> None:
        history, ok = [(self.time, list(kept[signals:-1]))], kept[-1]
        old, order = state.kept, policy.config.taylor_order
        if old is not None and order:
            # A forecast needs residuals of different times, all of them finite.
            earlier = [entry for entry in old.history if entry[0] != self.time]
            history += earlier[:order]
            ok = ok & old.ok
        state.kept = Kept(list(kept[:signals]), ok, history)

    def _follow(self, state: GateState, seen: Tensors) -> None:
        """Keep what is watched on a reused step, too: the next step is compared with it."""
        assert state.kept is not None
        state.kept.signals = [x[..., :: self.plan.stride].clone() for x in seen]


def _largest(scores: Sequence[float | None]) -> float | None:
    return max((score for score in scores if score is not None), default=None)


def _read(times: Tensors, ok: torch.Tensor) -> list[float]:
    """Return the time, if there is one, and whether what is kept is sound, in one read."""
    latest = [time.detach().reshape(-1).max().to(torch.float32).reshape(1) for time in times]
    flag = ok.to(torch.float32).reshape(1)
    return [float(x) for x in torch.cat([t.to(flag.device) for t in latest] + [flag]).tolist()]


def read_time(time: torch.Tensor | None, branch: Branch | None) -> float:
    """Return the timestep as a number; without one, the count of steps so far."""
    if time is None:
        return float(branch.step) if branch is not None else 0.0
    return float(time.detach().reshape(-1).max().to(torch.float32).item())
