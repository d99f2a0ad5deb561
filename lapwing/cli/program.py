"""The program ``lapwing``: its commands, what they print, and how they fail."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

import torch

import lapwing
from lapwing.cli.commands import COMMANDS
from lapwing.cli.models import working_folder_first
from lapwing.errors import LapwingError

FAILED, INTERRUPTED = 1, 130  # exit codes; 2 is that of argparse for a command that cannot be read
OPTIONS = {  # what the library advises, and how to give it here
    "timed=True": "--timed",
    "fit(..., validation=data)": "--validation DATA",
    "target_key=...": "--target NAME",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, or 1 with one line on stderr. A command that cannot be read exits 2.

    Results go to stdout. Progress, warnings, errors, and what the user's own code prints go to stderr.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if any("\0" in word for word in words):
        return _print_failure("an argument has a NUL character, which no path or name has; leave it out.", FAILED)
    arguments = _parser().parse_args(words, Namespace(words=words))
    try:
        with working_folder_first(), redirect_stdout(sys.stderr), warnings_in_a_line():
            outcome = COMMANDS[arguments.command].run(arguments)
    except KeyboardInterrupt:
        return _print_failure("interrupted.", INTERRUPTED)
    except Exception as error:
        if arguments.traceback:
            traceback.print_exc()
        return _print_failure(_in_words(error), FAILED)
    return _print_text(outcome.to_json(arguments.command) if arguments.json else in_options(outcome.text))


def _print_text(text: str) -> int:
    """Print the text and return the exit code; a reader such as ``head`` may close the pipe before its end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _Parser(ArgumentParser):
    """A parser that takes ``@FILE`` for the words in a file, with quotes and comments as in a shell."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        if "\0" in arg_line:
            self.error("a file of arguments has a NUL character, which no path or name has; write it as plain text")
        return shlex.split(arg_line, comments=True)


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="lapwing",
        description="Error bars for trained networks.",
        epilog="lapwing COMMAND --help lists the options of a command. @FILE stands for the words in a file.",
        fromfile_prefix_chars="@",
    )
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=f"lapwing {lapwing.__version__} ({versions})")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sentence = f"{command.help[0].upper()}{command.help[1:]}."
        own = commands.add_parser(name, help=command.help, description=sentence, allow_abbrev=False)
        command.add_options(own)
    return parser


def _in_words(error: Exception) -> str:
    """Return one line for an error; an unexpected one comes with its type."""
    if isinstance(error, LapwingError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'}: {error.strerror}. Check the path."
    return f"{type(error).__name__}: {error} (not expected). --traceback shows where."


def _print_failure(message: str, code: int) -> int:
    print(f"lapwing: {in_options(in_a_line(message))}", file=sys.stderr)
    return code


def in_a_line(text: str) -> str:
    """Return a text in one line; characters that a terminal would not print, such as those of a file, become "?".

    >>> in_a_line("no\\n  such \\x1b[2Jcolumn")
    'no such ?[2Jcolumn'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def in_options(text: str) -> str:
    """Return a text of the library with options in place of arguments.

    >>> in_options("timed=True measures on one batch.")
    '--timed measures on one batch.'
    """
    for argument, option in OPTIONS.items():
        text = text.replace(argument, option)
    return text


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Write warnings as a line each meanwhile, without the place in the code."""
    show: Callable[..., None] = lambda message, *_, **__: print(
        f"lapwing: warning: {in_a_line(str(message))}", file=sys.stderr
    )
    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
