"""What the compiler did to one graph, written down.

    <dump>/graph_0/00_dynamo.txt            the graph as Dynamo gave it
                   02_outline_blocks.txt    after each pass that changed something, and
                   02_outline_blocks.diff   how it differs from before
                   outer.txt                the outer graph alone
                   summary.txt, .json       rewrites, nodes, operations, milliseconds, misses

A number is the pass's row in the pipeline, so that a gap shows a pass that changed nothing.
The same texts go to PyTorch's structured trace.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import fx

from stepfx import logs
from stepfx.graph_diff import Edit, compare, unified
from stepfx.printer import format_graph, format_module

_claim = threading.Lock()


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to one graph.

    Attributes:
        name: the pass.
        rewrites: how many it made.
        milliseconds: wall-clock time of the pass.
        nodes_before: nodes of the outer graph before it.
        nodes_after: nodes of the outer graph behind it.
        operations: how the count of each operation changed, over all parts of the graph.
        misses: why the pass left something alone.
    """

    name: str
    rewrites: int
    milliseconds: float
    nodes_before: int
    nodes_after: int
    operations: dict[str, int] = field(default_factory=dict)
    misses: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the record as one line."""
        nodes = f"{self.nodes_before} -> {self.nodes_after}"
        line = (
            f"{self.name:<18} {self.rewrites:>8} {nodes:>14} {self.milliseconds:>9.1f}  "
            f"{format_delta(self.operations)}"
        )
        return line.rstrip()


@dataclass(frozen=True)
class GraphText:
    """The text of a graph after one pass and how it differs from the text before."""

    number: int
    name: str
    text: str
    edits: tuple[Edit, ...] = ()


class Dump:
    """The texts of one compiled graph; without a reader none is made.

    Args:
        root: the folder below which this graph gets its own, or None.
        keep: whether the texts stay in `texts`, for a report.
    """

    def __init__(self, root: Path | None = None, keep: bool = False) -> None:
        self.folder = None if root is None else _new_folder(root)
        self.texts: list[GraphText] = []
        self._is_on = keep or root is not None or logs.is_tracing()

    def graph(self, number: int, name: str, gm: fx.GraphModule) -> None:
        """Write the text of `gm` after pass `number`, and how it differs from before."""
        if not self._is_on:
            return
        text = format_module(gm)
        edits = compare(self.texts[-1].text, text) if self.texts else []
        self.texts.append(GraphText(number, name, text, tuple(edits)))
        label = f"{number:02d}_{name}"
        self.write(f"{label}.txt", text)
        if edits:
            self.write(f"{label}.diff", unified(edits, name))

    def finish(self, gm: fx.GraphModule, records: Sequence[PassRecord]) -> None:
        """Write the outer graph, if there is one, and the summary of all passes."""
        if not self._is_on:
            return
        if any(node.op in ("call_module", "get_attr") for node in gm.graph.nodes):
            self.write("outer.txt", format_graph(gm.graph))
        self.write("summary.txt", format_summary(records))
        self.write("summary.json", json.dumps([asdict(r) for r in records], indent=1))

    def left_alone(self, gm: fx.GraphModule, reason: str) -> None:
        """Write a graph on which no pass ran, and why."""
        self.graph(0, "dynamo", gm)
        if self._is_on:
            self.write("summary.txt", f"left alone: {reason}\n")

    def write(self, name: str, text: str) -> None:
        """Write one file into the folder and into the structured trace."""
        if self.folder is not None:
            (self.folder / name).write_text(text)
        stem, _, suffix = name.rpartition(".")
        if suffix == "json":
            logs.trace_artifact(stem, "json", lambda: text)
        else:
            logs.trace_artifact(stem if suffix == "txt" else name, "string", lambda: text)


def count_delta(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    """Return how the count of each operation changed, largest changes first."""
    changed = {
        name: after[name] - before[name]
        for name in sorted({*before, *after})
        if after[name] != before[name]
    }
    return dict(sorted(changed.items(), key=lambda item: -abs(item[1])))


def format_delta(operations: dict[str, int], most: int = 6) -> str:
    """Return changed counts in one line: `add +1, iadd -1`."""
    shown = [f"{name} {count:+d}" for name, count in itertools.islice(operations.items(), most)]
    more = len(operations) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def format_summary(records: Sequence[PassRecord]) -> str:
    """Return one line a pass, each followed by the reasons of its misses."""
    lines = [f"{'pass':<18} {'rewrites':>8} {'nodes':>14} {'ms':>9}  operations"]
    for record in records:
        lines.append(str(record))
        lines += [f"    missed: {reason}" for reason in record.misses]
    return "\n".join(lines) + "\n"


def _new_folder(root: Path) -> Path:
    """Create and return the first free `graph_<n>` below `root`."""
    with _claim:
        for number in itertools.count():
            folder = root / f"graph_{number}"
            if not folder.exists():
                folder.mkdir(parents=True)
                return folder
    raise AssertionError("unreachable")
