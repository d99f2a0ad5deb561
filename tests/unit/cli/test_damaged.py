"""Damaged files of a command: the short form of ``python -m tests.attack command_line``."""

from __future__ import annotations

import warnings
from pathlib import Path

from tests.attack import command_line


def test_damaged_files_are_read_or_refused_in_a_line(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        totals, wrong = command_line.attacked(30, seed=5, folder=tmp_path)
    assert not wrong
    assert totals["refused"] > 10
