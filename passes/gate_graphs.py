"""The small graphs of a gate: score, keep, reuse.

    score(seen.., kept.., ok, t)   -> [t, ok, change.., size..]      one vector, one read
    keep(seen.., base.., out..)    -> signal.., residual.., ok
    reuse(base.., residuals.., c)  -> out = base + sum_j c_j residual_j

They are FX graphs like the model's own stages, go through the same inner compiler and show
up in dumps. `seen` is what the gate looks at: the image stream before the watched blocks and
behind them, of which the signal is the difference, or tensors that are signals themselves.
`base` is what a stream was where the skipped blocks begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stepfx.patterns.program import value_of


@dataclass(frozen=True)
class Watch:
    """What a gate looks at, as fake tensors.

    Attributes:
        seen: the tensors; with `is_residual` first those before the watched blocks, then
            those behind them.
        is_residual: whether the signal is the difference of the two halves of `seen`.
        stride: every how many channels of a signal are compared.
        per_sample: whether the first dimension counts samples, each with a score.
    """

    seen: tuple[Any, ...]
    is_residual: bool
    stride: int
    per_sample: bool

    def signals(self, seen: Sequence[Any]) -> list[Any]:
        """Return the signals of recorded tensors `seen`."""
        values = list(seen)
        if self.is_residual:
            half = len(values) // 2
            pairs = zip(values[:half], values[half:], strict=True)
            values = [behind - before for before, behind in pairs]
        return values if self.stride == 1 else [x[..., :: self.stride] for x in values]


@dataclass(frozen=True)
class GateGraphs:
    """The graphs of one gate. `score` is None if it looks at nothing.

    Attributes:
        signals: how many tensors a computed step leaves to compare with.
        residuals: how many it leaves to reuse.
    """

    score: fx.GraphModule | None
    keep: fx.GraphModule
    reuse: fx.GraphModule
    signals: int
    residuals: int

    @classmethod
    def build(
        cls,
        watch: Watch,
        bases: list[Any | None],
        outs: list[Any],
        time: Any,
        history: int,
        sizes: list[Any],
    ) -> GateGraphs:
        """Build the graphs from fake values, under their fake mode.

        `time` is None where the gate does not read it, `sizes` are what dynamic shapes are
        made of.
        """
        keep = keep_graph(watch, bases, outs)
        kept = list(keep(*(value_of(n) for n in keep.graph.find_nodes(op="placeholder"))))
        residuals = kept[-1 - len(outs) : -1]
        signals = kept[: -1 - len(outs)]
        score = score_graph(watch, signals, time, sizes) if watch.seen else None
        reuse = reuse_graph(bases, residuals, history, sizes)
        return cls(score, keep, reuse, len(signals), len(residuals))

    def run_as_they_are(self, is_small: bool) -> None:
        """Mark the graphs that are not worth a compilation.

        `keep` never is; and what is kept is then never in memory that a CUDA graph owns.
        """
        self.keep.meta["run_as_is"] = True
        for graph in (self.score, self.reuse):
            if is_small and graph is not None:
                graph.meta["run_as_is"] = True


def build_graph(
    name: str, inputs: Sequence[tuple[str, Any]], body: Callable[..., Sequence[Any]]
) -> fx.GraphModule:
    """Record `body` on named inputs, each given with its fake value."""
    graph = fx.Graph()
    proxies = []
    tracer = fx.proxy.GraphAppendingTracer(graph)
    for label, value in inputs:
        node = graph.placeholder(label)
        node.meta["example_value"] = value
        proxies.append(fx.Proxy(node, tracer))
    graph.output(tuple(proxy.node for proxy in body(*proxies)))
    gm = fx.GraphModule(torch.nn.Module(), graph, class_name=name)
    gm.meta["of_gate"] = True
    return gm


def score_graph(watch: Watch, kept: list[Any], time: Any, sizes: list[Any]) -> fx.GraphModule:
    """Return the graph that measures how far the signals moved since `kept`.

    Per sample, change and size are vectors of the batch's length, else single numbers. Both
    are means of absolute values in float32 (the two halves of First Block Cache's relative
    L1: ParaAttention, diffusers).
    """
    n, m = len(watch.seen), len(kept)

    def size(x: Any) -> Any:
        x = x.abs()
        if watch.per_sample:
            return x.flatten(1).mean(1, dtype=torch.float32)
        return x.mean(dtype=torch.float32).reshape(1)

    def body(*args: Any) -> list[Any]:
        signals, old = watch.signals(args[:n]), args[n : n + m]
        ok, *rest = args[n + m : n + m + 1 + (time is not None)]
        changes = [size(now - k) for now, k in zip(signals, old, strict=True)]
        sizes = [size(k) for k in old]
        head = [*(latest_time(t) for t in rest), ok.to(torch.float32).reshape(1)]
        return [torch.cat([*head, *changes, *sizes])]

    inputs = [
        *((f"seen_{i}", value) for i, value in enumerate(watch.seen)),
        *((f"kept_{i}", value) for i, value in enumerate(kept)),
        ("ok", torch.empty((), dtype=torch.bool, device=kept[0].device)),
        *([("t", time)] if time is not None else []),
        *((f"size_{i}", size) for i, size in enumerate(sizes)),
    ]
    return build_graph("Score", inputs, body)


def latest_time(t: Any) -> Any:
    """Return the largest timestep of a tensor of any shape, as float32 [1].

    Samples of a batch and tokens of a frame may carry times of their own (Wan's first frame
    is at 0); the largest is that of the sampler.
    """
    return t.reshape(-1).max().to(torch.float32).reshape(1)


def keep_graph(watch: Watch, bases: list[Any | None], outs: list[Any]) -> fx.GraphModule:
    """Return the graph that makes what a computed step leaves behind.

    A stream without a base (it changed shape on the way) is kept as a value. The last
    result says whether everything kept is finite.
    """
    n = len(watch.seen)
    count = sum(base is not None for base in bases)

    def body(*args: Any) -> list[Any]:
        base = iter(args[n : n + count])
        signals = watch.signals(args[:n])
        if not watch.is_residual or watch.stride > 1:
            # What is seen belongs to the model, and a slice would hold the whole of it.
            signals = [x.clone(memory_format=torch.contiguous_format) for x in signals]
        residuals = [
            out.clone() if known is None else out - next(base)
            for known, out in zip(bases, args[n + count :], strict=True)
        ]
        # One NaN or infinity makes the sum one; float32 sums of finite values do not overflow.
        ok, *sums = (kept.sum(dtype=torch.float32) for kept in [*signals, *residuals])
        for total in sums:
            ok = ok + total * 0
        return [*signals, *residuals, torch.isfinite(ok)]

    inputs = [
        *((f"seen_{i}", value) for i, value in enumerate(watch.seen)),
        *((f"base_{i}", b) for i, b in enumerate(bases) if b is not None),
        *((f"out_{i}", value) for i, value in enumerate(outs)),
    ]
    return build_graph("Keep", inputs, body)


def reuse_graph(
    bases: list[Any | None], residuals: list[Any], history: int, sizes: list[Any]
) -> fx.GraphModule:
    """Return the graph that stands in for the skipped blocks.

    With `history` 1 it adds the last residual as it is. With more it adds a combination of
    the last residuals, newest first, with the coefficients [history] given at run time,
    in float32 (TaylorSeer's forecast is one such combination).
    """
    count = sum(base is not None for base in bases)
    coefficients = count + history * len(bases) if history > 1 else 0

    def body(*args: Any) -> list[Any]:
        base = iter(args[:count])
        kept = args[count : count + history * len(bases)]
        outs = []
        for i, (known, fake) in enumerate(zip(bases, residuals, strict=True)):
            terms = kept[i * history : (i + 1) * history]
            start = None if known is None else next(base)
            outs.append(_forecast(start, terms, args[coefficients], fake.dtype))
        return outs

    inputs = [
        *((f"base_{i}", b) for i, b in enumerate(bases) if b is not None),
        *(
            (f"residual_{i}_{j}", value)
            for i, value in enumerate(residuals)
            for j in range(history)
        ),
    ]
    if history > 1:
        device = residuals[0].device
        inputs.append(("coefficients", torch.empty(history, device=device)))
    inputs += [(f"size_{i}", size) for i, size in enumerate(sizes)]
    return build_graph("Reuse", inputs, body)


def _forecast(start: Any | None, terms: Sequence[Any], c: Any, dtype: torch.dtype) -> Any:
    if len(terms) == 1:
        return terms[0].clone() if start is None else start + terms[0]
    total = c[0] * terms[0].to(torch.float32)
    for j, term in enumerate(terms[1:], start=1):
        total = total + c[j] * term.to(torch.float32)
    if start is not None:
        total = start.to(torch.float32) + total
    return total.to(dtype)
