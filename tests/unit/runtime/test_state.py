"""Classes that files may name."""

from __future__ import annotations

import pytest

import lapwing as lw
from lapwing.runtime.state import class_named, saved


def test_two_classes_of_one_name_are_refused() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"already know a class 'Gaussian', from lapwing\.likelihoods"):
        saved(type("Gaussian", (), {}))
    assert class_named("Gaussian") is lw.Gaussian


def test_a_class_may_be_defined_again() -> None:
    """As when a notebook cell is run twice."""
    one, two = (type("DefinedTwice", (), {}) for _ in range(2))
    saved(one)
    assert saved(two) is two
    assert class_named("DefinedTwice") is two


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(lw.errors.FileError, match="names the class 'Nothing', which this version does not have"):
        class_named("Nothing")
