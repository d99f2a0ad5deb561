"""Check what a release needs and print a line for each: ``python -m tests.release [--tests PATH] [--keep FOLDER]``.

1. The version is the same in pyproject.toml, lapwing/__init__.py, CITATION.cff and at the top of CHANGELOG.md.
2. Wheel and sdist build from a clean checkout of HEAD, hold what they should, and are not too large.
3. Their metadata are valid (twine), and no link of the description leads nowhere.
4. The wheel installs into a new environment; from another folder the examples of the README pass, and the
   tests of the sdist pass against the installed copy.
5. The documentation builds strictly.

The exit status is 1 if a check failed. By default all tests run, which takes some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {
    "pyproject.toml": r'^version = "([^"]+)"$',
    "lapwing/__init__.py": r'^__version__ = "([^"]+)"$',
    "CITATION.cff": r"^version: (\S+)$",
    "CHANGELOG.md": r"^## \[?(\d[^\]\s]*)",
}
IN_SDIST = (
    "lapwing/api.py",
    "tests/release.py",
    "tests/data/0.2.0/full.lapwing",
    "docs/index.md",
    "experiments/__main__.py",
    "README.md",
    "CITATION.cff",
    "LICENSE",
)
LARGEST = 5e6  # bytes of the sdist
RELATIVE = re.compile(r"\]\((?!https?:)[^)]*\)")
TESTS = ("tests/unit", "tests/conformance", "tests/experiments")


class CheckError(Exception):
    """A check of a release that does not hold, with what was seen."""


def versions() -> str:
    """Check that all places name one version; return it."""
    seen = {}
    for place, pattern in PLACES.items():
        match = re.search(pattern, (ROOT / place).read_text(encoding="utf-8"), re.MULTILINE)
        seen[place] = match.group(1) if match else "none"
    if len(set(seen.values())) != 1:
        raise CheckError(f"versions differ: {seen}")
    return seen["pyproject.toml"]


def built(folder: Path) -> str:
    """Build wheel and sdist of HEAD into the folder; check what they hold."""
    source = folder / "source"
    _run("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(source))
    _run(
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "wheel",
        "--no-deps",
        "-w",
        str(folder),
        str(source),
    )
    builder = "import sys, hatchling.build as b; print(b.build_sdist(sys.argv[1]))"
    environment = _environment(folder / "builder", "hatchling", "twine")
    _run(str(environment), "-c", builder, str(folder), cwd=source)
    wheel, sdist = _one(folder, "*.whl"), _one(folder, "*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    strangers = sorted({name for name in names if not name.startswith(("lapwing/", "lapwing-"))})
    files = {path.relative_to(source).as_posix() for path in (source / "lapwing").rglob("*") if path.is_file()}
    missing = sorted(files - set(names))
    if strangers or missing:
        raise CheckError(f"the wheel misses {missing[:5]} and has {strangers[:5]} that it should not")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    if absent := [name for name in IN_SDIST if name not in inside]:
        raise CheckError(f"the sdist misses {absent}")
    if sdist.stat().st_size > LARGEST:
        raise CheckError(f"the sdist has {sdist.stat().st_size / 1e6:.2f} MB; expected at most {LARGEST / 1e6:g}")
    return f"{wheel.name} ({wheel.stat().st_size / 1e6:.2f} MB), {sdist.name} ({sdist.stat().st_size / 1e6:.2f} MB)"


def described(folder: Path) -> str:
    """Check the metadata of wheel and sdist, and the links of the description."""
    wheel, sdist = _one(folder, "*.whl"), _one(folder, "*.tar.gz")
    _run(str(folder / "builder" / "bin" / "python"), "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    if relative := RELATIVE.findall(metadata):
        raise CheckError(f"the description has relative links: {relative[:3]}")
    links = "absolute" if "\nProject-URL: Source" in metadata else "left out: [project.urls] has no Source"
    return f"twine finds nothing; links of the description are {links}"


def installed(folder: Path) -> str:
    """Install the wheel with what the tests need into a new environment; check that it is the copy that is imported."""
    constraints = ("-c", str(ROOT / "constraints.txt"))
    python = _environment(folder / "environment", f"{_one(folder, '*.whl')}[test]", *constraints)
    where = _run(str(python), "-c", "import lapwing; print(lapwing.__file__)", cwd=folder).strip()
    if "site-packages" not in where:
        raise CheckError(f"lapwing was imported from {where}")
    return "imported from site-packages"


def tested(folder: Path, tests: Sequence[str]) -> str:
    """Run the README's examples and the tests of the sdist against the installed copy."""
    with tarfile.open(_one(folder, "*.tar.gz")) as archive:
        archive.extractall(folder / "sdist", filter="data")
    copy = next((folder / "sdist").iterdir())
    shutil.rmtree(copy / "lapwing")
    python = folder / "environment" / "bin" / "python"
    printed = _run(str(python), "-m", "pytest", "-n", "2", "--dist", "worksteal", "README.md", *tests, cwd=copy)
    return printed.strip().splitlines()[-1]


def documented() -> str:
    """Build the site strictly."""
    _run("make", "--no-print-directory", "docs", cwd=ROOT)
    return f"{len(list((ROOT / 'site').rglob('*.html')))} pages"


def _environment(folder: Path, *packages: str) -> Path:
    """Return the interpreter of a new environment with these packages."""
    _run(sys.executable, "-m", "venv", str(folder))
    python = folder / "bin" / "python"
    _run(str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *packages)
    return python


def _one(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def _run(*command: str, cwd: Path | None = None) -> str:
    """Run a command, return what it printed, and raise with the end of it if it failed."""
    done = subprocess.run(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise CheckError(f"{' '.join(command[:4])} ... ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    """Run all checks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tests", nargs="+", default=TESTS, help="tests to run from the installed copy; all by default"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for wheel, sdist and environments; a temporary one by default"
    )
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        checks: dict[str, Callable[[], str]] = {
            "one version everywhere": versions,
            "wheel and sdist": lambda: built(folder),
            "metadata": lambda: described(folder),
            "installed copy": lambda: installed(folder),
            "tests from the installed copy": lambda: tested(folder, given.tests),
            "documentation": documented,
        }
        failed = 0
        for name, check in checks.items():
            try:
                print(f"ok      {name}: {check()}", flush=True)
            except (CheckError, ValueError, OSError) as error:
                failed += 1
                print(f"FAILED  {name}: {error}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
