"""Put the gates into the outer graph.

    h1 = block_0(h0, temb, w0...)          h1 = block_0(h0, temb, w0...)
    h = block_1(h1, temb, w1...)      ->   compute = gate.decide(0, score, (h0, h1), t)
    ...                                    h = gate.cond(0, compute, compute_blocks,
    h = block_n(h, temb, wn...)                          reuse_residual, keep, ...)
    y = epilogue(h, temb, w...)            y = epilogue(h, temb, w...)

`gate` is the first input of the graph: it holds the state of one call, so that the graph
holds none. `compute_blocks` is a module with the skipped stages, called only when the gate
says so. The first `fn` and the last `bn` blocks always run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from stepfx.passes.base import PassContext
from stepfx.passes.gate_graphs import GateGraphs, Watch
from stepfx.passes.graph_edit import copy_meta, copy_module
from stepfx.passes.outline_blocks import Boundary, Outline
from stepfx.passes.signal_stage import insert_signal_stage
from stepfx.patterns.analysis import Analysis
from stepfx.patterns.program import shape_of, traced_shape, value_of
from stepfx.patterns.region import Miss

# Streams of fewer elements are in cache: a fused score and forecast save tens of microseconds
# a step there (12 blocks of width 384, 256 tokens: 45 of 14,000) and cost a compilation each.
SMALL = 2**18


@dataclass(frozen=True)
class GateSite:
    """Where a gate sits and what it watches, for the runtime and the report.

    Blocks `first` to `last` (excluded) of `blocks` may be skipped; `list_number` says which
    options are its own where lists have options apart.
    """

    first: int
    last: int
    blocks: int
    signals: int
    outputs: int
    residuals: int
    history: int
    has_time: bool
    per_sample: bool
    signal: str = "residual"
    list_number: int = 0


@dataclass(frozen=True)
class Ungated:
    """The outer graph before gates were put in: where another placement starts from."""

    module: fx.GraphModule
    outline: Outline

    def copy(self) -> tuple[fx.GraphModule, Outline]:
        """Return a copy of the graph that calls the same stages, and its outline."""
        module, env = copy_module(self.module)
        return module, self.outline.moved(env)


@dataclass(frozen=True)
class StepCache:
    """Skip the blocks between the first `fn` and the last `bn` when the gate allows it.

    Args:
        fn: leading blocks that always run.
        bn: trailing blocks that always run.
        history: how many computed residuals a forecast may combine.
        signal: what is watched: "residual" of the first `fn` blocks, the "modulated" input,
            the "timestep" embedding, the "input" of the skipped blocks, or "none".
        stride: every how many channels of it are compared.
        per_block: whether each block has a gate of its own.
        lists: (fn, bn) of each block list, which then has a gate of its own; the last pair
            holds for all further lists. A list too short for its pair has no gate.
        exempt: with `per_block`, blocks of each list that have no gate, by number within it;
            the last entry holds for all further lists.
    """

    fn: int = 1
    bn: int = 0
    history: int = 2
    signal: str = "residual"
    stride: int = 1
    per_block: bool = False
    lists: tuple[tuple[int, int], ...] = ()
    exempt: tuple[tuple[int, ...], ...] = ((),)

    name: ClassVar[str] = "step_cache"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Insert the gates; return how many, 0 if too few blocks are left to skip."""
        outline: Outline | None = ctx.notes.get("outline")
        if outline is None:
            return 0
        if "ungated" not in ctx.notes:
            module, env = copy_module(gm)
            ctx.notes["ungated"] = Ungated(module, outline.moved(env))
        ranges = list(self._ranges(outline))
        if not ranges:
            ctx.miss(self.leaves_none(len(outline.blocks)))
            return 0
        if not self._can_watch(outline, ranges):
            ctx.miss(f"no tensor keeps its shape through the first {self.fn} block(s)")
            return 0
        signal = None
        if self.signal in ("modulated", "timestep"):
            found = insert_signal_stage(gm, outline, ctx.notes["analysis"], self.signal)
            if isinstance(found, Miss):
                ctx.miss(found.reason)
                return 0
            signal = found
        inserter = _Inserter(gm, outline, ctx, self, signal)
        # From the last to the first: what lies before a gate is then still as it was outlined.
        numbered = list(enumerate(ranges))
        sites = tuple(inserter.insert(i, place) for i, place in reversed(numbered))[::-1]
        ctx.notes["gate"], ctx.notes["gates"] = sites[0], sites
        return len(sites)

    def leaves_none(self, blocks: int) -> str:
        """Say that no block of `blocks` is left to skip."""
        if self.lists:
            pairs = ", ".join(f"{fn} and {bn}" for fn, bn in self.lists)
            return f"the first and last blocks that always run ({pairs}) leave none to skip"
        beside = f" beside the blocks {list(self.exempt[0])}" if any(self.exempt) else ""
        return (
            f"fn_compute_blocks={self.fn} and bn_compute_blocks={self.bn} leave none of "
            f"the {blocks} blocks to skip{beside}"
        )

    def _can_watch(self, outline: Outline, ranges: list[_Range]) -> bool:
        """Tell whether each gate finds a stream to compare, if it is to compare streams."""
        if self.signal not in ("residual", "input"):
            return True
        ahead = int(self.signal == "input")
        return all(outline.boundaries[place.first + ahead].watched for place in ranges)

    def _ranges(self, outline: Outline) -> Iterator[_Range]:
        """Yield the blocks of each gate, in the order they run."""
        spans = [(0, len(outline.blocks), self.fn, self.bn)]
        if self.lists:
            spans = [
                (start, stop, *self.lists[min(i, len(self.lists) - 1)])
                for i, (start, stop) in enumerate(outline.lists)
            ]
        for number, (start, stop, fn, bn) in enumerate(spans):
            first, last = start + fn, stop - bn
            if self.per_block:
                exempt = self.exempt[min(number, len(self.exempt) - 1)]
                for k in range(first, last):
                    if k - start not in exempt:
                        yield _Range(k, k, k + 1, number)
            elif first < last:
                yield _Range(start, first, last, number)


