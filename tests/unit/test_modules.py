"""Posteriors as modules, for export."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.modules import ClosedForm, DenseForm, NoForm, Predicting, _shared_axes
from lapwing.posteriors.weight_space import SharedAxes
from tests import problems
from tests.tolerances import assert_close, assert_near

# A posterior as a module: equal to predict, in the shape that the model returned, in plain evaluation loops.

ROWS, INPUTS, CLASSES, UNITS, NEW = 20, 4, 3, 5, 6
LIMIT = 1e-5  # of probabilities and variances


def generated(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, Z = generated(ROWS, INPUTS), generated(NEW, INPUTS, seed=1)
LABELS = torch.arange(ROWS) % CLASSES
NUMBERS, BINARY = generated(ROWS, 2, seed=2), (X[:, 0] > 0).float()


def net(outputs: int, flat: bool = False) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(INPUTS, UNITS), nn.Tanh(), nn.Linear(UNITS, outputs), *([nn.Flatten(0)] if flat else [])]
    return nn.Sequential(*layers)


def classes(method: Any = None, **more: Any) -> lw.Fitted:
    return lw.fit(net(CLASSES), [(X, LABELS)], more.pop("likelihood", "classification"), method=method, **more)


LAST = {"weights": lw.last_layer}
HELD_OUT = {"validation": (Z, LABELS[:NEW])}
CLOSED: dict[str, Callable[[], lw.Fitted]] = {
    "kron": lambda: classes(lw.Kron(), prior=0.5, **LAST),
    "full": lambda: classes(lw.Full(), prior=0.5, **LAST),
    "diagonal": lambda: classes(lw.Diagonal(), prior=0.5, **LAST),
    "ekron": lambda: classes(lw.EKron(), prior=0.5, **LAST),
    "bridge": lambda: classes(lw.Kron(), prior=0.5, likelihood=lw.Categorical(link="bridge"), **LAST),
    "probit": lambda: classes(lw.Kron(), prior=0.5, likelihood=lw.Categorical(link="probit"), **LAST),
    "default": lambda: classes(**LAST),
    "held-out data": lambda: classes(**LAST, **HELD_OUT),
    "plain network": lambda: classes(lw.baselines.MapOnly(), **HELD_OUT),
    "binary": lambda: lw.fit(net(1, True), [(X, BINARY)], "binary", prior=0.5, **LAST),
    "regression": lambda: lw.fit(net(2), [(X, NUMBERS)], "regression", **LAST),
    "regression, one noise": lambda: lw.fit(net(2), [(X, NUMBERS)], lw.Gaussian(noise_std=0.2), prior=2.0, **LAST),
}
OTHERS: dict[str, tuple[Callable[[], lw.Fitted], str]] = {
    "all weights": (lambda: classes(prior=0.5), "not those of one layer"),
    "another layer": (lambda: classes(prior=0.5, weights=lw.named("^0")), "not known to make the outputs"),
    "draws": (lambda: classes(prior=0.5, likelihood=lw.Categorical(link="mc"), **LAST), "'mc' has no closed form"),
    "members": (lambda: classes(lw.baselines.Ensemble([net(CLASSES), net(CLASSES)])), "not those of one layer"),
    "binary": (lambda: lw.fit(net(1, True), [(X, BINARY)], "binary", prior=0.5), "not those of one layer"),
    "counts": (lambda: lw.fit(net(2), [(X, NUMBERS.abs().round())], "counts", prior=0.5), "Poisson has no closed form"),
}


@cache
def closed(name: str) -> lw.Fitted:
    return CLOSED[name]()


def moments(posterior: lw.Fitted, x: Tensor) -> tuple[Tensor, Tensor]:
    predictive = posterior.predict(x)
    if hasattr(predictive, "probs"):
        return predictive.probs, posterior.functions(x).variance
    return predictive.mean, predictive.variance


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_are_predictions(name: str) -> None:
    posterior = closed(name)
    module = posterior.as_module("moments")
    assert isinstance(module, ClosedForm)
    shape = posterior.network.model(Z).shape
    for ours, theirs in zip(module(Z), moments(posterior, Z), strict=True):
        assert_near(ours, theirs.reshape(shape), LIMIT)
    logits = posterior.as_module()(Z)
    assert logits.shape == shape
    if name == "binary":
        assert_near(logits.sigmoid(), posterior.predict(Z).probs.reshape(shape), LIMIT)
    elif "regression" not in name:
        assert_near(logits.softmax(-1), posterior.predict(Z).probs, LIMIT)
        assert_near(posterior.as_module("probs")(Z), posterior.predict(Z).probs, LIMIT)
        assert_near(logits.exp().sum(-1), torch.ones(NEW), LIMIT)  # log-probabilities


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_after_loading(name: str, tmp_path: Path) -> None:
    """A file knows the last layer, without a batch of inputs to find it with."""
    posterior, path = closed(name), tmp_path / "net.lapwing"
    posterior.save(path)
    module = lw.load(path, posterior.network.model).as_module("moments")
    assert isinstance(module, ClosedForm)
    for ours, theirs in zip(module(Z), moments(posterior, Z), strict=True):
        assert_near(ours, theirs.reshape(ours.shape), LIMIT)


@pytest.mark.parametrize("name", OTHERS)
def test_others_call_predict_and_say_why_they_cannot_be_exported(name: str) -> None:
    make, why = OTHERS[name]
    posterior = make()
    module = posterior.as_module("moments")
    assert isinstance(module, Predicting)
    for ours, theirs in zip(module(Z), moments(posterior, Z), strict=True):
        assert_near(ours, theirs.reshape(ours.shape), 0.0)
    logits, mean = posterior.as_module()(Z), posterior.predict(Z).mean
    shown = {"binary": logits.sigmoid(), "counts": logits}.get(name, logits.softmax(-1))
    assert_near(shown, mean.reshape(logits.shape), LIMIT)
    with pytest.raises(lw.errors.UnsupportedError, match=f"{why}.*needs a closed form.*weights=lw.last_layer"):
        torch.export.export(module, (Z,))
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.trace; pytest restores the filters
    with pytest.raises(lw.errors.UnsupportedError, match=why):
        torch.jit.trace(module, (Z,))
    assert why in repr(module)


def test_a_plain_evaluation_loop() -> None:
    """Cross-entropy, accuracy and calls of train() as in existing code; the mean log-probability is predict's."""
    posterior = closed("kron")
    module = posterior.as_module()
    module.train()
    assert not module.training
    loss, right = 0.0, 0
    with torch.no_grad():
        for x, y in zip(X.split(7), LABELS.split(7), strict=True):
            logits = module(x)
            loss += float(nn.functional.cross_entropy(logits, y, reduction="sum"))
            right += int((logits.argmax(-1) == y).sum())
    predictive = posterior.predict(X)
    assert abs(loss + float(predictive.log_prob(LABELS).sum())) < LIMIT * ROWS
    assert right == int((predictive.probs.argmax(-1) == LABELS).sum())


