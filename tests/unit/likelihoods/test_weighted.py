"""The law of weights: data with whole weights are the data repeated; weight zero leaves a datum out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.base import weighted_count
from lapwing.posteriors.base import Posterior
from lapwing.registry import METHODS
from tests.tolerances import SOLVED, assert_close

COUNTS = torch.tensor([2, 0, 1, 3, 1, 1, 0, 2, 1])
EXACT = ("full", "diagonal", "kron", "ekron", "kernel_space", "low_rank", "map_only", "dropout")
ESTIMATED = ("sampled",)  # of the same Gram matrix, by draws for each row
NEED_NETWORKS = ("ensemble", "mixture_of_laplace")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 4)).double().eval()


X, NUMBERS = drawn(1, 9, 3), drawn(2, 9, 4)
LABELS = torch.arange(9) % 4


def both(net: nn.Module, y: Tensor, likelihood: Any, x: Any = X, **options: Any) -> tuple[lw.Fitted, lw.Fitted]:
    """The posterior of weighted data, in two batches, and that of the data repeated."""
    parts = [slice(0, 4), slice(4, None)]
    weighted = lw.samples.weighted([(x[part], y[part], COUNTS[part].double()) for part in parts])
    repeated = [(x.repeat_interleave(COUNTS, 0), y.repeat_interleave(COUNTS, 0))]
    one, other = (lw.fit(net, data, likelihood, **options) for data in (weighted, repeated))
    return one, other


def assert_same(one: lw.Fitted, other: lw.Fitted, x: Any = X, power: float = SOLVED) -> None:
    assert one.base.statistics.data == other.base.statistics.data
    assert_close(torch.tensor(one.base.statistics.loss), torch.tensor(other.base.statistics.loss))
    assert_close(one.functions(x).cov, other.functions(x).cov, power)
    if one.base.provides(Posterior.log_evidence):
        assert_close(one.log_evidence(), other.log_evidence(), power)
    if one.likelihood.noise_variance is not None:
        assert_close(one.likelihood.noise_variance, other.likelihood.noise_variance)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in NEED_NETWORKS])
def test_every_method_counts_weights_or_refuses_them(net, name):
    method = METHODS[name]()
    if name not in (*EXACT, *ESTIMATED):
        with pytest.raises(UnsupportedError, match="the data have weights"):
            both(net, NUMBERS, lw.Gaussian(), method=method, prior=1.0)
        return
    one, other = both(net, NUMBERS, lw.Gaussian(), method=method, prior=1.0)
    assert one.base.statistics.data == int(COUNTS.sum())
    assert_close(one.likelihood.noise_variance, other.likelihood.noise_variance)
    if name in EXACT:
        assert_same(one, other)


@pytest.mark.parametrize("method", [lw.Kron(sharing="reduce"), lw.Full(curvature="empirical"), lw.Kron("empirical")])
def test_other_settings_count_weights(net, method):
    assert_same(*both(net, LABELS, lw.Categorical(), method=method, prior=1.0))


def test_the_hessian_counts_weights(net):
    assert_same(*both(net, LABELS, lw.Categorical(), method=lw.Full(curvature="hessian"), prior=50.0))


@pytest.mark.parametrize("likelihood", [lw.Categorical(), lw.Gaussian(), lw.Gaussian(per_output=True)])
def test_the_default_counts_weights_in_prior_noise_tails_and_mixture(net, likelihood):
    y = LABELS if likelihood.has_logits else NUMBERS
    one, other = both(net, y, likelihood)
    assert_same(one, other)
    assert_close(one.predict(X).log_prob(y), other.predict(X).log_prob(y), SOLVED)
    assert_close(one.posterior.weights, other.posterior.weights, SOLVED)


def test_validation_data_count_weights(net):
    y = LABELS
    weighted = lw.samples.weighted((X, y, COUNTS))
    repeated = (X.repeat_interleave(COUNTS, 0), y.repeat_interleave(COUNTS, 0))
    one, other = (
        lw.fit(net, [(X + 0.1, y)], "classification", validation=validation) for validation in (weighted, repeated)
    )
    assert_close(one.posterior.weights, other.posterior.weights, SOLVED)
    assert_close(one.predict(X).probs, other.predict(X).probs, SOLVED)


def test_tuners_without_weights_refuse_them(net):
    weighted = lw.samples.weighted((X, LABELS, COUNTS))
    for tuner in (lw.tuners.LinearMode(), lw.tuners.Grid(weighted)):
        with pytest.raises(UnsupportedError, match="have weights"):
            lw.fit(net, weighted, "classification", tuner=tuner)


def test_products_with_the_ggn_count_weights(net):
    posterior = lw.fit(net, [(X, NUMBERS)], lw.Gaussian(1.0), method=lw.Full(), prior=1.0)
    matrix = posterior.ggn(lw.samples.weighted((X, NUMBERS, COUNTS))) @ torch.eye(44).double()
    repeated = both(net, NUMBERS, lw.Gaussian(1.0), method=lw.Full(), prior=1.0)[1]
    assert_close(matrix, repeated.base.curvature.matrix)


class Tokens(nn.Module):
    """An embedding, a layer that all tokens share, and an output for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(6, 3), nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.table(tokens)).tanh())


