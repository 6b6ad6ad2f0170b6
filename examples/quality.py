"""Error against cost: every cache method and plain sampling with fewer steps.

    python examples/quality.py --samples 50 --steps 50

Samples the bundled digits model from the same noise in many ways and compares each with the
run that computes every step. Writes docs/quality.md and docs/quality.png.

    computed    denoising steps in which every block ran
    evaluations blocks that ran, in units of the whole model: what a run costs
    PSNR        in dB, peak 2, against the run without a cache
    accuracy    share of samples that the bundled classifier names as asked
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import stepfx
from stepfx.demo.digits import accuracy, initial_noise, load_digits_model, load_judge, sample

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Row:
    """One way to sample, and what came of it."""

    group: str
    setting: str
    computed: int
    evaluations: float
    psnr: float
    relative_l2: float
    accuracy: float


def settings(steps: int, ratios: list[float]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield group, name and options of every run."""
    for order in (0, 1, 2):
        for threshold in (0.03, 0.06, 0.1, 0.15, 0.25):
            yield (
                f"fbcache, order {order}",
                f"threshold {threshold}",
                {"threshold": threshold, "taylor_order": order, "max_warmup_steps": 3},
            )
    for fn, threshold in ((2, 0.06), (2, 0.12), (4, 0.06), (4, 0.12), (4, 0.2)):
        yield (
            "dbcache, order 1",
            f"F{fn}B0 W4, threshold {threshold}",
            {
                "cache": "dbcache",
                "fn_compute_blocks": fn,
                "max_warmup_steps": 4,
                "threshold": threshold,
            },
        )
    for order in (0, 1):
        for threshold in (0.1, 0.2, 0.4, 0.8):
            yield (
                f"teacache, order {order}",
                f"threshold {threshold}",
                {"cache": "teacache", "threshold": threshold, "taylor_order": order},
            )
    for order in (0, 1):
        for threshold, most in ((0.03, 2), (0.06, 3), (0.12, 5)):
            yield (
                f"magcache, order {order}",
                f"threshold {threshold}, at most {most} in a row",
                {
                    "cache": "magcache",
                    "magnitudes": ratios,
                    "threshold": threshold,
                    "max_continuous_cached_steps": most,
                    "taylor_order": order,
                },
            )
    for order in (0, 1, 2):
        for name in ("slow", "medium", "fast", "ultra"):
            yield (
                f"SCM masks, order {order}",
                name,
                {"cache": "mask", "steps_mask": name, "taylor_order": order},
            )
        for every in (2, 3, 4, 6):
            mask = "".join("1" if i < 2 or i % every == 0 else "0" for i in range(steps))
            yield (
                f"every k-th step, order {order}",
                f"k = {every}",
                {"cache": "mask", "steps_mask": mask, "taylor_order": order},
            )
    for threshold in (0.03, 0.06, 0.12):
        yield (
            "dbprune, order 1",
            f"F1B0 W4, threshold {threshold}",
            {
                "cache": "dbprune",
                "fn_compute_blocks": 1,
                "max_warmup_steps": 4,
                "threshold": threshold,
            },
        )


@torch.no_grad()
def adams_bashforth(model: Any, noise: torch.Tensor, labels: Any, steps: int) -> torch.Tensor:
    """Integrate the flow with a second-order method of one evaluation a step."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps)
    x, last = noise, None
    for i, t in enumerate(scheduler.timesteps):
        velocity = model(x, t.expand(len(x)), class_labels=labels).sample
        width = scheduler.sigmas[i + 1] - scheduler.sigmas[i]
        step = velocity
        if last is not None:
            before = scheduler.sigmas[i] - scheduler.sigmas[i - 1]
            step = velocity + 0.5 * width / before * (velocity - last)
        x, last = x + width * step, velocity
    return x


def record_ratios(model: Any, steps: int, samples: int, seed: int) -> list[float]:
    """Return MagCache's curve of the block stack, from other samples than those compared."""
    noise, labels = initial_noise(samples, seed)
    entered: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    blocks = model.transformer_blocks
    handles = [
        blocks[0].register_forward_pre_hook(lambda _, args: entered.append(args[0])),
        blocks[-1].register_forward_hook(
            lambda *found: norms.append((found[-1] - entered.pop()).norm(dim=-1))
        ),
    ]
    sample(model, noise, labels, steps)
    for handle in handles:
        handle.remove()
    pairs = itertools.pairwise(norms)
    return [1.0, *(float((now / before).mean()) for before, now in pairs)]


