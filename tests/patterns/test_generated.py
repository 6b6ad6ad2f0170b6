"""Programs made at random: their block lists must be found, and outlined without a change."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stepfx.passes.canonicalize import Canonicalize
from stepfx.passes.outline_blocks import OutlineBlocks
from stepfx.patterns.block_list import BlockList
from stepfx.patterns.find_blocks import find_block_lists
from stepfx.patterns.program import Program
from stepfx.testing import capture, run_pass

WIDTH = 8
# What a block may do to its stream, in order; each is a residual branch of several operations.
LAYERS = ("attention", "mlp", "gated", "mixer", "scaled")


@dataclass(frozen=True)
class Body:
    """The layers of a block; two streams are joined in its attention."""

    layers: tuple[str, ...]
    streams: int = 1
    dead: bool = False  # computes something that nobody reads
    numbered: bool = False  # multiplies by a number of its own
    fed: bool = False  # reads an input that other blocks do not


@dataclass(frozen=True)
class Plan:
    """A stack: what each block does, and what stands before and behind."""

    body: Body
    count: int
    changed: str | None = None  # "first", "last": one block has a layer more or less
    prefix: int = 0
    suffix: int = 0
    skips: bool = False  # the second half reads the outputs of the first


class Layer(nn.Module):
    """One residual branch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.c, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        y = F.layer_norm(x, (WIDTH,))
        if self.kind == "attention":
            k, v = self.a(y).chunk(2, dim=-1)
            return self.c(F.scaled_dot_product_attention(self.c(y), k, v))
        if self.kind == "mlp":
            return self.b(F.gelu(self.a(y)))
        if self.kind == "gated":
            gate, value = self.a(y * (1 + c)).chunk(2, dim=-1)
            return self.c(F.silu(gate) * value)
        if self.kind == "mixer":
            weights = torch.softmax(self.c(y) @ y.transpose(1, 2), dim=-1)
            return self.c(weights @ y)
        return self.scale * self.c(F.relu(y + c))


