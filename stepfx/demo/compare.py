"""Run one sampler with Inductor alone and through stepfx, and compare the two."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

import stepfx

Sampler = Callable[[Callable[..., Any], Callable[[int], None]], torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """One trajectory, uncached and cached, from the same noise.

    Times are medians over `runs` alternating runs, in seconds, without compilation.
    """

    steps: int
    inductor_s: float
    stepfx_s: float
    compile_s: tuple[float, float]
    runs: int
    uncached: torch.Tensor
    cached: torch.Tensor
    schedule: str
    scores: tuple[float | None, ...]

    @property
    def computed_steps(self) -> int:
        """Steps in which every block ran."""
        return self.schedule.count("1")

    @property
    def speedup(self) -> float:
        """Time of Inductor alone over time of stepfx."""
        return self.inductor_s / self.stepfx_s

    def psnr(self, peak: float) -> float:
        """Return the peak signal-to-noise ratio in dB of cached against uncached."""
        error = (self.cached.double() - self.uncached.double()).square().mean()
        return float(10 * torch.log10(peak**2 / error))

    def relative_error(self) -> float:
        """Return the relative L2 error of cached against uncached."""
        difference = (self.cached - self.uncached).double().norm()
        return float(difference / self.uncached.double().norm())


def compare(
    model: torch.nn.Module,
    sampler: Sampler,
    steps: int,
    console: Console,
    runs: int = 3,
    **options: Any,
) -> Comparison:
    """Sample with `torch.compile(model)` and `stepfx.compile(model, **options)` in turn."""
    contenders = {
        "Inductor alone": torch.compile(model),
        "stepfx": stepfx.compile(model, **options),
    }
    images: dict[str, torch.Tensor] = {}
    compile_s: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for name, compiled in contenders.items():
            task = progress.add_task(f"{name}: compile and warm up", total=steps)
            start = time.perf_counter()
            images[name] = sampler(compiled, _advance(progress, task))
            compile_s[name] = time.perf_counter() - start
        task = progress.add_task("timed runs, in turn", total=2 * runs * steps)
        for _ in range(runs):
            for name, compiled in contenders.items():
                start = time.perf_counter()
                images[name] = sampler(compiled, _advance(progress, task))
                seconds[name].append(time.perf_counter() - start)
    last = stepfx.stats(model)[-1]
    branch = next(iter(last.branches.values()))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    plain, cached = contenders
    return Comparison(
        steps,
        median[plain],
        median[cached],
        (compile_s[plain] - median[plain], compile_s[cached] - median[cached]),
        runs,
        images[plain],
        images[cached],
        branch.schedule,
        branch.scores,
    )


def _advance(progress: Progress, task: TaskID) -> Callable[[int], None]:
    return lambda _: progress.advance(task)


def comparison_table(result: Comparison, rows: dict[str, tuple[str, str]]) -> Table:
    """Return the table of a comparison; `rows` are further lines (uncached, cached)."""
    table = Table(title="the same noise, without and with a step cache", title_justify="left")
    table.add_column("")
    table.add_column("Inductor alone", justify="right")
    table.add_column("stepfx", justify="right")
    table.add_row("denoising steps", str(result.steps), str(result.steps))
    table.add_row("computed steps", str(result.steps), str(result.computed_steps))
    table.add_row("seconds", f"{result.inductor_s:.2f}", f"{result.stepfx_s:.2f}")
    table.add_row("compilation, seconds", *(f"{s:.1f}" for s in result.compile_s))
    table.add_row("speedup", "1.00x", f"{result.speedup:.2f}x")
    table.add_row("relative L2 error", "0", f"{result.relative_error():.4f}")
    for label, (plain, cached) in rows.items():
        table.add_row(label, plain, cached)
    return table
