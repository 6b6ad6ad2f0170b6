"""What Dynamo calls at every step: binds a call to its session and runs the outer graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stepfx import calls
from stepfx.arrangements import Arrangements
from stepfx.gate import Gate
from stepfx.labels import current_label
from stepfx.requests import current_scope
from stepfx.session import SESSIONS, Caller


@dataclass(frozen=True, eq=False)
class InputRoles:
    """Positions of a graph's inputs by what they mean.

    `identity` are the weights whose objects tell one model from another, `weights` all that
    belongs to the model, `conditioning` what tells branches apart, `clocks` what may tell
    them apart or move from step to step, `given` every tensor of the caller. `outputs` are
    the shapes of what the graph returns.
    """

    identity: tuple[int, ...]
    weights: tuple[int, ...]
    conditioning: tuple[int, ...]
    clocks: tuple[int, ...]
    given: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...] = ()


class ObservedGraph:
    """A compiled graph without a gate that is one part of a broken model.

    Called with the inputs of Dynamo's graph. It notes what the caller gave for the graphs
    behind the break. `code` is None in a function that a skipped frame calls: what that is
    given was made on the way. `on_repeat` is called before its second run.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        code: tuple[str, str] | None,
        time: int | None,
        given: tuple[int, ...],
        is_first: bool,
        on_repeat: Callable[[], None] | None = None,
    ) -> None:
        self._forward, self._code, self._time = forward, code, time
        self._given = _picker(given if code is not None else ())
        self._is_first = is_first
        self._on_repeat, self._runs = on_repeat, 0

    def __call__(self, *args: Any) -> Any:
        """Run the graph and leave a note."""
        self._runs += 1
        if self._runs == 2 and self._on_repeat is not None:
            self._on_repeat()
        call = (
            calls.latest()
            if self._code is None
            else calls.enter(self._code, id(self), self._is_first)
        )
        if call is None:
            return self._forward(*args)
        call.note_inputs(None if self._time is None else args[self._time], self._given(args))
        outputs = self._forward(*args)
        call.note_outputs(outputs)
        return outputs


class GatedGraph:
    """A compiled outer graph. Called with the inputs of Dynamo's graph, in its order.

    What is kept belongs to `fingerprint`, not to this object: Dynamo may compile the same
    graph again for other strides or another grad mode in the middle of a request.
    """

    def __init__(
        self,
        arrangements: Arrangements,
        roles: InputRoles,
        fingerprint: str,
        code: tuple[str, str] | None = None,
        is_first: bool = True,
    ) -> None:
        self._arrangements = arrangements
        self._identity = _picker(roles.identity)
        self._weights = _picker(roles.weights)
        self._conditioning = _picker(roles.conditioning)
        self._clocks = _picker(roles.clocks)
        self._given = _picker(roles.given)
        self._fingerprint = fingerprint
        self._code, self._is_first = code, is_first
        self._outputs = roles.outputs

    def __call__(self, *args: Any) -> Any:
        """Run one denoising step of whoever the inputs belong to."""
        scope = current_scope()
        arrangement = self._arrangements.of(scope)
        session = SESSIONS.of(self._identity(args))
        with session.lock:
            session.observe_weights(self._weights(args))
            shapes = [tensor.shape for tensor in self._given(args)]
            time, conditioning = None, self._conditioning(args)
            if self._code is not None:
                time, conditioning = self._behind_break(conditioning)
            label = current_label()
            caller = Caller(
                scope,
                (self._fingerprint, label, *shapes),
                conditioning,
                self._clocks(args),
                label,
            )
            gate = Gate(session, caller, arrangement.plan, time)
            return arrangement.forward(gate, *args)

    def _behind_break(self, own: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the timestep and conditioning of a call that other graphs are part of."""
        assert self._code is not None
        call = calls.enter(self._code, id(self), self._is_first)
        # What an output mirrors is the latent: it moves from step to step.
        steady = [x for x in call.given if not any(_mirrors(x.shape, s) for s in self._outputs)]
        found = call.time, [*steady, *call.from_caller(own)]
        call.close()
        return found


def _mirrors(shape: Sequence[int], output: Sequence[int]) -> bool:
    """Tell whether two shapes differ in one size at most."""
    pairs = zip(shape, output, strict=False)
    return len(shape) == len(output) and sum(a != b for a, b in pairs) <= 1


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that takes the items at `positions`, always as a sequence."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)  # in C: a model has a thousand weights
    return lambda items: [items[i] for i in positions]
