"""Which graph of a broken model holds the main stack."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from stepfx.frames import Part
from stepfx.patterns.analysis import Analysis
from stepfx.patterns.program import is_registered, value_of
from stepfx.patterns.region import Region

_Place = tuple[tuple[str, str] | None, bool, str | None]


@dataclass(eq=False)
class Parts:
    """Finds the part of each model to gate; remembers the blocks of all parts seen."""

    _seen: weakref.WeakKeyDictionary[torch.nn.Module, dict[_Place, int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def why_not(self, part: Part, analysis: Analysis | None) -> str | None:
        """Return why a graph that is a part of its model is not the one to gate, or None.

        The main stack is in it if its blocks hold at least as many weights as all of the
        model that is outside the graph: a refiner of the prompt in front of a break is not
        it. At the end of the model all graphs are known, and it is enough if its blocks are
        the larger part of it and more than those of any other.
        """
        if part.is_whole or analysis is None:
            return None
        region = analysis.region
        if not isinstance(region, Region):
            return f"{region.reason}: {part}"
        if part.model is not None:
            weights = [n for n in analysis.program.placeholders if is_registered(n)]
            of_blocks, of_graph = weights_of_blocks(analysis), _count(weights)
            others = self._others(part, of_blocks)
            if of_blocks >= _count_in(part.model) - of_graph:
                return None
            if part.is_end and 2 * of_blocks >= of_graph and of_blocks > max(others, default=0):
                return None
        return f"its main blocks are not in one graph: {part}"

    def _others(self, part: Part, of_blocks: int) -> list[int]:
        assert part.model is not None
        seen = self._seen.setdefault(part.model, {})
        place = part.code, part.is_resumed, part.broken_at
        seen[place] = of_blocks
        return [count for other, count in seen.items() if other != place]


def weights_of_blocks(analysis: Analysis) -> int:
    """Count the weights of the blocks that a gate may skip."""
    if not isinstance(analysis.region, Region):
        return 0
    inside = analysis.program.live_in(analysis.region.span)
    return _count(n for n in inside if is_registered(n))


def _count(nodes: Iterable[fx.Node]) -> int:
    return sum(value_of(node).numel() for node in nodes)


def _count_in(model: torch.nn.Module) -> int:
    """Count the weights of a model; a table that is looked up does no work, however large."""
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = [m for m in model.modules() if not isinstance(m, tables)]
    return sum(w.numel() for m in modules for w in m.parameters(recurse=False))
