"""Turn a Dynamo graph into the outer graph: a straight line of stages.

    x = conv(...); ...; h = add(...)      ->  h, temb = prologue(x, t, w...)
    q = linear(h, w0); ...; h = add(...)      h = block_0(h, temb, w0...)
    q = linear(h, w1); ...; h = add(...)      h = block_1(h, temb, w1...)
    y = linear(h, w); ...                     y = epilogue(h, temb, w...)

Blocks that are the same operations call the same graph module with their own weights, so
that it is compiled once. A stage is a span of the program: what has no users (`setitem`,
autocast enter and exit) stays where it was.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from stepfx.passes.base import PassContext
from stepfx.passes.graph_edit import copy_meta, extract
from stepfx.patterns.analysis import Analysis, analyse
from stepfx.patterns.block_list import BlockList
from stepfx.patterns.program import Span, is_tensor, shape_of, value_of
from stepfx.patterns.region import Miss, Region


@dataclass(frozen=True)
class Boundary:
    """The values between two blocks, as nodes of the outer graph.

    `streams` maps a stream of the first list to its value here, `image` are the streams
    that the gate watches.
    """

    streams: dict[int, fx.Node]
    image: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Outline:
    """Where the stages of an outer graph are.

    `boundaries[k]` lies before block k, the last one behind the last block; `origins` maps
    outer nodes to the stream of the first list that they continue.
    """

    blocks: tuple[fx.Node, ...]
    boundaries: tuple[Boundary, ...]
    origins: dict[fx.Node, int]


@dataclass(frozen=True)
class OutlineBlocks:
    """Move prologue, blocks, glue and epilogue into graph modules of their own."""

    name: ClassVar[str] = "outline_blocks"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Rewrite `gm.graph` to call stages; return how many stages there are."""
        analysis = analyse(gm.graph)
        ctx.notes["analysis"] = analysis
        region = analysis.region
        if isinstance(region, Region):
            reason = _crossing_value(analysis, region)
            region = region if reason is None else Miss(reason)
        if isinstance(region, Miss):
            ctx.miss(region.reason)
            return 0
        outliner = _Outliner(gm, analysis, region)
        outliner.run()
        ctx.notes["outline"] = outliner.outline()
        return outliner.stages


def _stage_spans(analysis: Analysis, region: Region) -> list[Span]:
    """Return the spans of prologue, blocks, glue and epilogue; together all operations."""
    spans, position = [], 0
    for block in [*region.blocks(), Span(len(analysis.program), len(analysis.program))]:
        if block.start > position:
            spans.append(Span(position, block.start))
        if len(block):
            spans.append(block)
        position = block.stop
    return spans


def _crossing_value(analysis: Analysis, region: Region) -> str | None:
    """Say which value that is no tensor and no size would have to cross a stage."""
    program = analysis.program
    for span in _stage_spans(analysis, region):
        for node in program.live_out(span):
            value = value_of(node)
            if not is_tensor(value) and not hasattr(value, "node"):
                kind = type(value).__name__
                return f"a {kind} ({node.name}) is used in more than one stage"
    return None


