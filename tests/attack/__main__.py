"""The command ``python -m tests.attack NAME [options]``; without a name all attacks run, one after another."""

from __future__ import annotations

import sys
from importlib import import_module

ATTACKS = {
    "files": "tests.attack.files",
    "checkpoints": "tests.attack.checkpoints",
    "interrupts": "tests.attack.interrupts",
    "memory": "tests.attack.memory",
    "threads": "tests.attack.threads",
    "command_line": "tests.attack.command_line",
}


def main(argv: list[str]) -> int:
    names, options = (argv[:1], argv[1:]) if argv and not argv[0].startswith("-") else (list(ATTACKS), argv)
    if names[0] not in ATTACKS:
        print(f"no attack {names[0]!r}; expected one of {', '.join(ATTACKS)}")
        return 2
    return max(import_module(ATTACKS[name]).main(options) for name in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
