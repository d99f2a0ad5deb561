"""Every declared setting of every class refuses wrong values, in words that say what was expected.

The wrong values stand here by what a setting is said to be, apart from the code that checks them.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
import lapwing.compat.laplace  # its settings are declared too
from lapwing.registry import LIKELIHOODS, METHODS
from lapwing.runtime.settings import HasSettings, rules_of

X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
NET = nn.Linear(3, 2).double()
REQUIRED: dict[type, dict[str, Any]] = {
    lw.tuners.CrossValidated: {"data": [(X, X)]},
    lw.tuners.Temperature: {"data": [(X, X)]},
    lw.tuners.Integrate: {"data": [(X, X)]},
    lw.linear.OperatorDesign: {"rows": 3, "size": 2, "forward": print, "back": print, "like": X},
    lw.recipes.Recipe: {"epochs": 2, "method": lw.Kron(), "prior": lw.per_layer(), "update": None},
}
NOT_INTEGERS = [0.5, 3.0, math.nan, "3", True, torch.tensor(3)]
NOT_NUMBERS = [math.nan, "1", 1j, True, "a minute"]
NOT_POSITIVE = [*NOT_NUMBERS, 0, 0.0, -1.0, -math.inf]
NOT_FINITE = [*NOT_POSITIVE, math.inf]
NOT_LISTS = [1.0, "1", {1.0}, [math.nan], ["1"], [True], [-1.0], [0.0], X]
NOT_FUNCTIONS = ["abc", 3, nn.Linear, NET]
NOT_DATA = [3, "abc", {"x": X}, {1, 2}, X, X.numpy(), NET, object(), list]
# What a setting must be, in the words of the error, and values that are not that; None too, where it is not allowed.
WRONG: dict[str, list[Any]] = {
    "an integer": NOT_INTEGERS,
    "a positive, finite number": NOT_FINITE,
    "a positive number": NOT_POSITIVE,
    "a positive number, or one for each output": [
        *NOT_FINITE, [], [0.1, -1.0], (0.1, math.inf), torch.ones(2, 2), torch.tensor(True),
    ],
    "a finite number": [*NOT_NUMBERS, math.inf],
    "a finite number of at least 0": [*NOT_NUMBERS, -1.0, math.inf],
    "a number of at least 0 and below 1": [*NOT_NUMBERS, -0.1, 1.0],
    "a number from 0, below 1": [*NOT_NUMBERS, -0.1, 1.0],
    "a number between 0 and 1": [*NOT_NUMBERS, -0.1, 1.5],
    "a number between 0 and 1, both excluded: the share of a standard deviation by which a sample may be off": [
        *NOT_POSITIVE, 1.0, math.inf,
    ],
    "at least zero; math.inf allows any": [*NOT_NUMBERS, -1.0],
    "an even number from 4, or infinity": [*NOT_NUMBERS, "4", 3, 5, 2, -4],
    "a number or a tensor": ["1", [1.0], True],
    "a tensor": ["1", 1.0, [1.0]],
    "finite numbers, one or a list": ["1", 1j, math.inf, [math.nan], X, object()],
    "finite numbers that are not negative, one or a list": ["1", 1j, -1.0, [-1.0, 1.0], X, object(), []],
    "a list of positive, finite numbers": NOT_LISTS,
    "True or False": [0, 1, 0.1, "yes"],
    "one of": ["", "no such name", 3, ["ggn"], {"adam"}, X],
    "a function": NOT_FUNCTIONS,
    "a function of the posterior": NOT_FUNCTIONS,
    "a function of (predictive, targets)": ["nll", 3, NET, lw.Gaussian],
    "a function, a metric with update() and compute()": ["nll", 3],
    "a DataLoader, a list of (inputs, targets) batches, or a pair of tensors or arrays": NOT_DATA,
    "inputs, a list of batches of inputs": [3, "abc", object(), NET],
    "an object such as lw.Kron(), whose class inherits from Method": ["kron", 3, lw.Kron, NET],
    "an object such as lw.per_layer()": [1.0, "flat", lw.per_layer],
    "a tuner, such as lw.tuners.Ascend()": ["ascend", lw.tuners.Ascend, NET],
    "a list of trained torch.nn.Module": [3, "abc", NET, [3], [nn.Linear]],
    "a list of posteriors": [3, "abc", [3], NET],
    "a mapping from regular expressions to names of blocks": ["0", {}, {"0": 1}, {1: "a"}],
    "torch.float64, torch.float32 or None": ["float64", torch.float16, 64, X],
    "-1: classes are the last dimension of outputs (B, T, C)": [1, 0, "last", True, X, X.numpy()],
    "None: Lapwing has no such setting": [1, "a"],
}  # fmt: skip
LEAST = {  # of integers; one for all others
    **dict.fromkeys(["seed", "full_limit", "burn_in", "Ascend.steps"], 0),
    **dict.fromkeys(["members", "folds", "probes", "snapshots", "SWAG.rank"], 2),
    **dict.fromkeys([f"{name}.samples" for name in ("MCDropout", "IVON", "SWAG", "VariationalLastLayer")], 2),
}


def classes(parent: type = HasSettings) -> Iterator[type]:
    """All classes of the library that declare settings."""
    for each in parent.__subclasses__():
        if each.__module__.startswith("lapwing."):
            yield from classes(each)
            if is_dataclass(each):
                yield each


CLASSES = sorted(set(classes()), key=lambda cls: cls.__name__)


def wrong_values(expected: str) -> list[Any]:
    """The values that a setting of these words must refuse."""
    kind, *others = re.split(r", or (?=None|an empty tuple|'evidence')", expected)
    known = next((kind for kind in (kind, *re.findall(r"^(?:an integer|one of|-1: [^.]*)", kind)) if kind in WRONG), "")
    values = WRONG[known] if known else pytest.fail(f"no wrong values for {expected!r}")
    none = [] if "None" in f"{kind}{others}" or kind.startswith("-1") else [None]
    if least := re.search(r"of at least (\d)$", kind) if known == "an integer" else None:
        values = [*values, int(least[1]) - 1]
    return [*values, *none]


SETTINGS = [(cls, name) for cls in CLASSES for name in rules_of(cls)]


@pytest.mark.parametrize(("cls", "name"), SETTINGS, ids=lambda each: each if isinstance(each, str) else each.__name__)
def test_a_wrong_value_is_refused_with_what_was_seen_and_expected(cls: Any, name: str) -> None:
    rule = rules_of(cls)[name]
    for value in wrong_values(rule.expected):
        with pytest.raises(rule.error) as caught:
            cls(**{**REQUIRED.get(cls, {}), name: value})
        message = str(caught.value)
        assert message.startswith(f"{name} is "), value
        assert f"; expected {rule.expected}." in message
        assert len(message) < 500


@pytest.mark.parametrize("cls", CLASSES)
def test_the_least_integer_is_allowed_and_none_below(cls: Any) -> None:
    for name, rule in rules_of(cls).items():
        found = re.match(r"an integer of at least (\d)", rule.expected)
        if found:
            least = LEAST.get(f"{cls.__name__}.{name}", LEAST.get(name, 1))
            assert int(found[1]) == least, name
            rule.check(name, least)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not lapwing.compat.laplace.Settings])
def test_defaults_are_allowed_and_names_are_too(cls: Any) -> None:
    made = cls(**REQUIRED.get(cls, {}))
    for name, rule in rules_of(cls).items():
        for choice in rule.names:
            rule.check(name, choice)
        rule.check(name, getattr(made, name))


@pytest.mark.parametrize("cls", sorted({*METHODS.values(), *LIKELIHOODS.values()}, key=lambda cls: cls.__name__))
def test_every_field_of_a_method_or_likelihood_is_declared(cls: Any) -> None:
    assert {each.name for each in fields(cls) if each.init} == set(rules_of(cls))


@pytest.mark.parametrize("cls", [cls for cls in METHODS.values() if rules_of(cls)])
def test_another_setting_is_refused_and_the_signature_stays_visible(cls: Any) -> None:
    name = next(iter(rules_of(cls)))
    assert name in inspect.signature(cls).parameters
    with pytest.raises(
        lw.errors.CallError, match=rf"{cls.__name__}\(\) has no argument '{name}x'\. Did you mean '{name}'"
    ):
        cls(**{f"{name}x": 1})


TOGETHER: dict[str, tuple[Callable[[], Any], str]] = {
    "more deviations than snapshots": (
        lambda: lw.baselines.SWAG(snapshots=5, rank=6), "rank is 6 and snapshots 5; expected no more deviations",
    ),
    "steps and epochs": (
        lambda: lw.baselines.SWAG(steps_between=4, epochs_between=2),
        "steps_between is 4 and epochs_between 2; expected one of",
    ),
    "an odd number of draws": (
        lambda: lw.baselines.VariationalLastLayer(samples=3), "samples is 3; expected an even number",
    ),
    "a rising rate": (lambda: lw.recipes.online(rate=1e-4, last_rate=1e-3), "expected 0 < last <= first"),
    "a bound that is collapsed": (
        lambda: lw.VaLLA(alpha=1.0, optimiser="lbfgs"), 'collapsed bound belongs to alpha=0; use optimiser="adam"',
    ),
    "a bound that stays": (
        lambda: lw.VaLLA(alpha=0.5, optimiser="none"), 'collapsed bound belongs to alpha=0; use optimiser="adam"',
    ),
    "no solution": (
        lambda: lw.HFL("linearised", tolerance=math.inf),
        "tolerance is inf; expected below 1 in the mode 'linearised', where a residual of 1 is no solution",
    ),
    "calibration of variances": (
        lambda: lw.HFL(calibration=[]),
        "calibration data for the mode 'nonlinear', whose variances have their scale; leave them",
    ),
    "posteriors and scales": (lambda: lw.tuners.Budget(scales=(1.0,)), "scales has 1 entries for 0 posteriors"),
}  # fmt: skip


@pytest.mark.parametrize("what", TOGETHER)
def test_settings_that_do_not_fit_together_are_refused(what: str) -> None:
    make, message = TOGETHER[what]
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        make()
