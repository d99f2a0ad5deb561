"""Measures of the code itself: sizes, ladders, words, and how far one call travels.

    python -m benchmarks.house [FOLDER]

Counts the library under FOLDER (``lapwing`` by default) without docstrings, comments and blank lines. Folders named
``demo``, ``experiments`` and ``reports`` are left out: they use the library and are no part of it. Then follows one
``fit`` with Kron and one ``predict`` through the files.
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
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ASKING = ("isinstance", "hasattr", "getattr")
LEFT_OUT = ("demo", "experiments", "reports")


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


def sources(folder: Path) -> Iterator[Path]:
    """Yield the library's files."""
    for path in sorted(folder.rglob("*.py")):
        if not set(path.relative_to(folder).parts[:-1]) & set(LEFT_OUT):
            yield path


def sizes(folder: Path) -> dict[str, Any]:
    """Return counts over all files of the library."""
    files, functions, arguments, asked, words = {}, [], [], 0, {"found": 0, "nought": 0}
    for path in sources(folder):
        text = path.read_text(encoding="utf-8")
        files[path] = code_lines(text)
        for word in words:
            words[word] += len(re.findall(rf"\b{word}\b", text))
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
    long = sorted(functions, reverse=True)
    return {
        "lines of code": sum(files.values()),
        "files": len(files),
        "median lines of a file": statistics.median(n for n in files.values() if n > 0),
        "longest files": [f"{path} {n}" for path, n in sorted(files.items(), key=lambda item: -item[1])[:5]],
        "longest functions": [f"{name} {n}" for n, name in long[:5]],
        "longest argument lists": [f"{name} {n}" for n, name in sorted(arguments, reverse=True)[:8]],
        "isinstance, hasattr, getattr": asked,
        **{f'the word "{word}"': n for word, n in words.items()},
    }


def _dedented(text: str, columns: int) -> list[str]:
    first, *rest = text.split("\n")
    return [first, *(line[columns:] for line in rest)]


def journey(folder: Path, call: Any) -> dict[str, int]:
    """Return how many files and functions of the library a call passes, and how often it changes folder.

    Comprehensions, generator expressions and lambdas are not counted: they are read inside their function.
    """
    places: list[tuple[str, str]] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(folder)) and not code.co_name.startswith("<"):
            places.append((code.co_filename, code.co_qualname if sys.version_info >= (3, 11) else code.co_name))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    folders = [str(Path(name).parent) for name, _ in places]
    return {
        "files": len({name for name, _ in places}),
        "functions": len(set(places)),
        "changes of folder": sum(a != b for a, b in itertools.pairwise(folders)),
    }


def main(argv: list[str]) -> int:
    folder = Path(argv[0] if argv else "lapwing").resolve()
    for name, value in sizes(folder).items():
        print(f"{name}: {value if not isinstance(value, list) else ''}")
        for line in value if isinstance(value, list) else ():
            print(f"    {line.replace(str(folder.parent) + '/', '')}")
    sys.path.insert(0, str(folder.parent))
    import torch

    import lapwing as lw

    namespaces = [name for name in lw.__all__ if inspect.ismodule(getattr(lw, name))]
    print(f"public flat names: {len(lw.__all__) - len(namespaces)}, and {len(namespaces)} namespaces")
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).eval()
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20,))
    fits: list[Any] = []
    print("one fit with Kron:", journey(folder, lambda: fits.append(lw.fit(net, [(x, y)], "classification"))))
    print("one predict:", journey(folder, lambda: fits[0].predict(x).probs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
