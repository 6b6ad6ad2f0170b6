"""The manual: its examples run, its tables hold what the code holds."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_pass_of_the_manual_and_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("manual")
    monkeypatch.setitem(sys.modules, "manual", module)  # dataclasses look it up
    space: dict[str, Any] = vars(module)
    for source in blocks("writing_a_pass.md"):
        # As a future import rules a whole file, the first block is compiled alone.
        exec(compile(source, "writing_a_pass.md", "exec", dont_inherit=True), space)
    tests = [value for name, value in space.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_versions_agree() -> None:
    version = importlib.metadata.version("stepfx")
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
