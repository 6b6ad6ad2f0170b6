"""Read the command line, run one subcommand, turn what is raised into an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import stepfx
from stepfx.cli import demo, doctor, dump, explain
from stepfx.cli.command import Command, CommandError, Exit, Output
from stepfx.config import ConfigError

# The order of `stepfx --help`. A subcommand is a module with a `COMMAND`.
COMMANDS: tuple[Command, ...] = (
    demo.COMMAND,
    explain.COMMAND,
    dump.COMMAND,
    doctor.COMMAND,
)

CODES = "exit codes: 0 done, 1 failed, 2 wrong usage, 3 done and the answer is no"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (see `Exit`)."""
    args = _parser().parse_args(argv)
    output = Output.of(args.json)
    command: Command = args.command
    try:
        return int(command.run(args, output))
    except CommandError as error:
        output.error(error)
        return error.code
    except ConfigError as error:
        output.error(CommandError(str(error), "docs/options.md lists all options"))
        return Exit.USAGE
    except KeyboardInterrupt:
        print("stepfx: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stepfx",
        description="Step caching and fp8 for diffusion transformers in torch.compile.",
        epilog=CODES,
    )
    parser.add_argument("--version", action="version", version=f"stepfx {stepfx.__version__}")
    parsers = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = parsers.add_parser(
            command.name, help=command.help, description=command.help, epilog=CODES
        )
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        command.add_arguments(sub)
        sub.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
