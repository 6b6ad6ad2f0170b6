"""What the graphs of one model call know of each other, where Dynamo breaks a model.

The graph behind a break sees hidden states: the timestep and the prompt that they came from
were inputs of the graph before it. Each graph of a broken function leaves a note of its
inputs in the thread that runs it, for the graphs of the same function that follow. A graph
that meets its own note begins a new call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Ref = weakref.ref[torch.Tensor]


@dataclass(eq=False)
class Call:
    """What the graphs of one call of a broken function left.

    The inputs are held until the call is closed: some are made on the way, by operations
    that no graph holds.
    """

    seen: set[int] = field(default_factory=set)
    time: torch.Tensor | None = None
    given: list[torch.Tensor] = field(default_factory=list)
    made: list[Ref] = field(default_factory=list)
    is_closed: bool = False

    def note_inputs(self, time: torch.Tensor | None, given: Sequence[torch.Tensor]) -> None:
        """Add the inputs of one graph; what earlier graphs made is none of the caller's."""
        if self.is_closed:
            return
        if time is not None and self.time is None:
            self.time = time
        self.given += self.from_caller(given)

    def note_outputs(self, outputs: object) -> None:
        """Add what one graph returned."""
        items = outputs if isinstance(outputs, list | tuple) else (outputs,)
        self.made += [weakref.ref(x) for x in items if isinstance(x, torch.Tensor)]

    def from_caller(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of `tensors` that no earlier graph made."""
        made = {id(tensor) for ref in self.made if (tensor := ref()) is not None}
        return [tensor for tensor in tensors if id(tensor) not in made]

    def close(self) -> None:
        """Let go of what is held; nothing is noted any more."""
        self.time, self.given, self.made, self.is_closed = None, [], [], True


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: dict[tuple[str, str], Call] = {}
        self.latest: Call | None = None


_calls = _Calls()


def enter(code: tuple[str, str], graph: int, is_first: bool) -> Call:
    """Return the call that graph number `graph` of a function is part of."""
    call = _calls.open.get(code)
    if call is None or is_first or graph in call.seen:
        call = _calls.open[code] = Call()
    call.seen.add(graph)
    _calls.latest = call
    return call


def latest() -> Call | None:
    """Return the call that this thread entered last: that of whoever calls a nested graph."""
    return _calls.latest
