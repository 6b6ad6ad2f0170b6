"""Who is calling: requests and CFG branches, told apart by what the inputs prove.

A request is one sampling run, a branch one conditioning inside it (with and without the
prompt). A call belongs to the branch whose conditioning tensors it brings: the same
objects, unchanged, or tensors of equal value. A request ends when the timestep turns back.
What cannot be told apart (a timestep that repeats under one conditioning) is computed.

Nothing here knows of graphs; times are floats, conditioning is a list of tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from stepfx.config import check_run_time
from stepfx.errors import ConfigError

MAX_BRANCHES = 8  # branches of one request that may keep tensors


@dataclass(eq=False)
class Kept:
    """What computed steps of one branch left behind.

    `history` holds (time, residuals) of the last computed steps, newest first.
    """

    signals: list[torch.Tensor]
    ok: torch.Tensor
    history: list[tuple[float, list[torch.Tensor]]]

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that is held."""
        residuals = itertools.chain.from_iterable(r for _, r in self.history)
        return [*self.signals, self.ok, *residuals]


@dataclass(eq=False)
class GateState:
    """What one gate knows of one branch: what it kept, and how it decided so far.

    Attributes:
        kept: tensors of the last computed steps; None if the next step must be computed.
        reused: reused steps of the request.
        in_a_row: reused steps since the last computed one.
        runs: the same as cache-dit counts it.
        drift: the sum of all scores.
        accumulated: the sum of scores since the last computed step.
        magnitude: product of the magnitude ratios since the last computed step.
    """

    kept: Kept | None = None
    reused: int = 0
    in_a_row: int = 0
    runs: int = 0
    drift: float = 0.0
    accumulated: float = 0.0
    magnitude: float = 1.0


@dataclass(eq=False)
class Conditioning:
    """The tensors that tell a branch from others: by object and version, else by value."""

    refs: list[weakref.ref[torch.Tensor]]
    versions: list[int | None]
    values: list[torch.Tensor]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Conditioning:
        """Remember `tensors`: weakly by object, and a copy of their values."""
        return cls(
            [weakref.ref(tensor) for tensor in tensors],
            [version_of(tensor) for tensor in tensors],
            [tensor.detach().clone() for tensor in tensors],
        )

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether `tensors` are the remembered ones or equal them in every value."""
        if len(tensors) != len(self.values):
            return False
        for i, tensor in enumerate(tensors):
            version = version_of(tensor)
            same = self.refs[i]() is tensor and version is not None
            if same and version == self.versions[i]:
                continue
            if not _equal(self.values[i], tensor):
                return False
            self.refs[i], self.versions[i] = weakref.ref(tensor), version
        return True


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the count of in-place writes; None for inference tensors, which keep none."""
    return None if tensor.is_inference() else tensor._version


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return torch.equal(a, b)


@dataclass(eq=False)
class Branch:
    """One conditioning of one request: its schedule so far and the state of its gates.

    `layout` names the graph whose gates the states belong to; `origin` is the step at which
    the branch was last refreshed, `start` how many steps of the request were before it.
    """

    name: str
    signature: object
    conditioning: Conditioning | None
    clocks: Conditioning | None = None
    gates: list[GateState] = field(default_factory=lambda: [GateState()])
    layout: object = None
    origin: int = 0
    start: int = 0
    first_time: float | None = None
    last_time: float | None = None
    ambiguous: bool = False
    schedule: list[bool] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    @property
    def kept(self) -> Kept | None:
        """What the first gate keeps; setting it to None drops what every gate keeps."""
        return self.gates[0].kept

    @kept.setter
    def kept(self, kept: Kept | None) -> None:
        for state in self.gates:
            state.kept = kept

    @property
    def step(self) -> int:
        """The index of the denoising step that comes next."""
        return len(self.schedule)

    @property
    def position(self) -> int:
        """The same since the last refresh."""
        return len(self.schedule) - self.origin

    @property
    def reused(self) -> int:
        """Steps in which a gate skipped blocks."""
        return self.schedule.count(False)

    @property
    def reused_since_refresh(self) -> int:
        """The same since the last refresh."""
        return self.schedule[self.origin :].count(False)

    @property
    def reused_in_a_row(self) -> int:
        """Such steps at the end of the schedule, since the last refresh."""
        recent = reversed(self.schedule[self.origin :])
        return sum(1 for _ in itertools.takewhile(operator.not_, recent))

    def fit(self, layout: object, gates: int) -> None:
        """Make the states those of the `gates` of a graph; of another graph nothing is kept."""
        if self.layout != layout:
            self.kept = None
            self.gates += [GateState() for _ in range(gates - len(self.gates))]
            self.layout = layout

    def refresh(self) -> None:
        """Forget what is kept and how was decided; the coming step is a first one."""
        self.gates = [GateState() for _ in self.gates]
        self.origin = self.step

    def level(self, time: float | None, now: float) -> float:
        """Return the noise level of `time`, 1 for noise and 0 for none.

        Times count to 1 or to 1000, and fall, or rise where models count from noise up.
        """
        first = self.first_time if self.first_time is not None else now
        scale = 1000.0 if max(abs(first), abs(now)) > 1 else 1.0
        level = (first if time is None else time) / scale
        return 1 - level if now > first else level

    def record(
        self, time: float, computed: bool, score: float | None, skipped: int = 0
    ) -> None:
        """Add one finished step."""
        self.schedule.append(computed)
        self.scores.append(score)
        self.skipped.append(skipped)
        self.last_time = time
        if self.first_time is None:
            self.first_time = time


