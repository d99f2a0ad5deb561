"""Modules for other packages name the extra to install where the package is missing."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "packages"),
    [("sklearn", ("sklearn",)), ("lightning", ("lightning", "lightning.pytorch", "pytorch_lightning"))],
)
def test_missing_packages_are_named(module: str, packages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"lapwing.{module}")]:
        monkeypatch.delitem(sys.modules, name)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install 'lapwing\[{module}\]'"):
        importlib.import_module(f"lapwing.{module}")