@dataclass(frozen=True)
class _Range:
    """Blocks `first` to `last` (excluded) may be skipped; those from `start` are watched."""

    start: int
    first: int
    last: int
    list_number: int


class _Inserter:
    """Inserts the gates of one graph."""

    def __init__(
        self,
        gm: fx.GraphModule,
        outline: Outline,
        ctx: PassContext,
        options: StepCache,
        signal: fx.Node | None,
    ) -> None:
        self.gm, self.graph, self.outline, self.ctx = gm, gm.graph, outline, ctx
        self.options, self.signal = options, signal
        self.analysis: Analysis = ctx.notes["analysis"]
        self.time = outline.timestep
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            self.gate = self.graph.placeholder("gate")

    def insert(self, number: int, place: _Range) -> GateSite:
        """Put gate `number` around the blocks of `place`."""
        skipped = _nodes_between(self.outline, place.first, place.last)
        inside = set(skipped)
        operands = _external_inputs(skipped, inside)
        results = [n for n in skipped if any(user not in inside for user in n.users)]
        bases = [_base(node, self.outline, place.first) for node in results]
        known = [base for base in bases if base is not None]
        seen, signals = self._seen(place)
        read = [*seen, *results, *known]
        sizes = [
            _placeholder(self.graph, node) for node in self.analysis.program.sizes_in(read)
        ]
        # The first gate of a call reads the time, too.
        time = self.time if number == 0 else None
        per_sample = bool(signals) and _is_batch_first(self.analysis, signals)
        watch = Watch(
            tuple(value_of(node) for node in seen),
            self.options.signal == "residual",
            self.options.stride,
            per_sample,
        )
        with self.ctx.fake_mode:
            graphs = GateGraphs.build(
                watch,
                [None if base is None else value_of(base) for base in bases],
                [value_of(node) for node in results],
                None if time is None else value_of(time),
                self.options.history,
                [value_of(node) for node in sizes],
            )
        graphs.run_as_they_are(all(_elements(node) <= SMALL for node in read))
        blocks = _module_of(self.gm, skipped, operands, results)
        with self.graph.inserting_before(skipped[0]):
            parts = self._add_parts(number, graphs, blocks)
            compute = self.graph.call_method(
                "decide",
                (self.gate, number, parts.get("score"), tuple(seen), time, tuple(sizes)),
            )
            compute.name = "compute" + _suffix(number)
            region = self.graph.call_method(
                "cond",
                (
                    self.gate,
                    number,
                    compute,
                    parts["compute_blocks"],
                    parts["reuse_residual"],
                    parts["keep"],
                ),
                {
                    "operands": tuple(operands),
                    "bases": tuple(known),
                    "seen": tuple(seen),
                    "sizes": tuple(sizes),
                },
            )
            for i, node in enumerate(results):
                item = self.graph.call_function(operator.getitem, (region, i))
                copy_meta(node, item)
                node.replace_all_uses_with(item, lambda user: user not in inside)
        for node in reversed(skipped):
            self.graph.erase_node(node)
        return GateSite(
            place.first,
            place.last,
            len(self.outline.blocks),
            graphs.signals,
            len(results),
            graphs.residuals,
            self.options.history,
            self.time is not None,
            per_sample,
            self.options.signal,
            place.list_number,
        )

    def _add_parts(
        self, number: int, graphs: GateGraphs, blocks: fx.GraphModule
    ) -> dict[str, fx.Node]:
        modules = {
            "score": graphs.score,
            "compute_blocks": blocks,
            "keep": graphs.keep,
            "reuse_residual": graphs.reuse,
        }
        parts = {}
        for name, module in modules.items():
            if module is not None:
                self.gm.add_submodule(name + _suffix(number), module)
                parts[name] = self.graph.get_attr(name + _suffix(number))
        return parts

    def _seen(self, place: _Range) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return what the gate looks at, and of it the nodes that are shaped as signals are."""
        boundaries = self.outline.boundaries
        if self.options.signal == "residual":
            pairs = [
                (_entry(boundaries[place.start], origin, pair), pair[1])
                for origin, pair in boundaries[place.first].watched.items()
            ]
            before, behind = ([pair[i] for pair in pairs] for i in (0, 1))
            return [*before, *behind], behind
        if self.options.signal == "input":
            streams = boundaries[place.first].streams
            own = boundaries[place.first + 1].watched
            seen = [streams[origin] for origin in own if origin in streams]
        else:
            seen = [] if self.signal is None else [self.signal]
        return seen, seen


def _suffix(number: int) -> str:
    return f"_{number}" if number else ""


def _entry(boundary: Boundary, origin: int, pair: tuple[fx.Node, fx.Node]) -> fx.Node:
    """Return what a watched stream was where the gate's own list begins."""
    entry = boundary.streams.get(origin)
    if entry is None or shape_of(entry) != shape_of(pair[1]):
        return pair[0]
    return entry if value_of(entry).dtype == value_of(pair[1]).dtype else pair[0]