@pytest.mark.parametrize("method", [lw.Kron(), lw.Kron(sharing="reduce"), lw.Kron("empirical"), lw.EKron()])
def test_tokens_have_the_weight_of_their_sample(method):
    torch.manual_seed(0)
    net = Tokens().double()
    tokens = torch.randint(0, 6, (9, 2), generator=torch.Generator().manual_seed(3))
    y = (tokens + LABELS[:, None]) % 4
    y[2, 1] = -100
    likelihood = lw.Categorical(class_dim=-1)
    assert_same(*both(net, y, likelihood, tokens, method=method, prior=1.0), tokens)


def test_convolutions_count_weights():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)).double()
    x = drawn(5, 9, 2, 3, 3)
    assert_same(*both(net, LABELS, lw.Categorical(), x, prior=1.0), x)


def test_fractions_scale_the_curvature_and_the_count(net):
    """Equal weights of 1/4 are the data themselves under a dispersion of 4, but for the number of data."""
    quarter = lw.fit(net, lw.samples.weighted((X, NUMBERS, torch.full((9,), 0.25))), lw.Gaussian(0.5), prior=1.0)
    whole = lw.fit(net, [(X, NUMBERS)], lw.Gaussian(1.0), prior=1.0)
    assert quarter.base.statistics.data == 2.25
    assert_close(quarter.functions(X).variance, whole.functions(X).variance)


def test_files_hold_a_fractional_number_of_data(net, tmp_path):
    weights = torch.full((9,), 0.1)
    fitted = lw.fit(net, lw.samples.weighted((X, NUMBERS, weights)), lw.Gaussian(), prior=1.0)
    fitted.save(tmp_path / "net")
    assert_close(lw.load(tmp_path / "net", net).log_evidence(), fitted.log_evidence())


def test_training_counts_weights():
    recipe = lw.recipes.online(epochs=2, rate=0.1)
    torch.manual_seed(0)
    start = nn.Linear(3, 4).double()
    weighted = [(X, lw.samples.Weighted(NUMBERS, COUNTS))]
    repeated = [(X.repeat_interleave(COUNTS, 0), NUMBERS.repeat_interleave(COUNTS, 0))]
    one, other = (lw.train(start, data, lw.Gaussian(), recipe=recipe) for data in (weighted, repeated))
    assert_close(one.model.weight, other.model.weight)
    assert_close(one.posterior.log_evidence(), other.posterior.log_evidence())


def test_labels_that_are_known_in_part_count_once():
    y = torch.tensor([[1.0, -1, 0], [-1, -1, -1], [0, 0, 1]])
    count = weighted_count(lw.Bernoulli(ignore_index=-1), torch.zeros(3, 3), y, torch.tensor([2.0, 5, 3]).double())
    assert float(count) == 5
