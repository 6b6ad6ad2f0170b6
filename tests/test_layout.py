"""The house: layers, links, sizes, and that every pass has its test."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

import stepfx
from stepfx.config import Config
from stepfx.pipeline import default_pipeline

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("stepfx", "passes", "patterns")
    for path in (ROOT / folder).glob("**/*.py")
    if "stepfx/passes" not in str(path) and "stepfx/patterns" not in str(path)
)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.split(".")[0] in ("stepfx", "passes", "patterns")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    allowed = {
        "patterns": ("stepfx.patterns",),
        "passes": ("stepfx.passes", "stepfx.patterns"),
        "stepfx": ("stepfx",),
    }[path.relative_to(ROOT).parts[0]]
    for name in imports(path):
        assert name.startswith(allowed), f"{path.name} imports {name}"


def test_runtime_state_knows_no_graphs() -> None:
    for name in ("gate", "requests", "session", "runtime"):
        text = (ROOT / "stepfx" / f"{name}.py").read_text()
        assert "torch.fx" not in text
        assert "import fx" not in text


def test_links_and_no_double_import() -> None:
    for name in ("passes", "patterns"):
        link = ROOT / "stepfx" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name
        assert name not in sys.modules


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("one", default_pipeline(Config()), ids=lambda one: one.name)
def test_every_pass_has_a_test_and_a_doc_row(one: object) -> None:
    name = one.name  # type: ignore[attr-defined]
    assert (ROOT / "passes" / f"{name}.py").exists()
    assert (ROOT / "tests" / "passes" / f"test_{name}.py").exists()
    assert f"| `{name}` |" in manual_page("passes.md")


def manual_page(name: str) -> str:
    """Return a page of the manual with its tables filled in."""
    path = ROOT / "docs" / "_hooks" / "tables.py"
    spec = importlib.util.spec_from_file_location("manual_tables", path)
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    filled: str = tables.on_page_markdown((ROOT / "docs" / name).read_text())
    return filled


def test_every_option_is_documented() -> None:
    text = manual_page("options.md")
    for name in Config.__dataclass_fields__:
        assert f"| `{name}` |" in text, name


def test_public_names_are_documented() -> None:
    for name in stepfx.__all__:
        assert getattr(stepfx, name).__doc__, name
