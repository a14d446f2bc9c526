"""Runs the command line: `python -m explorer_hooks` is `explorer`."""

from explorer_hooks.cli.main import main

main()
