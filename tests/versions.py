"""Run the test suite with the oldest and the newest versions of what Lapwing needs: only what was tried is declared.

    python -m tests.versions oldest|newest [--python PYTHON] [--folder FOLDER] [-- PYTEST ARGUMENTS]

Makes a virtual environment in FOLDER, installs the lower bounds of ``pyproject.toml`` (oldest) or whatever is newest,
prints the versions, and runs the tests there. Linters and type checkers are left out: they say nothing about versions.
An environment that is there already is used as it is. The newest PyTorch takes several gigabytes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

TOOLS = ("ruff", "mypy", "import-linter", "lapwing")  # not needed to run the tests
INTEGRATIONS = "integrations"  # the extra of `make test-integrations`, which has an environment of its own
SHOWN = """
import platform, torch, numpy, sklearn, scipy, matplotlib, safetensors, pytest
packages = (torch, numpy, sklearn, scipy, matplotlib, safetensors, pytest)
print("python", platform.python_version(), *(f"{package.__name__} {package.__version__}" for package in packages))
"""


def requirements(oldest: bool) -> list[str]:
    """Return what the tests need: pinned to its lower bound, or without a bound."""
    pinned = []
    for text in requires("lapwing") or ():
        match = re.match(r"([\w-]+)(?:\[[\w,]+\])?(?:>=([\w.]+))?", text)
        assert match is not None, text
        name, bound = match.groups()
        if name not in TOOLS and f'extra == "{INTEGRATIONS}"' not in text.replace("'", '"'):
            pinned.append(f"{name}=={bound}" if oldest and bound else name)
    return sorted(set(pinned))


def main(arguments: list[str]) -> int:
    """Make the environment, and return the exit status of pytest."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("which", choices=("oldest", "newest"))
    parser.add_argument("--python", default=sys.executable, help="the interpreter; this one by default")
    parser.add_argument("--folder", type=Path, help="the virtual environment; out/versions/WHICH by default")
    given = parser.parse_args(arguments[:cut])
    folder = given.folder or Path("out/versions") / given.which
    python = folder / "bin" / "python"
    if not python.exists():
        packages = requirements(given.which == "oldest")
        print("installing " + " ".join(packages), flush=True)
        subprocess.run([given.python, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    subprocess.run([str(python), "-c", SHOWN], check=True)
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *(arguments[cut + 1 :] or ("-n", "2"))]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
