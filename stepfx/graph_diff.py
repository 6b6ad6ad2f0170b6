"""Differences between two canonical graph texts that survive renumbering.

Values are numbered in program order, so one more operation renumbers all that follow. Lines
are therefore aligned without their numbers first:

    -    %9: f32[2, 6, 16] = iadd(%5, %8)              # model.py:8
    +    %9: f32[2, 6, 16] = add(%5, %8)               # model.py:8

An aligned line counts as equal only if its operands are made by aligned lines, so that an
operation that reads another value shows up even where its text did not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

_NUMBER = re.compile(r"%\d+")


@dataclass(frozen=True)
class Edit:
    """One line of a difference: " " in both texts, "-" in the first, "+" in the second."""

    mark: Literal[" ", "-", "+"]
    text: str
    before: int  # lines of the first text that come before this one
    after: int  # lines of the second text that come before this one


@dataclass(frozen=True)
class _Line:
    """A line of a canonical text; `section` is the graph it stands in."""

    text: str
    key: str
    section: int
    operands: tuple[str, ...]
    is_input: bool


def compare(before: str, after: str) -> list[Edit]:
    """Return both texts as one list of lines, each marked as kept, removed or added."""
    old, new = _parse(before), _parse(after)
    matcher = SequenceMatcher(None, [x.key for x in old], [y.key for y in new], autojunk=False)
    pairs = [
        (block.a + i, block.b + i)
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    ]
    edits: list[Edit] = []
    i = j = 0
    for a, b in [*_same(old, new, pairs), (len(old), len(new))]:
        edits += [Edit("-", old[k].text, k, j) for k in range(i, a)]
        edits += [Edit("+", new[k].text, a, k) for k in range(j, b)]
        if b < len(new):
            edits.append(Edit(" ", new[b].text, a, b))
        i, j = a + 1, b + 1
    return edits


def hunks(edits: list[Edit], context: int = 3) -> Iterator[list[Edit]]:
    """Yield the runs of changed lines, each with up to `context` kept lines around it."""
    changed = [i for i, edit in enumerate(edits) if edit.mark != " "]
    start = stop = -1
    for i in changed:
        if start >= 0 and i - context > stop:
            yield edits[start:stop]
            start = -1
        if start < 0:
            start = max(0, i - context)
        stop = min(len(edits), i + 1 + context)
    if start >= 0:
        yield edits[start:stop]


def unified(edits: list[Edit], name: str) -> str:
    """Return the difference in the unified format; empty if nothing changed."""
    lines: list[str] = []
    for hunk in hunks(edits):
        if not lines:
            lines += [f"--- before {name}", f"+++ after {name}"]
        lines.append(header(hunk))
        lines += [f"{edit.mark}{edit.text}" for edit in hunk]
    return "".join(f"{line}\n" for line in lines)


def header(hunk: list[Edit]) -> str:
    """Return the line that says where a hunk stands: `@@ -3,7 +3,8 @@`."""
    removed = sum(edit.mark != "+" for edit in hunk)
    added = sum(edit.mark != "-" for edit in hunk)
    first = hunk[0]
    return f"@@ -{first.before + 1},{removed} +{first.after + 1},{added} @@"


def _parse(text: str) -> list[_Line]:
    lines, section = [], -1
    for line in text.splitlines():
        if line and not line[0].isspace() and line.endswith(":"):
            section += 1
        body = line.split("  # ")[0].rstrip()
        left, _, right = body.partition(" = ")
        lines.append(
            _Line(
                line,
                _NUMBER.sub("%", body),
                section,
                tuple(_NUMBER.findall(right or left)),
                right.startswith("input"),
            )
        )
    return lines


def _definitions(lines: list[_Line]) -> dict[tuple[int, str], int]:
    """Map (section, number) to the line that makes the value."""
    found = {}
    for i, line in enumerate(lines):
        match = _NUMBER.match(line.text.lstrip())
        if match:
            found[line.section, match.group()] = i
    return found


def _same(
    old: list[_Line], new: list[_Line], pairs: list[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of aligned lines that also read the same values."""
    made_old, made_new = _definitions(old), _definitions(new)
    old_of, new_of = {b: a for a, b in pairs}, dict(pairs)

    def agree(p: str, q: str, x: _Line, y: _Line) -> bool:
        a, b = made_old.get((x.section, p), -1), made_new.get((y.section, q), -1)
        if b >= 0 and new[b].is_input and new[b].section > 0:
            return True  # an operation that moved into a part reads the part's input
        # Where both were replaced, the lines that replaced them show it.
        return new_of[a] == b if a in new_of else b not in old_of

    for a, b in pairs:
        x, y = old[a], new[b]
        if all(agree(p, q, x, y) for p, q in zip(x.operands, y.operands, strict=True)):
            yield a, b
