"""The gate of one call: asks who is calling, decides, reuses, keeps.

The outer graph calls `decide` when the watched blocks have run and `cond` in place of the
blocks that may be skipped. All state is in the session; the graph holds none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepfx.config import Preset
from stepfx.requests import Branch, Kept, Request
from stepfx.session import Caller, Session

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Policy:
    """When a step is computed whatever the score says, and how a score is judged."""

    preset: Preset
    batch: str = "worst"
    taylor_order: int = 1
    max_cached_steps: int | None = None
    max_continuous_cached_steps: int | None = None

    @property
    def is_off(self) -> bool:
        """A threshold of 0 computes every step and keeps nothing."""
        return self.preset.threshold <= 0

    def must_compute(self, request: Request | None, branch: Branch | None) -> bool:
        """Tell whether the coming step is computed without asking the score."""
        if self.is_off or request is None or branch is None or branch.kept is None:
            return True
        step = branch.step
        warm = max(1, self.preset.max_warmup_steps)
        if step < warm and step % self.preset.warmup_interval == 0:
            return True
        if request.steps is not None and step >= request.steps - 1:
            return True
        limit, in_a_row = self.max_cached_steps, self.max_continuous_cached_steps
        if limit is not None and branch.reused >= limit:
            return True
        return in_a_row is not None and branch.in_a_row >= in_a_row

    def score(self, changes: list[float], sizes: list[float], signals: int) -> float:
        """Return the relative change: of the worst sample and signal, or the mean."""
        rows = len(changes) // signals
        if self.batch == "mean":
            totals = [
                sum(changes[i : i + rows]) / _positive(sum(sizes[i : i + rows]))
                for i in range(0, len(changes), rows)
            ]
            return _worst(totals)
        return _worst([c / _positive(s) for c, s in zip(changes, sizes, strict=True)])


def _positive(size: float) -> float:
    """Keep 0/0 at 0 and x/0 infinite, as a signal that never moves is unchanged."""
    return size if size != 0 else math.ulp(0.0)


def _worst(scores: list[float]) -> float:
    return math.nan if any(math.isnan(s) for s in scores) else max(scores)


def taylor_coefficients(times: Sequence[float], time: float) -> list[float]:
    """Return the weights of kept residuals, newest first, in a forecast at `time`.

    With the residual Y_k kept at times t_k the forecast is Y_k + u D1 + u^2/2 D2, u = time -
    t_k, with D1 the difference of the last two over their distance and D2 the difference
    of the last two D1 over the last distance (TaylorSeer, arXiv 2503.06923, on the true
    timestep distance as in cache-dit).
    """
    if len(times) == 1:
        return [1.0]
    u, w = time - times[0], times[0] - times[1]
    coefficients = [1 + u / w, -u / w]
    if len(times) == 2:
        return coefficients
    half, older = u * u / 2 / w, times[1] - times[2]
    return [
        coefficients[0] + half / w,
        coefficients[1] - half / w - half / older,
        half / older,
    ]


class Gate:
    """The decision of one call and what follows from it."""

    def __init__(
        self,
        session: Session,
        caller: Caller,
        policy: Policy,
        has_time: bool,
        outer_time: torch.Tensor | None = None,
    ) -> None:
        self.session, self.caller, self.policy = session, caller, policy
        # Behind a graph break the timestep is an input of the graph before it.
        self.outer_time = None if has_time else outer_time
        self.has_time = has_time or outer_time is not None
        self.branch: Branch | None = None
        self.time = 0.0
        self._score: float | None = None

    @property
    def is_blind(self) -> bool:
        """Without a timestep and without `stepfx.request` requests cannot be told apart."""
        return not self.has_time and self.caller.scope is None

    def decide(
        self,
        score: Callable[..., Any],
        h0: Tensors,
        h1: Tensors,
        time: torch.Tensor | None,
        sizes: Sequence[int] = (),
    ) -> bool:
        """Return whether the blocks must run; reads the device once.

        `h0` and `h1` are the watched streams before and behind the first blocks, `time` the
        model's timestep input of any shape, `sizes` what dynamic shapes are made of.
        """
        if self.is_blind:
            self.session.warn_once(
                "no timestep input was found in the graph, so requests "
                "cannot be told apart: every step is computed; name requests with "
                "stepfx.request(steps=...)"
            )
            return True
        request, branch = self.session.candidate(self.caller)
        skippable = not self.policy.must_compute(request, branch)
        times = () if time is None else (time,)
        close = sound = False
        if skippable:
            assert branch is not None and branch.kept is not None
            kept = branch.kept
            values = score(*h0, *h1, *kept.signals, kept.ok, *times, *sizes)[0].tolist()
            now = values.pop(0) if times else read_time(self.outer_time, branch)
            ok, half = values[0], (len(values) - 1) // 2
            self._score = self.policy.score(values[1 : 1 + half], values[1 + half :], len(h0))
            sound = bool(ok) and math.isfinite(self._score)
            close = sound and self._score <= self.policy.preset.threshold
        else:
            now = read_time(self.outer_time if time is None else time, branch)
        self.branch = self.session.settle(self.caller, request, branch, now)
        self.time = now
        if self.branch.ambiguous:
            self.session.warn_once(
                "the same timestep came twice under the same conditioning, so the calls "
                "cannot be told apart: they are computed in full; name them with "
                "stepfx.request(branch=...)"
            )
        if self.branch is not branch:
            self._score = None
        if skippable and not sound:
            self.branch.kept = None
        return not close or self.branch is not branch or self.branch.kept is None

    def cond(
        self,
        compute: bool,
        blocks: Callable[..., Any],
        reuse: Callable[..., Any],
        keep: Callable[..., Any],
        *,
        operands: Sequence[Any],
        bases: Tensors,
        seen: tuple[Tensors, Tensors],
        sizes: Sequence[int] = (),
    ) -> Sequence[Any]:
        """Return what the skipped blocks return: computed, or made from what is kept."""
        outs: Sequence[Any]
        outs = blocks(*operands) if compute else self._reuse(reuse, bases, sizes)
        if self.branch is None:
            return outs
        if compute and not self.policy.is_off:
            self._keep(keep(*seen[0], *seen[1], *bases, *outs), len(seen[0]))
        # Last: a step that fails on the way is not one.
        self.branch.record(self.time, compute, self._score)
        return outs

    def _reuse(
        self, reuse: Callable[..., Any], bases: Tensors, sizes: Sequence[int]
    ) -> Sequence[Any]:
        assert self.branch is not None
        assert self.branch.kept is not None
        history = self.branch.kept.history
        length = self.policy.taylor_order + 1
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

    def _keep(self, kept: Sequence[torch.Tensor], signals: int) -> None:
        assert self.branch is not None
        history, ok = [(self.time, list(kept[signals:-1]))], kept[-1]
        old = self.branch.kept
        if old is not None and self.policy.taylor_order:
            # A forecast needs residuals of different times, all of them finite.
            earlier = [entry for entry in old.history if entry[0] != self.time]
            history += earlier[: self.policy.taylor_order]
            ok = ok & old.ok
        self.branch.kept = Kept(list(kept[:signals]), ok, history)


def read_time(time: torch.Tensor | None, branch: Branch | None) -> float:
    """Return the timestep as a number; without one, the count of steps so far."""
    if time is None:
        return float(branch.step) if branch is not None else 0.0
    return float(time.detach().reshape(-1).max().to(torch.float32).item())
