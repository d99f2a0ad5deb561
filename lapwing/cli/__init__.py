"""The command line: one file for each command of ``lapwing``, and what they share."""

from lapwing.cli.program import main

__all__ = ["main"]
