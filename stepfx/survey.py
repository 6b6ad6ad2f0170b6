"""A look at the graphs of a model without compiling them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from stepfx.backend import rewrite, why_not_gated
from stepfx.config import Config
from stepfx.frames import part_of
from stepfx.main_part import Parts, weights_of_blocks
from stepfx.patterns.program import depends_on_data
from stepfx.pipeline import PipelineResult


class Survey:
    """A backend that runs each graph as it is and keeps what the passes say of it.

    Attributes:
        results: of the passes on each graph, in the order the graphs came.
        depends_on_data: whether a graph has sizes or numbers that depend on values of tensors.
    """

    def __init__(self, config: Config, keep: bool = False) -> None:
        self.config, self.keep = config, keep
        self._parts = Parts()
        self.results: list[PipelineResult] = []
        self.depends_on_data = False

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Look at one graph of Dynamo."""
        self.depends_on_data |= depends_on_data(gm.graph.nodes)
        result = rewrite(gm, self.config, self.keep)
        reason = why_not_gated(inputs)
        reason = reason or self._parts.why_not(part_of(gm), result.notes.get("analysis"))
        if reason is not None:
            result.notes.pop("gate", None)
            first = result.records[0]
            result.records[0] = replace(first, misses=(reason, *first.misses))
        self.results.append(result)
        forward: Callable[..., Any] = gm.forward
        return forward

    @property
    def finds_gate(self) -> bool:
        """Whether one of the graphs has a gate."""
        return any(
            weights_of_blocks(result.notes["analysis"])
            for result in self.results
            if "gate" in result.notes
        )
