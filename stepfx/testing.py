"""Tools for testing passes and caches, for this project and for authors of passes.

    check_pass(Canonicalize(), f, (x,), before="...", after="...", rewrites=1)

compares the readable text of a graph before and after a pass, its values, and that running
the pass again changes nothing. `BlockCounter` counts blocks that truly ran, independently
of what stepfx says.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from stepfx.passes.base import Pass, PassContext
from stepfx.pipeline import copy_graph_module, recorded_fake_mode
from stepfx.printer import format_graph


def capture(function: Callable[..., Any], inputs: Sequence[Any]) -> fx.GraphModule:
    """Return the graph that Dynamo hands a backend for one call of `function`."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(copy_graph_module(gm))
        forward: Callable[..., Any] = gm.forward
        return forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def run_pass(one: Pass, gm: fx.GraphModule, **notes: Any) -> tuple[int, list[str]]:
    """Run a pass on `gm` in place; return the rewrites and the reasons for misses."""
    misses: list[str] = []
    rewrites = one(gm, PassContext(recorded_fake_mode(gm), misses.append, notes))
    gm.graph.lint()
    gm.recompile()
    return rewrites, misses


def check_pass(
    one: Pass,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    before: str,
    after: str,
    rewrites: int,
) -> None:
    """Assert that a pass turns the text `before` into `after`, keeps values, and is done.

    The graph's inputs must be `inputs` in order (a function without weights).
    """
    gm = capture(function, inputs)
    assert_text(gm, before)
    expected = gm(*[clone(x) for x in inputs])
    found, _ = run_pass(one, gm)
    assert_text(gm, after)
    assert found == rewrites, f"{found} rewrites, not {rewrites}"
    for a, b in zip(expected, gm(*[clone(x) for x in inputs]), strict=True):
        assert torch.equal(a, b), "the pass changed a value"
    again, _ = run_pass(one, gm)
    assert again == 0, f"a second run made {again} rewrites"


def check_no_match(one: Pass, function: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Assert that a pass leaves a graph alone."""
    gm = capture(function, inputs)
    text = format_graph(gm.graph, sources=False)
    found, _ = run_pass(one, gm)
    assert found == 0, f"{found} rewrites"
    assert_text(gm, text)


def assert_text(gm: fx.GraphModule, expected: str) -> None:
    """Assert that the canonical text of a graph is `expected`, indentation aside."""
    text = format_graph(gm.graph, sources=False).strip()
    wanted = textwrap.dedent(expected).strip()
    assert text == wanted, f"the graph is\n{text}\n\nnot\n{wanted}"


def clone(value: Any) -> Any:
    """Copy a tensor; return anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


_counts = [0]


@torch.library.custom_op("stepfx_testing::count", mutates_args=())
def _count(x: torch.Tensor) -> torch.Tensor:
    _counts[0] += 1
    return x.clone()


@_count.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class BlockCounter:
    """Counts how often modules run, through an operator that every compiler must call."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._handles = [
            m.register_forward_pre_hook(self._hook, with_kwargs=True) for m in modules
        ]

    @staticmethod
    def _hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # On what enters: of what leaves, one tensor may be dead in the last block.
        if args:
            return (torch.ops.stepfx_testing.count(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: torch.ops.stepfx_testing.count(kwargs[name])}

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[int]]:
        """Yield a list that holds the number of runs once the block ends."""
        start, result = _counts[0], [0]
        yield result
        result[0] = _counts[0] - start

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def fill_gates(model: torch.nn.Module, std: float = 0.1, seed: int = 0) -> None:
    """Give every parameter random values: zero gates would make any cache look right."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise.to(parameter.dtype))
