"""Change one line of the library at a time, and see whether a test notices: a test that cannot fail is a defect.

    python -m tests.mutants [--count 60] [--seed 0] [--only PART] [--workers 2] [--list]

A mutant is one change of one line: another comparison, another sign, another constant, a dropped statement, two swapped
arguments, "and" for "or". They are drawn with a seed from the syntax trees of all files, at least one in every folder
and the others in proportion to lines of code. Each is made in a copy of the tree, in a folder that is deleted
afterwards. The tests of its file run first, then those of its folder, then all; the first that fails ends it. Printed
are the mutants, the test that caught each, and the survivors as a diff. First all tests run on an unchanged copy: one
that fails there would catch everything, so it ends the run.
A survivor is a hole in the tests, or it changes nothing that a test should see: read it, and write a test, or the line
with the reason into ``READ``.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("lapwing", "tests", "experiments", "benchmarks", "docs", "conftest.py", "pyproject.toml", "README.md")
LEFT_OUT = ("demo", "plots")  # pictures and the demo's tables are looked at, not computed with
EVERYTHING = ("tests/conformance", "tests/unit")
SECONDS = 1800  # after which a stage counts as failed: a mutant that never ends is noticed
# Beginnings of lines whose changes survived --count 90 --seed 11; six more were holes, and have tests.
READ = {
    "if not shape or shape[0] % batch:": "networks take every batch size, so that rows are whole samples at every node",
    "size = (SIZE[0], 1.0 + ": "the width of a picture",
    "COPIES = 3  # float64 chunks of rows": "the same numbers in smaller pieces",
    "CACHED_BYTES = 32 * 2**20": "the same numbers in larger pieces",
    "cheaper = outputs * (positions + 2 * count)": "both ways give the same numbers",
    "is_tried = train_fn is None or (seconds <": "two times that are equal to the last digit",
    "if count >= size:": "a number of bytes that is exactly a unit",
    "return Offer(cls(), 3)": "the last offer has the highest number, 3 or 4",
    "n_seeds = lambda network: CLOSED_SEEDS": "a maximum has no order",
    "GROWTH = 10.0  # times the cubic root": "a forecast of how many vectors a basis takes, as measured",
    "explained = 10 * 0.375": "a generous factor for layers that enlarge what eps changes",
}
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """One change of one line of a file: ``text`` in the place of the bytes from ``start`` to ``end``."""

    path: Path  # from the root
    line: int
    start: int
    end: int
    text: str
    kind: str

    def source(self) -> str:
        """Return the file with the change."""
        lines = (ROOT / self.path).read_bytes().split(b"\n")
        changed = lines[self.line - 1]
        lines[self.line - 1] = changed[: self.start] + self.text.encode() + changed[self.end :]
        return b"\n".join(lines).decode()

    def before(self) -> str:
        """Return the line as it is."""
        return (ROOT / self.path).read_text(encoding="utf-8").split("\n")[self.line - 1].strip()

    def reason(self) -> str:
        """Return why no test should notice a change of this line; nothing if it has not been read."""
        return next((reason for start, reason in READ.items() if self.before().startswith(start)), "")

    def diff(self) -> str:
        """Return the line before and after."""
        after = self.source().split("\n")[self.line - 1]
        return f"{self.path}:{self.line} ({self.kind})\n    - {self.before()}\n    + {after.strip()}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file: of code that runs, not of annotations, messages of errors or docstrings."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for node in _running(tree):
        if getattr(node, "end_lineno", None) != getattr(node, "lineno", None):
            continue
        for text, kind in _changes(node):
            yield Mutant(path, node.lineno, node.col_offset, node.end_col_offset, text, kind)  # type: ignore[attr-defined]


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the library is used."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params", "decorator_list") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            skipped = ast.Raise | ast.Import | ast.ImportFrom | ast.Assert
            named = isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) in ("__all__", "T")
            typed = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            if isinstance(child, ast.AST) and not isinstance(child, skipped) and not named and not typed:
                yield from _running(child)


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the texts that may stand in the place of a node, with the kind of change."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        changed = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
        yield f"({ast.unparse(changed)})", "comparison"
    elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS and not _is_text(node):
        yield f"({ast.unparse(ast.BinOp(node.left, SIGNS[type(node.op)](), node.right))})", "sign"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield f"({ast.unparse(node.operand)})", "sign"
    elif isinstance(node, ast.BoolOp):
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield f"({ast.unparse(ast.BoolOp(other, node.values))})", "and, or"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value), "constant"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value + 1 if isinstance(node.value, int) else 2 * node.value + 0.1), "constant"
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "pass", "dropped statement"
    elif isinstance(node, ast.Call) and _can_swap(node):
        swapped = ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
        yield ast.unparse(swapped), "swapped arguments"


def _can_swap(call: ast.Call) -> bool:
    """Return whether the first two arguments differ and swapping them is no error that every test shows."""
    first, second = call.args[:2] if len(call.args) > 1 else (call, call)
    texts = any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in (first, second))
    stars = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
    asks = ast.unparse(call.func) in ("isinstance", "issubclass", "getattr", "hasattr", "setattr")
    return ast.dump(first) != ast.dump(second) and not (texts or stars or asks)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(each, ast.JoinedStr | ast.Constant) and isinstance(getattr(each, "value", ""), str)
        for each in (node.left, node.right)
    )


def drawn(count: int, seed: int) -> list[Mutant]:
    """Return mutants: at least one of every folder, and the others by the lines of code that a folder has."""
    folders: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted((ROOT / "lapwing").rglob("*.py")):
        inner = path.relative_to(ROOT / "lapwing")
        if inner.parts[0] not in LEFT_OUT:
            folders[inner.parts[0] if len(inner.parts) > 1 else "."] += mutants_of(path.relative_to(ROOT))
    source, names = random.Random(seed), sorted(name for name, each in folders.items() if each)
    shares = [len(folders[name]) for name in names]
    chosen = [*names, *source.choices(names, shares, k=max(0, count - len(names)))][:count]
    return [source.choice(folders[name]) for name in chosen]


def stages(path: Path) -> list[list[str]]:
    """Return the tests to run in order: those of the file, those of its folder, all."""
    unit, inner = ROOT / "tests" / "unit", path.relative_to("lapwing")
    top = inner.parts[0].removesuffix(".py")
    own = sorted((unit / inner.parent).glob(f"test_{path.stem}*.py")) if (unit / inner.parent).is_dir() else []
    folder = [unit / top] if (unit / top).is_dir() else []
    folder += sorted(unit.glob(f"test_{top}*.py"))
    listed = [[str(each.relative_to(ROOT)) for each in paths] for paths in (own, folder)]
    return [each for each in (*listed, [*EVERYTHING, str(path)]) if each]


def run_tests(tests: Sequence[str], changed: Mutant | None = None) -> str:
    """Run tests in a copy of the tree with one line changed, and return the first that fails, or nothing."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for part in COPIED:
            source = ROOT / part
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, copy / part)
        if changed is not None:
            (copy / changed.path).write_text(changed.source(), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *tests]
        try:
            run = subprocess.run(
                command, cwd=copy, env=environment, check=False, capture_output=True, timeout=SECONDS, text=True
            )
        except subprocess.TimeoutExpired:
            return f"{tests[0]} (did not end)"
    if run.returncode in (0, 5):  # 5: no tests in these files
        return ""
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" - ")[0] if failed else f"{tests[0]} (pytest ended with {run.returncode})"


