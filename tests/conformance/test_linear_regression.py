"""Every method that declares itself exact is exact Bayesian linear regression.

One linear layer with Gaussian noise: the tangent model is the model. The methods must give the textbook posterior for
any inputs, or for inputs with orthogonal columns where they say so. The same for the last layer of a network, whose
features are the hidden activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.base import Exactness
from lapwing.posteriors.base import Posterior
from lapwing.posteriors.weight_space import WeightPosterior
from tests import problems
from tests.conformance.declared import exact_entries, power
from tests.references.linear_regression import Exact, regress
from tests.tolerances import assert_close, assert_within

D = torch.float64
N, INPUTS, OUTPUTS, NEW = 17, 4, 3, 5
P = OUTPUTS * (INPUTS + 1)
SIZES = (7, 1, 9)
ENTRIES = exact_entries()


@dataclass(frozen=True)
class Setting:
    """A linear layer (behind fixed features), data, and the design matrix (N C, P) written out by hand."""

    model: nn.Module
    x: Tensor
    y: Tensor
    new: Tensor
    design: Tensor
    design_new: Tensor

    @property
    def head(self) -> nn.Linear:
        return self.model if isinstance(self.model, nn.Linear) else self.model[-1]

    def data(self) -> list[Any]:
        return problems.split(self.x, self.y, SIZES)

    def exact(self, precision: Tensor, noise: Tensor, mean: Tensor | None = None) -> Exact:
        return regress(self.design, self.y.reshape(-1), precision, noise.repeat(N), mean)

    def move_to(self, theta: Tensor) -> None:
        """Put the weights at theta: (weights row by row, biases)."""
        self.head.weight.data = theta[: OUTPUTS * INPUTS].reshape(OUTPUTS, INPUTS).clone()
        self.head.bias.data = theta[OUTPUTS * INPUTS :].clone()


def written_out(features: Tensor) -> Tensor:
    """(n C, P): row (n, c) holds the features of n where theta holds the weights of output c, a one at its bias."""
    rows = []
    for a in features:
        for c in range(OUTPUTS):
            row = torch.zeros(P, dtype=D)
            row[c * INPUTS : (c + 1) * INPUTS] = a
            row[OUTPUTS * INPUTS + c] = 1
            rows.append(row)
    return torch.stack(rows)


def orthogonal(n: int) -> Tensor:
    """Columns orthogonal to each other and to the constant."""
    basis, _ = torch.linalg.qr(torch.cat([torch.ones(n, 1, dtype=D), torch.randn(n, INPUTS, dtype=D)], 1))
    return basis[:, 1:] * torch.linspace(1, 3, INPUTS, dtype=D)


def setting(kind: str) -> Setting:
    torch.manual_seed(3)
    if kind == "last layer":
        body = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, INPUTS), nn.ReLU())
        model: nn.Module = nn.Sequential(*body, nn.Linear(INPUTS, OUTPUTS)).double()
        x, new = torch.randn(N, 2, dtype=D), torch.randn(NEW, 2, dtype=D)
        with torch.no_grad():
            a, a_new = model[:-1](x), model[:-1](new)
    else:
        model = nn.Linear(INPUTS, OUTPUTS).double()
        x = orthogonal(N) if kind == "orthogonal" else torch.randn(N, INPUTS, dtype=D)
        new = torch.randn(NEW, INPUTS, dtype=D)
        a, a_new = x, new
    y = torch.randn(N, OUTPUTS, dtype=D)
    return Setting(model, x, y, new, written_out(a), written_out(a_new))


SETTINGS = [(kind, name) for kind in ("orthogonal", "any inputs", "last layer") for name, entry in ENTRIES.items()
            if (entry.scope == "orthogonal") == (kind == "orthogonal")]  # fmt: skip
# The same for every output, another for each input and for the bias.
BY_INPUT = torch.cat(
    [torch.tensor([0.5, 2.0, 0.7, 1.3], dtype=D).repeat(OUTPUTS), torch.full((OUTPUTS,), 3.0, dtype=D)]
)
FINENESS = {"layer": 0, "input": 1, "weight": 2}


@dataclass(frozen=True)
class PriorCase:
    """A prior, the precision of every weight (P,), and how finely it varies."""

    make: Callable[..., Any]
    given: Any
    precision: Tensor
    varies_by: str


PRIORS = {
    "isotropic": PriorCase(lw.isotropic, 0.625, torch.full((P,), 0.625, dtype=D), "layer"),
    "per layer": PriorCase(lw.per_layer, 0.625, torch.full((P,), 0.625, dtype=D), "layer"),
    "by input": PriorCase(lw.priors.diagonal, BY_INPUT, BY_INPUT, "input"),
    "by weight": PriorCase(
        lw.priors.diagonal, torch.linspace(0.3, 2, P, dtype=D), torch.linspace(0.3, 2, P, dtype=D), "weight"
    ),
}
NOISES = {
    "one": (lw.Gaussian(noise_std=0.7), torch.full((OUTPUTS,), 0.49, dtype=D)),
    "each": (lw.Gaussian(noise_std=(0.7, 0.3, 1.2)), torch.tensor([0.49, 0.09, 1.44], dtype=D)),
}


def fitted(s: Setting, method: str, noise: str = "one", prior: str = "isotropic", *about: Tensor) -> lw.Fitted:
    """``about`` is the mean of the prior, where it is not zero."""
    weights = lw.all_weights if isinstance(s.model, nn.Linear) else lw.last_layer
    chosen, case = ENTRIES[method].settings(P, N * OUTPUTS), PRIORS[prior]
    given = case.make(case.given, *about)
    return lw.fit(s.model, s.data(), NOISES[noise][0], method=chosen, weights=weights, prior=given)


def takes(entry: Exactness, prior: str) -> bool:
    return FINENESS[PRIORS[prior].varies_by] <= FINENESS[entry.prior]


COMBINED = [  # every method has both noises, and every prior that it takes
    (kind, method, [*NOISES][(i + j) % 2], prior)
    for i, (kind, method) in enumerate(SETTINGS)
    for j, prior in enumerate(PRIORS)
    if takes(ENTRIES[method], prior)
]


@pytest.mark.parametrize(("kind", "method", "noise", "prior"), COMBINED)
def test_belief_about_outputs_and_weights(kind: str, method: str, noise: str, prior: str) -> None:
    """Λ^-½ applied to the standard basis squares to the covariance of the weights: no Monte Carlo needed."""
    s, near = setting(kind), power(ENTRIES[method])
    posterior = fitted(s, method, noise, prior)
    exact = s.exact(PRIORS[prior].precision, NOISES[noise][1])
    joint = s.design_new @ exact.covariance @ s.design_new.T
    belief = posterior.functions(s.new)
    assert_close(belief.mean, s.model(s.new))
    blocks = torch.stack([joint[i : i + OUTPUTS, i : i + OUTPUTS] for i in range(0, NEW * OUTPUTS, OUTPUTS)])
    assert_close(belief.cov, blocks, near)
    assert_close(belief.variance, joint.diagonal().reshape(NEW, OUTPUTS), near)
    across = posterior.functions(s.new, joint=True)
    assert across.cov.shape == (NEW, OUTPUTS, NEW, OUTPUTS)
    assert_close(across.cov.reshape(NEW * OUTPUTS, -1), joint, near)
    assert_close(across.variance, belief.variance, near)
    if isinstance(posterior.posterior, WeightPosterior):
        rows = posterior.posterior.precision.sample(torch.eye(P, dtype=D))
        assert_close(rows.T @ rows, exact.covariance, near)


def refused_samples(posterior: lw.Fitted, s: Setting) -> None:
    """Check that a posterior without samples says so."""
    if not posterior.posterior.provides(Posterior.weight_samples):
        with pytest.raises(lw.errors.UnsupportedError, match="has no weight samples"):
            posterior.weight_samples(2)
    if not posterior.posterior.provides(Posterior.function_samples):
        with pytest.raises(lw.errors.UnsupportedError, match="has no function samples"):
            posterior.function_samples(s.new, 2)


@pytest.mark.parametrize(("kind", "method"), SETTINGS)
def test_weight_samples_have_the_posterior_moments(kind: str, method: str, generator: torch.Generator) -> None:
    s = setting(kind)
    posterior = fitted(s, method)
    refused_samples(posterior, s)
    n = 3000  # the standard error of a variance is 1/39 of it
    theta = torch.cat([s.head.weight.detach().reshape(-1), s.head.bias.detach()])
    exact = s.exact(torch.full((P,), 0.625, dtype=D), NOISES["one"][1])
    if posterior.posterior.provides(Posterior.weight_samples):
        gap = posterior.weight_samples(n, generator) - theta
        assert_within(gap[:, :, None] * gap[:, None, :], exact.covariance)
    if posterior.posterior.provides(Posterior.function_samples):
        gap = (posterior.function_samples(s.new, n, generator) - s.model(s.new).detach()).flatten(1)
        assert_within(gap[:, :, None] * gap[:, None, :], s.design_new @ exact.covariance @ s.design_new.T)


@pytest.mark.parametrize(("kind", "method", "noise", "prior"), COMBINED)
def test_log_evidence_at_the_optimum_is_the_marginal_likelihood(kind: str, method: str, noise: str, prior: str) -> None:
    """With w̃ at the posterior mean the Laplace evidence is the Gaussian process's, constants and all.

    The mean of the prior is zero with one noise, and given with one noise for each output.
    """
    s = setting(kind)
    centre = torch.zeros(P, dtype=D) if noise == "one" else torch.linspace(-1, 1, P, dtype=D)
    exact = s.exact(PRIORS[prior].precision, NOISES[noise][1], centre)
    s.move_to(exact.mean)
    posterior = fitted(s, method, noise, prior, centre)
    if posterior.posterior.provides(Posterior.log_evidence):
        assert_close(posterior.log_evidence(), exact.log_evidence)
    else:
        with pytest.raises(lw.errors.UnsupportedError, match="has no evidence"):
            posterior.log_evidence()
    predictive_mean = (s.design_new @ exact.mean).reshape(NEW, OUTPUTS)
    assert_close(posterior.predict(s.new).mean, predictive_mean)


@pytest.mark.parametrize(
    ("method", "prior"), [(m, prior) for m, entry in ENTRIES.items() for prior in PRIORS if not takes(entry, prior)]
)
def test_priors_finer_than_a_method_takes_are_refused(method: str, prior: str) -> None:
    s = setting("any inputs")
    with pytest.raises(lw.errors.UnsupportedError, match=r"prior differs.*weight.*Diagonal\(\) or Full\(\)"):
        fitted(s, method, prior=prior).functions(s.new)


@pytest.mark.parametrize("method", ENTRIES)
def test_noise_from_the_residuals(method: str) -> None:
    s = setting("orthogonal" if ENTRIES[method].scope == "orthogonal" else "any inputs")
    chosen, near = ENTRIES[method].settings(P, N * OUTPUTS), power(ENTRIES[method])
    residual = (s.y - s.model(s.x)).detach()
    one = lw.fit(s.model, s.data(), lw.Gaussian(), method=chosen, prior=0.625)
    assert_close(one.likelihood.noise_variance, residual.square().mean())
    each = lw.fit(s.model, s.data(), lw.Gaussian(per_output=True), method=chosen, prior=0.625)
    noise = residual.square().mean(0)
    assert_close(each.likelihood.noise_variance, noise)
    exact = s.exact(torch.full((P,), 0.625, dtype=D), noise)
    joint = s.design_new @ exact.covariance @ s.design_new.T
    assert_close(each.functions(s.new).variance, joint.diagonal().reshape(NEW, OUTPUTS), near)
    assert_close(each.predict(s.new).variance, joint.diagonal().reshape(NEW, OUTPUTS) + noise, near)


@pytest.mark.parametrize("outputs", [3, 20])
@pytest.mark.parametrize("block", [2, 16])
def test_low_rank_finds_every_one_of_equal_eigenvalues(outputs: int, block: int) -> None:
    """H = I ⊗ A: each eigenvalue comes as often as there are outputs, more often than the block is wide."""
    model = nn.Linear(3, outputs).double()
    x, new = torch.randn(9, 3, dtype=D), torch.randn(NEW, 3, dtype=D)
    y = torch.randn(9, outputs, dtype=D)
    likelihood = lw.Gaussian(noise_std=0.5)
    size = 4 * outputs
    thin = lw.fit(model, [(x, y)], likelihood, method=lw.LowRank(rank=size, block=block), prior=0.625)
    a = torch.cat([x, torch.ones(9, 1, dtype=D)], 1)
    a_new = torch.cat([new, torch.ones(NEW, 1, dtype=D)], 1)
    inner = torch.linalg.inv(a.T @ a / 0.25 + 0.625 * torch.eye(4, dtype=D))
    expected = (a_new @ inner * a_new).sum(1)[:, None].expand(NEW, outputs)
    assert_close(thin.functions(new).variance, expected)


def test_low_rank_keeps_the_prior_where_it_does_not_look() -> None:
    """The variance of f is at least the exact one and at most that of the prior."""
    s = setting("any inputs")
    exact = s.exact(torch.full((P,), 0.625, dtype=D), NOISES["one"][1])
    full = (s.design_new @ exact.covariance @ s.design_new.T).diagonal().reshape(NEW, OUTPUTS)
    prior = (s.design_new @ s.design_new.T / 0.625).diagonal().reshape(NEW, OUTPUTS)
    thin = lw.fit(s.model, s.data(), NOISES["one"][0], method=lw.LowRank(rank=5), prior=0.625)
    variance = thin.functions(s.new).variance
    assert bool((variance >= full * (1 - 1e-6)).all())
    assert bool((variance <= prior * (1 + 1e-6)).all())
    assert bool((variance > full * 1.01).any())
