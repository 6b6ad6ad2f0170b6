"""What every subcommand shares: options, output, errors and exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from rich.console import Console


class Exit(IntEnum):
    """What the exit code says."""

    DONE = 0
    FAILED = 1  # it could not be done
    USAGE = 2  # the command line or an option is wrong
    NO = 3  # it was done, and the answer is no: no gate, a problem found


class CommandError(Exception):
    """Why a command cannot go on, and what to do about it."""

    def __init__(self, text: str, hint: str = "", code: Exit = Exit.FAILED) -> None:
        super().__init__(text)
        self.hint, self.code = hint, code


@dataclass(frozen=True)
class Output:
    """Where a command writes: the result to stdout, all else to stderr under `--json`.

    Attributes:
        is_json: whether the result is one JSON object.
        console: for tables and sentences.
    """

    is_json: bool = False
    console: Console = field(default_factory=Console)

    @classmethod
    def of(cls, is_json: bool) -> Output:
        """Return the output of a command line with or without `--json`."""
        return cls(is_json, Console(stderr=is_json))

    def result(self, record: dict[str, Any], *shown: Any) -> None:
        """Print `record` as JSON, or `shown` for people."""
        if self.is_json:
            print(json.dumps(record, indent=2))
            return
        for item in shown:
            self.console.print(item, highlight=False, soft_wrap=isinstance(item, str))

    def error(self, error: CommandError) -> None:
        """Print what went wrong to stderr, and under `--json` as an object to stdout."""
        print(f"stepfx: {error}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        if self.is_json:
            print(json.dumps({"error": str(error), "hint": error.hint}, indent=2))


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        name: how it is called.
        help: one line that says what it does.
        add_arguments: adds its options to a parser; `--json` is there already.
        run: does it; returns the exit code or raises `CommandError`.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Output], int]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `-o NAME=VALUE`, the options of `stepfx.Config`."""
    parser.add_argument(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of stepfx, such as -o cache=fbcache (the value is JSON or text)",
    )


def options_of(given: Sequence[str]) -> dict[str, Any]:
    """Return `-o NAME=VALUE` as a dictionary; a value that is no JSON is text."""
    options = {}
    for item in given:
        name, separator, value = item.partition("=")
        if not separator or not name:
            raise CommandError(
                f"-o {item!r} is not NAME=VALUE", "write -o threshold=0.1", Exit.USAGE
            )
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = {"None": None, "True": True, "False": False}.get(value, value)
    return options
