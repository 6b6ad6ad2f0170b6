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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from stepfx.passes.base import PassContext
from stepfx.passes.graph_edit import copy_meta, extract
from stepfx.patterns.analysis import analyse
from stepfx.patterns.block_list import BlockKind, group_kinds
from stepfx.patterns.program import Program, Span, is_operation, is_tensor, value_of
from stepfx.patterns.region import Miss, Region


@dataclass(frozen=True)
class Boundary:
    """The values between two blocks, as nodes of the outer graph.

    `streams` maps the origin of a stream to its value where the next block begins,
    `watched` to the value before the first block and the one behind the last that ran.
    """

    streams: dict[int, fx.Node]
    watched: dict[int, tuple[fx.Node, fx.Node]]

    def moved(self, env: dict[fx.Node, fx.Node]) -> Boundary:
        """Return the boundary in a copy of the graph."""
        return Boundary(
            {origin: env[node] for origin, node in self.streams.items()},
            {origin: (env[a], env[b]) for origin, (a, b) in self.watched.items()},
        )


@dataclass(frozen=True)
class Outline:
    """Where the stages of an outer graph are.

    `boundaries[k]` lies before block k, the last one behind the last block; `origins` maps
    outer nodes to the stream that they continue; `timestep` is the outer node that tells
    denoising steps apart; `lists` are the first block of each list and the block behind its
    last; `values` maps the program's nodes to outer ones.
    """

    blocks: tuple[fx.Node, ...]
    boundaries: tuple[Boundary, ...]
    origins: dict[fx.Node, int]
    timestep: fx.Node | None
    lists: tuple[tuple[int, int], ...] = ()
    values: dict[fx.Node, fx.Node] = field(default_factory=dict, repr=False)

    def moved(self, env: dict[fx.Node, fx.Node]) -> Outline:
        """Return the outline of a copy of the graph; `env` maps its nodes to the copy's."""
        return Outline(
            tuple(env[node] for node in self.blocks),
            tuple(boundary.moved(env) for boundary in self.boundaries),
            {env[node]: origin for node, origin in self.origins.items()},
            None if self.timestep is None else env[self.timestep],
            self.lists,
            {ours: env[node] for ours, node in self.values.items()},
        )


