"""Put the gate into the outer graph.

    h1 = block_0(h0, temb, w0...)          h1 = block_0(h0, temb, w0...)
    h = block_1(h1, temb, w1...)      ->   compute = gate.decide(score, h0, h1, t)
    ...                                    h = gate.cond(compute, compute_blocks,
    h = block_n(h, temb, wn...)                          reuse_residual, keep, ...)
    y = epilogue(h, temb, w...)            y = epilogue(h, temb, w...)

`gate` is the first input of the graph: it holds the state of one call, so that the graph
holds none. `compute_blocks` is a module with the skipped stages, called only when the gate
says so. The first `fn` and the last `bn` blocks always run.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from stepfx.passes.base import PassContext
from stepfx.passes.gate_graphs import keep_graph, reuse_graph, score_graph
from stepfx.passes.graph_edit import copy_meta
from stepfx.passes.outline_blocks import Outline
from stepfx.patterns.analysis import Analysis
from stepfx.patterns.program import shape_of, traced_shape, value_of

# Streams of fewer elements are in cache: a fused score and forecast save tens of microseconds
# a step there (12 blocks of width 384, 256 tokens: 45 of 14,000) and cost a compilation each.
SMALL = 2**18


@dataclass(frozen=True)
class GateSite:
    """Where the gate sits and what it watches, for the runtime and the report.

    Blocks `first` to `last` (excluded) of `blocks` may be skipped.
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


@dataclass(frozen=True)
class StepCache:
    """Skip the blocks between the first `fn` and the last `bn` when the gate allows it.

    `history` is how many computed residuals a forecast may combine.
    """

    fn: int = 1
    bn: int = 0
    history: int = 2

    name: ClassVar[str] = "step_cache"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Insert the gate; return 1, or 0 if too few blocks are left to skip."""
        outline: Outline | None = ctx.notes.get("outline")
        if outline is None:
            return 0
        count = len(outline.blocks)
        if self.fn + self.bn >= count:
            ctx.miss(
                f"fn_compute_blocks={self.fn} and bn_compute_blocks={self.bn} leave none of "
                f"the {count} blocks to skip"
            )
            return 0
        if not outline.boundaries[self.fn].watched:
            ctx.miss(f"no tensor keeps its shape through the first {self.fn} block(s)")
            return 0
        site = _insert_gate(gm, outline, ctx, self)
        ctx.notes["gate"] = site
        return 1


def _insert_gate(
    gm: fx.GraphModule, outline: Outline, ctx: PassContext, options: StepCache
) -> GateSite:
    analysis: Analysis = ctx.notes["analysis"]
    graph, count = gm.graph, len(outline.blocks)
    first, last = options.fn, count - options.bn
    skipped = _nodes_between(outline, first, last)
    inside = set(skipped)
    operands = _external_inputs(skipped, inside)
    results = [n for n in skipped if any(user not in inside for user in n.users)]
    boundary = outline.boundaries[first]
    before, behind = (tuple(part) for part in zip(*boundary.watched.values(), strict=True))
    bases = [_base(node, outline, first) for node in results]
    time = outline.timestep
    per_sample = _is_batch_first(analysis, before)

    read = [*before, *behind, *results, *(b for b in bases if b is not None)]
    sizes = [_placeholder(graph, node) for node in analysis.program.sizes_in(read)]
    size_values = [value_of(node) for node in sizes]

    values = [value_of(node) for node in before]
    watched = [value_of(node) for node in behind]
    base_values = [None if base is None else value_of(base) for base in bases]
    with ctx.fake_mode:
        keep = keep_graph(values, watched, base_values, [value_of(n) for n in results])
        kept = _fake_call(keep)
        signals, residuals = kept[: len(values)], kept[len(values) : -1]
        fake_time = None if time is None else value_of(time)
        score = score_graph(values, watched, fake_time, per_sample, size_values)
        for placeholder, value in zip(
            score.graph.find_nodes(op="placeholder")[2 * len(values) :],
            signals,
            strict=False,
        ):
            placeholder.meta["example_value"] = value
        reuse = reuse_graph(base_values, residuals, options.history, size_values)
    # Not worth a compilation; and so that what is kept is never in memory that a CUDA graph
    # owns.
    keep.meta["run_as_is"] = True
    if all(_elements(node) <= SMALL for node in read):
        score.meta["run_as_is"] = reuse.meta["run_as_is"] = True
    modules = {
        "score": score,
        "compute_blocks": _module_of(gm, skipped, operands, results),
        "keep": keep,
        "reuse_residual": reuse,
    }
    for name, module in modules.items():
        gm.add_submodule(name, module)

    with graph.inserting_before(next(iter(graph.nodes))):
        gate = graph.placeholder("gate")
    with graph.inserting_before(skipped[0]):
        parts = {name: graph.get_attr(name) for name in modules}
        seen = (before, behind)
        compute = graph.call_method("decide", (gate, parts["score"], *seen, time, tuple(sizes)))
        compute.name = "compute"
        region = graph.call_method(
            "cond",
            (
                gate,
                compute,
                parts["compute_blocks"],
                parts["reuse_residual"],
                parts["keep"],
            ),
            {
                "operands": tuple(operands),
                "bases": tuple(base for base in bases if base is not None),
                "seen": seen,
                "sizes": tuple(sizes),
            },
        )
        for i, node in enumerate(results):
            item = graph.call_function(operator.getitem, (region, i))
            copy_meta(node, item)
            node.replace_all_uses_with(item, lambda user: user not in inside)
    for node in reversed(skipped):
        graph.erase_node(node)
    return GateSite(
        first,
        last,
        count,
        len(values),
        len(results),
        len(residuals),
        options.history,
        time is not None,
        per_sample,
    )


def _nodes_between(outline: Outline, first: int, last: int) -> list[fx.Node]:
    """Return the calls of blocks `first` to `last` (excluded) with all that lies between."""
    node: fx.Node = outline.blocks[first]
    nodes: list[fx.Node] = []
    stop = outline.blocks[last] if last < len(outline.blocks) else None
    final = outline.blocks[last - 1]
    while node is not stop and node.op != "output":
        if stop is None and nodes and final in nodes and not _is_item_of(node, final):
            break
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
    return next(n for n in graph.find_nodes(op="placeholder") if n.target == original.target)


def _is_batch_first(analysis: Analysis, image: tuple[fx.Node, ...]) -> bool:
    """Tell whether the first dimension of the signal counts the samples of the latent."""
    latents = analysis.inputs.latents
    batch = (traced_shape(latents[0]) or (0,))[0] if latents else 0
    shapes = [traced_shape(node) or () for node in image]
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


def _fake_call(gm: fx.GraphModule) -> list[Any]:
    """Run a graph on the fake values of its inputs."""
    values = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    return list(gm(*values))
