"""Bad input raises a clear error in every method, and leaves the model unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.posteriors.base import Posterior
from tests import problems
from tests.cases import BY_NAME, Wrapped
from tests.conformance.declared import SMALL, net, small_method
from tests.tolerances import assert_close

D = torch.float64
X = torch.randn(7, 4, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (7,), generator=torch.Generator().manual_seed(2))
R = torch.randn(7, 3, dtype=D, generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=SMALL)
def method(request: pytest.FixtureRequest) -> str:
    """The name of a method, whose settings may depend on the model."""
    name: str = request.param
    return name


def fitted(model: nn.Module, data: Any, method: str, likelihood: Any = "classification") -> lw.Fitted:
    """A strong prior, so that the weights are near a minimum of the regularised loss."""
    return lw.fit(model, data, likelihood, method=small_method(method, model), prior=1e3)


def refused(
    error: type,
    message: str,
    data: Any,
    likelihood: Any,
    method: str,
    model: nn.Module | None = None,
    prior: Any = None,
) -> None:
    """Check the error, its message, and that the model is bit for bit unchanged."""
    model = net() if model is None else model

    def run() -> None:
        with pytest.raises(error, match=message) as caught:
            lw.fit(model, data, likelihood, method=small_method(method, model), prior=prior)
        assert isinstance(caught.value, lw.LapwingError)

    problems.unchanged(model, run)


# A model in training mode


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(5), nn.Dropout(0.5)])
def test_training_mode(layer: nn.Module, method: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3)).double().train()
    message = rf"1 \({type(layer).__name__}\) is in training mode; expected evaluation mode\. Call model\.eval\(\)"
    refused(lw.errors.ModelError, message, [(X, Y)], "classification", method, model)
    assert int(getattr(layer, "num_batches_tracked", 0)) == 0


# Empty data


def test_empty_data(method: str) -> None:
    none = (X[:0], Y[:0])
    for data in ([], (), DataLoader(TensorDataset(X, Y), 50, drop_last=True), [none], [none, none]):
        refused(lw.errors.DataError, r"empty|no datum|0 samples", data, "classification", method)


def test_every_target_ignored(method: str) -> None:
    message = "every target is ignored, or has the weight zero; expected at least one"
    refused(lw.errors.DataError, message, [(X, torch.full_like(Y, -100))], "classification", method)


def test_an_empty_batch_among_others_is_skipped_or_refused_as_data(method: str) -> None:
    """It is never blamed on the model."""
    data, empty = [(X[:4], Y[:4]), (X[4:], Y[4:])], (X[:0], Y[:0])
    plain = fitted(net(), data, method).predict(X).probs
    for with_empty in ([empty, *data], [data[0], empty, data[1]]):
        try:
            posterior = fitted(net(), with_empty, method)
        except lw.errors.DataError as error:
            assert "empty" in str(error)  # noqa: PT017
        else:
            assert posterior.posterior.statistics.data == 7
            assert_close(posterior.predict(X).probs, plain)


# NaN or infinite


def spoiled(t: Tensor, value: float) -> Tensor:
    t = t.clone()
    t[1, 1] = value
    return t


@pytest.mark.parametrize(("value", "batch"), [(math.nan, 0), (math.inf, 1), (-math.inf, 0)])
def test_inputs_that_are_not_finite(value: float, batch: int, method: str) -> None:
    data = [(X, Y), (X, Y)]
    data[batch] = (spoiled(X, value), Y)
    message = f"inputs of batch {batch}: 1 of 28 entries are NaN or infinite; expected finite numbers. Clean the data"
    refused(lw.errors.DataError, message, data, "classification", method)


@pytest.mark.parametrize(("value", "batch"), [(math.nan, 1), (math.inf, 0)])
def test_targets_that_are_not_finite(value: float, batch: int, method: str) -> None:
    data = [(X, R), (X, R)]
    data[batch] = (X, spoiled(R, value))
    message = f"targets of batch {batch}: 1 of 21 entries are NaN or infinite; expected finite numbers"
    refused(lw.errors.DataError, message, data, "regression", method)


def exploding() -> nn.Module:
    run = lambda m, x: m.drop(m.lin(x)).exp().exp()
    return Wrapped(run, lin=nn.Linear(4, 3), drop=nn.Dropout(0.2)).double().eval()


@pytest.mark.parametrize("batch", [0, 1])
def test_outputs_that_are_not_finite(batch: int, method: str) -> None:
    data = [(0.1 * X, R), (0.1 * X, R)]
    data[batch] = (1e4 * X, R)
    message = r"outputs of (the network|a \w+): \d+ of \d+ entries are NaN or infinite; expected finite.*overflow"
    refused(lw.errors.DataError, message, data, "regression", method, exploding())


def test_weights_that_are_not_finite(method: str) -> None:
    model = net()
    model[3].weight.data[0, 0] = math.nan
    message = r"outputs of (the network|a \w+): \d+ of 21 entries are NaN or infinite"
    with pytest.raises(lw.errors.DataError, match=message):  # NaN is not equal to itself, so no comparison of weights
        lw.fit(model, [(X, Y)], "classification", method=small_method(method, model))


ASK: dict[str, Callable[[lw.Fitted, Tensor], Any]] = {
    "predict": lambda p, x: p.predict(x),
    "functions": lambda p, x: p.functions(x),
    "joint": lambda p, x: p.functions(x, joint=True),
    "function_samples": lambda p, x: p.function_samples(x, 2),
    "network_samples": lambda p, x: p.network_samples(x, 2),
}


def test_new_inputs_that_are_not_finite(method: str) -> None:
    model = net()
    posterior = fitted(model, [(X, Y)], method)
    message = "inputs: 1 of 28 entries are NaN or infinite; expected finite numbers"

    def run() -> None:
        for what, ask in ASK.items():
            has = what != "function_samples" or posterior.posterior.provides(Posterior.function_samples)
            error = lw.errors.DataError if has else lw.errors.UnsupportedError
            with pytest.raises(error, match=message if has else "has no function samples"):
                ask(posterior, spoiled(X, math.nan))

    problems.unchanged(model, run)


@pytest.mark.parametrize("what", ["predict", "functions", "joint", "function_samples"])
@pytest.mark.parametrize("chosen", [lw.Kron(), lw.baselines.MapOnly()], ids=["kron", "map_only"])
def test_new_outputs_that_are_not_finite(what: str, chosen: Any) -> None:
    """The front door looks at them, whatever the method."""
    model = exploding()
    posterior = lw.fit(model, [(0.1 * X, R)], "regression", method=chosen, prior=1.0)

    def run() -> None:
        with pytest.raises(lw.errors.DataError, match=r"outputs of the network: \d+ of 21 entries are NaN or infinite"):
            ASK[what](posterior, 1e4 * X)

    problems.unchanged(model, run)


# Targets out of range or of the wrong shape; a likelihood that does not fit the output

WRONG: dict[str, tuple[Any, Any, Tensor, str]] = {
    "class too high": ("classification", 3, torch.tensor([0, 1, 2, 3, 0, 1, 2]), r"run from 0 to 3; expected 0\.\.2"),
    "class below zero": ("classification", 3, torch.tensor([0, 1, 2, -1, 0, 1, 2]), r"from -1 to 2; expected 0\.\.2"),
    "classes as numbers": ("classification", 3, Y.double(), r"dtype torch\.float64.*expected whole class numbers"),
    "one-hot classes": ("classification", 3, nn.functional.one_hot(Y, 3), r"shape \(7, 3\).*shape \(7,\).*argmax"),
    "labels above one": ("multilabel", 3, torch.full((7, 3), 2), r"run from 2 to 2; expected 0\.\.1"),
    "classes for labels": ("multilabel", 3, Y, r"targets have the shape \(7,\) and outputs \(7, 3\)"),
    "negative counts": ("poisson", 3, -torch.ones(7, 3), "-1; expected whole numbers from 0"),
    "broken counts": ("poisson", 3, torch.full((7, 3), 0.5), r"0\.5; expected whole numbers from 0"),
    "flat targets": ("regression", 3, R[:, 0], r"shape \(7,\) and outputs \(7, 3\); expected the same"),
    "column targets": ("regression", 3, R[:, :1], r"\(7, 1\) and outputs \(7, 3\); expected the same shape"),
    "wide targets": ("regression", 1, R, r"\(7, 3\) and outputs \(7, 1\); expected the same shape or \(7,\)"),
    "too many targets": ("regression", 3, torch.cat([R, R]), r"\(14, 3\) and outputs \(7, 3\): 7 inputs with 14"),
    "too few targets": ("classification", 3, Y[:5], r"\(5,\) and outputs \(7, 3\): 7 inputs with 5 targets"),
    "one output, classes": (lw.Categorical(), 1, Y, r"one output; expected two or more\. Use Bernoulli\(\)"),
    "odd outputs": ("heteroscedastic", 3, R, "3 outputs; expected an even number: the means first"),
    "noise for other outputs": (lw.Gaussian(noise_std=(0.1, 0.2)), 3, R, "2 noise values for 3 outputs; expected"),
    "weights for other classes": (lw.Categorical(class_weights=(1.0, 2.0)), 3, Y, "2 class weights for 3 classes"),
}  # fmt: skip


def test_targets_that_do_not_fit(method: str) -> None:
    for likelihood, outputs, y, message in WRONG.values():
        refused(lw.errors.DataError, message, [(X, y)], likelihood, method, net(outputs))


@pytest.mark.parametrize("extra", [-2, 2])
def test_a_later_batch_with_another_number_of_targets(extra: int, method: str) -> None:
    data = [(X[:4], Y[:4]), (X[4:6], torch.cat([Y, Y])[4 : 6 + extra])]
    refused(lw.errors.DataError, r"\d.*; expected|expected one target", data, "classification", method)


def test_batches_that_are_not_pairs(method: str) -> None:
    refused(
        lw.errors.DataError,
        r"a batch is a tuple of 3; expected \(inputs, targets\)",
        [(X, X, Y)],
        "classification",
        method,
    )
    refused(
        lw.errors.DataError,
        r"a batch is a tensor of shape .*; expected \(inputs, targets\)",
        [X],
        "classification",
        method,
    )
    refused(lw.errors.DataError, r"keys \['x'\] has no target; pass target_key", [{"x": X}], "classification", method)


def test_a_model_without_parameters(method: str) -> None:
    refused(lw.errors.ModelError, "no parameter", [(X[:, :3], Y)], "classification", method, nn.Tanh())


# Later batches, and new inputs

LATER = {
    "inputs": ((spoiled(X, math.nan), Y), "inputs of batch 1: 1 of 28 entries are NaN or infinite; expected finite"),
    "a class": ((X, torch.full_like(Y, 9)), r"run from \d to 9; expected 0\.\.2"),
    "targets": ((X, Y[:5]), r"expected"),
}


@pytest.mark.parametrize("prior", [None, 1e3])
def test_a_later_batch_that_is_wrong(prior: float | None, method: str) -> None:
    """With a given prior, which nothing learns beforehand, it is the method itself that meets the batch."""
    for batch, message in LATER.values():
        refused(lw.errors.DataError, message, [(X, Y), batch], "classification", method, prior=prior)


def test_predictions_check_their_inputs(method: str) -> None:
    model = net()
    posterior = fitted(model, [(X, Y)], method)

    def run() -> None:
        for joint in (False, True):
            assert bool(torch.isfinite(posterior.functions(X[:2], joint=joint).cov).all())
            with pytest.raises(lw.errors.DataError, match="the batch is empty"):
                posterior.functions(X[:0], joint=joint)

    problems.unchanged(model, run)
    model.train()
    with pytest.raises(lw.errors.ModelError, match=r"2 \(Dropout\) is in training mode; expected evaluation mode"):
        posterior.functions(X)


# A precision that is not positive definite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("prior", [1e-3, lw.per_layer(1e-3), lw.priors.diagonal(1e-3)])
def test_a_precision_that_is_not_positive_definite(dtype: torch.dtype, prior: Any) -> None:
    """The Hessian away from an optimum: the error names the layer and the smallest eigenvalue."""
    case = BY_NAME["mlp"]
    model, data = case.build(dtype), problems.batches(case, dtype=dtype)
    fit = lambda prior: lw.fit(model, data, "classification", method=lw.Full(curvature="hessian"), prior=prior)

    def run() -> None:
        # learning the prior, which is None, meets it too
        for ask in (lambda: fit(prior).functions(case.batch(3, dtype)), lambda: fit(prior).log_evidence(),
                    lambda: fit(None)):  # fmt: skip
            with pytest.raises(
                lw.errors.NumericalError, match=r"0\.weight.*not positive definite.*eigenvalue is -\d.*expected above"
            ):
                ask()

    problems.unchanged(model, run)


def test_priors_that_are_not_positive(method: str) -> None:
    for prior in (0.0, -1.0, math.nan, math.inf):
        message = "expected positive, finite numbers"
        refused(lw.errors.NumericalError, message, [(X, Y)], "classification", method, prior=prior)


def test_every_error_is_one_kind() -> None:
    for error in (
        lw.errors.DataError,
        lw.errors.ModelError,
        lw.errors.NumericalError,
        lw.errors.FileError,
        lw.errors.UnsupportedError,
    ):
        assert issubclass(error, lw.LapwingError)
        assert issubclass(error, ValueError)