def test_parameters_are_shared_and_the_model_is_left_as_it_was() -> None:
    posterior = closed("kron")
    model = posterior.network.model
    module = problems.unchanged(model, posterior.as_module)
    assert {id(p) for p in model.parameters()} == {id(p) for p in module.parameters()}
    problems.unchanged(model, lambda: module(Z))


def test_copies_and_another_dtype() -> None:
    module = closed("kron").as_module("moments")
    double = copy.deepcopy(module).double()
    for wide, narrow in zip(double(Z.double()), module(Z), strict=True):
        assert wide.dtype == torch.float64
        assert_near(wide, narrow, LIMIT)


def test_a_shifted_mean() -> None:
    """The mean of the tangent model at its own optimum."""
    posterior = lw.fit(net(2), [(X, NUMBERS)], lw.Gaussian(noise_std=0.2), method=lw.Full(), prior=2.0, **LAST)
    shifted = posterior.tuned(lw.tuners.LinearMode([(X, NUMBERS)], mean="tangent"))
    for ours, theirs in zip(shifted.as_module("moments")(Z), moments(shifted, Z), strict=True):
        assert_near(ours, theirs, LIMIT)


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match="returns"):
        closed("kron").as_module("variance")
    with pytest.raises(lw.errors.UnsupportedError, match="regression has none"):
        closed("regression").as_module("probs")
    counts = lw.fit(net(2), [(X, LABELS[:, None].expand(-1, 2))], "counts", prior=2.0)
    with pytest.raises(lw.errors.UnsupportedError, match="Poisson has none; expected 'logits' or 'moments'"):
        counts.as_module("probs")
    spread = lw.fit(net(2), [(X, NUMBERS[:, :1])], "heteroscedastic", prior=2.0)
    with pytest.raises(lw.errors.UnsupportedError, match="has none; expected 'logits' or 'moments'"):
        spread.as_module("probs")