class _Outliner:
    """Builds the outer graph of one module."""

    def __init__(self, gm: fx.GraphModule, analysis: Analysis, region: Region) -> None:
        self.gm, self.program, self.region = gm, analysis.program, region
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.modules: dict[str, fx.GraphModule] = {}
        self.block_calls: list[fx.Node] = []
        self.stages = 0

    def run(self) -> None:
        """Build the outer graph and put it in place of the module's graph."""
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.env[node] = self.graph.node_copy(node)
                self.env[node].meta = dict(node.meta)
        position = 0
        for number, blocks in enumerate(self.region.lists):
            if blocks.span.start > position:
                stop = blocks.span.start
                name = "prologue" if number == 0 else f"glue_{number}"
                self._stage(Span(position, stop), name)
            self._block_list(number, blocks)
            position = blocks.span.stop
        if position < len(self.program):
            self._stage(Span(position, len(self.program)), "epilogue")
        self._finish()

    def outline(self) -> Outline:
        """Return where the stages and streams of the finished graph are."""
        origins = {
            self.env[node]: origin
            for node, origin in self.region.followed.items()
            if node in self.env
        }
        boundaries: list[Boundary] = []
        for number, blocks in enumerate(self.region.lists):
            last = number == len(self.region.lists) - 1
            boundaries += [
                self._boundary(number, blocks, k, origins) for k in range(len(blocks) + last)
            ]
        return Outline(tuple(self.block_calls), tuple(boundaries), origins)

    def _boundary(
        self, number: int, blocks: BlockList, k: int, origins: dict[fx.Node, int]
    ) -> Boundary:
        values = [s.entry if k == 0 else s.outputs[k - 1] for s in blocks.streams]
        outer = [self.env.get(node) if node is not None else None for node in values]
        streams = {origins[n]: n for n in outer if n is not None and n in origins}
        image = tuple(node for i in self.region.image[number] if (node := outer[i]) is not None)
        return Boundary(streams, image)

    def _block_list(self, number: int, blocks: BlockList) -> None:
        """Call one module for all regular blocks whose numbers agree, others by themselves."""
        shared: dict[str, str] = {}
        for k, span in enumerate(blocks.spans):
            if k >= blocks.regular:
                self._stage(span, f"list_{number}_block_{k}", is_block=True)
                continue
            shapes = [shape_of(node) for node in self.program.span_nodes(span)]
            key = repr((self.program.constants[span.start : span.stop], shapes))
            if key not in shared:
                shared[key] = f"list_{number}_block" + (f"_{k}" if shared else "")
                self.modules[shared[key]] = self._regular_block(blocks, k, shared[key])
            inputs = [slot.nodes[k] for slot in blocks.slots]
            inputs += self._sizes(blocks, k, inputs)
            outputs = [self.program.nodes[span.start + offset] for offset in blocks.outputs]
            self._call(shared[key], inputs, outputs, is_block=True)

    def _regular_block(self, blocks: BlockList, k: int, name: str) -> fx.GraphModule:
        # Edges name the slot they read, since in the first block one tensor may be both the
        # first value of a stream and an invariant.
        span = blocks.spans[k]
        inputs = [slot.nodes[k] for slot in blocks.slots]
        return extract(
            self.gm,
            self.program,
            span,
            [*inputs, *self._sizes(blocks, k, inputs)],
            [self.program.nodes[span.start + offset] for offset in blocks.outputs],
            name,
            lambda offset, edge: blocks.edge_slots[offset, edge],
        )

    def _sizes(self, blocks: BlockList, k: int, inputs: list[fx.Node]) -> list[fx.Node]:
        """Return the sizes that occur in a regular block and are not among its inputs."""
        inside = self.program.span_nodes(blocks.spans[k])
        found = self.program.sizes_in([*inside, *inputs])
        return [node for node in found if node not in inputs]

    def _stage(self, span: Span, name: str, is_block: bool = False) -> None:
        inputs = self.program.live_in(span)
        sizes = self.program.sizes_in([*inputs, *self.program.span_nodes(span)])
        inputs += [node for node in sizes if node not in inputs]
        outputs = self.program.live_out(span)
        self.modules[name] = extract(self.gm, self.program, span, inputs, outputs, name)
        self._call(name, inputs, outputs, is_block)

    def _call(
        self, name: str, inputs: list[fx.Node], outputs: list[fx.Node], is_block: bool
    ) -> None:
        call = self.graph.call_module(name, tuple(self.env[node] for node in inputs))
        self.stages += 1
        if is_block:
            self.block_calls.append(call)
        for i, node in enumerate(outputs):
            item = self.graph.call_function(operator.getitem, (call, i))
            copy_meta(node, item)
            self.env[node] = item

    def _finish(self) -> None:
        output: Any = self.program.output.args[0]
        self.graph.output(fx.map_arg(output, lambda node: self.env[node]))
        for name, module in self.modules.items():
            self.gm.add_submodule(name, module)
        self.gm.graph = self.graph
        for node in list(self.graph.nodes):
            if node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)
