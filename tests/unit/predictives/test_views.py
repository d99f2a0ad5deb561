"""The predictive of a loader against that of all rows in one tensor."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
import lapwing.predictives.views as module
from lapwing.networks.jacobians import Footprint
from lapwing.predictives.numbers import NormalPredictive
from lapwing.predictives.views import concat_batches, concat_beliefs, concat_rows
from lapwing.values.gaussian import FunctionGaussian
from tests.tolerances import SOLVED, assert_close, assert_near

D = torch.float64
CPU = torch.device("cpu")
X = torch.randn(23, 3, dtype=D, generator=torch.Generator().manual_seed(0))
KINDS = {
    "classification": 3, "binary": 1, "multilabel": 2, "regression": 1, "several": 2, "counts": 2, "heteroscedastic": 2,
}  # fmt: skip
LABELS = ("mean", "probs", "entropy", "epistemic", "aleatoric", "integrated_probs")
NUMBERS = ("mean", "variance", "std", "epistemic", "aleatoric", "known_entropy")


@pytest.fixture(autouse=True)
def batches_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are otherwise joined until they are worth a pass."""
    monkeypatch.setattr(Footprint, "batch_size_for", lambda *_: 1)


def targets(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    size = 1 if kind == "heteroscedastic" else KINDS[kind]
    if kind == "classification":
        return torch.randint(0, 3, (23,), generator=generator)
    if kind in ("binary", "multilabel"):
        return torch.randint(0, 2, (23, size), generator=generator).to(D)
    if kind == "counts":
        return torch.randint(0, 4, (23, size), generator=generator).to(D)
    return torch.randn(23, size, dtype=D, generator=generator)


@cache
def fitted(kind: str, mixed: bool) -> lw.Fitted:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, KINDS[kind])).double().eval()
    name = "regression" if kind == "several" else kind
    prior = None if mixed else 2.0
    validation = (X[:9] + 0.1, targets(kind)[:9]) if mixed else None
    return lw.fit(net, (X, targets(kind)), name, method=lw.Kron(), prior=prior, validation=validation)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_member_is_that_of_all_rows(kind: str, mixed: bool) -> None:
    posterior, y = fitted(kind, mixed), targets(kind)
    whole, parts = posterior.predict(X), posterior.predict(list(X.split([5, 1, 17])))
    assert len(parts.parts) == 3
    for member in LABELS if hasattr(whole, "probs") else NUMBERS:
        assert_close(getattr(parts, member), getattr(whole, member), SOLVED)
    assert_close(parts.log_prob(y), whole.log_prob(y), SOLVED)
    if hasattr(whole, "known_log_prob"):
        known = torch.arange(y.numel()).reshape(y.shape) % 3 > 0
        assert_close(parts.known_log_prob(y, known), whole.known_log_prob(y, known), SOLVED)
    if hasattr(whole, "quantile"):
        for one, other in zip(parts.interval(0.8), whole.interval(0.8), strict=True):
            assert_close(one, other, SOLVED)
        assert_close(parts.cdf(0.5), whole.cdf(0.5), SOLVED)
        assert_close(parts.cdf(whole.mean), whole.cdf(whole.mean), SOLVED)
        assert_close(parts.distribution.log_prob(y), whole.log_prob(y), SOLVED)
        if kind == "counts":  # sums up to 12 standard deviations of the largest count of a batch
            assert_near(parts.entropy, whole.entropy, 1e-5)
        elif not (mixed and whole.mean.shape[-1] > 1):  # random draws, other ones for each part
            assert_close(parts.entropy, whole.entropy, SOLVED)
    draws = parts.sample(5, torch.Generator().manual_seed(3))
    assert draws.shape == whole.sample(5).shape


def test_draws_have_the_distribution() -> None:
    parts = fitted("several", False).predict(list(X.split([5, 18])))
    draws = parts.sample(4000, torch.Generator().manual_seed(3))
    gap = (draws.mean(0) - parts.mean).abs() / (parts.std / 4000**0.5)
    assert float(gap.max()) < 5
    labels = fitted("multilabel", True).predict(list(X.split([5, 18])))
    share = labels.sample(4000, torch.Generator().manual_seed(3)).mean(0)
    gap = (share - labels.probs).abs() / (labels.probs * (1 - labels.probs) / 4000).sqrt()
    assert float(gap.max()) < 5


