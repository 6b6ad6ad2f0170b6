"""Does stepfx see a model rightly? Block lists, off is off, reuse: checked on one call."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree  # what torch itself flattens inputs with

import stepfx
from stepfx.patterns.program import Span
from stepfx.pipeline import PipelineResult
from stepfx.report import Report

CALLS = 3  # one computed step and two reused ones


@dataclass(frozen=True)
class Coverage:
    """What was checked of one model.

    Attributes:
        name: the model's class, or what the caller calls it.
        report: what `stepfx.explain` says.
        is_equal: whether threshold 0 through `inner="eager"` gave the model's own output,
            bit for bit.
        schedule: the steps of three equal calls in one request, "100" where blocks are reused;
            empty without a gate.
        is_sound: whether the output of a reused step is finite and has the model's shapes.
        linears: how many linear layers PyTorch's profiler saw run in a computed step.
        skipped: how many fewer it saw in a reused step.
        expected: how many linear layers the blocks have that the gate may skip.
    """

    name: str
    report: Report
    is_equal: bool
    schedule: str
    is_sound: bool
    linears: int = 0
    skipped: int = 0
    expected: int = 0

    @property
    def passed(self) -> bool:
        """Whether the model runs as it should, gated or not."""
        if not (self.is_equal and self.is_sound):
            return False
        return not self.schedule or (self.schedule == "100" and self.skips_all)

    @property
    def skips_all(self) -> bool:
        """Whether a reused step ran no block that the gate may skip, and all others."""
        return self.skipped == self.expected

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain dictionaries, lists, numbers and strings."""
        return {
            "name": self.name,
            "passed": self.passed,
            "is_equal": self.is_equal,
            "is_sound": self.is_sound,
            "schedule": self.schedule,
            "linears": self.linears,
            "skipped": self.skipped,
            "expected": self.expected,
            "report": self.report.to_dict(),
        }


def check(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Coverage:
    """Check stepfx on one model and one call of it.

    The model is called a handful of times on copies of the inputs, under no_grad and through
    `inner="eager"`, so nothing is compiled by Inductor.
    """
    given = (tuple(args), dict(kwargs or {}))

    def call(target: Any) -> list[torch.Tensor]:
        own_args, own_kwargs = _copied(given)
        with torch.no_grad():
            return _tensors(target(*own_args, **own_kwargs))

    call(model)  # what a model makes once and keeps is no part of a step
    with _counting_linears() as full:
        expected = call(model)
    own_args, own_kwargs = _copied(given)
    report = stepfx.explain(model, *own_args, **own_kwargs)
    found = call(_compiled(model, 0.0))
    schedule, sound, reused = "", True, full
    if report.gate is not None:
        stepfx.reset(model)
        gated = _compiled(model, float("1e30"))
        for _ in range(2):  # `stepfx.compile` may try two ways of tracing
            call(gated)
        stepfx.reset(model)
        with stepfx.request(steps=CALLS + 1, name="coverage", branch="coverage"):
            outputs = [call(gated)]
            with _counting_linears() as reused:
                outputs.append(call(gated))
            outputs.append(call(gated))
        branches = [b for r in stepfx.stats(model) for b in r.branches.values()]
        schedule = branches[-1].schedule if branches else ""
        sound = all(
            torch.isfinite(out).all() and out.shape == like.shape and out.dtype == like.dtype
            for out, like in zip(outputs[-1], expected, strict=True)
        )
        stepfx.reset(model)
    return Coverage(
        name or type(model).__name__,
        report,
        len(found) == len(expected) and all(map(torch.equal, found, expected)),
        schedule,
        bool(sound),
        full[0],
        full[0] - reused[0],
        sum(map(_skippable, report.results)),
    )


@contextlib.contextmanager
def _counting_linears() -> Iterator[list[int]]:
    """Yield a list that holds how many linear layers ran, once the block ends."""
    count = [0]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        yield count
    count[0] = sum(e.count for e in seen.key_averages() if e.key == "aten::linear")


def _skippable(result: PipelineResult | str) -> int:
    """Count the linear layers that the gate of one graph may skip, glue included."""
    if isinstance(result, str) or "gate" not in result.notes:
        return 0
    analysis, gate = result.notes["analysis"], result.notes["gate"]
    blocks = analysis.region.blocks()[gate.first : gate.last]
    span = Span(blocks[0].span.start, blocks[-1].span.stop)
    return sum(n.target is torch._C._nn.linear for n in analysis.program.span_nodes(span))


def markdown(results: Sequence[Coverage]) -> str:
    """Return the results as a Markdown table, one row a model."""
    rows = [
        "| model | graphs | block lists | pattern | gated | off is off | steps | linears |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        lists = one.report.block_lists
        reason = "" if one.report.gate else f" {one.report.reason}"
        cells = (
            one.name,
            f"{one.report.graphs}{', flags' if one.report.needs_flags else ''}",
            _joined(b.length for b in lists),
            _joined("0/1" if b.pattern is None else b.pattern for b in lists),
            _joined("yes" if b.gated else "no" for b in lists) if one.report.gate else reason,
            "yes" if one.is_equal else "NO",
            one.schedule or "-",
            _linears(one),
        )
        rows.append(
            "| " + " | ".join(cell.replace("|", "\\|").strip() for cell in cells) + " |"
        )
    return "\n".join(rows) + "\n"


def _linears(one: Coverage) -> str:
    if not one.schedule:
        return str(one.linears)
    text = f"{one.linears}, {one.linears - one.skipped}"
    wanted = one.linears - one.expected
    return text if one.skips_all else f"{text} (expected {wanted})"


def _joined(items: Any) -> str:
    return ", ".join(map(str, items)) or "none"


def _compiled(model: torch.nn.Module, threshold: float) -> Any:
    torch._dynamo.reset()
    return stepfx.compile(model, inner="eager", threshold=threshold, taylor_order=0)


def _copied(value: Any) -> Any:
    return pytree.tree_map(
        lambda x: x.clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x), value
    )


def _tensors(output: Any) -> list[torch.Tensor]:
    plain = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [x for x in pytree.tree_leaves(plain) if isinstance(x, torch.Tensor)]
