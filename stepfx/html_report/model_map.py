"""The model as a row of its parts: one small square a block, the gate where it sits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stepfx.html_report.elements import element, text
from stepfx.passes.step_cache import GateSite
from stepfx.patterns.analysis import Analysis
from stepfx.patterns.region import Region

State = Literal["always", "skipped", "ungated"]

STATES: dict[State, str] = {
    "always": "runs at every step",
    "skipped": "may be skipped",
    "ungated": "outside the gate",
}


@dataclass(frozen=True)
class Chip:
    """One block: where it stands in its list, its kind, and what the gate does to it."""

    number: int
    of: int
    kind: int
    nodes: int
    state: State


@dataclass(frozen=True)
class Part:
    """Neighbouring blocks of one list, or operations between lists (`chips` is empty)."""

    title: str
    chips: tuple[Chip, ...] = ()
    number: int = -1


def parts_of(analysis: Analysis, sites: Sequence[GateSite]) -> list[Part]:
    """Return the parts of a graph in the order they run."""
    states = _states(analysis, sites)
    blocks = sorted(
        (span.start, span.stop, number, index)
        for number, of_list in enumerate(analysis.lists)
        for index, span in enumerate(of_list.spans)
    )
    parts: list[Part] = []
    position, last = 0, -1
    for start, stop, number, index in blocks:
        if start > position:
            name = "glue" if parts else "prologue"
            parts.append(Part(f"{name}, {_operations(start - position)}"))
        chip = Chip(
            index,
            len(analysis.lists[number]),
            _kind_of(analysis, number, index),
            stop - start,
            states.get((number, index), "ungated"),
        )
        if last == number and parts[-1].chips:
            parts[-1] = replace(parts[-1], chips=(*parts[-1].chips, chip))
        else:
            parts.append(Part(f"list {number}", (chip,), number))
        position, last = stop, number
    left = len(analysis.program) - position
    if left > 0:
        parts.append(Part(f"{'epilogue' if parts else 'no blocks'}, {_operations(left)}"))
    return parts


def model_map(parts: Sequence[Part], patterns: Sequence[str]) -> str:
    """Draw parts as HTML that wraps on a narrow screen; `patterns` are those of the lists."""
    drawn, gated = [], False
    for part in parts:
        if not part.chips:
            drawn.append(element("div", text(part.title), class_="stage"))
            continue
        chips = []
        for chip in part.chips:
            if chip.state == "skipped" and not gated:
                label = "the gate decides here"
                chips.append(element("span", class_="gate", title=label, aria_label=label))
            gated = chip.state == "skipped"
            chips.append(_chip(chip))
        count = len(part.chips)
        title = f"{part.title} · {count} block{'s' if count > 1 else ''}"
        pattern = element("span", text(f"pattern {patterns[part.number]}"))
        drawn.append(
            element(
                "div",
                element("div", element("strong", text(title)), " ", pattern, class_="title"),
                element("div", *chips, class_="chips"),
                class_="list",
            )
        )
    keys = [("gate", "the gate")]
    keys += [(f"chip {state}", meaning) for state, meaning in STATES.items()]
    legend = [element("span", element("span", class_=mark), text(m)) for mark, m in keys]
    if any(chip.kind for part in parts for chip in part.chips):
        legend.append(element("span", "a letter: a block of another kind"))
    return element("div", *drawn, class_="map") + element("p", *legend, class_="legend")


def _chip(chip: Chip) -> str:
    hint = (
        f"block {chip.number} of {chip.of}, {_operations(chip.nodes)}, "
        f"kind {chip.kind}: {STATES[chip.state]}"
    )
    letter = "" if chip.kind == 0 else chr(ord("a") + min(chip.kind, 25))
    return element("span", letter, class_=f"chip {chip.state}", title=hint)


def _states(analysis: Analysis, sites: Sequence[GateSite]) -> dict[tuple[int, int], State]:
    """Map (list, index) of the region's blocks to what the gates do to them."""
    region = analysis.region
    if not isinstance(region, Region) or not sites:
        return {}
    number_of = [analysis.lists.index(blocks) for blocks in region.lists]
    return {
        (number_of[block.number], block.index): (
            "skipped" if any(s.first <= k < s.last for s in sites) else "always"
        )
        for k, block in enumerate(region.blocks())
    }


def _kind_of(analysis: Analysis, number: int, index: int) -> int:
    kinds = analysis.lists[number].kinds
    return next(i for i, kind in enumerate(kinds) if index in kind.members)


def _operations(count: int) -> str:
    return f"{count} operation{'s' if count != 1 else ''}"