@dataclass(frozen=True)
class OutlineBlocks:
    """Move prologue, blocks, glue and epilogue into graph modules of their own.

    `gate_lists` are the block lists under the gate, by number; None lets the graph decide.
    """

    gate_lists: tuple[int, ...] | None = None

    name: ClassVar[str] = "outline_blocks"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Rewrite `gm.graph` to call stages; return how many stages there are."""
        analysis = analyse(gm.graph, self.gate_lists)
        ctx.notes["analysis"] = analysis
        region = analysis.region
        if isinstance(region, Region):
            stages = _stages(region)
            reason = _crossing_value(analysis.program, stages)
            region = region if reason is None else Miss(reason)
        if isinstance(region, Miss):
            ctx.miss(region.reason)
            return 0
        timestep = analysis.inputs.timestep
        ctx.notes["outline"] = _Outliner(gm, region, stages, timestep).run()
        return len(stages)


@dataclass(frozen=True)
class _Stage:
    """A span of the program that becomes a call; `name` without a number for the kind."""

    span: Span
    name: str
    is_block: bool = False


def _stages(region: Region) -> list[_Stage]:
    """Return prologue, blocks, glue and epilogue in order; together all operations."""
    stages: list[_Stage] = []
    position = 0
    for block in region.blocks():
        if block.span.start > position:
            name = "glue" if stages else "prologue"
            stages.append(_Stage(Span(position, block.span.start), name))
        stages.append(_Stage(block.span, f"list_{block.number}_block", is_block=True))
        position = block.span.stop
    if position < len(region.program):
        stages.append(_Stage(Span(position, len(region.program)), "epilogue"))
    return stages


def _crossing_value(program: Program, stages: list[_Stage]) -> str | None:
    """Say which value that is no tensor and no size would have to cross a stage."""
    for stage in stages:
        for node in program.live_out(stage.span):
            value = value_of(node)
            if not is_tensor(value) and not hasattr(value, "node"):
                kind = type(value).__name__
                return f"a {kind} ({node.name}) is used in more than one stage"
    return None


class _Outliner:
    """Builds the outer graph of one module."""

    def __init__(
        self,
        gm: fx.GraphModule,
        region: Region,
        stages: list[_Stage],
        timestep: fx.Node | None,
    ) -> None:
        self.gm, self.program, self.region = gm, region.program, region
        self.timestep = timestep
        self.stages = stages
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.modules: dict[str, fx.GraphModule] = {}

    def run(self) -> Outline:
        """Build the outer graph and put it in place of the module's graph."""
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.env[node] = self.graph.node_copy(node)
                self.env[node].meta = dict(node.meta)
        made = [n for n in (self.timestep,) if n is not None and is_operation(n)]
        kinds = group_kinds(self.program, [stage.span for stage in self.stages], kept=made)
        kind_of = {member: kind for kind in kinds for member in kind.members}
        names = self._names(kinds)
        blocks = []
        for i, stage in enumerate(self.stages):
            kind = kind_of[i]
            call = self._call(names[kind.members[0]], kind, i)
            if stage.is_block:
                blocks.append(call)
        self._finish()
        return Outline(
            tuple(blocks),
            tuple(self._boundaries()),
            self._origins(),
            None if self.timestep is None else self.env[self.timestep],
            self._lists(),
            dict(self.env),
        )

    def _names(self, kinds: tuple[BlockKind, ...]) -> dict[int, str]:
        """Name the kinds by their first stage, numbered where a list has several."""
        names: dict[int, str] = {}
        for first in sorted(kind.members[0] for kind in kinds):
            name = base = self.stages[first].name
            count = 1
            while name in names.values():
                name, count = f"{base}_{count}", count + 1
            names[first] = name
        return names

    def _call(self, name: str, kind: BlockKind, stage: int) -> fx.Node:
        span, place = self.stages[stage].span, kind.members.index(stage)
        inputs = [slot.nodes[place] for slot in kind.slots]
        # Under dynamic shapes a part must be given the sizes that its shapes are made of.
        sizes = self.program.sizes_in([*inputs, *self.program.span_nodes(span)])
        inputs += [node for node in sizes if node not in inputs]
        outputs = [self.program.nodes[span.start + offset] for offset in kind.outputs]
        if name not in self.modules:
            # Edges name the slot they read: one tensor may be both the first value of a
            # stream and an invariant.
            self.modules[name] = extract(
                self.gm,
                self.program,
                span,
                inputs,
                outputs,
                name,
                lambda offset, edge: kind.edge_slots[offset, edge],
            )
        call = self.graph.call_module(name, tuple(self.env[node] for node in inputs))
        for i, node in enumerate(outputs):
            item = self.graph.call_function(operator.getitem, (call, i))
            copy_meta(node, item)
            self.env[node] = item
        return call

    def _finish(self) -> None:
        output: Any = self.program.output.args[0]
        self.graph.output(fx.map_arg(output, lambda node: self.env[node]))
        for name, module in self.modules.items():
            self.gm.add_submodule(name, module)
        self.gm.graph = self.graph
        for node, ours in list(self.env.items()):
            if ours.op == "get_attr" and not ours.users:
                self.graph.erase_node(ours)
                del self.env[node]

    def _boundaries(self) -> Iterator[Boundary]:
        blocks = self.region.blocks()
        cuts = [*(block.span.start for block in blocks), self.region.span.stop]
        for k, cut in enumerate(cuts):
            streams = {
                origin: self.env[node]
                for origin, node in self.region.values_at(cut).items()
                if node in self.env
            }
            watched = self.region.watched_behind(blocks[k - 1]) if k else {}
            yield Boundary(
                streams,
                {o: (self.env[a], self.env[b]) for o, (a, b) in watched.items()},
            )

    def _origins(self) -> dict[fx.Node, int]:
        return {
            self.env[node]: origin
            for node, origin in self.region.origin_of().items()
            if node in self.env
        }

    def _lists(self) -> tuple[tuple[int, int], ...]:
        """Return where each list lies among the blocks; lists that take turns are one."""
        numbers = [block.number for block in self.region.blocks()]
        starts = [i for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n]
        if len(starts) > len(set(numbers)):
            starts = [0]
        return tuple(zip(starts, [*starts[1:], len(numbers)], strict=True))