@pytest.mark.parametrize("weights", [lw.last_layer, lw.all_weights])
def test_the_mode_of_the_model_is_left_to_its_user(weights: Any) -> None:
    model = net(CLASSES).train()
    posterior = lw.fit(model, [(X, LABELS)], "classification", prior=0.5, weights=weights)
    for call in (lambda m: m, lambda m: m.train(), lambda m: m.eval(), lambda m: m(Z)):
        problems.unchanged(model, lambda call=call: call(posterior.as_module()))
        assert all(each.training for each in model.modules())


@pytest.mark.parametrize("weights", [lw.last_layer, lw.all_weights])
def test_a_model_in_training_mode_or_with_other_weights_is_refused(weights: Any) -> None:
    torch.manual_seed(3)
    layers = nn.Linear(INPUTS, UNITS), nn.BatchNorm1d(UNITS), nn.Dropout(0.5), nn.Linear(UNITS, CLASSES)
    model = nn.Sequential(*layers).eval()
    module = lw.fit(model, [(X, LABELS)], "classification", prior=0.5, weights=weights).as_module()
    before = module(Z)
    model.train()
    random = torch.get_rng_state()

    def refused(match: str) -> None:
        with pytest.raises(lw.errors.ModelError, match=match):
            module(Z)

    problems.unchanged(model, lambda: refused("is in training mode; expected evaluation mode"))
    assert torch.equal(torch.get_rng_state(), random)
    if weights is lw.last_layer:
        with pytest.raises(lw.errors.ModelError, match="is in training mode"):
            torch.export.export(module, (Z,))
    model.eval()
    assert_near(module(Z), before, 0.0)
    with torch.no_grad():
        layers[0].weight[0, 0] += 0.1
    refused("'0.weight' has changed since the fit")


@pytest.mark.parametrize("name", ["default", "held-out data", "plain network", "labels", "regression"])
def test_backward_reaches_the_inputs_alone(name: str) -> None:
    """The slopes are those of predict, also where the mixture holds the plain network, without spread."""
    many = lambda: lw.fit(net(2), [(X, (X[:, :2] > 0).float())], "multilabel", **LAST)
    posterior = many() if name == "labels" else closed(name)
    model, (ours, theirs) = posterior.network.model, (Z.clone().requires_grad_() for _ in range(2))
    module = posterior.as_module()
    problems.unchanged(model, lambda: module(ours).sin().sum().backward())
    predictive = posterior.predict(theirs)
    probs = getattr(predictive, "probs", predictive.mean)
    logits = probs.logit() if name == "labels" else probs if name == "regression" else probs.log()
    logits.sin().sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert_near(ours.grad, theirs.grad, 1e-4 * float(theirs.grad.abs().max()))
    assert not module(Z).requires_grad


class Heads(nn.Module):
    """Two heads, of which none is named logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.a, self.b = nn.Linear(INPUTS, UNITS), nn.Linear(UNITS, CLASSES), nn.Linear(UNITS, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        return {"a": self.a(h), "b": self.b(h)}


@pytest.mark.parametrize("weights", [lw.last_layer, lw.all_weights])
def test_one_of_several_outputs(weights: Any) -> None:
    posterior = lw.fit(Heads(), [(X, LABELS)], "classification", output="a", prior=0.5, weights=weights)
    module = posterior.as_module("probs")
    assert isinstance(module, Predicting if weights is lw.all_weights else ClosedForm)
    assert_near(module(Z), posterior.predict(Z).probs, LIMIT)


def test_threads_do_not_take_the_features_of_each_other() -> None:
    meet = Barrier(2, timeout=20)

    class Meeting(nn.Module):
        """A network in which two runs wait for each other before and after the last layer."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.waits = nn.Linear(INPUTS, UNITS), nn.Linear(UNITS, CLASSES), [False]

        def forward(self, x: Tensor) -> Tensor:
            a = self.body(x).tanh()
            _ = self.waits[0] and meet.wait()
            f = self.head(a)
            _ = self.waits[0] and meet.wait()
            return f

    model = Meeting().eval()
    module = lw.fit(model, [(X, LABELS)], "classification", prior=0.5, **LAST).as_module("moments")
    alone = [module(x) for x in (X, Z)]
    model.waits[0] = True
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(module, (X, Z)))
    for ours, theirs in zip(together, alone, strict=True):
        assert_close(ours[1], theirs[1])


