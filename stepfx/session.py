"""The requests of one model: one session for each set of weights in use.

Compiled code is shared by every instance of a class, so nothing is stored in it; a call
finds its session by the weights that it brings. A session ends with its weights.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepfx.errors import StepfxWarning
from stepfx.requests import (
    MAX_BRANCHES,
    Branch,
    Conditioning,
    Request,
    Scope,
    version_of,
)

MAX_FINISHED = 64  # requests whose statistics are remembered for a model


@dataclass(frozen=True)
class Caller:
    """What a call shows of who is calling.

    `conditioning` tells branches apart. `clocks` (guidance, picture sizes, a second
    timestep) do where they stand still, and say nothing where they move. `label` is the name of
    the pipeline's cache context; the signature holds it, too.
    """

    scope: Scope | None
    signature: object
    conditioning: Sequence[torch.Tensor]
    clocks: Sequence[torch.Tensor] = ()
    label: str | None = None

    @property
    def branch(self) -> str | None:
        """The name that the caller gave the branch, or None where inputs must tell."""
        given = self.scope.branch if self.scope else None
        return f"{given}, {self.label}" if given and self.label else given


class Session:
    """The requests of one model, the current one with its kept tensors."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.current: Request | None = None
        self.requests: deque[Request] = deque(maxlen=MAX_FINISHED)
        self.versions: list[int] = []
        self._numbers = 0
        self._warned: set[str] = set()

    def warn_once(self, text: str) -> None:
        """Warn the user of this model, once for each text."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"stepfx: {text}", StepfxWarning, stacklevel=2)

    def observe_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Forget what is kept if a weight was written to since the last call."""
        try:
            versions = [weight._version for weight in weights]
        except RuntimeError:  # an inference tensor counts no writes
            versions = [version_of(weight) or 0 for weight in weights]
        if versions != self.versions:
            for request in self.requests:
                for branch in request.branches:
                    branch.kept = None
            self.versions = versions

    def reset(self) -> None:
        """Forget every request and all that is kept."""
        for request in self.requests:
            request.release()
        self.requests.clear()
        self.current = None

    def candidate(self, caller: Caller) -> tuple[Request | None, Branch | None]:
        """Return the request and branch that the caller continues, if time agrees."""
        request = self._explicit(caller) if caller.scope else self.current
        if request is None:
            return None, None
        name = caller.branch
        moved: list[Branch] = []
        for branch in reversed(request.branches):
            if name is not None:
                if branch.name == name:
                    if branch.signature != caller.signature:
                        branch.kept, branch.signature = None, caller.signature
                    return request, branch
            elif (
                branch.signature == caller.signature
                and branch.conditioning is not None
                and branch.conditioning.matches(caller.conditioning)
            ):
                if branch.clocks is None or branch.clocks.matches(caller.clocks):
                    return request, branch
                moved.append(branch)
        if len(moved) > 1:
            self.warn_once(
                "CFG branches that differ only in inputs that move from step to step cannot "
                "be told apart, so they are computed in full; name them with "
                "stepfx.request(branch=...)"
            )
        return request, moved[0] if len(moved) == 1 else None

    def settle(
        self, caller: Caller, request: Request | None, branch: Branch | None, time: float
    ) -> Branch:
        """Return the branch that the step at `time` belongs to, opening what is new."""
        if branch is not None and branch.clocks and not branch.clocks.matches(caller.clocks):
            if time == branch.last_time:
                branch = None
            else:
                branch.clocks = Conditioning.of(caller.clocks)
        if request is None or not self._continues(caller, request, branch, time):
            forced = 2 if self._repeats(request, branch, time) else 1
            request, branch = self._open(caller, forced), None
        if branch is None:
            branch = self._new_branch(caller, request)
        elif time == branch.last_time and caller.branch is None:
            branch.ambiguous = True
        if branch.ambiguous or branch.step < request.forced:
            branch.kept = None
        request.observe(time)
        if branch.step == 0:
            branch.start = request.moves
        if caller.scope is None:
            self.current = request
        return branch

    def request_of(self, branch: Branch) -> Request:
        """Return the request that a settled branch belongs to."""
        return next(r for r in reversed(self.requests) if branch in r.branches)

    @staticmethod
    def _repeats(request: Request | None, branch: Branch | None, time: float) -> bool:
        return request is not None and branch is not None and branch.last_time == time

    @staticmethod
    def _continues(
        caller: Caller, request: Request, branch: Branch | None, time: float
    ) -> bool:
        """Tell whether a step at `time` can belong to `request`."""
        if request.explicit:
            if branch is not None and branch.last_time is not None:
                # An explicit request may go back in time (RePaint); what was kept may not.
                moved = (time > branch.last_time) - (time < branch.last_time)
                if request.direction and moved == -request.direction:
                    branch.kept = None
            return True
        last = request.last_time if branch is None else branch.last_time
        if last is None:
            return True
        if time == last:
            # A new conditioning at the same time is another branch. The same conditioning
            # again is a second call of the step, or the first step of a new request.
            return branch is None or request.direction != 0
        moved = 1 if time > last else -1
        if request.direction == 0:
            return branch is not None
        return moved == request.direction

    def _explicit(self, caller: Caller) -> Request:
        assert caller.scope is not None
        root = caller.scope.root
        mine = [r for r in root.requests if r in self.requests]
        return mine[-1] if mine else self._open(caller, 1)

    def _open(self, caller: Caller, forced: int) -> Request:
        scope = caller.scope.root if caller.scope else None
        self._numbers += 1
        request = Request(
            name=(scope.name if scope else None) or f"request {self._numbers}",
            steps=scope.steps if scope else None,
            explicit=scope is not None,
            forced=forced,
        )
        if scope is not None:
            scope.requests.append(request)
        elif self.current is not None:
            self.current.release()
        self.requests.append(request)
        return request

    def _new_branch(self, caller: Caller, request: Request) -> Branch:
        given = caller.branch
        branch = Branch(
            given or _free_name(caller.label, request),
            caller.signature,
            None if given else Conditioning.of(caller.conditioning),
            None if given or not caller.clocks else Conditioning.of(caller.clocks),
        )
        request.branches.append(branch)
        for old in request.branches[:-MAX_BRANCHES]:
            old.kept = old.conditioning = old.clocks = None
        return branch


