"""Give a shared block the memory layout it was compiled for, at every call.

    h0 = prologue(...)        # strides (128, 1, 16)        h0 = prologue(...)  # (128, 8, 1)
    h1 = block(h0, w0...)     # strides (128, 8, 1)    ->   h1 = block(h0, w0...)
    h2 = block(h1, w1...)     # compiled for (128, 8, 1)    h2 = block(h1, w1...)

An artifact is compiled for the strides of its inputs. The first block of a list often
reads another layout than those behind it (a transposed patch embedding), and FLUX's single
blocks hand on slices of a joint tensor. The stage that makes a tensor then makes it in the
layout that its reader wants, where the inner compiler fuses it into the last kernel.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from stepfx.passes.base import PassContext
from stepfx.passes.graph_edit import copy_meta
from stepfx.patterns.program import is_tensor, size_hint, value_of

Order = tuple[int, ...]


@dataclass(frozen=True)
class MatchLayouts:
    """Make inputs of modules that are called more than once agree in their strides."""

    name: ClassVar[str] = "match_layouts"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Add layout changes where needed; return how many."""
        if "outline" not in ctx.notes:
            return 0
        matcher = _Matcher(gm, ctx.fake_mode)
        return matcher.run()


def dense_order(value: torch.Tensor) -> Order | None:
    """Return the dimensions from slowest to fastest if memory has no gaps, else None.

    Dimensions of size 1 have no place in memory; they keep the one they have.
    """
    sizes, strides = value.shape, value.stride()
    movable = [d for d in range(value.dim()) if str(sizes[d]) != "1"]
    ranked = sorted(movable, key=lambda d: (-size_hint(strides[d]), d))
    expected: Any = 1
    for d in reversed(ranked):
        if str(strides[d]) != str(expected):
            return None
        expected = expected * sizes[d]
    order = list(range(value.dim()))
    for place, d in zip(movable, ranked, strict=True):
        order[place] = d
    return tuple(order)


class _Matcher:
    def __init__(self, gm: fx.GraphModule, fake_mode: Any) -> None:
        self.gm, self.fake_mode = gm, fake_mode
        calls = [n for n in gm.graph.nodes if n.op == "call_module"]
        self.calls = calls
        times = Counter(str(n.target) for n in calls)
        self.shared = {name for name, count in times.items() if count > 1}
        self.changed: dict[tuple[str, int], Order] = {}
        self.rewrites = 0

    def run(self) -> int:
        # Private (torch 2.11 to 2.13): operations such as `pad` have their symbolic form in
        # Python only; running `nonzero` again makes a size that nobody else knows.
        fresh = self.fake_mode.shape_env.ignore_fresh_unbacked_symbols()
        with self.fake_mode, torch.no_grad(), enable_python_dispatcher(), fresh:
            for name in self.shared:
                self._expect_layouts(name)
            # A changed output changes what later stages make of it: until nothing moves.
            for _ in range(4):
                if not self._propagate():
                    break
        return self.rewrites

    def _expect_layouts(self, name: str) -> None:
        """Let the last call of a shared module, deep in the list, say what it reads."""
        last = [call for call in self.calls if call.target == name][-1]
        module = self.gm.get_submodule(name)
        assert isinstance(module, fx.GraphModule)
        for placeholder, argument in zip(
            module.graph.find_nodes(op="placeholder"), last.args, strict=True
        ):
            assert isinstance(argument, fx.Node)
            value = value_of(argument)
            if is_tensor(value) and argument.op != "placeholder":
                order = dense_order(value)
                value = relayout(value, order or tuple(range(value.dim())))
            placeholder.meta["example_value"] = value

    def _propagate(self) -> bool:
        """Recompute all fake values in order; return whether a layout was changed."""
        moved = False
        outputs: dict[str, Any] = {}
        for call in list(self.calls):
            name = str(call.target)
            module = self.gm.get_submodule(name)
            assert isinstance(module, fx.GraphModule)
            placeholders = module.graph.find_nodes(op="placeholder")
            for i, placeholder in enumerate(placeholders):
                argument = call.args[i]
                assert isinstance(argument, fx.Node)
                if name in self.shared:
                    moved |= self._require(call, i, placeholder)
                else:
                    placeholder.meta["example_value"] = value_of(argument)
            if name not in outputs or name not in self.shared:
                outputs[name] = module(*[value_of(p) for p in placeholders])
            for user in call.users:
                user.meta["example_value"] = outputs[name][user.args[1]]
        return moved

    def _require(self, call: fx.Node, i: int, placeholder: fx.Node) -> bool:
        """Make input `i` of a call come in the layout of `placeholder`."""
        argument, wanted = call.args[i], value_of(placeholder)
        assert isinstance(argument, fx.Node)
        given = value_of(argument)
        if not is_tensor(wanted) or _same_layout(given, wanted):
            return False
        order = dense_order(wanted)
        if order is None:
            return False
        self.rewrites += 1
        producer = argument.args[0] if argument.target is operator.getitem else None
        if isinstance(producer, fx.Node) and producer.op == "call_module":
            index = argument.args[1]
            assert isinstance(index, int)
            key = (str(producer.target), index)
            if key not in self.changed:
                self.changed[key] = order
                self._change_output(*key, order)
                return True
        # The maker serves readers of different layouts, or is the caller: copy for this one.
        with self.gm.graph.inserting_before(call):
            copied = self.gm.graph.call_function(relayout, (argument, order))
        copy_meta(argument, copied)
        copied.meta["example_value"] = wanted
        call.update_arg(i, copied)
        return True

    def _change_output(self, name: str, index: int, order: Order) -> None:
        module = self.gm.get_submodule(name)
        assert isinstance(module, fx.GraphModule)
        output = next(iter(reversed(module.graph.nodes)))
        results = list(output.args[0])
        with module.graph.inserting_before(output):
            results[index] = module.graph.call_function(relayout, (results[index], order))
        output.args = (tuple(results),)
        module.recompile()


def relayout(x: torch.Tensor, order: Order) -> torch.Tensor:
    """Return `x` with its dimensions laid out in memory in `order`, slowest first."""
    inverse = [0] * len(order)
    for place, d in enumerate(order):
        inverse[d] = place
    return x.permute(order).contiguous().permute(inverse)


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(
        str(x) == str(y)
        for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)
        if str(size) != "1"
    )
