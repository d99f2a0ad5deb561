"""A table of wrong calls: each raises an error of Lapwing that says what was seen and what was expected.

A row is a call with one wrong argument. The argument in the place of ``_`` comes from a list, so that one line of the
table makes several rows. Calls that are unusual but right are in ``FINE``: these must not be refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(12, 3, dtype=D, generator=GENERATOR)
Y = torch.randn(12, 2, dtype=D, generator=GENERATOR)
LABELS = torch.arange(12) % 2
PROBS = torch.randn(12, 2, dtype=D, generator=GENERATOR).softmax(-1)
NAN = torch.full((12, 2), math.nan, dtype=D)


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()


NET = small()
ONE = nn.Linear(3, 1).double()
REGRESSION = lw.fit(NET, [(X, Y)], lw.Gaussian(0.1), method=lw.Full(), prior=1.0)
NORMAL = REGRESSION.predict(X)
CLASSES = lw.fit(NET, [(X, LABELS)], "classification", method=lw.Diagonal(), prior=1.0).predict(X)
BINARY = lw.fit(ONE, [(X, LABELS)], "binary", method=lw.Diagonal(), prior=1.0).predict(X)
COUNTS = lw.fit(ONE, [(X, LABELS)], "counts", method=lw.Diagonal(), prior=1.0).predict(X)
MIXTURE = lw.fit(ONE, [(X, Y[:, :1])], "regression", method=lw.Diagonal()).predict(X)
LINEAR = lw.linear.fit(X, Y[:, 0], precision=1.0, noise_std=0.1, num_samples=2)


def fit(model: Any = NET, data: Any = None, likelihood: Any = "regression", **options: Any) -> lw.Fitted:
    """A fit whose arguments are right unless they are given."""
    data = [(X, Y)] if data is None else data
    return lw.fit(model, data, likelihood, **{"method": lw.Diagonal(), "prior": 1.0, **options})


def fit_target(y: Any) -> lw.Fitted:
    return fit(data=[(X, y)])


def fit_label(y: Any) -> lw.Fitted:
    return fit(data=[(X, y)], likelihood="classification")


def fit_prior(prior: Any) -> lw.Fitted:
    return fit(prior=prior)


# Values that are wrong in the place of ...

OBJECTS = [3, 0.5, True, 1j, [1, 2], {"a": 1}, nn.Linear(3, 2), torch.zeros(3), object(), print]  # an object of Lapwing
FLAGS = [None, "yes", 1, 0.0, [True], torch.tensor(True)]  # True or False
COUNT = [None, "3", 2.5, -1, 0, True, math.nan, torch.tensor(3), [3]]  # a whole number from one
NUMBERS = [None, "1", 1j, -1.0, 0.0, math.nan, math.inf, True, {"a": 1.0}, object()]  # a positive number
TENSORS = [None, "abc", 1.0, [[1.0]], (X,), X.numpy(), torch.complex(Y, Y), nn.Linear(1, 1), object()]  # a tensor
DATA = ["abc", 3, 0.5, nn.Linear(3, 2), object(), lw.Kron(), {"x": X}, X]  # data
PATHS = [None, 3, 0.5, "", [], object()]  # a path
GENERATORS = [3, "seed", 0.5, object(), torch.Generator]  # a generator or None

# A message says what was expected, or what to do.
REMEDY = r"expected|must be|[Uu]se |[Gg]ive |has no|does not depend|in training mode|the model has "

Call = Callable[[Any], Any]
TABLE: list[tuple[str, Call, list[Any]]] = [
    # The front door
    ("fit model", lambda _: fit(model=_), [None, "net", 3, [], X, lambda x: x, nn.Linear, nn.Tanh(), [(X, Y)]]),
    ("fit model and data swapped", lambda _: lw.fit([(X, Y)], NET, "regression"), [None]),  # type: ignore[arg-type]
    ("fit on no device", lambda _: fit(model=nn.Linear(3, 2, device="meta")), [None]),
    ("fit data", lambda _: fit(data=_),
     [*DATA, [], (), iter([(X, Y)]), [X], [(X, X, Y)], [(X,)], [3], [{"x": X}]]),
    ("fit no data", lambda _: lw.fit(NET, _, "regression"), [None]),
    ("fit likelihood", lambda _: fit(likelihood=_),
     [*OBJECTS, None, "", "regresion", lw.Gaussian, lw.Kron(), X.numpy()]),
    ("fit method", lambda _: fit(method=_),
     [*OBJECTS, "", "krn", "Kron ", lw.Kron, lw.Gaussian(), REGRESSION, lw.per_layer()]),
    ("fit weights", lambda _: fit(weights=_), [*OBJECTS, "", "last layr", lw.Kron(), "0.weight", lw.named]),
    ("fit prior", fit_prior, [*OBJECTS[2:], "flat", -1.0, 0.0, math.nan, math.inf, lw.per_layer, lw.Kron(), 1j]),
    ("fit tuner", lambda _: fit(tuner=_), ["evidence", 3, lw.tuners.FixedPoint, nn.Linear(3, 2), [], lambda p: None]),
    ("fit generator", lambda _: fit(generator=_), GENERATORS),
    ("fit progress", lambda _: fit(progress=_), ["yes", 1, X, [], object()]),
    ("fit target_key", lambda _: fit(target_key=_), [3, ["y"], X, object(), True]),
    ("fit validation", lambda _: fit(validation=_), [3, "abc", [], X, nn.Linear(3, 2), [(X, Y[:5])], [(X, NAN)]]),
    ("fit targets", fit_target,
     [None, "abc", {}, object(), NET, print, b"y", Y[0], Y[:5], Y[:, :1], NAN, torch.complex(Y, Y)]),
    ("fit targets without numbers", fit_target, [torch.zeros(12, 2, device="meta"), torch.zeros(0), 1.0]),
    ("fit labels", fit_label,
     [LABELS.double(), LABELS + 1, LABELS - 1, LABELS[:5], Y, torch.complex(Y, Y), None, "abc"]),
    ("fit binary labels", lambda _: fit(ONE, [(X, _)], "binary"), [LABELS + 1, LABELS - 1, Y, LABELS[:3]]),
    ("fit counts", lambda _: fit(ONE, [(X, _)], "counts"), [-LABELS - 1, LABELS + 0.5, Y, LABELS[:3]]),
    ("fit inputs", lambda _: fit(data=[(_, Y)]),
     [X[:, :2], X.float(), X.long(), X[0], X[None], X[:5], torch.complex(X, X), None, "abc", 3, NAN,
      X.numpy().astype(str)]),
    ("fit inputs on no device", lambda _: fit(data=[(_, Y)]), [torch.zeros(12, 3, device="meta")]),
    ("fit one sample without its batch", lambda _: fit(ONE, [(X[0], Y[0])]), [None]),
    ("train model", lambda _: lw.train(_, [(X, Y)], "regression"), [None, "net", X, nn.Tanh()]),
    ("train data", lambda _: lw.train(NET, _, "regression"), [*DATA, []]),
    ("train likelihood", lambda _: lw.train(NET, [(X, Y)], _), [None, "regresion", 3, lw.Gaussian, X.numpy()]),
    ("train recipe", lambda _: lw.train(NET, [(X, Y)], "regression", recipe=_),
     ["online", 3, lw.recipes.online, lw.Kron()]),
    ("train weights", lambda _: lw.train(NET, [(X, Y)], "regression", weights=_), ["first", 3, lw.Kron()]),
    ("train checkpoint", lambda _: lw.train(NET, [(X, Y)], "regression", checkpoint=_), PATHS[1:]),
    ("train resume", lambda _: lw.train(NET, [(X, Y)], "regression", resume=_), [3, "", [], {}, X, NET, lw.Kron]),
    ("train progress", lambda _: lw.train(NET, [(X, Y)], "regression", progress=_), ["yes", 1]),
    ("load path", lambda _: lw.load(_, NET), PATHS),
    ("load model", lambda _: lw.load("net.lapwing", _), [None, "net", 3, nn.Linear, nn.Tanh()]),
    ("check model", lambda _: lw.check(_, X), [None, "net", 3, X, nn.Linear, nn.Tanh()]),
    ("check batch", lambda _: lw.check(NET, _), [None, "abc", 3, [], X[:0], X[:, :2], X.numpy()[:0], NAN]),
    ("check weights", lambda _: lw.check(NET, X, weights=_), ["first", 3, X, lw.Kron(), lw.named]),
    ("check data", lambda _: lw.check(NET, X, data=_), ["10", 2.5, -1, 0, True, math.nan, math.inf, [(X, Y)]]),
    ("compare", lw.compare, [None, {}, [], 3, "ab", REGRESSION, [REGRESSION], X]),
    ("compare with", lambda _: lw.compare({"a": REGRESSION, "b": _}), [None, 3, "kron", NET, REGRESSION.posterior]),
    # What a fit returns
    ("predict", REGRESSION.predict,
     [None, "abc", 3, [], X[:0], X[0], X[:, :2], X.float(), NAN, X[None], NET]),
    ("functions", REGRESSION.functions, [None, "abc", X[:0], X[0], X.long(), torch.complex(X, X)]),
    ("functions joint", lambda _: REGRESSION.functions(X, _), FLAGS),
    ("function_samples", lambda _: REGRESSION.function_samples(X, _), COUNT),
    ("function_samples generator", lambda _: REGRESSION.function_samples(X, 2, _), GENERATORS),
    ("weight_samples", REGRESSION.weight_samples, COUNT),
    ("weight_samples generator", lambda _: REGRESSION.weight_samples(2, _), GENERATORS),
    ("network_samples", lambda _: REGRESSION.network_samples(X, _), COUNT),
    ("tuned", REGRESSION.tuned, ["evidence", 0, [], {}, X, NET, lw.tuners.Grid, lambda p: None]),
    ("with_prior", REGRESSION.with_prior, [None, "flat", -1.0, math.nan, [1.0], lw.Kron(), object(), lw.per_layer]),
    ("to", REGRESSION.to, [None, "gpu", 3.5, [], "meta", object()]),
    ("save", REGRESSION.save, PATHS),
    ("variance_of", REGRESSION.variance_of, [None, "w", 3, X, lambda w: 1.0, lambda w: w["a"], lambda w: w["0.bias"]]),
    ("variance_of outputs", lambda _: REGRESSION.variance_of(_, X),
     [None, NET, lambda f: f, lambda f: f.x, lambda f: f["a"]]),
    ("jacobian", REGRESSION.jacobian, [None, 3, "abc", [], [X], NET]),
    ("ggn", REGRESSION.ggn, [None, 3, "abc", [], [X], NET]),
    ("jacobian progress", lambda _: REGRESSION.jacobian([(X, Y)], progress=_), ["yes", 1, X]),
    ("jacobian product", lambda _: REGRESSION.jacobian([(X, Y)]) @ _, [None, "v", 3, X, torch.zeros(5), NAN]),
    # Predictives
    ("normal log_prob", NORMAL.log_prob,
     [None, "y", 1.0, Y[:5], Y.T, Y[:, 0], NAN, torch.complex(Y, Y), torch.zeros(2, 3, 4)]),
    ("normal cdf", NORMAL.cdf, [None, "y", 1j, Y[:5], NAN, torch.complex(Y, Y), math.nan]),
    ("normal quantile", NORMAL.quantile, [None, "0.5", 0, 1, -0.1, 1.5, math.nan, [0.5], True, Y]),
    ("normal interval", NORMAL.interval, [None, "0.5", 0, 95, -0.1, math.nan, Y]),
    ("normal sample", NORMAL.sample, COUNT),
    ("normal sample generator", lambda _: NORMAL.sample(2, _), GENERATORS),
    ("class log_prob", CLASSES.log_prob,
     [None, "y", 1, LABELS.double(), LABELS + 1, LABELS - 1, LABELS[:5], Y, LABELS - 100]),
    ("class sample", CLASSES.sample, COUNT),
    ("binary log_prob", BINARY.log_prob, [None, "y", LABELS + 1, LABELS - 1, LABELS[:5], Y, NAN]),
    ("count log_prob", COUNTS.log_prob, [None, "y", LABELS - 1, LABELS + 0.5, LABELS[:5], Y]),
    ("count cdf", COUNTS.cdf, [None, "y", Y, math.nan, 1j]),
    ("count quantile", COUNTS.quantile, [None, "0.5", 0, 1, math.nan]),
    ("mixture log_prob", MIXTURE.log_prob, [None, "y", Y, Y[:5, 0], NAN[:, 0]]),
    ("mixture quantile", MIXTURE.quantile, [None, "0.5", 0, 1, math.nan]),
    ("mixture interval", MIXTURE.interval, [None, "0.5", 0, 95]),
    ("belief mean", lambda _: lw.FunctionGaussian(_, torch.zeros(2, 1, 1)), [None, 1.0, [1.0], Y]),
    ("belief covariance", lambda _: lw.FunctionGaussian(torch.zeros(2, 1), _),
     [None, 1.0, [1.0], Y, torch.zeros(2, 1)]),
    # Likelihoods
    ("weights of positive labels", lambda _: fit(likelihood=lw.Bernoulli(pos_weight=_)), [(1.0, 2.0, 3.0)]),
    ("phi below zero", lambda _: fit(likelihood=lw.Gaussian(phi=torch.tensor(_))), [-1.0, math.nan]),
    # Methods
    ("Kron of single weights", lambda _: fit(method=lw.Kron(), weights=lw.subnetwork([0, 1])), [None]),
    ("Kron with a prior for each weight", lambda _: fit(method=_, prior=lw.priors.diagonal(torch.arange(1.0, 27))),
     [lw.Kron(), lw.EKron()]),
    # Tuners
    ("evidence_bound", lambda _: lw.tuners.evidence_bound(_, [(X, Y)]), [None, 3, NET, X]),
    # Priors and weights
    ("isotropic", lambda _: fit_prior(lw.isotropic(_)), [*NUMBERS, [1.0, 2.0], torch.ones(3)]),
    ("isotropic mean", lambda _: fit_prior(lw.isotropic(1.0, _)),
     [None, "0", 1j, math.nan, math.inf, [0.0, 1.0], torch.zeros(3), torch.zeros(2, 13), object()]),
    ("per_layer", lambda _: fit_prior(lw.per_layer(_)),
     [None, "1", -1.0, [1.0] * 3, {"0": 1.0}, {"0": 1.0, "2": "a"}, {"0": 1.0, "2": [1.0, 2.0]}]),
    ("diagonal", lambda _: fit_prior(lw.priors.diagonal(_)), [None, "1", [1.0] * 3, {"weight": 1.0}, -torch.ones(26)]),
    ("grouped", lambda _: fit_prior(lw.grouped(_)),
     [None, 1.0, {}, {"(": 1.0}, {"0.*": 1.0}, {".*": "a"}, {".*": -1.0}]),
    ("g_prior", lambda _: fit_prior(lw.priors.g_prior(_)), NUMBERS),
    ("named", lambda _: fit(weights=lw.named(_)), [None, 3, "(", "no such name", ["0"], b"0", X]),
    ("subnetwork", lambda _: fit(weights=lw.subnetwork(_)),
     [None, 3, 0.5, "0", [], [0.5, 2.7], [[0, 1]], [0, 0], [-1], [26], [True], torch.zeros(2, 2), torch.tensor(3),
      torch.tensor([1j]), object()]),
    # Scores
    ("accuracy labels", lambda _: lw.metrics.accuracy(PROBS, _), [*TENSORS, LABELS.double(), LABELS + 1, LABELS - 1]),
    ("accuracy swapped", lambda _: lw.metrics.accuracy(LABELS, PROBS), [None]),
    ("accuracy ignore_index", lambda _: lw.metrics.accuracy(PROBS, LABELS, ignore_index=_), [None, 0.5, "0"]),
    ("ece bins", lambda _: lw.metrics.ece(PROBS, LABELS, _), COUNT),
    ("calibration", lambda _: lw.metrics.calibration(_, LABELS == 1), [PROBS, 2 + PROBS[:, 0]]),
    ("rmse", lambda _: lw.metrics.rmse(Y, _), [*TENSORS, Y[:, 0], NAN, Y[:0]]),
    ("normal_nll std", lambda _: lw.metrics.normal_nll(Y, _, Y), [None, -Y.abs(), 0 * Y, NAN, Y[:5]]),
    ("crps std", lambda _: lw.metrics.crps(Y, _, Y), [None, -Y.abs(), 0 * Y, NAN]),
    ("coverage swapped", lambda _: lw.metrics.coverage(Y + 1, Y - 1, Y), [None]),
    ("interval_width", lambda _: lw.metrics.interval_width(Y, _), [None, Y - 1, NAN]),
    ("auroc", lambda _: lw.metrics.auroc(Y[:, 0], _), [*TENSORS, Y, NAN[:, 0], Y[:0, 0]]),
    ("adaptive_ece bins", lambda _: lw.metrics.adaptive_ece(PROBS, LABELS, _), COUNT),
    ("cqm", lw.metrics.cqm, [2 * Y]),
    ("joint probs", lambda _: lw.metrics.joint_log_likelihood(_, LABELS), [PROBS, X.unsqueeze(0)]),
    # Linear models
    ("linear precision", lambda _: lw.linear.fit(X, Y[:, 0], precision=_), NUMBERS[1:]),
    ("linear num_samples", lambda _: lw.linear.fit(X, Y[:, 0], num_samples=_), COUNT),
    ("linear generator", lambda _: lw.linear.fit(X, Y[:, 0], generator=_), GENERATORS),
    ("linear tuned", lambda _: LINEAR.tuned(precision=_), FLAGS),
    ("linear tuned steps", lambda _: LINEAR.tuned(max_steps=_), COUNT),
    # Recipes
    ("misspelt setting", lambda _: lw.recipes.online(**{_: 3}), ["epoch", "burnin", "optimizer"]),
]  # fmt: skip


def rows() -> Iterator[Any]:
    for name, call, values in TABLE:
        for number, value in enumerate(values):
            yield pytest.param(call, value, id=f"{name} {number}")


@pytest.mark.parametrize(("call", "value"), [*rows()])
def test_a_wrong_call_is_refused_with_what_was_expected(call: Call, value: Any) -> None:
    before = {key: tensor.clone() for key, tensor in NET.state_dict().items()}
    with pytest.raises(lw.LapwingError) as caught:
        call(value)
    message = str(caught.value)
    assert re.search(REMEDY, message), message
    for key, tensor in NET.state_dict().items():
        assert torch.equal(tensor, before[key])


FINE: dict[str, Callable[[], Any]] = {
    "targets as a list": lambda: fit_target(Y.tolist()),
    "targets as an array": lambda: fit_target(Y.numpy()),
    "labels as booleans": lambda: fit_label(LABELS == 1),
    "a prior as a tensor": lambda: fit_prior(torch.tensor(2.0)),
    "a mean as a list": lambda: fit_prior(lw.isotropic(1.0, [0.1] * 26)),
    "no weight of the data": lambda: lw.Categorical(class_weights=[0.0, 1.0]),
    "the order of names": lambda: fit(weights="all_weights", method="diagonal"),
    "a grid by the evidence": lambda: REGRESSION.tuned(lw.tuners.Grid()),
    "one number for all": lambda: NORMAL.cdf(0.0),
    "targets without the dimension of one output": lambda: BINARY.log_prob(LABELS),
    "scores of arrays": lambda: lw.metrics.accuracy(PROBS.numpy(), LABELS.numpy()),
    "infinite intervals": lambda: lw.metrics.coverage(Y - math.inf, Y + math.inf, Y),
    "a tuner that is a function": lambda: REGRESSION.tuned(lambda posterior: posterior),
}


@pytest.mark.parametrize("name", FINE)
def test_an_unusual_call_is_right(name: str) -> None:
    FINE[name]()


# Names


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: fit(likelihood="regresion"), "regression"),
        (lambda: fit(likelihood="Classification"), "classification"),
        (lambda: fit(method="low-rank"), "low_rank"),
        (lambda: fit(weights="last layer"), "last_layer"),
        (lambda: lw.Categorical(link="pairwis"), "pairwise"),
        (lambda: lw.recipes.online(optimizer="adam"), "optimiser"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(call: Callable[[], Any], meant: str) -> None:
    with pytest.raises(lw.LapwingError, match=f"Did you mean '{meant}'"):
        call()