def test_targets_of_another_number_of_rows_are_refused() -> None:
    for kind in ("several", "classification", "multilabel"):
        parts = fitted(kind, True).predict(list(X.split([5, 18])))
        with pytest.raises(lw.errors.DataError, match="expected"):
            parts.log_prob(targets(kind)[:-1])


@pytest.mark.parametrize("kind", ["classification", "several", "counts"])
def test_covariances_beyond_the_limit_are_not_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the batch on that exceeds it, and for those before; what needs none stays exact."""
    posterior, y = fitted(kind, True), targets(kind)
    whole = posterior.predict(X)
    monkeypatch.setattr(module, "COVARIANCE_BYTES", 600)
    parts = posterior.predict(list(X.split([2, 2, 19])))
    assert_close(parts.mean, whole.mean)
    if kind == "classification":
        assert_close(parts.log_prob(y), whole.log_prob(y))
        assert_close(parts.entropy, whole.entropy)
        refused: Any = lambda: parts.epistemic
    else:
        assert_close(parts.std, whole.std)
        assert_close(parts.interval(0.9)[1], whole.interval(0.9)[1], SOLVED)
        refused = lambda: parts.sample(1)
    with pytest.raises(lw.errors.UnsupportedError, match=r"needs the covariances between the \d outputs.*one by one"):
        refused()


def test_more_outputs_than_a_covariance_is_built_for() -> None:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 40)).double().eval()
    labels, numbers = torch.arange(23), torch.randn(23, 40, dtype=D)
    classes = lw.fit(net, (X, labels), "classification", prior=2.0)
    assert_close(classes.predict(list(X.split(9))).probs, classes.predict(X).probs)
    regression = lw.fit(net, (X, numbers), lw.Gaussian(0.5), prior=2.0)
    assert_close(regression.predict(list(X.split(9))).std, regression.predict(X).std)
    with pytest.raises(lw.errors.UnsupportedError, match="more than 32 outputs"):
        regression.predict(list(X.split(9))).log_prob(numbers)
    belief = regression.functions(list(X.split(9)))
    assert_close(belief.std, regression.functions(X).std)
    with pytest.raises(lw.errors.UnsupportedError, match="more than 32 outputs"):
        _ = belief.cov


def test_functions_of_a_loader() -> None:
    posterior = fitted("several", True)
    whole, parts = posterior.functions(X), posterior.functions(DataLoader(TensorDataset(X, X), 7))
    assert_close(parts.mean, whole.mean)
    assert_close(parts.cov, whole.cov)
    some = posterior.functions(list(X.split(7)), outputs=[1])
    assert_close(some.cov, whole.cov[:, 1:, 1:])
    for wrong in ({"joint": True}, {"outputs": torch.zeros(23, 1, dtype=torch.long)}):
        with pytest.raises(lw.errors.UnsupportedError, match="and a loader were given"):
            posterior.functions(list(X.split(7)), **wrong)


def test_the_answer_is_where_it_is_asked_for() -> None:
    posterior = fitted("several", True)
    moved = posterior.predict(X, device="cpu")
    assert_close(moved.std, posterior.predict(X).std)
    assert_close(posterior.functions(X, device="cpu").cov, posterior.functions(X).cov)
    assert_close(posterior.functions(X, joint=True, device="cpu").cov, posterior.functions(X, joint=True).cov)
    with pytest.raises(lw.errors.UnsupportedError, match="device is 'nonsense'; expected one that this machine has"):
        posterior.predict(X, device="nonsense")


def test_kept_numbers_do_not_change_with_their_batch() -> None:
    """They are copies: a model may reuse the memory of its outputs."""
    mean = torch.zeros(3, 1)
    whole = concat_batches([NormalPredictive(FunctionGaussian(mean, torch.ones(3, 1, 1)), torch.ones(3, 1))] * 2, CPU)
    mean += 1
    assert torch.equal(whole.mean, torch.zeros(6, 1))


def test_rows_of_several_shapes_are_refused() -> None:
    """Text of several lengths has no one predictive."""
    with pytest.raises(lw.errors.DataError, match=r"outputs of shapes \(2, 3, 4\) and \(2, 5, 4\) in two batches"):
        concat_rows([torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)])
    one, two = (FunctionGaussian(torch.zeros(2, t, 2), torch.eye(2).expand(2, t, 2, 2)) for t in (3, 5))
    with pytest.raises(lw.errors.DataError, match="Predict the batches one by one"):
        concat_beliefs([one, two], CPU)


def test_a_predictive_of_no_known_kind_is_refused() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match="str has neither log_probs, probs nor quantile"):
        concat_batches(["text"], CPU)
