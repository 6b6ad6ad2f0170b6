"""What each pass did: a table, and the difference that it made to the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepfx.dump import GraphText, PassRecord, format_delta
from stepfx.graph_diff import Edit, header, hunks
from stepfx.html_report.elements import details, element, table, text

LONGEST_RUN = 24  # lines of one kind in a row that are shown in full
LONGEST_DIFF = 400  # lines of one pass that are shown

CLASSES = {"+": "added", "-": "removed", " ": "kept"}


def pass_table(records: Sequence[PassRecord]) -> str:
    """Return one row a pass."""
    rows = [
        (
            element("code", text(record.name)),
            str(record.rewrites),
            f"{record.nodes_before:,} → {record.nodes_after:,}",
            f"{record.milliseconds:.1f}",
            text(format_delta(record.operations, 4)),
        )
        for record in records
    ]
    return table(("pass", "rewrites", "nodes", "ms", "operations"), rows, (1, 2, 3))


def pass_diffs(texts: Sequence[GraphText]) -> str:
    """Return the difference of each pass that changed something, folded."""
    return "".join(_diff(one) for one in texts if one.edits)


def _diff(one: GraphText) -> str:
    counts = {mark: sum(edit.mark == mark for edit in one.edits) for mark in "+-"}
    summary = (
        f"{element('code', text(one.name))} "
        f"<span class=added>+{counts['+']:,}</span> "
        f"<span class=removed>-{counts['-']:,}</span>"
    )
    lines: list[str] = []
    for hunk in hunks(list(one.edits)):
        if len(lines) >= LONGEST_DIFF:
            lines.append(
                element("span", "… the rest is in the dump (STEPFX_DUMP)", class_="at")
            )
            break
        lines.append(element("span", header(hunk), class_="at"))
        lines += _shortened(hunk)
    return details(summary, element("pre", "\n".join(lines), class_="diff"))


def _shortened(hunk: list[Edit]) -> Iterator[str]:
    """Yield the lines of a hunk; the middle of a long run of one mark is left out."""
    for run in _runs(hunk):
        keep = LONGEST_RUN // 2
        if len(run) <= LONGEST_RUN + 1:
            yield from map(_line, run)
            continue
        yield from map(_line, run[:keep])
        yield element("span", f"… {len(run) - 2 * keep:,} lines", class_="at")
        yield from map(_line, run[-keep:])


def _runs(hunk: list[Edit]) -> Iterator[list[Edit]]:
    run: list[Edit] = []
    for edit in hunk:
        if run and run[-1].mark != edit.mark:
            yield run
            run = []
        run.append(edit)
    if run:
        yield run


def _line(edit: Edit) -> str:
    body, _, source = edit.text.partition("  # ")
    shown = text(edit.mark + body.rstrip())
    if source:
        shown += element("i", text(f"  # {source}"))
    return element("span", shown, class_=CLASSES[edit.mark])


def graph_listing(listing: str) -> str:
    """Return the text of a graph; a long row of inputs is shortened."""
    lines, inputs = [], 0
    for line in listing.splitlines():
        is_input = " = input" in line
        inputs = inputs + 1 if is_input else 0
        if inputs <= 6:
            lines.append(_line(Edit(" ", line, 0, 0)))
        elif inputs == 7:
            lines.append(element("span", "… further inputs", class_="at"))
    return element("pre", "\n".join(lines), class_="diff")
