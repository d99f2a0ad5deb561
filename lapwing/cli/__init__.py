"""The command line: the commands of ``lapwing``, their options, and the models, data and files that they read."""

from lapwing.cli.commands import main

__all__ = ["main"]
