"""Differences of graph texts: renumbering is no change, another operand is one."""

from __future__ import annotations

import textwrap

from hypothesis import given
from hypothesis import strategies as st

from stepfx.graph_diff import compare, header, hunks, unified


def changed(before: str, after: str) -> list[str]:
    edits = compare(textwrap.dedent(before), textwrap.dedent(after))
    return [f"{edit.mark} {edit.text.strip()}" for edit in edits if edit.mark != " "]


BEFORE = """\
    graph:
        %0: f32[2] = input                    # x, model.py:3
        %1: f32[2] = neg(%0)                  # model.py:4
        %2: f32[2] = exp(%0)                  # model.py:5
        %3: f32[2] = add(%1, %2)              # model.py:6
        return (%3,)
    """


def test_equal_texts() -> None:
    assert changed(BEFORE, BEFORE) == []
    assert unified(compare(BEFORE, BEFORE), "x") == ""


def test_an_inserted_operation_renumbers_nothing() -> None:
    after = """\
    graph:
        %0: f32[2] = input                    # x, model.py:3
        %1: f32[2] = abs(%0)
        %2: f32[2] = neg(%0)                  # model.py:4
        %3: f32[2] = exp(%0)                  # model.py:5
        %4: f32[2] = add(%2, %3)              # model.py:6
        return (%4,)
    """
    assert changed(BEFORE, after) == ["+ %1: f32[2] = abs(%0)"]


def test_a_replaced_operation_does_not_change_its_readers() -> None:
    after = BEFORE.replace("exp(", "sin(")
    assert [line[:2] + line.split("= ")[1][:3] for line in changed(BEFORE, after)] == [
        "- exp",
        "+ sin",
    ]


def test_another_operand_is_a_change() -> None:
    after = BEFORE.replace("add(%1, %2)", "add(%1, %1)")
    assert [line.split("  ")[0] for line in changed(BEFORE, after)] == [
        "- %3: f32[2] = add(%1, %2)",
        "+ %3: f32[2] = add(%1, %1)",
    ]


def test_swapped_operands_are_a_change() -> None:
    after = BEFORE.replace("add(%1, %2)", "add(%2, %1)")
    assert "+ %3: f32[2] = add(%2, %1)              # model.py:6" in changed(BEFORE, after)


def test_a_part_that_moved_out_is_recognised() -> None:
    after = """\
    graph:
        %0: f32[2] = input                    # x, model.py:3
        %1 = call part(%0)
        %2: f32[2] = getitem(%1, 0)
        return (%2,)

    part:
        %0: f32[2] = input                    # x, model.py:3
        %1: f32[2] = neg(%0)                  # model.py:4
        %2: f32[2] = exp(%0)                  # model.py:5
        %3: f32[2] = add(%1, %2)              # model.py:6
        return (%3,)
    """
    kept = changed(BEFORE, after)
    assert not any("neg" in line or "exp" in line or "add" in line for line in kept)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["neg", "exp", "sin"]), st.integers(0, 6)), max_size=12
)


def program(operations: list[tuple[str, int]]) -> str:
    lines = ["graph:", "    %0: f32[2] = input"]
    for i, (name, operand) in enumerate(operations, start=1):
        lines.append(f"    %{i}: f32[2] = {name}(%{operand % i})")
    return "\n".join([*lines, f"    return (%{len(operations)},)"]) + "\n"


@given(OPERATIONS, OPERATIONS)
def test_both_texts_can_be_read_off(
    first: list[tuple[str, int]], second: list[tuple[str, int]]
) -> None:
    before, after = program(first), program(second)
    edits = compare(before, after)
    removed = [edit.text for edit in edits if edit.mark == "-"]
    added = [edit.text for edit in edits if edit.mark != "-"]
    assert "\n".join(added) + "\n" == after
    assert len(removed) + sum(e.mark == " " for e in edits) == len(before.splitlines())
    if first != second and before != after:
        assert any(edit.mark != " " for edit in edits)


def test_hunks_and_headers() -> None:
    before = "graph:\n" + "".join(f"    %{i} = f{i}()\n" for i in range(30))
    after = before.replace("f3()", "g3()").replace("f25()", "g25()")
    found = list(hunks(compare(before, after)))
    assert [header(hunk) for hunk in found] == ["@@ -2,7 +2,7 @@", "@@ -24,7 +24,7 @@"]
    text = unified(compare(before, after), "rename")
    assert text.startswith(
        "--- before rename\n+++ after rename\n@@ -2,7 +2,7 @@\n     %0 = f0()\n"
    )
