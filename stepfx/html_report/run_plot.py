"""What happened in a run: one column a denoising step, the score above, the decision below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from stepfx.html_report.elements import details, element, table, text


class BranchRun(Protocol):
    """What the plot reads of `stepfx.BranchStats`."""

    @property
    def schedule(self) -> str:
        """One digit a step: 1 computed, 0 reused."""

    @property
    def scores(self) -> Sequence[float | None]:
        """The relative change at each step; None where none was measured."""

    @property
    def bytes_kept(self) -> int:
        """Bytes of tensors kept now."""


def run_plot(title: str, run: BranchRun) -> str:
    """Draw one branch of a request; nothing in it depends on the width of the screen."""
    steps = len(run.schedule)
    computed = run.schedule.count("1")
    head = element(
        "figcaption",
        element("strong", text(title)),
        text(
            f" · {computed} of {steps} steps computed, {steps - computed} reused · "
            f"{format_bytes(run.bytes_kept)} kept"
        ),
    )
    cells = (
        element(
            "span",
            class_="computed" if digit == "1" else "reused",
            title=f"step {i}: {'computed' if digit == '1' else 'reused'}{_score(run, i)}",
        )
        for i, digit in enumerate(run.schedule)
    )
    strip = element("div", *cells, class_="strip")
    axis = element(
        "div", element("span", "step 0"), element("span", f"step {steps - 1}"), class_="axis"
    )
    rows = [
        (str(i), "computed" if d == "1" else "reused", _number(run.scores[i]))
        for i, d in enumerate(run.schedule)
    ]
    listed = details("the numbers", table(("step", "decision", "score"), rows, (0, 2)))
    return element("figure", head, _scores(run), strip, axis, listed, class_="run")


def format_bytes(count: int) -> str:
    """Return a count of bytes with a binary unit."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


def _scores(run: BranchRun) -> str:
    """Return the line of scores over the strip, with the largest value as its scale."""
    known = {
        i: score
        for i, score in enumerate(run.scores)
        if score is not None and math.isfinite(score)
    }
    if not known:
        return element("p", "no score was measured", class_="note")
    top = max(known.values()) or 1.0
    points = {i: (i + 0.5, 1 - score / top) for i, score in known.items()}
    line = "".join(
        f"{'L' if i - 1 in points else 'M'}{x:g} {y:.4f}" for i, (x, y) in points.items()
    )
    # A line of no length with round ends is a dot that keeps its form when stretched.
    dots = {"computed": "", "reused": ""}
    for i, (x, y) in points.items():
        dots["computed" if run.schedule[i] == "1" else "reused"] += f"M{x:g} {y:.4f}h0"
    drawing = element(
        "svg",
        element("path", d=line, class_="line"),
        *(element("path", d=d, class_=f"dots {kind}") for kind, d in dots.items() if d),
        viewBox=f"0 0 {len(run.schedule)} 1",
        preserveAspectRatio="none",
        role="img",
        aria_label="score of each step",
    )
    scale = element(
        "div",
        element("span", f"score {top:.3g}"),
        element("span", "0"),
        class_="scale",
    )
    return element("div", scale, drawing, class_="scores")


def _score(run: BranchRun, step: int) -> str:
    score = run.scores[step]
    return "" if score is None else f", score {score:.4g}"


def _number(score: float | None) -> str:
    return "" if score is None else f"{score:.4g}"
