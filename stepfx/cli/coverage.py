"""`stepfx coverage`: are block lists found and reused, and is off off, on these models?"""

from __future__ import annotations

import argparse

from rich.table import Table

from stepfx.cli.command import Command, Exit, Output
from stepfx.cli.factory import load
from stepfx.coverage import Coverage, check
from stepfx.progress import waiting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the factories."""
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        nargs="+",
        help="functions that return (model, kwargs), (model, args) or (model, args, kwargs)",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Check each model; exit with 3 if one fails."""
    results = []
    for spec in args.factory:
        call = load(spec)
        with waiting(f"checking {spec}"):
            results.append(check(call.model, call.args, call.kwargs))
    table = Table("model", "graphs", "block lists", "gated", "off is off", "steps")
    for one in results:
        table.add_row(*_row(one))
    output.result({"models": [one.to_dict() for one in results]}, table)
    return Exit.DONE if all(one.passed for one in results) else Exit.NO


def _row(one: Coverage) -> list[str]:
    lists = one.report.block_lists
    gated = ", ".join(str(i) for i, blocks in enumerate(lists) if blocks.gated)
    return [
        one.name,
        str(one.report.graphs),
        ", ".join(str(blocks.length) for blocks in lists) or "none",
        f"list {gated}" if gated else (one.report.reason or "no"),
        "yes" if one.is_equal else "NO",
        one.schedule or "-",
    ]


COMMAND = Command(
    "coverage",
    "check on models of your own that blocks are found and reused and that off is off",
    add_arguments,
    run,
)
