"""Values as plain data for files, by their declarations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import lapwing as lw
from lapwing.runtime.settings import POSITIVE, setting
from lapwing.runtime.state import Array, Known, Later, ListOf, Maybe, PartOf, Real, Stored, Text, saved, stored


@saved
@dataclass(frozen=True, eq=False)
class Widened(lw.Gaussian):
    """A likelihood of the user with a setting that files of earlier versions do not have."""

    width: float = setting(2.0, POSITIVE, stored=Later(Real(1)))


@dataclass(frozen=True, eq=False)
class Forgetful(lw.Gaussian):
    """A likelihood of the user with a field that nothing declares."""

    width: float = 2.0


@saved
@dataclass(frozen=True, eq=False)
class Pair(Stored):
    """A value with a tensor, a part and a setting, which belongs to an owner."""

    owner: str
    numbers: torch.Tensor = stored(Array(("n",), 0, dtype="weights"))
    part: Pair | None = stored(Maybe(PartOf(Stored)), None)
    words: tuple[str, ...] = stored(ListOf(Text()), ())


def test_settings_are_written_and_read_by_their_declaration() -> None:
    given = Widened(0.5, width=3.0)
    state = given.state()
    assert state.settings == {
        "noise_std": 0.5, "per_output": False, "degrees": None, "tail_scale": 1.0, "width": 3.0,
    }  # fmt: skip
    again = Widened.from_state(state)
    assert (again.width, again.noise_std, again.degrees) == (3.0, 0.5, math.inf)
    assert torch.equal(again.dispersion, given.dispersion)
    assert "width" not in Widened(0.5).state().settings  # the default of a later setting: earlier versions read it
    assert Widened.from_state(Widened(0.5).state()).width == 2.0


@pytest.mark.parametrize(("name", "value", "message"), [
    ("width", 0.5, "width of Widened is 0.5; expected a number from 1"),
    ("per_output", 1, "per_output of Widened is 1; expected True or False"),
    ("tail_scale", 1e-40, "tail_scale of Widened is 1e-40; expected a positive number"),
    ("degrees", 2.0, "degrees of Widened is 2.0; expected a number from 4"),
    ("more", 2.0, "unknown"),
])  # fmt: skip
def test_a_setting_in_a_file_is_as_declared(name: str, value: Any, message: str) -> None:
    state = Widened(0.5).state()
    with pytest.raises(lw.errors.FileError, match=message):
        Widened.from_state(replace(state, settings={**state.settings, name: value}))


def test_a_field_that_nothing_declares_has_no_place_in_a_file() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"Forgetful has no file form, .* may hold for width"):
        Forgetful(0.5).state()


def test_parts_and_fields_of_the_owner() -> None:
    inner = Pair("me", torch.ones(3), None, ("a",))
    pair = Pair("me", torch.tensor([1.0, 2.0]), inner)
    state = replace(pair.state(), known=Known({}, torch.float64))
    assert (sorted(state.tensors), sorted(state.parts), state.settings) == (["numbers"], ["part"], {"words": []})
    again = Pair.from_state(state, "me")
    assert again.owner == again.part.owner == "me"
    assert (again.part.words, again.part.part) == (("a",), None)
    assert again.numbers.dtype == again.part.numbers.dtype == torch.float64
    with pytest.raises(lw.errors.FileError, match=r"numbers of Pair runs from -1 to 2; expected 0"):
        Pair.from_state(replace(state, tensors={"numbers": torch.tensor([-1.0, 2.0])}), "me")
    with pytest.raises(lw.errors.UnsupportedError, match="may hold for owner"):
        Pair.from_state(state)
