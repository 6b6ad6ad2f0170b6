"""`stepfx doctor`: what this machine and its packages can do, and what is known to clash."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from stepfx.cli.command import Command, Exit, Output
from stepfx.doctor import Check, check_all
from stepfx.progress import waiting

STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "problem": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stepfx doctor`."""
    parser.add_argument(
        "--quick", action="store_true", help="do not let Inductor compile a function"
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Check everything; exit with 3 if there is a problem."""
    with waiting("looking around"):
        checks = list(check_all(compile_one=not args.quick))
    problems = [check for check in checks if check.status == "problem"]
    record = {"ok": not problems, "checks": [asdict(check) for check in checks]}
    output.result(record, _table(checks), _verdict(checks))
    return Exit.NO if problems else Exit.DONE


def _table(checks: list[Check]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for check in checks:
        found = Text(check.found)
        if check.hint:
            found.append(f"\n{check.hint}", style="italic")
        table.add_row(Text(check.status, style=STYLES[check.status]), check.name, found)
    return table


def _verdict(checks: list[Check]) -> str:
    counts = [
        f"{number} {kind}{'s' if number > 1 else ''}"
        for kind in ("problem", "warning")
        if (number := sum(check.status == kind for check in checks))
    ]
    return ", ".join(counts) or "no problems"


COMMAND = Command(
    "doctor",
    "check versions, devices, fp8, compilers and caches, and name known conflicts",
    add_arguments,
    run,
)
