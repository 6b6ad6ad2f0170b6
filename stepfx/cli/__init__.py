"""The `stepfx` command: one module a subcommand, listed in main.py."""