class Generated(nn.Module):
    """The model that a plan describes."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.join = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(plan.count))
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.ModuleList(Layer(kind) for kind in self.layers_of(i))
                for _ in range(plan.body.streams)
            )
            for i in range(plan.count)
        )
        generator = torch.Generator().manual_seed(0)
        for parameter in self.requires_grad_(False).parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def layers_of(self, i: int) -> tuple[str, ...]:
        layers = self.plan.body.layers
        if self.plan.changed == "last" and i == self.plan.count - 1:
            return layers[:-1] if len(layers) > 2 else (*layers, "scaled")
        if self.plan.changed == "first" and i == 0:
            return ("scaled", *layers)
        return layers

    def forward(self, x: Tensor, c: Tensor, given: Tensor) -> Tensor:
        plan, body = self.plan, self.plan.body
        for _ in range(plan.prefix):
            x = torch.tanh(x * 1.5)
        h = [self.first(x), torch.cos(x)][: body.streams]
        skips: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if plan.skips and i >= (plan.count + 1) // 2:
                h[0] = self.join[i](torch.cat([h[0], skips.pop()], dim=-1))
            h = self.run_block(i, block, h, c, given)
            if plan.skips and i < plan.count // 2:
                skips.append(h[0])
        y = sum(h[1:], h[0])
        for _ in range(plan.suffix):
            y = torch.sigmoid(y - 0.5)
        return self.last(y)

    def run_block(
        self, i: int, block: nn.Module, h: list[Tensor], c: Tensor, given: Tensor
    ) -> list[Tensor]:
        body = self.plan.body
        if len(h) == 2:
            joint = torch.cat(h, dim=1)
            mean = self.join[i](torch.cat([joint, joint.sin()], dim=-1)).mean(1, keepdim=True)
            h = [part + mean for part in h]
        for stream, layers in enumerate(block):
            x = h[stream]
            for layer in layers:
                x = x + layer(x, c)
            if body.numbered:
                x = x * (1.0 + 0.25 * i)
            if body.fed:
                x = x + given[i]
            if body.dead:
                x.exp().sum()
            h[stream] = x
        return h


# What mixes tokens and then runs an MLP is a block: a body mixes them once.
one_stream = (
    st.lists(st.sampled_from(LAYERS), min_size=2, max_size=4)
    .map(tuple)
    .filter(lambda layers: sum(kind in ("attention", "mixer") for kind in layers) <= 1)
)
two_streams = st.sampled_from([("attention", "mlp"), ("mixer", "gated"), ("gated", "scaled")])
bodies = st.builds(
    lambda layers, pair, streams, **rest: Body(
        layers if streams == 1 else pair, streams=streams, **rest
    ),
    layers=one_stream,
    pair=two_streams,
    streams=st.integers(1, 2),
    dead=st.booleans(),
    numbered=st.booleans(),
    fed=st.booleans(),
)
plans = st.builds(
    Plan,
    body=bodies,
    count=st.integers(2, 12),
    prefix=st.integers(0, 3),
    suffix=st.integers(0, 3),
)
slow = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    # A program takes seconds to trace: a failing one is shown as it is.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def inputs(plan: Plan) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(2, 5, WIDTH), torch.randn(2, 1, WIDTH), torch.randn(12, 2, 5, WIDTH)


def captured(model: nn.Module, *given: Tensor) -> tuple[Program, list[BlockList]]:
    gm = capture(model, given)
    run_pass(Canonicalize(), gm)
    program = Program(gm.graph)
    return program, find_block_lists(program)


def is_periodic(body: Body) -> bool:
    """Tell whether half of a block is like the other: then there are twice as many."""
    half, rest = divmod(len(body.layers), 2)
    if body.streams == 2 or body.numbered or body.fed:
        return False
    return len(set(body.layers)) == 1 or (not rest and body.layers[:half] == body.layers[half:])


@given(plans)
@slow
def test_the_list_is_found(plan: Plan) -> None:
    assume(not is_periodic(plan.body))
    program, lists = captured(Generated(plan), *inputs(plan))
    assert [len(blocks) for blocks in lists] == [plan.count]
    assert len(lists[0].streams) == plan.body.streams
    check(program, lists)


def test_two_streams_of_several_layers_each() -> None:
    body = Body(("mixer", "gated", "mlp"), streams=2, dead=True, numbered=True, fed=True)
    plan = Plan(body, 5, prefix=2, suffix=2)
    _, lists = captured(Generated(plan), *inputs(plan))
    assert [len(blocks) for blocks in lists] == [5]


@given(plans, st.sampled_from(["first", "last"]))
@slow
def test_a_changed_block_at_an_end_belongs_to_the_list(plan: Plan, where: str) -> None:
    layers = plan.body.layers
    # Equal neighbours are a list of two themselves, and what nobody reads hides the residual
    # add that marks the end of a block: the odd block may then stay outside.
    assume(len(set(layers)) == len(layers) and not plan.body.dead)
    assume(plan.count > 2 and plan.body.streams == 1)
    changed = Plan(plan.body, plan.count, where, plan.prefix, plan.suffix)
    program, lists = captured(Generated(changed), *inputs(plan))
    assert [len(blocks) for blocks in lists] == [plan.count]
    check(program, lists)


@pytest.mark.xfail(
    strict=True, reason="its equal halves are aligned crosswise; it stays outside"
)
def test_a_changed_first_block_of_two_streams() -> None:
    plan = Plan(Body(("attention", "mlp"), streams=2, numbered=True), 11, "first", suffix=1)
    _, lists = captured(Generated(plan), *inputs(plan))
    assert [len(blocks) for blocks in lists] == [11]


@given(plans, st.integers(2, 5))
@slow
def test_long_skips(plan: Plan, half: int) -> None:
    assume(not is_periodic(plan.body))
    shaped = Plan(plan.body, 2 * half, None, plan.prefix, plan.suffix, skips=True)
    program, lists = captured(Generated(shaped), *inputs(plan))
    assert [len(blocks) for blocks in lists] == [2 * half]
    check(program, lists)


class Touching(nn.Module):
    """Two stacks of which the second begins where the first ends, at other tokens."""

    def __init__(self, a: Plan, b: Plan) -> None:
        super().__init__()
        self.a, self.b = Generated(a), Generated(b)

    def forward(self, x: Tensor, c: Tensor, given: Tensor) -> Tensor:
        h = [x]
        for i, block in enumerate(self.a.blocks):
            h = self.a.run_block(i, block, h, c, given)
        h = [torch.cat([h[0], c], dim=1)]
        longer = torch.cat([given, given[:, :, :1]], dim=2)
        for i, block in enumerate(self.b.blocks):
            h = self.b.run_block(i, block, h, c, longer)
        return h[0].sin()


@given(bodies, st.integers(2, 6), st.integers(2, 6))
@slow
def test_two_lists_that_touch(body: Body, first: int, second: int) -> None:
    single = Body(body.layers, 1, body.dead, body.numbered, body.fed)
    assume(not is_periodic(single))
    a, b = Plan(single, first), Plan(single, second)
    program, lists = captured(Touching(a, b), *inputs(a))
    assert [len(blocks) for blocks in lists] == [first, second]
    check(program, lists)


def check(program: Program, lists: list[BlockList]) -> None:
    """Assert what is true of every block list."""
    spans = sorted((span for blocks in lists for span in blocks.spans), key=lambda s: s.start)
    for before, after in itertools.pairwise(spans):
        assert before.stop <= after.start
    for blocks in lists:
        assert list(blocks.spans) == sorted(blocks.spans, key=lambda s: s.start)
        for stream in blocks.streams:
            for span, entry, left in zip(
                blocks.spans, stream.inputs, stream.outputs, strict=True
            ):
                assert entry is not None and program.at(entry) < span.start
                assert left is None or program.at(left) in span
        for kind in blocks.kinds:
            check_kind(program, blocks, kind.members)


def check_kind(program: Program, blocks: BlockList, members: tuple[int, ...]) -> None:
    """Assert that all edges of equal blocks agree: inside, or at one slot outside."""
    spans = [blocks.spans[i] for i in members]
    for span, other in itertools.pairwise(spans):
        outside: dict[object, object] = {}
        for offset in range(len(span)):
            edges = program.edges[span.start + offset], program.edges[other.start + offset]
            assert len(edges[0]) == len(edges[1])
            for mine, theirs in zip(*edges, strict=True):
                inner = program.at(mine) in span
                assert inner == (program.at(theirs) in other)
                if inner:
                    assert program.at(theirs) - program.at(mine) == other.start - span.start
                elif mine in outside and mine.op == "placeholder":
                    assert outside.setdefault(mine, theirs) is theirs


@given(plans, st.sampled_from([None, "first", "last"]), st.booleans())
@slow
def test_the_outlined_graph_computes_the_same(
    plan: Plan, changed: str | None, skips: bool
) -> None:
    model = Generated(
        Plan(plan.body, plan.count, changed, plan.prefix, plan.suffix, skips=skips)
    )
    given = inputs(plan)
    gm = capture(model, given)
    values = [n.meta["grapharg"].example for n in gm.graph.find_nodes(op="placeholder")]
    expected = gm(*values)[0]
    run_pass(Canonicalize(), gm)
    stages, misses = run_pass(OutlineBlocks(), gm)
    assert (stages > 0) != bool(misses)
    assert torch.equal(gm(*values)[0], expected)
    assert torch.equal(model(*given), expected)
