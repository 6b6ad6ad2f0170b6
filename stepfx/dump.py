"""Write what the compiler did to a folder a person can read.

dump/graph_0/00_dynamo.txt
01_canonicalize.txt, .diff      only passes that changed something
02_outline_blocks.txt
03_step_cache.txt               the outer graph and the modules it calls
outer.txt                       the outer graph alone
summary.txt
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx

from stepfx.printer import diff, format_graph, format_module

if TYPE_CHECKING:
    from stepfx.pipeline import PassRecord

_claim = threading.Lock()


class Dump:
    """The files of one compiled graph; without a folder nothing is written."""

    def __init__(self, root: Path | None) -> None:
        self.folder = None if root is None else _new_folder(root)
        self._last = ""

    def graph(self, number: int, name: str, gm: fx.GraphModule) -> None:
        """Write the text of `gm` after pass `number`, and how it differs from before."""
        if self.folder is None:
            return
        text = format_module(gm)
        (self.folder / f"{number:02d}_{name}.txt").write_text(text)
        if self._last and number == 1:
            (self.folder / f"{number:02d}_{name}.diff").write_text(diff(self._last, text, name))
        self._last = text
        if name == "step_cache":
            (self.folder / "outer.txt").write_text(format_graph(gm.graph, sources=False))

    def text(self, name: str, text: str) -> None:
        """Write one more file."""
        if self.folder is not None:
            (self.folder / name).write_text(text)

    def summary(self, records: Sequence[PassRecord]) -> None:
        """Write one line a pass: rewrites, nodes, milliseconds, reasons for a miss."""
        lines = [f"{'pass':<16} {'rewrites':>8} {'nodes':>14} {'ms':>8}"]
        for record in records:
            nodes = f"{record.nodes_before} -> {record.nodes_after}"
            lines.append(
                f"{record.name:<16} {record.rewrites:>8} {nodes:>14} "
                f"{record.milliseconds:>8.1f}"
            )
            lines += [f"    missed: {reason}" for reason in record.misses]
        self.text("summary.txt", "\n".join(lines) + "\n")


def _new_folder(root: Path) -> Path:
    """Create and return the first free `graph_<n>` below `root`."""
    with _claim:
        for number in itertools.count():
            folder = root / f"graph_{number}"
            if not folder.exists():
                folder.mkdir(parents=True)
                return folder
    raise AssertionError("unreachable")
