"""Measures of the code itself: sizes, imports, types, names, and how far one call travels.

    python -m benchmarks.house [FOLDER] > benchmarks/results/house.txt

Counts the library under FOLDER (``lapwing`` by default) and the tests beside it, without docstrings, comments and blank
lines. Then follows one default ``fit`` and one ``predict`` through the files: how many, how many lines of code they
have, and how many of these run.
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import re
import statistics
import sys
import tokenize
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ASKING = ("isinstance", "hasattr", "getattr")
ABSTRACT = ("Protocol", "ABC", "ABCMeta")


def code_lines(source: str) -> int:
    """Return the number of lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    docstrings = {
        (node.body[0].lineno, node.body[0].end_lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
        and isinstance(node.body[0].value.value, str)
    }
    documentation = {line for first, last in docstrings for line in range(first, (last or first) + 1)}
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def sizes(folder: Path) -> dict[str, Any]:
    """Return counts over all files of the library."""
    files, functions, arguments, imports, asked, anys, abstract = {}, [], [], 0, 0, 0, 0
    classes: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        files[path] = code_lines(text)
        anys += sum(bool(re.search(r"\bAny\b", line)) for line in text.split("\n"))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = ast.get_source_segment(text, node) or ""
                functions.append((code_lines("\n".join(_dedented(body, node.col_offset))), f"{path}:{node.name}"))
                spec = node.args
                names = [
                    a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs) if a.arg not in ("self", "cls")
                ]
                arguments.append((len(names), f"{path}:{node.name}"))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                asked += node.func.id in ASKING
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports += (node.end_lineno or node.lineno) - node.lineno + 1
            elif isinstance(node, ast.ClassDef):
                classes[node.name] += 1
                bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                abstract += any(base in ABSTRACT for base in bases)
    counted = [n for n in files.values() if n > 0]
    return {
        "lines of code": sum(files.values()),
        "files": len(files),
        "lines of a file, median and largest": f"{statistics.median(counted):g}, {max(counted)}",
        "functions": len(functions),
        "lines that import": imports,
        "lines that say Any": anys,
        "isinstance, hasattr, getattr": asked,
        "protocols and abstract classes": abstract,
        "names of several classes": sorted(name for name, count in classes.items() if count > 1),
        "longest files": [f"{path} {n}" for path, n in sorted(files.items(), key=lambda item: -item[1])[:5]],
        "longest functions": [f"{name} {n}" for n, name in sorted(functions, reverse=True)[:5]],
        "longest argument lists": [f"{name} {n}" for n, name in sorted(arguments, reverse=True)[:8]],
    }


def _dedented(text: str, columns: int) -> list[str]:
    first, *rest = text.split("\n")
    return [first, *(line[columns:] for line in rest)]


def journey(folder: Path, call: Any) -> dict[str, int]:
    """Return how many files, lines and functions of the library a call passes, and how often it changes folder.

    Comprehensions, generator expressions and lambdas are not counted as functions: they are read inside theirs.
    """
    places: list[tuple[str, str]] = []
    lines: set[tuple[str, int]] = set()

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(f"{folder}/"):
            return None
        if event == "line":
            lines.add((code.co_filename, frame.f_lineno))
        elif event == "call" and not code.co_name.startswith("<"):
            places.append((code.co_filename, code.co_qualname if sys.version_info >= (3, 11) else code.co_name))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        call()
    finally:
        sys.settrace(before)
    folders = [str(Path(name).parent) for name, _ in places]
    files = {name for name, _ in places}
    return {
        "files": len(files),
        "lines in them": sum(code_lines(Path(name).read_text(encoding="utf-8")) for name in files),
        "lines that run": len(lines),
        "functions": len(set(places)),
        "changes of folder": sum(a != b for a, b in itertools.pairwise(folders)),
    }


def main(argv: list[str]) -> int:
    folder = Path(argv[0] if argv else "lapwing").resolve()
    for name, value in sizes(folder).items():
        print(f"{name}: {value if not isinstance(value, list) else len(value)}")
        for line in value if isinstance(value, list) else ():
            print(f"    {line.replace(str(folder.parent) + '/', '')}")
    tests = [path.read_text(encoding="utf-8") for path in sorted((folder.parent / "tests").rglob("*.py"))]
    print(f"lines of code of tests: {sum(map(code_lines, tests))} in {len(tests)} files")
    pages = sorted((folder.parent / "docs").rglob("*.md"))
    print(
        f"words of docs: {sum(len(path.read_text(encoding='utf-8').split()) for path in pages)} in {len(pages)} pages"
    )
    sys.path.insert(0, str(folder.parent))
    import torch

    import lapwing as lw

    namespaces = [name for name in lw.__all__ if inspect.ismodule(getattr(lw, name))]
    print(f"public flat names: {len(lw.__all__) - len(namespaces)}, and {len(namespaces)} namespaces")
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).eval()
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20,))
    fits: list[Any] = []
    print("one default fit:", journey(folder, lambda: fits.append(lw.fit(net, [(x, y)], "classification"))))
    print("one predict:", journey(folder, lambda: fits[0].predict(x).probs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
