"""What Dynamo calls at every step: binds a call to its session and runs the outer graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepfx.gate import Gate, Policy
from stepfx.requests import current_scope
from stepfx.session import SESSIONS, Caller


@dataclass(frozen=True, eq=False)
class InputRoles:
    """Positions of a graph's inputs by what they mean.

    `identity` are the weights whose objects tell one model from another, `weights` all that
    belongs to the model, `conditioning` what tells branches apart, `given` every tensor of
    the caller.
    """

    identity: tuple[int, ...]
    weights: tuple[int, ...]
    conditioning: tuple[int, ...]
    given: tuple[int, ...]


class GatedGraph:
    """A compiled outer graph. Called with the inputs of Dynamo's graph, in its order.

    What is kept belongs to `fingerprint`, not to this object: Dynamo may compile the same
    graph again for other strides or another grad mode in the middle of a request.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        roles: InputRoles,
        policy: Policy,
        has_time: bool,
        fingerprint: str,
    ) -> None:
        self._forward, self._roles = forward, roles
        self._policy, self._has_time = policy, has_time
        self._fingerprint = fingerprint

    def __call__(self, *args: Any) -> Any:
        """Run one denoising step of whoever the inputs belong to."""
        roles = self._roles
        session = SESSIONS.of([args[i] for i in roles.identity])
        with session.lock:
            session.observe_weights([args[i] for i in roles.weights])
            caller = Caller(
                current_scope(),
                (self._fingerprint, *_shapes(args, roles.given)),
                [args[i] for i in roles.conditioning],
            )
            gate = Gate(session, caller, self._policy, self._has_time)
            return self._forward(gate, *args)


def _shapes(args: Sequence[Any], positions: Sequence[int]) -> list[torch.Size]:
    return [args[i].shape for i in positions]
