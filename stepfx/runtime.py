"""What Dynamo calls at every step: binds a call to its session and runs the outer graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stepfx.arrangements import Arrangements
from stepfx.gate import Gate
from stepfx.requests import current_scope
from stepfx.session import SESSIONS, Caller


@dataclass(frozen=True, eq=False)
class InputRoles:
    """Positions of a graph's inputs by what they mean.

    `identity` are the weights whose objects tell one model from another, `weights` all that
    belongs to the model, `conditioning` what tells branches apart, `clocks` what may tell
    them apart or move from step to step, `given` every tensor of the caller.
    """

    identity: tuple[int, ...]
    weights: tuple[int, ...]
    conditioning: tuple[int, ...]
    clocks: tuple[int, ...]
    given: tuple[int, ...]


class GatedGraph:
    """A compiled outer graph. Called with the inputs of Dynamo's graph, in its order.

    What is kept belongs to `fingerprint`, not to this object: Dynamo may compile the same
    graph again for other strides or another grad mode in the middle of a request.
    """

    def __init__(self, arrangements: Arrangements, roles: InputRoles, fingerprint: str) -> None:
        self._arrangements = arrangements
        self._identity = _picker(roles.identity)
        self._weights = _picker(roles.weights)
        self._conditioning = _picker(roles.conditioning)
        self._clocks = _picker(roles.clocks)
        self._given = _picker(roles.given)
        self._fingerprint = fingerprint

    def __call__(self, *args: Any) -> Any:
        """Run one denoising step of whoever the inputs belong to."""
        scope = current_scope()
        arrangement = self._arrangements.of(scope)
        session = SESSIONS.of(self._identity(args))
        with session.lock:
            session.observe_weights(self._weights(args))
            shapes = [tensor.shape for tensor in self._given(args)]
            caller = Caller(
                scope,
                (self._fingerprint, *shapes),
                self._conditioning(args),
                self._clocks(args),
            )
            gate = Gate(session, caller, arrangement.plan)
            return arrangement.forward(gate, *args)


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that takes the items at `positions`, always as a sequence."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)  # in C: a model has a thousand weights
    return lambda items: [items[i] for i in positions]