def caught_by(mutant: Mutant) -> str:
    """Return the test that noticed the mutant, or nothing."""
    return next(filter(None, (run_tests(tests, mutant) for tests in stages(mutant.path))), "")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the mutants, try them, and print which survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="One-line changes against the tests.")
    parser.add_argument("--count", type=int, default=60, help="mutants (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--workers", type=int, default=2, help="mutants tried at a time (2)")
    parser.add_argument("--only", default="", help="try those whose file and line contain this")
    parser.add_argument("--list", action="store_true", help="print them and try none")
    settings = parser.parse_args(argv)
    mutants = [each for each in drawn(settings.count, settings.seed) if settings.only in f"{each.path}:{each.line}"]
    if settings.list:
        print(*(each.diff() for each in mutants), sep="\n")
        return 0
    start, survivors = time.monotonic(), []
    with ThreadPoolExecutor(settings.workers) as pool:
        failed = [test for test in pool.map(lambda tests: run_tests([tests]), (*EVERYTHING, "lapwing")) if test]
        if failed:
            print("these tests fail without a change:", *failed, sep="\n")
            return 1
        for mutant, noticed in zip(mutants, pool.map(caught_by, mutants), strict=True):
            survivors += [] if noticed else [mutant]
            end = f"{mutant.path}:{mutant.line} {mutant.kind}; {noticed or mutant.reason()}"
            print(f"{'caught' if noticed else 'SURVIVED':8} {end}", flush=True)
    caught, seconds = len(mutants) - len(survivors), time.monotonic() - start
    unread = [each for each in survivors if not each.reason()]
    print(f"{caught} of {len(mutants)} caught in {seconds:.0f} s (seed {settings.seed}); not read: {len(unread)}")
    print(*(each.diff() for each in unread), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
