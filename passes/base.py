"""What a pass is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import fx


@dataclass(frozen=True)
class PassContext:
    """What the runner tells a pass beside the graph.

    `fake_mode` is Dynamo's, to learn shapes of new operations; `miss(reason)` records why a
    pass left the graph alone; `notes` carries what a pass found to the passes behind it
    and to the report.
    """

    fake_mode: Any
    miss: Callable[[str], None]
    notes: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Pass(Protocol):
    """A rewrite of one graph.

    A pass is a frozen dataclass whose fields are its options. Called with a graph module it
    edits the graph in place and returns the number of rewrites; 0 promises that nothing
    changed. It does not lint, recompile, print or read the environment: the runner does.
    """

    name: ClassVar[str]

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Rewrite `gm.graph` in place and return the number of rewrites."""
        ...
