"""Fill the tables of the manual from the code, so that they cannot fall behind it.

A page holds a line such as `<!-- table: options -->`; mkdocs calls `on_page_markdown`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from stepfx.config import ALIASES, PRESETS, Config
from stepfx.passes.base import Pass
from stepfx.pipeline import default_pipeline

MARK = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table in the place of each mark; an unknown name fails the build."""
    return MARK.sub(lambda found: TABLES[found[1]](), markdown)


def options() -> str:
    """Return a row for each field of the configuration."""
    meaning = attributes(Config)
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(Config):
        default = field.default
        if default is dataclasses.MISSING:
            default = field.default_factory()  # type: ignore[misc]
        kind = str(field.type).replace("|", "\\|")
        rows.append(f"| `{field.name}` | `{kind}` | `{default!r}` | {meaning[field.name]} |")
    return "\n".join(rows)


def attributes(cls: type) -> dict[str, str]:
    """Return what the `Attributes` of a class's docstring say, by name."""
    text = inspect.getdoc(cls) or ""
    _, _, listed = text.partition("Attributes:\n")
    found = re.findall(r"^ {4}(\w+): ((?:.|\n {8})+)", listed, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def aliases() -> str:
    """Return a row for each spelling of another project."""
    rows = ["| also accepted | stands for |", "|---|---|"]
    rows += [f"| `{theirs}` | `{ours}` |" for theirs, ours in sorted(ALIASES.items())]
    return "\n".join(rows)


def methods() -> str:
    """Return a row for each cache method with the values that it gives to open options."""
    names = [field.name for field in dataclasses.fields(next(iter(PRESETS.values())))]
    rows = [f"| `cache` | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for method, preset in PRESETS.items():
        values = " | ".join(f"{getattr(preset, name)}" for name in names)
        rows.append(f"| `{method}` | {values} |")
    return "\n".join(rows)


def pipeline() -> list[tuple[Pass, bool]]:
    """Return all passes in their order, and whether each runs without options."""
    everything = {"fp8": "dynamic"} if "fp8" in Config.__dataclass_fields__ else {}
    usual = {one.name for one in default_pipeline(Config())}
    every = default_pipeline(dataclasses.replace(Config(), **everything))
    return [(one, one.name in usual) for one in every]


def passes() -> str:
    """Return a row for each pass."""
    rows = ["| # | pass | by default | does |", "|---|---|---|---|"]
    for number, (one, usual) in enumerate(pipeline(), start=1):
        first = (inspect.getdoc(type(one)) or "").split("\n\n")[0].replace("\n", " ")
        rows.append(
            f"| {number} | `{one.name}` | {'yes' if usual else 'with `fp8`'} | {first} |"
        )
    return "\n".join(rows)


def rewrites() -> str:
    """Return, for each pass, what its module says: before, after and why."""
    parts = []
    for one, _ in pipeline():
        text = inspect.getdoc(sys.modules[type(one).__module__]) or ""
        parts.append(f"### `{one.name}`\n\n{text}\n")
    return "\n".join(parts)


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "aliases": aliases,
    "methods": methods,
    "passes": passes,
    "rewrites": rewrites,
}