@dataclass(eq=False)
class Request:
    """One sampling run: its branches in the order they first appeared."""

    name: str
    steps: int | None = None
    explicit: bool = False
    forced: int = 1
    direction: int = 0
    last_time: float | None = None
    moves: int = 0
    branches: list[Branch] = field(default_factory=list)

    def release(self) -> None:
        """Drop the tensors that the branches keep."""
        for branch in self.branches:
            branch.kept = None
            branch.conditioning = branch.clocks = None

    def observe(self, time: float) -> None:
        """Learn from a step in which direction time runs."""
        if self.last_time is not None and time != self.last_time and not self.direction:
            self.direction = 1 if time > self.last_time else -1
        self.moves += self.last_time is not None and time != self.last_time
        self.last_time = time


class Scope:
    """An open `stepfx.request(...)` block: a name and options for what happens inside."""

    def __init__(
        self,
        steps: int | None,
        name: str | None,
        branch: str | None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.steps, self.name, self.branch = steps, name, branch
        self.options: dict[str, Any] = options or {}
        self.root: Scope = self
        self.requests: list[Request] = []

    def renew(self) -> None:
        """Let what follows be another request; of the one so far nothing is kept."""
        for opened in self.root.requests:
            opened.release()
        self.root.requests = []


_scope: ContextVar[Scope | None] = ContextVar("stepfx_request", default=None)


def current_scope() -> Scope | None:
    """Return the innermost open request block of this thread or task."""
    return _scope.get()


@contextlib.contextmanager
def request(
    steps: int | None = None,
    name: str | None = None,
    branch: str | None = None,
    **options: Any,
) -> Iterator[None]:
    """Mark what happens inside as one request, or as one branch of the request around it.

    Args:
        steps: denoising steps of the run; the last one is then always computed.
        name: how the request is called in `stepfx.stats`.
        branch: how the CFG branch, tile or window is called. Inside another request and
            without `steps` and `name` it names a branch of that request.
        **options: options of `stepfx.Config` that hold inside (`cache`, `threshold`,
            `fn_compute_blocks`, masks, limits, ...), over those that the model was compiled
            with. No option that may be given here recompiles the model.

    Raises:
        ConfigError: `steps` is not a positive integer, a name is empty, an option is unknown
            or has a bad value, or is fixed when a model is compiled.
    """
    check_run_time("request", options)
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
        raise ConfigError(f"request: 'steps' must be a positive integer, not {steps!r}")
    if steps is not None and steps < 1:
        raise ConfigError(f"request: 'steps' must be a positive integer, not {steps}")
    for label, value in (("name", name), ("branch", branch)):
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"request: {label!r} must be a non-empty string, not {value!r}")
    scope, outer = Scope(steps, name, branch, options), _scope.get()
    if outer is not None and steps is None and name is None:
        scope.root = outer.root
        scope.options = {**outer.options, **options}
        scope.branch = branch or outer.branch
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)
        if scope.root is scope:
            for opened in scope.requests:
                opened.release()
