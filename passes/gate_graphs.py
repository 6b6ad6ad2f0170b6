"""The small graphs of a gate: score, keep, reuse.

    score(h0.., h1.., kept.., ok, t) -> [t, ok, change.., size..]      one vector, one read
    keep(h0.., h1.., base.., out..)  -> signal.., residual.., ok
    reuse(base.., residuals.., c)    -> out = base + sum_j c_j residual_j

They are FX graphs like the model's own stages, go through the same inner compiler and show
up in dumps. h0 is the image stream before the watched blocks and h1 behind them; the signal
is h1 - h0; `base` is what a stream was where the skipped blocks begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


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
    return fx.GraphModule(torch.nn.Module(), graph, class_name=name)


def score_graph(
    h0: list[Any], h1: list[Any], time: Any, per_sample: bool, sizes: list[Any]
) -> fx.GraphModule:
    """Return the graph that measures how far the signal moved since it was kept.

    Values are fake tensors; `sizes` are those that their shapes are made of, under dynamic
    shapes. `per_sample` keeps the first dimension apart: change and size
    are then vectors of its length, else single numbers. Both are means of absolute values
    in float32 (the two halves of First Block Cache's relative L1: ParaAttention, diffusers).
    """
    n = len(h0)

    def size(x: Any) -> Any:
        x = x.abs()
        if per_sample:
            return x.flatten(1).mean(1, dtype=torch.float32)
        return x.mean(dtype=torch.float32).reshape(1)

    def body(*args: Any) -> list[Any]:
        before, after, kept = args[:n], args[n : 2 * n], args[2 * n : 3 * n]
        ok, *rest = args[3 * n : 3 * n + 1 + (time is not None)]
        pairs = list(zip(before, after, kept, strict=True))
        changes = [size((b - a) - k) for a, b, k in pairs]
        sizes = [size(k) for k in kept]
        head = [*(latest_time(t) for t in rest), ok.to(torch.float32).reshape(1)]
        return [torch.cat([*head, *changes, *sizes])]

    inputs = [
        *((f"h0_{i}", value) for i, value in enumerate(h0)),
        *((f"h1_{i}", value) for i, value in enumerate(h1)),
        *((f"kept_{i}", value) for i, value in enumerate(h1)),
        ("ok", torch.empty((), dtype=torch.bool, device=h0[0].device)),
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


def keep_graph(
    h0: list[Any], h1: list[Any], bases: list[Any | None], outs: list[Any]
) -> fx.GraphModule:
    """Return the graph that makes what a computed step leaves behind.

    A stream without a base (it changed shape on the way) is kept as a value. The last
    result says whether everything kept is finite.
    """
    n = len(h0)
    count = sum(base is not None for base in bases)

    def body(*args: Any) -> list[Any]:
        before, after = args[:n], args[n : 2 * n]
        base = iter(args[2 * n : 2 * n + count])
        results = args[2 * n + count :]
        signals = [b - a for a, b in zip(before, after, strict=True)]
        residuals = [
            out.clone() if known is None else out - next(base)
            for known, out in zip(bases, results, strict=True)
        ]
        # One NaN or infinity makes the sum one; float32 sums of finite values do not overflow.
        ok, *sums = (kept.sum(dtype=torch.float32) for kept in [*signals, *residuals])
        for total in sums:
            ok = ok + total * 0
        return [*signals, *residuals, torch.isfinite(ok)]

    inputs = [
        *((f"h0_{i}", value) for i, value in enumerate(h0)),
        *((f"h1_{i}", value) for i, value in enumerate(h1)),
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
