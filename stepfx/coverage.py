"""Does stepfx see a model rightly? Block lists, off is off, reuse: checked on a few calls."""

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

# Two calls with the given inputs, two with others: where inputs jump, blocks must run.
SCHEDULE = "1010"
THRESHOLD = 1e-3  # equal calls score 0


@dataclass(frozen=True)
class Coverage:
    """What was checked of one model.

    Attributes:
        name: the model's class, or what the caller calls it.
        report: what `stepfx.explain` says.
        is_equal: whether the steps that must be the model's own through `inner="eager"` are,
            bit for bit: with threshold 0, and the computed ones under the gate.
        schedule: the steps of two calls with the given inputs and two with others, in one
            request: "1010" where blocks run and are reused as they should; empty without a
            gate.
        is_sound: whether the outputs of reused steps are finite and have the model's shapes
            and dtypes.
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
        return not self.schedule or (self.schedule == SCHEDULE and self.skips_all)

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
    _call(model, given)  # what a model makes once and keeps is no part of a step
    with _counting_linears() as full:
        expected = _call(model, given)
    own_args, own_kwargs = _copied(given)
    report = stepfx.explain(model, *own_args, **own_kwargs)
    equal = _are_equal(_call(_compiled(model, 0.0), given), expected)
    schedule, sound, reused = "", True, full
    if report.gate is not None:
        gated = _compiled(model, THRESHOLD)
        for _ in range(2):  # `stepfx.compile` may try two ways of tracing
            _call(gated, given)
        stepfx.reset(model)
        others = _jumped(given)
        others_expected = _call(model, others)
        with stepfx.request(steps=len(SCHEDULE) + 1, name="coverage", branch="coverage"):
            equal &= _are_equal(_call(gated, given), expected)
            with _counting_linears() as reused:
                sound = _are_alike(_call(gated, given), expected)
            equal &= _are_equal(_call(gated, others), others_expected)
            sound &= _are_alike(_call(gated, others), others_expected)
        branches = [b for r in stepfx.stats(model) for b in r.branches.values()]
        schedule = branches[-1].schedule if branches else ""
        stepfx.reset(model)
    return Coverage(
        name or type(model).__name__,
        report,
        equal,
        schedule,
        sound,
        full[0],
        full[0] - reused[0],
        sum(map(_skippable, report.results)),
    )


def _call(target: Any, given: tuple[Any, Any]) -> list[torch.Tensor]:
    """Call a model under no_grad on copies of its inputs; return the tensors of its output."""
    args, kwargs = _copied(given)
    with torch.no_grad():
        return _tensors(target(*args, **kwargs))


def _jumped(given: Any) -> Any:
    """Return inputs like the given ones that are far from them.

    Tensors of floats with three or more dimensions (latents, embeddings) are flipped in all
    of them, so that values stay in their range; where that changes nothing, the largest tensor
    of floats becomes noise.
    """
    flipped = pytree.tree_map(_flipped, given)
    before, after = pytree.tree_leaves(given), pytree.tree_leaves(flipped)
    floats = [x for x in before if _is_float(x)]
    if not floats or any(
        not torch.equal(x, y) for x, y in zip(before, after, strict=True) if _is_float(x)
    ):
        return flipped
    largest = max(floats, key=torch.Tensor.numel)
    return pytree.tree_map(lambda x: torch.randn_like(x) if x is largest else x, given)


def _flipped(value: Any) -> Any:
    if not _is_float(value) or value.ndim < 3:
        return value
    return value.flip(tuple(range(value.ndim)))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _are_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def _are_alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Tell whether outputs are finite and have the shapes and dtypes of the model's own."""
    return len(found) == len(expected) and all(
        bool(torch.isfinite(x).all()) and x.shape == y.shape and x.dtype == y.dtype
        for x, y in zip(found, expected, strict=True)
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