def _free_name(label: str | None, request: Request) -> str:
    """Return a name for a new branch of `request`."""
    number = len(request.branches) + 1
    if label is None:
        return f"branch {number}"
    taken = {branch.name for branch in request.branches}
    return f"{label}, branch {number}" if label in taken else label


class Sessions:
    """The sessions of a process, found by weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[tuple[int, ...], Session] = {}
        self._refs: dict[tuple[int, ...], list[weakref.ref[torch.Tensor]]] = {}

    def of(self, weights: Sequence[torch.Tensor]) -> Session:
        """Return the session of exactly these weight tensors, in this order."""
        key = tuple(map(id, weights))
        session = self._sessions.get(key)
        return session if session is not None else self._create(key, weights)

    def holding(self, weights: Iterable[torch.Tensor]) -> list[Session]:
        """Return the sessions that use any of `weights`, oldest first."""
        wanted = {id(weight) for weight in weights}
        return [s for key, s in self._sessions.items() if not wanted.isdisjoint(key)]

    def _create(self, key: tuple[int, ...], weights: Sequence[torch.Tensor]) -> Session:
        with self._lock:
            if key in self._sessions:
                return self._sessions[key]

            # An id may be given to another tensor once its owner is gone: the first weight
            # to go takes the session with it.
            def forget(_: Any) -> None:
                self._sessions.pop(key, None)
                self._refs.pop(key, None)

            self._refs[key] = [weakref.ref(weight, forget) for weight in weights]
            session = self._sessions[key] = Session()
            return session


SESSIONS = Sessions()