def test_a_cast_copy_may_differ_by_rounding() -> None:
    module = closed("kron").as_module("probs")
    cast = copy.deepcopy(module).to(torch.bfloat16)
    assert_near(cast(Z.bfloat16()).float(), module(Z), 0.05)


# Quadratic forms: the shorter one where it is exact, the dense one otherwise.

D, C, QUADRATIC_ROWS = 5, 3, 4
A = torch.randn(QUADRATIC_ROWS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def symmetric(*shape: int, seed: int = 0) -> Tensor:
    root = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return root @ root.mT


def expected(covariance: Tensor) -> Tensor:
    return torch.stack([torch.einsum("i,icdj,j->cd", a, covariance, a) for a in A])


def test_a_dense_covariance() -> None:
    covariance = symmetric(D * C, D * C).reshape(D, C, D, C).permute(0, 1, 3, 2)
    assert _shared_axes(covariance) is None
    assert_close(DenseForm(covariance)(A)[0], expected(covariance))


def test_a_covariance_with_shared_axes_takes_the_shorter_form() -> None:
    outputs, inputs = torch.linalg.eigh(symmetric(C, C)).eigenvectors, torch.linalg.eigh(symmetric(D, D)).eigenvectors
    weights = torch.linspace(0.3, 2.0, C * D, dtype=torch.float64).square().reshape(C, D)
    covariance = torch.einsum("ck,dk,ia,ja,ka->icdj", outputs, outputs, inputs, inputs, weights)
    form = _shared_axes(covariance)
    assert isinstance(form, SharedAxes)
    assert_close(form(A)[0], expected(covariance))


def test_a_wide_layer_takes_the_memory_of_its_covariance() -> None:
    """All six axes of the shorter form would be 17 GB here; the covariance is 13 MB."""
    wide = nn.Sequential(nn.Linear(INPUTS, 127), nn.Tanh(), nn.Linear(127, 10))
    posterior = lw.fit(
        wide, [(X, torch.arange(ROWS) % 10)], "classification", method=lw.KernelSpace(), prior=0.5, **LAST
    )
    assert_near(posterior.as_module("probs")(Z), posterior.predict(Z).probs, LIMIT)


@pytest.mark.parametrize("method", [lw.Kron(), lw.Diagonal()], ids=str)
def test_known_axes_need_no_covariance_of_the_weights(method: Any) -> None:
    """The covariance of 60,100 weights would be 29 GB."""
    wide = nn.Sequential(nn.Linear(INPUTS, 600), nn.Tanh(), nn.Linear(600, 100))
    posterior = lw.fit(wide, [(X, torch.arange(ROWS))], "classification", method=method, prior=0.5, **LAST)
    module = posterior.as_module("moments")
    assert isinstance(module, ClosedForm)
    for ours, theirs in zip(module(Z), moments(posterior, Z), strict=True):
        assert_near(ours / theirs.max(), theirs / theirs.max(), LIMIT)


def test_a_covariance_too_large_to_hold_is_not_exported_but_predicts() -> None:
    wide = nn.Sequential(nn.Linear(INPUTS, 600), nn.Tanh(), nn.Linear(600, 20))
    with lw.memory.limited("8MB"):
        posterior = lw.fit(wide, [(X, LABELS)], "classification", method=lw.KernelSpace(), prior=0.5, **LAST)
        module = posterior.as_module("probs")
        assert isinstance(module, Predicting)
        assert "covariance of 12020 weights" in module.why
        assert_near(module(Z), posterior.predict(Z).probs, LIMIT)


def test_a_head_whose_bias_is_fixed() -> None:
    posterior = classes(lw.Kron(), prior=0.5, weights=lw.named("2.weight"))
    for ours, theirs in zip(posterior.as_module("moments")(Z), moments(posterior, Z), strict=True):
        assert_near(ours, theirs, LIMIT)


def test_no_spread() -> None:
    assert NoForm()(A[:, :C]).shape == (1, QUADRATIC_ROWS, C, C)
    assert float(NoForm()(A[:, :C]).abs().max()) == 0