class Contest:
    """One model, one noise, one reference; every way to sample becomes a row."""

    def __init__(self, samples: int, steps: int, seed: int) -> None:
        self.model, (self.judge, _) = load_digits_model(), load_judge()
        self.steps, self.blocks = steps, len(self.model.transformer_blocks)
        self.noise, self.labels = initial_noise(samples, seed)
        self.reference = sample(self.model, self.noise, self.labels, steps)
        self.compiled = stepfx.compile(self.model, inner="eager", batch="mean")

    def row(
        self, group: str, setting: str, computed: int, evaluations: float, x: torch.Tensor
    ) -> Row:
        """Compare images with the reference."""
        error = (x - self.reference).double()
        return Row(
            group,
            setting,
            computed,
            evaluations,
            float(10 * torch.log10(4 / error.square().mean())),
            float(error.norm() / self.reference.double().norm()),
            accuracy(self.judge, x, self.labels),
        )

    def cached(self, group: str, setting: str, options: dict[str, Any]) -> Row:
        """Sample through stepfx."""
        with stepfx.request(steps=self.steps, **options):
            x = sample(self.compiled, self.noise, self.labels, self.steps)
        (branch,) = stepfx.stats(self.model)[-1].branches.values()
        skipped = sum(branch.skipped_blocks) / self.blocks
        return self.row(group, setting, branch.computed, self.steps - skipped, x)

    def fewer(self, group: str, solver: Callable[..., torch.Tensor], steps: int) -> Row:
        """Sample plainly with fewer steps."""
        x = solver(self.model, self.noise, self.labels, steps)
        return self.row(group, f"{steps} steps", steps, steps, x)


def best_fewer(rows: list[Row], evaluations: float) -> Row:
    """Return the best plain run that costs no more than `evaluations`, rounded up."""
    plain = [
        r for r in rows if r.group.startswith("fewer") and r.evaluations <= evaluations + 1
    ]
    return max(plain, key=lambda r: r.psnr)


def page(rows: list[Row], blocks: int, args: argparse.Namespace) -> str:
    """Return the table as a page of the manual."""
    lost = [
        r
        for r in rows
        if not r.group.startswith("fewer") and best_fewer(rows, r.evaluations).psnr >= r.psnr
    ]
    cached = sum(not r.group.startswith("fewer") for r in rows)
    lines = [
        "# Quality at equal cost",
        "",
        "Measured by "
        f"`python examples/quality.py --samples {args.samples} --steps {args.steps}` "
        f"on the bundled digits model (class-conditional DiT of {blocks} blocks, flow "
        f"matching, float32, torch {torch.__version__}, CPU): {args.samples} samples, "
        f"seed {args.seed}, compared with the Euler run that computes all {args.steps} steps. "
        "One small model "
        "without guidance: it shows how methods compare, not what they do to FLUX.",
        "",
        "`computed` are steps in which every block ran, `evaluations` is the work of all "
        "blocks in units of the whole model (blocks that always run cost on reused steps, "
        "too). MagCache has a curve recorded on other samples; each method runs with the last "
        "step computed. `beaten` marks rows that plain sampling with fewer steps equals or "
        "beats, by the better of two solvers and at no more than one evaluation more: "
        f"{len(lost)} of {cached}. Who may change the solver should do that first: against "
        f"the exact flow rather than the {args.steps}-step run it gains more than shown here.",
        "",
        "![PSNR against evaluations](quality.png)",
        "",
        "| method | setting | computed | evaluations | PSNR, dB | relative L2 | accuracy | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.group} | {r.setting} | {r.computed} | {r.evaluations:.1f} | {r.psnr:.1f} | "
        f"{r.relative_l2:.4f} | {r.accuracy:.2f} | {'beaten' if r in lost else ''} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Draw PSNR against evaluations, a line a group."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    groups = list(dict.fromkeys(r.group for r in rows))
    colours = plt.get_cmap("tab20").colors
    for i, group in enumerate(groups):
        mine = sorted((r for r in rows if r.group == group), key=lambda r: r.evaluations)
        plain = group.startswith("fewer")
        axes.plot(
            [r.evaluations for r in mine],
            [r.psnr for r in mine],
            "k" + ("-" if "second" in group else "--") if plain else "o-",
            **({} if plain else {"color": colours[i % 20], "markersize": 4}),
            label=group,
        )
    axes.set_xlabel("evaluations of the whole model")
    axes.set_ylabel("PSNR against the uncached run, dB")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the contest."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    contest = Contest(args.samples, args.steps, args.seed)
    ratios = record_ratios(contest.model, args.steps, 10, args.seed + 1)
    rows = []
    for steps in (4, 6, 8, 10, 12, 15, 18, 22, 25, 30, 40):
        if steps < args.steps:
            rows.append(contest.fewer("fewer steps, first order (Euler)", sample, steps))
            rows.append(
                contest.fewer("fewer steps, second order (AB2)", adams_bashforth, steps)
            )
    rows.sort(key=lambda r: r.group)
    for group, setting, options in settings(args.steps, ratios):
        rows.append(contest.cached(group, setting, options))
        print(rows[-1], flush=True)
    (args.folder / "quality.md").write_text(page(rows, contest.blocks, args))
    plot(rows, args.folder / "quality.png")


if __name__ == "__main__":
    main()
