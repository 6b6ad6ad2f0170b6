"""What `stepfx.explain` answers: block lists, where the gate sits, or why there is none."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from stepfx.passes.step_cache import GateSite
from stepfx.patterns.analysis import Analysis
from stepfx.patterns.block_list import BlockList
from stepfx.patterns.fingerprint import fingerprint
from stepfx.patterns.forward_pattern import stream_names
from stepfx.patterns.program import shape_of, value_of
from stepfx.patterns.region import Region
from stepfx.pipeline import PipelineResult
from stepfx.printer import format_value, input_name

if TYPE_CHECKING:
    from stepfx.api import RequestStats

PATTERN_TEXT = {
    0: "0: (h, e) -> (h, e)",
    1: "1: (h, e) -> (e, h)",
    2: "2: (h, e) -> h",
    3: "3: h -> h",
    None: "0 or 1: two streams",
}


@dataclass(frozen=True)
class BlockListReport:
    """One list of repeated blocks.

    Attributes:
        length: how many blocks run.
        pattern: ForwardPattern in cache-dit's numbering; None if 0 and 1 cannot be told apart.
        streams: the tensors carried from block to block, with dtype and shape.
        graph: which compiled graph holds the list, from 0.
        nodes: operations in a block of the most frequent kind.
        kinds: how many different blocks there are.
        invariants: tensors that every block reads unchanged.
        inputs: inputs that differ from block to block and are no weights.
        gated: whether the gate may skip blocks of this list.
        outside: why the list is not under the gate of its graph, or None.
    """

    length: int
    pattern: int | None
    streams: tuple[str, ...]
    graph: int
    nodes: int
    kinds: int
    invariants: int
    inputs: int
    gated: bool
    outside: str | None = None


@dataclass(frozen=True)
class Report:
    """What stepfx sees in a model.

    Attributes:
        graphs: graphs that Dynamo made of it.
        block_lists: in the order they run.
        gate: where the gate sits, or None.
        reason: why there is no gate, or None.
        timestep: the input that tells denoising steps apart, or None.
        latents: the inputs that the outputs mirror.
        conditioning: the inputs that tell CFG branches apart.
        fingerprint: a hash of the kinds of blocks, the same for all sizes of an architecture;
            None without block lists.
        needs_flags: whether the graph under the gate has sizes that depend on values of
            tensors: it needs the Dynamo settings that `stepfx.compile` tries, and
            `torch.compile(model, backend="stepfx")` gets other graphs.
        runs: what happened in the requests of the model so far, oldest first.
        results: the rewritten graphs behind the report, or why there is none.
        model: the class of the model, for titles.
    """

    graphs: int
    block_lists: tuple[BlockListReport, ...]
    gate: GateSite | None
    reason: str | None
    timestep: str | None = None
    latents: tuple[str, ...] = ()
    conditioning: tuple[str, ...] = ()
    fingerprint: str | None = None
    needs_flags: bool = False
    runs: tuple[RequestStats, ...] = ()
    results: tuple[PipelineResult | str, ...] = field(default=(), repr=False, compare=False)
    model: str = "model"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dictionaries, lists, numbers and strings."""
        return asdict(replace(self, results=()))

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML file without outside resources; return its path.

        Beside what the text says it shows a block of each list as a graph, what each pass
        changed, and the schedule and scores of `runs`.
        """
        from stepfx.html_report.page import page

        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(self), encoding="utf-8")
        return target

    def __str__(self) -> str:
        """Return the report as a table and sentences for a terminal."""
        stream = io.StringIO()
        console = Console(file=stream, width=100, color_system=None)
        console.print(self)
        return stream.getvalue()

    def __rich_console__(self, console: Console, options: Any) -> Any:
        """Render for rich: one row a block list, then the gate or the reason."""
        table = Table(title=f"stepfx: {self.graphs} graph(s)", title_justify="left")
        for column in ("list", "blocks", "pattern", "streams", "nodes", "gated"):
            table.add_column(column, justify="right" if column == "nodes" else "left")
        for number, blocks in enumerate(self.block_lists):
            count = str(blocks.length)
            if blocks.kinds > 1:
                count += f" ({blocks.kinds} kinds)"
            table.add_row(
                f"{number}" + (f" (graph {blocks.graph})" if self.graphs > 1 else ""),
                count,
                PATTERN_TEXT[blocks.pattern],
                "\n".join(blocks.streams),
                str(blocks.nodes),
                "yes" if blocks.gated else "no",
            )
        yield table
        for number, blocks in enumerate(self.block_lists):
            if blocks.outside:
                yield f"list {number} is not under the gate: {blocks.outside}"
        if self.fingerprint:
            yield f"architecture: {self.fingerprint}"
        if self.timestep:
            yield f"timestep: {self.timestep}; latent: {', '.join(self.latents)}"
        if self.conditioning:
            yield f"conditioning: {', '.join(self.conditioning)}"
        if self.gate is not None:
            yield gate_text(self.gate)
            if self.needs_flags:
                yield (
                    "so with stepfx.compile(model), which sets Dynamo flags for sizes that "
                    "depend on values of tensors; torch.compile alone gets other graphs"
                )
        else:
            yield f"no gate: {self.reason}"


def _watched_text(gate: GateSite) -> str:
    """Say what a gate watches."""
    return {
        "residual": f"the residual of block(s) 0 to {gate.first - 1}",
        "modulated": "the modulated input of block 0",
        "timestep": "the embedding of the timestep",
        "input": "the input of each block",
        "none": "the recorded curve or step mask",
    }[gate.signal]


def gate_text(gate: GateSite) -> str:
    """Return in a sentence what a gate does."""
    return (
        f"gate: blocks {gate.first} to {gate.last - 1} of {gate.blocks} are skipped "
        f"when {_watched_text(gate)} hardly changes"
    )


def report_of(
    results: Sequence[PipelineResult | str],
    runs: Sequence[RequestStats] = (),
    model: str = "model",
) -> Report:
    """Make one report of all graphs of a model; a string is why a graph was left alone."""
    lists: list[BlockListReport] = []
    found: list[BlockList] = []
    gate: GateSite | None = None
    reasons: list[str] = []
    main: Analysis | None = None
    for number, result in enumerate(results):
        if isinstance(result, str):
            reasons.append(result)
            continue
        analysis: Analysis | None = result.notes.get("analysis")
        site: GateSite | None = result.notes.get("gate")
        if analysis is None:
            reasons += result.misses
            continue
        lists += _lists_of(analysis, number, site is not None)
        found += analysis.lists
        if site is None:
            reasons += result.misses
        elif gate is None:
            gate, main = site, analysis
    reason = None if gate is not None else (reasons or ["nothing was compiled"])[0]
    print_of = fingerprint(found) if found else None
    report = Report(
        len(results),
        tuple(lists),
        gate,
        reason,
        fingerprint=print_of,
        runs=tuple(runs),
        results=tuple(results),
        model=model,
    )
    if main is None:
        return report
    inputs = main.inputs
    return replace(
        report,
        timestep=None if inputs.timestep is None else _input(inputs.timestep),
        latents=tuple(map(_input, inputs.latents)),
        conditioning=tuple(map(_input, inputs.conditioning)),
    )


def _lists_of(analysis: Analysis, graph: int, is_gated: bool) -> list[BlockListReport]:
    reports = []
    region = analysis.region
    for blocks, pattern in zip(analysis.lists, analysis.patterns, strict=True):
        inside = isinstance(region, Region) and blocks in region.lists
        streams = [
            f"{name}: {format_value(value_of(stream.entry))}"
            for name, stream in zip(
                stream_labels(analysis, blocks), blocks.streams, strict=True
            )
        ]
        streams.sort(reverse=True)  # h before e
        kinds = [slot.kind for slot in blocks.kinds[0].slots]
        reports.append(
            BlockListReport(
                len(blocks),
                pattern,
                tuple(streams),
                graph,
                blocks.period,
                len(blocks.kinds),
                kinds.count("invariant"),
                kinds.count("input"),
                inside and is_gated,
                analysis.why_outside(blocks) if is_gated else None,
            )
        )
    return reports


def stream_labels(analysis: Analysis, blocks: BlockList) -> list[str]:
    """Return the names of a list's streams: h and e under a gate, else s0, s1, ..."""
    region = analysis.region
    if isinstance(region, Region) and blocks in region.lists:
        origins = region.origins[region.lists.index(blocks)]
        image = tuple(i for i, origin in enumerate(origins) if origin in region.image)
        if image:
            return stream_names(blocks, image)
    return [f"s{i}" for i in range(len(blocks.streams))]


def _input(node: Any) -> str:
    """Return what the caller calls an input, with its type."""
    shape = ", ".join(shape_of(node) or ())
    return f"{input_name(node)} {format_value(value_of(node)).split('[')[0]}[{shape}]"
