"""When a step is computed, and what a score means: plain numbers, no tensors.

The rules, in the order of cache-dit's DBCache; the first that fires decides:

    first step, refresh, warm-up, last step, mask, limits -> computed or reused
    otherwise the score against the threshold

What a rule changes (counters, sums) is written by `commit`, once the step is done: a call may
turn out to belong to another request than it seemed to when the score was read.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from stepfx.coefficients import polynomial
from stepfx.config import Config
from stepfx.methods import Preset
from stepfx.requests import Branch, GateState, Request


class Verdict(enum.Enum):
    """What the rules say before any score is read."""

    COMPUTE = "compute"
    REUSE = "reuse"
    ASK = "ask"


@dataclass
class Trial:
    """One gate's decision on its way.

    `score` is what is compared with the threshold and shown in `stepfx.stats`.
    """

    verdict: Verdict
    close: bool = False
    score: float | None = None
    magnitude: float = 1.0
    clears_runs: bool = False


@dataclass(frozen=True)
class Policy:
    """The rules of one gate. `config` holds what the user chose."""

    config: Config = field(default_factory=Config)

    @cached_property
    def preset(self) -> Preset:
        """The method's values with the user's own laid over them."""
        return self.config.preset()

    @property
    def is_off(self) -> bool:
        """A threshold of 0 computes every step and keeps nothing."""
        return self.preset.threshold <= 0

    def steps(self, request: Request | None) -> int | None:
        """Return the number of steps of a request, if it is known."""
        known = request.steps if request is not None else None
        return known if known is not None else self.config.num_inference_steps

    def lacks_steps(self, request: Request | None) -> bool:
        """Tell whether a named mask cannot be made for want of the number of steps."""
        return self.config.mask(self.steps(request)) == ""

    def threshold(self, request: Request, branch: Branch) -> float:
        """Return the threshold of a branch: the first of a request, or another."""
        other = self.config.alternate_threshold
        if other is None or not request.branches or request.branches[0] is branch:
            return self.preset.threshold
        return other

    def pruning_threshold(self, threshold: float, earlier: Sequence[float]) -> float:
        """Return the threshold of a block that is pruned alone.

        `earlier` are the scores of the blocks that were asked before it in this step. The
        dynamic threshold is that of cache-dit's DBPrune: the mean of the first five that are
        above 0, times a ratio, where that is above the threshold and below a cap.
        """
        config = self.config
        found = [score for score in earlier[:5] if score > 0]
        if not config.enable_dynamic_prune_threshold or not found:
            return threshold
        raised = sum(found) / len(found) * config.dynamic_prune_threshold_relax_ratio
        cap = config.max_dynamic_prune_threshold
        fits = raised < (2 * threshold if cap is None else cap)
        return max(raised, threshold) if fits else threshold

    def refreshes(self, branch: Branch) -> bool:
        """Tell whether everything is forgotten before the coming step of `branch`."""
        if self.config.force_refresh_step != branch.position:
            return False
        return self.config.force_refresh_policy == "repeat" or branch.origin == 0

    def trial(
        self, request: Request | None, branch: Branch | None, state: GateState | None
    ) -> Trial:
        """Return what the rules say of the coming step."""
        if self.is_off or request is None or branch is None or state is None:
            return Trial(Verdict.COMPUTE)
        if state.kept is None or self.refreshes(branch):
            return Trial(Verdict.COMPUTE)
        if self.threshold(request, branch) <= 0:
            return Trial(Verdict.COMPUTE)
        steps = self.steps(request)
        mask = self.config.mask(steps)
        if self._is_early(branch.position, steps, mask) or mask == "":
            return Trial(Verdict.COMPUTE)
        # A branch may open in mid-run: guidance that starts late, another graph.
        done = branch.start + branch.step
        if self.config.compute_last_step and steps is not None and done >= steps - 1:
            return Trial(Verdict.COMPUTE)
        if mask is not None:
            if mask[branch.position : branch.position + 1] == "1":
                return Trial(Verdict.COMPUTE)
            if self.preset.steps_mask_policy == "static":
                return Trial(Verdict.REUSE, close=True)
        return self._limits(state, branch)

    def _is_early(self, step: int, steps: int | None, mask: str | None) -> bool:
        """Tell whether `step` is one of the first ones, which are computed."""
        warm = max(1, self.preset.max_warmup_steps)
        if mask is not None:
            warm = min(warm, len(mask) - len(mask.lstrip("1")))
        if step < warm and step % self.preset.warmup_interval == 0:
            return True
        if self.config.magnitudes is None or self.preset.score != "magnitude":
            return False
        total = steps or len(self.config.magnitudes.ratios)
        return step < math.floor(self.preset.retention_ratio * total + 0.5)

    def _limits(self, state: GateState, branch: Branch) -> Trial:
        limit, in_a_row = self.config.max_cached_steps, self.preset.max_continuous_cached_steps
        # Where each block has a gate, a limit counts steps in which any block was skipped, as
        # in cache-dit's DBPrune.
        per_block = self.preset.per_block
        if limit is not None:
            reused = branch.reused_since_refresh if per_block else state.reused
            if reused >= limit:
                return Trial(Verdict.COMPUTE)
        if in_a_row is not None:
            original = self.config.continuous_counter == "cache-dit"
            row = state.runs if original else state.in_a_row
            if (branch.reused_in_a_row if per_block else row) >= in_a_row:
                return Trial(Verdict.COMPUTE, clears_runs=True)
        most = self.config.max_accumulated_threshold
        if most and state.drift >= most:
            return Trial(Verdict.COMPUTE)
        return Trial(Verdict.ASK)

    def judge(
        self,
        trial: Trial,
        change: float,
        state: GateState,
        request: Request,
        branch: Branch,
        earlier: Sequence[float] = (),
    ) -> Trial:
        """Return the decision that a measured relative change leads to.

        `earlier` are the scores of this policy's gates that decided before in this step.
        """
        score = change
        if self.preset.score == "accumulated":
            score = state.accumulated + self._polynomial(change)
        threshold = self.threshold(request, branch)
        if self.preset.per_block:
            threshold = self.pruning_threshold(threshold, earlier)
        return replace(trial, score=score, close=self._is_close(score, threshold))

    def judge_magnitude(
        self, trial: Trial, state: GateState, request: Request, branch: Branch, time: float
    ) -> Trial:
        """Return the decision of a recorded curve: R <- R g, error <- error + |1 - R|."""
        assert self.config.magnitudes is not None
        ratio = self.config.magnitudes.ratio(
            branch.position,
            self.steps(request),
            branch.level(branch.last_time, time),
            branch.level(time, time),
        )
        magnitude = state.magnitude * ratio
        error = state.accumulated + abs(1 - magnitude)
        close = self._is_close(error, self.threshold(request, branch))
        return replace(trial, score=error, magnitude=magnitude, close=close)

    def _is_close(self, score: float, threshold: float) -> bool:
        return score < threshold if self.preset.strict else score <= threshold

    def _polynomial(self, change: float) -> float:
        if not math.isfinite(change):
            return change
        value = polynomial(self.config.polynomial(), change)
        if self.config.coefficients_sign == "abs":
            return abs(value)
        return max(value, 0.0) if self.config.coefficients_sign == "clamp" else value

    def score(self, changes: list[float], sizes: list[float], signals: int) -> float:
        """Return the relative change: of the worst sample and signal, or the mean."""
        rows = len(changes) // signals
        if self.config.batch == "mean":
            totals = [
                sum(changes[i : i + rows]) / _positive(sum(sizes[i : i + rows]))
                for i in range(0, len(changes), rows)
            ]
            return _worst(totals)
        return _worst([c / _positive(s) for c, s in zip(changes, sizes, strict=True)])

    def commit(self, state: GateState, trial: Trial, computed: bool) -> None:
        """Write what a finished step changes for the steps after it."""
        if trial.score is not None and math.isfinite(trial.score):
            state.drift += max(trial.score, 0.0)
        if trial.clears_runs:
            state.runs = 0
        if computed:
            state.in_a_row, state.accumulated, state.magnitude = 0, 0.0, 1.0
            return
        if self.preset.score in ("accumulated", "magnitude"):
            state.accumulated = trial.score or 0.0
        state.magnitude = trial.magnitude
        # cache-dit's counter up to August 2026: the first reused step of a request counts one,
        # one behind a reused step one (two if the counter is 0), one behind a gap nothing.
        if state.reused == 0:
            state.runs += 1
        elif state.in_a_row:
            state.runs += 1 if state.runs else 2
        state.in_a_row += 1
        state.reused += 1


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