def _nodes_between(outline: Outline, first: int, last: int) -> list[fx.Node]:
    """Return the calls of blocks `first` to `last` (excluded) with all that lies between."""
    node: fx.Node = outline.blocks[first]
    final = outline.blocks[last - 1]
    nodes: list[fx.Node] = []
    while final not in nodes or _is_item_of(node, final):
        nodes.append(node)
        node = node.next
    return nodes


def _is_item_of(node: fx.Node, call: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0] is call


def _external_inputs(nodes: list[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """Return what `nodes` read from outside, in order of first use."""
    found = {
        producer: None
        for node in nodes
        for producer in node.all_input_nodes
        if producer not in inside
    }
    return list(found)


def _base(node: fx.Node, outline: Outline, first: int) -> fx.Node | None:
    """Return the value, before the skipped blocks, of the stream that `node` continues."""
    origin = outline.origins.get(node)
    streams = outline.boundaries[first].streams
    base = streams.get(origin) if origin is not None else None
    if base is None or shape_of(base) != shape_of(node):
        return None
    return base if value_of(base).dtype == value_of(node).dtype else None


def _elements(node: fx.Node) -> int:
    return math.prod(traced_shape(node) or (1,))


def _placeholder(graph: fx.Graph, original: fx.Node) -> fx.Node:
    placeholders: list[fx.Node] = list(graph.find_nodes(op="placeholder"))
    return next(node for node in placeholders if node.target == original.target)


def _is_batch_first(analysis: Analysis, signals: list[fx.Node]) -> bool:
    """Tell whether the first dimension of the signal counts the samples of the latent."""
    latents = analysis.inputs.latents
    batch = (traced_shape(latents[0]) or (0,))[0] if latents else 0
    shapes = [traced_shape(node) or () for node in signals]
    return all(len(shape) > 1 and shape[0] == batch for shape in shapes)


def _module_of(
    gm: fx.GraphModule,
    nodes: list[fx.Node],
    operands: list[fx.Node],
    results: list[fx.Node],
) -> fx.GraphModule:
    """Return `nodes` as a module from `operands` to `results` that calls the same stages."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in operands:
        env[node] = graph.placeholder(node.name)
        copy_meta(node, env[node])
    for node in nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].meta = dict(node.meta)
    graph.output(tuple(env[node] for node in results))
    return fx.GraphModule(gm, graph, class_name="ComputeBlocks")
