"""The demo's picture: both sets of samples and the score of every step."""

from __future__ import annotations

from pathlib import Path

import torch

from stepfx.demo.compare import Comparison

COMPUTED, REUSED, LINE = "#1f4e79", "#e08214", "#666666"


def save_picture(path: Path, result: Comparison, threshold: float, subtitle: str) -> None:
    """Write a PNG with uncached and cached samples side by side over a plot of scores."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(9, 7.2), dpi=140, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3.1, 2))
    titles = (
        f"uncached: {result.steps} of {result.steps} steps computed",
        f"stepfx: {result.computed_steps} of {result.steps} steps computed",
    )
    for column, (title, images) in enumerate(
        zip(titles, (result.uncached, result.cached), strict=True)
    ):
        axes = figure.add_subplot(grid[0, column])
        axes.imshow(_tiles(images), cmap="gray", interpolation="nearest")
        axes.set_title(title, fontsize=10)
        axes.set_axis_off()
    axes = figure.add_subplot(grid[1, :])
    colours = [COMPUTED if digit == "1" else REUSED for digit in result.schedule]
    heights = [score if score is not None else 0.0 for score in result.scores]
    axes.bar(range(result.steps), heights, color=colours)
    unscored = [i for i, score in enumerate(result.scores) if score is None]
    axes.scatter(unscored, [0.0] * len(unscored), marker="^", color=COMPUTED, zorder=3)
    axes.axhline(threshold, color=LINE, linestyle="--", linewidth=1)
    axes.set_xlabel("denoising step")
    axes.set_ylabel("relative change\nof the first block's residual")
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=COMPUTED),
        plt.Rectangle((0, 0), 1, 1, color=REUSED),
        plt.Line2D([], [], color=LINE, linestyle="--"),
        plt.Line2D([], [], color=COMPUTED, marker="^", linestyle=""),
    ]
    labels = ["computed", "reused", f"threshold {threshold:g}", "computed, no score yet"]
    axes.legend(handles, labels, fontsize=8, ncols=4, loc="upper center")
    axes.set_ylim(0, 1.3 * max([threshold, *heights]))
    figure.suptitle(subtitle, fontsize=11)
    figure.savefig(path)
    plt.close(figure)


def _tiles(images: torch.Tensor, columns: int = 10, rows: int = 8) -> torch.Tensor:
    """Return images [B, C, H, W] as one picture of at most `rows` by `columns`."""
    shown = images[: columns * rows].clamp(-1, 1).mean(1).add(1).div(2)
    columns = min(columns, len(shown))
    shown = shown[: len(shown) // columns * columns]
    padded = torch.nn.functional.pad(shown, (1, 1, 1, 1), value=0.5)
    count, height, width = padded.shape
    table = padded.view(count // columns, columns, height, width)
    return table.permute(0, 2, 1, 3).reshape(-1, columns * width)
