"""The `stepfx` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from stepfx.config import ConfigError
from stepfx.demo import main as demo


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 1 failed, 2 bad usage."""
    parser = argparse.ArgumentParser(
        prog="stepfx", description="Step caching for diffusion transformers in torch.compile."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser(
        "demo", help="sample a trained model without and with the cache, and compare"
    )
    demo.add_arguments(demo_parser)
    args = parser.parse_args(argv)
    try:
        return demo.run(args, Console())
    except ConfigError as error:
        print(f"stepfx: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
