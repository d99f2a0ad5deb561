"""Settings that are declared and checked, and states for files."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.runtime.settings import FLAG, POSITIVE, integer, setting
from lapwing.runtime.states import (
    Array,
    Known,
    Later,
    ListOf,
    Maybe,
    PartOf,
    Real,
    Stored,
    Text,
    class_named,
    saved,
    stored,
)

# Numbers that a user sets.


@pytest.mark.parametrize("value", [3, 2**70, torch.Size([3])[0]])
def test_integers(value: Any) -> None:
    integer().check("count", value)
    integer(3).check("count", value)


@pytest.mark.parametrize("value", [1, 0.5, 1e-300, Fraction(1, 3)])
def test_positive_numbers(value: Any) -> None:
    POSITIVE.check("rate", value)


def test_flags() -> None:
    FLAG.check("noise", True)
    FLAG.check("noise", False)
    for value in (0, 1, 0.1, "yes", None):
        with pytest.raises(lw.errors.UnsupportedError, match=re.escape(f"noise is {value!r}; expected True or False.")):
            FLAG.check("noise", value)


def test_a_long_value_is_cut() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"^rate is '9{79}; expected"):
        POSITIVE.check("rate", "9" * 1000)


POINTS = torch.zeros(4, 2), torch.zeros(4, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lw.fit(nn.Linear(2, 1), [POINTS], "regression", val=[POINTS]), r"fit\(\) has no argument 'val'\. Did "
         r"you mean 'validation'\? It takes model, data, likelihood, method"),
        (lambda: lw.fit(nn.Linear(2, 1), [POINTS]), r"fit\(\) cannot be called: .*: 'likelihood'"),
        (lambda: lw.train(nn.Linear(2, 1), [POINTS], "regression", weight=lw.last_layer), "mean 'weights'"),
        (lambda: lw.load("net.lapwing", nn.Linear(2, 1), strict=False), r"load\(\) .* It takes path, model\.$"),
        (lambda: lw.Kron(shareing="reduce"), r"Kron\(\) has no argument 'shareing'\. Did you mean 'sharing'"),
        (lambda: lw.Gaussian(noise=0.1), "mean 'noise_std'"),
        (lambda: lw.tuners.FixedPoint(max_step=1), "mean 'max_steps'"),
        (lambda: lw.compare(None, level=0.9), "no argument 'level'"),
        (lambda: lw.train_ensemble(nn.Linear(2, 1), [POINTS], "regression", member=2), "mean 'members'"),
        (lambda: lw.metrics.ece(POINTS[0]), "missing a required argument: 'y'"),
        (lambda: lw.metrics.rmse(*POINTS, weights=1), "no argument 'weights'. It takes mean, y"),
        (lambda: lw.named(name="x"), "no argument 'name'. It takes pattern"),
        (lambda: lw.isotropic(precisions=1.0), "mean 'precision'"),
        (lambda: lw.linear.fit(POINTS[0], target=POINTS[1]), "mean 'targets'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_arguments_that_do_not_exist(call: Callable[[], Any], message: str) -> None:
    """They are errors of Lapwing and of the type that Python raises; the signature stays visible."""
    with pytest.raises(lw.errors.CallError, match=message) as error:
        call()
    assert isinstance(error.value, (TypeError, lw.LapwingError))
    assert list(inspect.signature(lw.fit).parameters)[:3] == ["model", "data", "likelihood"]
    assert "sharing" in inspect.signature(lw.Kron).parameters


def test_posteriors_refuse_other_arguments_and_paths_with_nul() -> None:
    net = nn.Linear(2, 1)
    posterior = lw.fit(net, [POINTS], lw.Gaussian(noise_std=1.0), prior=1.0)
    for call, word in ((lambda: posterior.functions(POINTS[0], join=True), "'joint'"),
                       (lambda: posterior.predict(POINTS[0], sample=3), "'samples'")):  # fmt: skip
        with pytest.raises(lw.errors.CallError, match=word):
            call()
    bad = "net\0.lapwing"
    for use in (
        lambda: posterior.save(bad), lambda: lw.load(bad, net), lambda: posterior.report([POINTS], bad),
        lambda: lw.train(net, [POINTS], "regression", checkpoint=bad),
        lambda: lw.train(net, [POINTS], "regression", resume=bad),
        lambda: lw.train_ensemble(net, [POINTS], "regression", members=2, folder=bad),
    ):  # fmt: skip
        with pytest.raises(lw.LapwingError, match="without NUL characters"):
            use()


# Classes that files may name.


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


# Values as plain data for files, by their declarations.


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
