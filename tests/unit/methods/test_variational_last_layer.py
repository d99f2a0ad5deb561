"""Mean-field variational inference over the last layer, against dense formulas and quadrature in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from tests.tolerances import SOLVED, assert_close, assert_within

D = torch.float64
TOTAL, INPUTS, UNITS, OUTPUTS = 17, 4, 5, 2
X = torch.randn(TOTAL, INPUTS, dtype=D, generator=torch.Generator().manual_seed(1))
NEW = torch.randn(6, INPUTS, dtype=D, generator=torch.Generator().manual_seed(2))
Y = torch.randn(TOTAL, OUTPUTS, dtype=D, generator=torch.Generator().manual_seed(3))
LABELS = torch.randint(0, 3, (TOTAL,), generator=torch.Generator().manual_seed(4))


def net(outputs: int = OUTPUTS, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    last = nn.Linear(UNITS, outputs, bias=bias)
    return nn.Sequential(nn.Linear(INPUTS, UNITS), nn.Tanh(), last).double().eval()


def variational(**settings: Any) -> Any:
    return lw.baselines.VariationalLastLayer(**settings)


def fitted(model: nn.Module, likelihood: Any, y: Tensor, prior: Any = 2.0, x: Tensor = X, **settings: Any) -> lw.Fitted:
    return lw.fit(model, [(x, y)], likelihood, method=variational(**settings), prior=prior)


def features(model: nn.Sequential, x: Tensor) -> Tensor:
    """Return the input of the last layer, with ones if that has a bias."""
    a = model[:-1](x).detach()
    return torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1) if model[-1].bias is not None else a


# Gaussian noise: the closed form


PRIORS: dict[str, Any] = {"one": 2.0, "off zero": lw.isotropic(0.5, mean=0.3), "layers": lw.per_layer(3.0)}
NOISES: dict[str, Any] = {"one": 0.4, "each": (0.4, 0.9)}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("prior", PRIORS)
def test_gaussian_noise_gives_the_exact_mean_and_the_diagonal_of_the_precision(
    prior: str, noise: str, bias: bool
) -> None:
    model = net(bias=bias)
    posterior = fitted(model, lw.Gaussian(noise_std=NOISES[noise]), Y, PRIORS[prior])
    a, precision = features(model, X), float(posterior.prior.values.flatten()[0])
    centre = torch.full((a.shape[1],), 0.3 if prior == "off zero" else 0.0, dtype=D)
    for c in range(OUTPUTS):
        phi = (NOISES[noise] if noise == "one" else NOISES[noise][c]) ** 2
        full = a.T @ a / phi + precision * torch.eye(a.shape[1], dtype=D)
        assert_close(posterior.posterior.mean[c], torch.linalg.solve(full, a.T @ Y[:, c] / phi + precision * centre))
        assert_close(posterior.posterior.variance[c], 1 / full.diagonal())
        new = features(model, NEW)
        assert_close(posterior.functions(NEW).mean[:, c], new @ posterior.posterior.mean[c])
        assert_close(posterior.functions(NEW).variance[:, c], new.square() @ (1 / full.diagonal()))
        assert_close(
            posterior.functions(NEW, joint=True).cov[:, c, :, c], new @ torch.diag(1 / full.diagonal()) @ new.T
        )
    assert float(posterior.functions(NEW, joint=True).cov[:, 0, :, 1].abs().max()) == 0


def dense_bound(a: Tensor, mean: Tensor, variance: Tensor, phi: float, alpha: float) -> Tensor:
    """Return the evidence bound for Gaussian noise, datum by datum from its definition."""
    total = torch.zeros((), dtype=D)
    for c in range(OUTPUTS):
        noise = torch.distributions.Normal(a @ mean[c], phi**0.5)
        total += noise.log_prob(Y[:, c]).sum() - 0.5 * (a.square() @ variance[c]).sum() / phi
        prior = torch.distributions.Normal(torch.zeros_like(mean[c]), alpha**-0.5)
        own = torch.distributions.Normal(mean[c], variance[c].sqrt())
        total -= torch.distributions.kl_divergence(own, prior).sum()
    return total


def test_the_bound_is_that_of_its_definition_and_the_highest() -> None:
    model = net()
    posterior = fitted(model, lw.Gaussian(noise_std=0.5), Y, 1.5).posterior
    a, mean, variance = features(model, X), posterior.mean, posterior.variance
    best = dense_bound(a, mean, variance, 0.25, 1.5)
    assert_close(torch.tensor(posterior.elbo, dtype=D), best)
    full = a.T @ a / 0.25 + 1.5 * torch.eye(a.shape[1], dtype=D)
    evidence = (
        torch.distributions.MultivariateNormal(
            torch.zeros(TOTAL, dtype=D), a @ a.T / 1.5 + 0.25 * torch.eye(TOTAL, dtype=D)
        )
        .log_prob(Y.T)
        .sum()
    )
    assert posterior.elbo < float(evidence)
    # The gap of a mean-field optimum is that of the log-determinants.
    assert_close(evidence - best, 0.5 * OUTPUTS * (full.diagonal().log().sum() - torch.logdet(full)))
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        step = 0.01 * torch.randn(2, *mean.shape, dtype=D, generator=generator)
        assert float(dense_bound(a, mean + step[0], variance * step[1].exp(), 0.25, 1.5)) < float(best)


def test_noise_is_the_residual_and_a_prior_is_learned_if_none_is_given() -> None:
    model = net()
    posterior = fitted(model, "regression", Y)
    assert_close(posterior.likelihood.dispersion, (model(X) - Y).square().mean().detach())
    learned = lw.fit(model, [(X, Y)], "regression", method=variational())
    kron = lw.fit(model, [(X, Y)], "regression", weights="last_layer", tuner=lw.tuners.MaximiseEvidence())
    assert_close(learned.prior.values, kron.prior.values, SOLVED)
    assert learned.network.selection.names == ("2.weight", "2.bias")


# Other likelihoods


def quadrature(a: Tensor, y: Tensor, mean: Tensor, deviation: Tensor, alpha: float) -> Tensor:
    """Return the negative bound of binary labels, with the expectation over the one logit by Gauss and Hermite."""
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(40))
    f = (a @ mean)[:, None] + (a.square() @ deviation.square()).sqrt()[:, None] * nodes
    losses = F.softplus(f) - y[:, None] * f
    scaled = alpha * deviation.square()
    kl = 0.5 * (scaled - 1 - scaled.log() + alpha * mean.square()).sum()
    return (losses * weights / weights.sum()).sum() + kl


def test_binary_labels_reach_the_optimum_of_the_bound_by_quadrature() -> None:
    """The slope of the average over S draws at n data has a standard error of about 1/√(S n) of a unit."""
    model, alpha, y = net(outputs=1), 2.0, (LABELS > 0).double()
    a = features(model, X)
    posterior = fitted(model, "binary", y, alpha, samples=1000).posterior
    mean, spread = (torch.zeros(a.shape[1], dtype=D, requires_grad=True) for _ in range(2))
    optimiser = torch.optim.LBFGS([mean, spread], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = quadrature(a, y, mean, spread.exp(), alpha)
        loss.backward()
        return loss

    optimiser.step(closure)
    best = float(closure().detach())
    found = float(quadrature(a, y, posterior.mean[0], posterior.variance[0].sqrt(), alpha))
    error = 5 / (1000 * TOTAL) ** 0.5
    assert best <= found < best + error**2 * 2 * a.shape[1]
    assert float(((posterior.mean[0] - mean) / spread.exp()).detach().abs().max()) < error
    assert float((posterior.variance[0].log() - 2 * spread).detach().abs().max()) < 2 * error
    assert abs(-posterior.elbo - best) < 0.05


def test_classes_have_a_bound_without_slope() -> None:
    """With the same draws, a step in any direction lowers the average; with more draws the optimum hardly moves."""
    model = net(outputs=3)
    posterior = fitted(model, "classification", LABELS, samples=64).posterior
    more = fitted(model, "classification", LABELS, samples=256, seed=1).posterior
    deviation = posterior.variance.sqrt()
    assert float(((posterior.mean - more.mean) / deviation).abs().max()) < 5 / (64 * TOTAL) ** 0.5
    assert float((posterior.variance / more.variance - 1).abs().max()) < 10 / (64 * TOTAL) ** 0.5
    start = dict(model[-1].named_parameters())
    assert float((posterior.mean[:, :-1] - start["weight"]).detach().abs().max()) > 0.1  # it moved


LIKELIHOODS: dict[str, tuple[Any, Tensor]] = {
    "labels": (lw.Bernoulli(), torch.stack([LABELS > 0, LABELS > 1], 1).double()),
    "counts": ("poisson", torch.stack([LABELS, 2 - LABELS], 1)),
    "both": (lw.HeteroscedasticGaussian(), Y[:, :1]), "tempered": (lw.Categorical(temperature=2.0), LABELS > 1),
    "weighted": (lw.Categorical(class_weights=(0.5, 2.0)), LABELS > 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_likelihood(name: str) -> None:
    likelihood, y = LIKELIHOODS[name]
    posterior = fitted(net(), likelihood, y.long() if y.dtype == torch.bool else y)
    assert float(posterior.functions(NEW).variance.min()) > 0
    assert bool(torch.isfinite(posterior.predict(NEW).log_prob(posterior.predict(NEW).sample(1)[0])).all())


# Draws, seeds, files


def test_drawn_functions_are_those_of_networks_with_drawn_weights() -> None:
    model = net()
    posterior = fitted(model, "regression", Y)
    seeded = lambda: torch.Generator().manual_seed(5)
    draws = posterior.function_samples(NEW, 3000, seeded())
    assert_close(draws[:4], posterior.network_samples(NEW, 4, seeded()))
    assert_within(draws, posterior.functions(NEW).mean)
    belief = posterior.functions(NEW)
    assert_within((draws - belief.mean).square(), belief.variance)
    assert_close(belief.centred_variance, lw.FunctionGaussian(belief.mean, belief.cov).centred_variance)


class Counted(nn.Sequential):
    """A network that counts the rows that it has seen, in all its copies."""

    rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        out: Tensor = super().forward(x)
        return out


def test_features_are_computed_once() -> None:
    model = Counted(*net(outputs=3)).eval()
    Counted.rows.clear()
    lw.fit(model, [(X, LABELS)], "classification", weights="last_layer", method=lw.baselines.MapOnly())
    plain = sum(Counted.rows)
    Counted.rows.clear()
    fitted(model, "classification", LABELS)
    # One pass, the checks that every fit makes, and one run that compares the Jacobian of the first batch.
    assert sum(Counted.rows) == plain + len(X)


# What is refused


class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return 2 * out


def test_unsupported_problems_are_refused() -> None:
    fit = lambda model, **options: lw.fit(model, [(X, Y)], "regression", method=variational(), **options)
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"with the weights 0\.weight, .*; expected those of a last layer"
    ):
        fit(net(), weights="all", prior=1.0)
    with pytest.raises(lw.errors.UnsupportedError, match="a g-prior follows the curvature"):
        fit(net(), prior=lw.priors.g_prior())
    with pytest.raises(lw.errors.UnsupportedError, match="the outputs differ from the last layer's by up to"):
        fit(Scaled(*net()).eval(), prior=1.0)
    posterior = fit(net(), prior=1.0)
    for call in (posterior.log_evidence, lambda: posterior.with_prior(1.0)):
        with pytest.raises(lw.errors.UnsupportedError, match="VariationalLastLayer has no"):
            call()


def test_a_search_that_does_not_converge() -> None:
    with pytest.raises(lw.errors.NumericalError, match=r"slope of the evidence bound is .* after 1 .*Raise max_steps"):
        fitted(net(outputs=3), "classification", LABELS, max_steps=1, tolerance=1e-9)


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_features_beyond_the_byte_budget_are_refused(likelihood: str) -> None:
    """16 bytes for each number: features with a one for the bias, and draws of every output unless in closed form."""
    classes = likelihood == "classification"
    outputs, draws = (3, 64) if classes else (OUTPUTS, 1)
    most = 2**20 // (16 * (UNITS + 1 + draws * outputs))  # data that four times a quarter of a MiB are enough for
    x = torch.zeros(most + 1, INPUTS, dtype=D)
    y = torch.zeros(len(x), dtype=torch.long) if classes else torch.zeros(len(x), outputs, dtype=D)
    given = lw.Categorical() if classes else lw.Gaussian(noise_std=0.5)
    fit = lambda n: fitted(net(outputs), given, y[:n], 2.0, x[:n], samples=64)
    with lw.memory.limited(2**18):
        assert fit(most).functions(NEW).variance.shape == (6, outputs)
        with pytest.raises(lw.errors.UnsupportedError, match=f"features of {most + 1} data takes .* GiB at once.*Kron"):
            fit(most + 1)
