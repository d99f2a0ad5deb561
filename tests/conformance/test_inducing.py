"""Kernel space, subspaces and inducing points: exact where they must be, on the safe side everywhere else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature.dense import LowRankCurvature
from lapwing.data.batches import Data
from lapwing.methods.inducing_points import Anchors, InducingPoints, SubspaceCurvature, curvature_within, leading_rows
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.problem import Problem
from tests import problems
from tests.references import dense, inducing
from tests.references.tangent import Tangent
from tests.tolerances import SOLVED, assert_close

D = torch.float64
N = 9
STARTS = ["greedy", "kmeans", "random"]
EVERY = {"valla": lw.VaLLA(num_inducing=1000), "kernel space": lw.KernelSpace(),
         "ella with residual": lw.ELLA(num_landmarks=1000, rank=1000, residual=True)}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A small network with data, in unequal batches."""

    kind: str
    outputs: int
    likelihood: Any
    phi: float = 1.0

    @property
    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, self.outputs)).double()

    @property
    def x(self) -> Tensor:
        return torch.randn(N, 2, dtype=D, generator=torch.Generator().manual_seed(1))

    @property
    def new(self) -> Tensor:
        return 2 * torch.randn(5, 2, dtype=D, generator=torch.Generator().manual_seed(2))

    @property
    def y(self) -> Tensor:
        gen = torch.Generator().manual_seed(4)
        if self.kind == "gaussian":
            return torch.randn(N, self.outputs, dtype=D, generator=gen)
        if self.kind == "categorical":
            return torch.randint(0, self.outputs, (N,), generator=gen)
        return torch.randint(0, 2 if self.kind == "bernoulli" else 4, (N, self.outputs), generator=gen)

    def fit(self, method: Any, prior: Any = 0.8, **options: Any) -> lw.Fitted:
        data = options.pop("data", None) or problems.split(self.x, self.y, (4, 1, 4))
        return lw.fit(self.model, data, self.likelihood, method=method, prior=prior, **options)

    def dense(self) -> tuple[Tensor, Tensor, Tensor, Tangent]:
        """The Jacobian (N C, P), the curvature in the outputs over φ (N C, N C), weights, and the tangent model."""
        tangent = Tangent.of(self.kind, self.model, self.x, self.y)
        each = {
            "gaussian": lambda f: torch.eye(f.shape[-1], dtype=D).expand(len(f), -1, -1) / self.phi,
            "categorical": dense.softmax_hessian, "bernoulli": dense.sigmoid_hessian,
            "poisson": lambda f: torch.diag_embed(f.exp()),
        }[self.kind](tangent.f)  # fmt: skip
        return tangent.jacobian.flatten(0, 1), torch.block_diag(*each), tangent.w, tangent


SETTINGS = {
    "regression": Setting("gaussian", 1, lw.Gaussian(noise_std=0.4), 0.16),
    "two outputs": Setting("gaussian", 2, lw.Gaussian(noise_std=0.4), 0.16),
    "classification": Setting("categorical", 3, lw.Categorical()),
    "binary": Setting("bernoulli", 1, lw.Bernoulli()),
    "labels": Setting("bernoulli", 2, lw.Bernoulli()),
    "counts": Setting("poisson", 2, lw.Poisson()),
}


@cache
def full(name: str) -> lw.Fitted:
    return SETTINGS[name].fit(lw.Full())


def joint(posterior: lw.Fitted, x: Tensor) -> Tensor:
    belief = posterior.functions(x, joint=True)
    return belief.cov.reshape(belief.mean.numel(), belief.mean.numel())


def assert_same(one: lw.Fitted, other: lw.Fitted, x: Tensor) -> None:
    assert_close(one.functions(x).mean, other.functions(x).mean)
    assert_close(one.functions(x).cov, other.functions(x).cov, SOLVED)
    assert_close(joint(one, x), joint(other, x), SOLVED)
    assert_close(one.log_evidence(), other.log_evidence(), SOLVED)


# Exact.


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("name", SETTINGS)
def test_all_outputs_of_all_data_give_the_full_posterior(name: str, method: str) -> None:
    posterior = SETTINGS[name].fit(EVERY[method])
    assert_same(posterior, full(name), SETTINGS[name].new)
    effective, exact = posterior.effective_parameters(), full(name).effective_parameters()
    assert effective.total == pytest.approx(exact.total, rel=1e-7)
    assert_close(posterior.predict(SETTINGS[name].new).log_prob(SETTINGS[name].y[:5]),
                 full(name).predict(SETTINGS[name].new).log_prob(SETTINGS[name].y[:5]), SOLVED)  # fmt: skip


@pytest.mark.parametrize("method", [*EVERY, "ella"])
@pytest.mark.parametrize("kind", ["per_layer", "diagonal"])
def test_other_priors(kind: str, method: str) -> None:
    setting = SETTINGS["two outputs"]
    size = sum(p.numel() for p in setting.model.parameters())
    prior = {"per_layer": lw.per_layer(torch.tensor([0.2, 3.0], dtype=D)),
             "diagonal": lw.priors.diagonal(torch.linspace(0.2, 3.0, size, dtype=D))}[kind]  # fmt: skip
    exact = setting.fit(lw.Full(), prior)
    if method == "ella":
        assert_same(setting.fit(lw.ELLA(1000, 1000), prior), exact, setting.x)
    else:
        assert_same(setting.fit(EVERY[method], prior), exact, setting.new)


@pytest.mark.parametrize("method", [*EVERY, "ella"])
@pytest.mark.parametrize("weights", [lw.last_layer, lw.subnetwork(torch.arange(0, 32, 3))], ids=["last", "some"])
def test_some_of_the_weights(weights: Any, method: str) -> None:
    """There are fewer of them than outputs, so that the subspace is everything."""
    setting = SETTINGS["two outputs"]
    exact = setting.fit(lw.Full(), weights=weights)
    chosen = lw.ELLA(1000, 1000) if method == "ella" else EVERY[method]
    assert_same(setting.fit(chosen, weights=weights), exact, setting.new)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_subspace_of_all_landmarks_is_exact_at_the_data(name: str) -> None:
    """And nowhere else: other inputs need directions that the data do not have."""
    setting = SETTINGS[name]
    posterior = setting.fit(lw.ELLA(num_landmarks=1000, rank=1000))
    assert_same(posterior, full(name), setting.x)
    gap = full(name).functions(setting.new).variance - posterior.functions(setting.new).variance
    assert float(gap.max()) > 1e-3 * float(full(name).functions(setting.new).variance.max())


@pytest.mark.parametrize("residual", [False, True])
def test_a_subspace_of_all_weights_is_exact_everywhere(residual: bool) -> None:
    """More rows than weights, and a rank that reaches them."""
    model = nn.Linear(4, 3).double()
    x, y, new = torch.randn(17, 4, dtype=D), torch.randn(17, 3, dtype=D), torch.randn(5, 4, dtype=D)
    fit = lambda m: lw.fit(model, [(x, y)], lw.Gaussian(noise_std=0.7), method=m, prior=0.6)
    assert_same(fit(lw.ELLA(num_landmarks=51, rank=15, residual=residual)), fit(lw.Full()), new)
    posterior = fit(lw.ELLA(num_landmarks=51, rank=400))
    assert len(posterior.posterior.curvature.directions) == 15


def test_ignored_data_give_the_exact_posterior_of_the_rest() -> None:
    """They have outputs like others, of which the points must not take the place of those that count."""
    setting = SETTINGS["classification"]
    y = setting.y.clone()
    y[[1, 3, 4, 8]] = -100
    fit = lambda m: setting.fit(m, data=problems.split(setting.x, y, (4, 1, 4)))
    for method in EVERY.values():
        assert_same(fit(method), fit(lw.Full()), setting.new)


# The same directions, with and without what they leave out.


def shared(name: str, prior: Any = None) -> tuple[Setting, Problem, Data, Anchors]:
    """Five points that are no data, with outputs in turn."""
    setting = SETTINGS[name]
    problem = setting.fit(lw.Full(), 0.8 if prior is None else prior).posterior.problem
    inputs = torch.randn(5, 2, dtype=D, generator=torch.Generator().manual_seed(7))
    anchors = Anchors(problem.network, inputs, torch.arange(5) % setting.outputs)
    return setting, problem, training(setting), anchors


@pytest.mark.parametrize("prior", ["isotropic", "per_layer"])
@pytest.mark.parametrize("name", SETTINGS)
def test_inducing_points_are_the_subspace_and_the_prior_outside(name: str, prior: str) -> None:
    given = 0.8 if prior == "isotropic" else lw.per_layer(torch.tensor([0.2, 3.0], dtype=D))
    setting, problem, data, anchors = shared(name, given)
    rows = leading_rows(anchors, problem.prior, 5)
    directions = rows / problem.prior.vector
    gram, statistics = curvature_within(problem, data, directions)
    network, phi = problem.network, problem.likelihood.dispersion
    subspace = SubspaceCurvature(network.selection, directions, gram).precision(phi, problem.prior)
    jacobians = network.linearise(setting.new).jacobians()
    z = torch.stack([dense.jacobian(setting.model, anchors.inputs, 5)[i, c] for i, c in enumerate(anchors.outputs)])
    new = dense.jacobian(setting.model, setting.new, 5).flatten(0, 1)
    precision = problem.prior.vector
    across = inducing.kernel(new, z, precision)
    explained = across @ torch.linalg.solve(inducing.kernel(z, z, precision), across.T)
    expected = subspace.cross(jacobians) + inducing.kernel(new, new, precision) - explained
    points = InducingPoints(problem, anchors, statistics, N, movable=False).posterior(data)
    assert_close(points(setting.new, joint=True).cov.reshape(expected.shape), expected)
    values, turn = torch.linalg.eigh(gram)
    _, singular, vectors = torch.linalg.svd((turn * values.sqrt()).T @ rows, full_matrices=False)
    low = LowRankCurvature(singular.square(), vectors, network.layout, network.selection)
    stored = WeightPosterior.fitted(problem, low, statistics)
    assert_close(stored(setting.new, joint=True).cov.reshape(expected.shape), expected)
    jac, curvature, _, _ = setting.dense()
    assert_close(expected, inducing.covariance(new, z, jac, curvature, precision), SOLVED)


# Against the formulas.


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_covariance_and_bound_are_the_formulas(name: str, start: str) -> None:
    setting = SETTINGS[name]
    posterior = setting.fit(lw.VaLLA(num_inducing=6, start=start, optimiser="none"))
    anchors = posterior.posterior.curvature.anchors
    each = dense.jacobian(setting.model, anchors.inputs, len(anchors))
    z = each[torch.arange(len(anchors)), anchors.outputs]
    jac, curvature, w, tangent = setting.dense()
    precision = torch.full((len(w),), 0.8, dtype=D)
    new = dense.jacobian(setting.model, setting.new, 5).flatten(0, 1)
    assert_close(joint(posterior, setting.new), inducing.covariance(new, z, jac, curvature, precision), SOLVED)
    fit = -tangent.loss(w) / setting.phi - tangent.log_normaliser(setting.phi) - 0.4 * w.square().sum()
    assert_close(posterior.log_evidence(), fit + inducing.log_occam(z, jac, curvature, precision), SOLVED)


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_subspaces_are_the_formulas(name: str, rank: int) -> None:
    """All landmarks, of which there is no choice, and the leading directions of their kernel."""
    setting = SETTINGS[name]
    posterior = setting.fit(lw.ELLA(num_landmarks=1000, rank=rank))
    jac, curvature, w, _ = setting.dense()
    precision = torch.full((len(w),), 0.8, dtype=D)
    d = inducing.directions(jac, precision, rank)
    covariance = inducing.within(d, jac.T @ curvature @ jac + torch.diag(precision))
    new = dense.jacobian(setting.model, setting.new, 5).flatten(0, 1)
    assert_close(joint(posterior, setting.new), new @ covariance @ new.T, SOLVED)
    assert posterior.effective_parameters().total == pytest.approx(
        float(rank - (precision * covariance.diagonal()).sum()), rel=1e-8
    )


# On the safe side.


@pytest.mark.parametrize("rank", [1, 3, 6, 100])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_subspace_is_never_above_the_exact_covariance(name: str, rank: int) -> None:
    setting = SETTINGS[name]
    x = torch.cat([setting.x, setting.new, 10 * setting.new])
    exact = joint(full(name), x)
    for seed in range(3):
        posterior = setting.fit(lw.ELLA(num_landmarks=7, rank=rank), generator=torch.Generator().manual_seed(seed))
        smallest = float(torch.linalg.eigvalsh(exact - joint(posterior, x)).min())
        assert smallest >= -1e-10 * float(exact.diagonal().max())


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_evidence_of_inducing_points_is_a_lower_bound(name: str, start: str) -> None:
    """Whatever their number, under the prior they were made for and multiples of it."""
    setting, exact = SETTINGS[name], full(name)
    for count in (1, 2, 5, 8, 100):
        posterior = setting.fit(lw.VaLLA(num_inducing=count, start=start, optimiser="none"))
        for precision in (0.8, 1e-3, 30.0):
            bound = float(posterior.with_prior(precision).log_evidence())
            value = float(exact.with_prior(precision).log_evidence())
            assert bound <= value + 1e-9 * abs(value)


@pytest.mark.parametrize("prior", [lw.per_layer(torch.tensor([0.01, 30.0])), lw.per_layer(torch.tensor([30.0, 0.01]))])
def test_the_evidence_is_a_lower_bound_under_any_prior_that_points_are_made_for(prior: Any) -> None:
    setting = SETTINGS["two outputs"]
    value = float(setting.fit(lw.Full(), prior).log_evidence())
    for count in (1, 4, 9):
        for start in STARTS:
            posterior = setting.fit(lw.VaLLA(num_inducing=count, start=start, optimiser="none"), prior)
            assert float(posterior.log_evidence()) <= value + 1e-9 * abs(value)


@pytest.mark.parametrize("name", SETTINGS)
def test_more_points_raise_the_bound(name: str) -> None:
    """Greedy ones are nested; the last of them reach the evidence."""
    setting = SETTINGS[name]
    bounds = [
        float(setting.fit(lw.VaLLA(num_inducing=count, optimiser="none")).log_evidence()) for count in range(1, 20)
    ]
    steps = torch.tensor(bounds, dtype=D).diff()
    assert float(steps.min()) >= -1e-9 * abs(bounds[-1])
    assert float(steps[:3].min()) > 0
    reached = N * setting.outputs <= 19
    assert (abs(bounds[-1] - float(full(name).log_evidence())) < 1e-7 * abs(bounds[-1])) == reached


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", ["two outputs", "classification"])
def test_the_batch_size_does_not_matter_to_a_subspace(name: str, residual: bool) -> None:
    """The same landmarks are drawn, and the sums are the same."""
    setting = SETTINGS[name]
    posteriors = [
        setting.fit(lw.ELLA(num_landmarks=6, rank=4, residual=residual), data=problems.split(setting.x, setting.y, s))
        for s in ((9,), (1,) * 9, (2, 5, 2))
    ]
    for other in posteriors[1:]:
        assert_close(joint(other, setting.new), joint(posteriors[0], setting.new))
        assert_close(other.log_evidence(), posteriors[0].log_evidence())


@pytest.mark.parametrize("method", [*EVERY, "ella"])
def test_equal_data_give_the_exact_posterior(method: str) -> None:
    """Each datum four times: the kernel is singular, and what is null in it is left out."""
    setting = SETTINGS["two outputs"]
    data = problems.split(setting.x.repeat(4, 1), setting.y.repeat(4, 1), (20, 16))
    exact = setting.fit(lw.Full(), data=data)
    chosen = lw.ELLA(num_landmarks=1000, rank=1000) if method == "ella" else EVERY[method]
    posterior = setting.fit(chosen, data=data)
    assert_same(posterior, exact, setting.x if method == "ella" else setting.new)
    if method == "ella":
        assert len(posterior.posterior.curvature.directions) == int(torch.linalg.matrix_rank(setting.dense()[0]))


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize(
    "method",
    [lw.ELLA(8, 5), lw.ELLA(8, 5, residual=True), lw.VaLLA(8, optimiser="none"), lw.VaLLA(3, optimiser="none")],
    ids=["ella", "ella with residual", "valla", "valla of three"],
)
def test_priors_and_noise_are_tuned_without_the_network(
    method: Any, noise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read off the data once serves all; MacKay's updates end where the evidence, or its bound, is largest."""
    setting = SETTINGS["two outputs"]
    posterior = replace(setting, likelihood=lw.Gaussian()).fit(method)
    float(posterior.log_evidence())
    monkeypatch.setattr(type(posterior.network.model), "forward", lambda *_: pytest.fail("the network ran"))
    values = (0.01, 0.1, 1.0, 10.0)
    picked = posterior.tuned(lw.tuners.Grid(precisions=values))
    evidences = [float(posterior.with_prior(value).log_evidence()) for value in values]
    assert float(picked.prior.values) == pytest.approx(values[evidences.index(max(evidences))])
    one = posterior.tuned(lw.tuners.MaximiseEvidence(noise=noise, tolerance=1e-9))
    other = posterior.tuned(lw.tuners.FixedPoint(noise=noise, tolerance=1e-8))
    assert float(one.prior.values) == pytest.approx(float(other.prior.values), rel=1e-5)
    assert float(one.likelihood.dispersion) == pytest.approx(float(other.likelihood.dispersion), rel=1e-5)
    assert float(one.log_evidence()) >= max(evidences)


@pytest.mark.parametrize("method", [*EVERY, "ella"])
@pytest.mark.parametrize("mean", ["network", "tangent"])
def test_the_tangent_models_own_optimum(mean: str, method: str) -> None:
    """Found through the curvature of all data in any form, it is that of the full posterior."""
    setting = SETTINGS["classification"]
    tuner = lw.tuners.LinearMode(mean=mean, tolerance=1e-6, max_steps=100)
    chosen = lw.ELLA(num_landmarks=1000, rank=1000) if method == "ella" else EVERY[method]
    posterior, exact = (setting.fit(m, 0.8).tuned(tuner.with_data(training(setting))) for m in (chosen, lw.Full()))
    assert float(posterior.prior.values) == pytest.approx(float(exact.prior.values), rel=1e-4)
    assert float(posterior.log_evidence()) == pytest.approx(float(exact.log_evidence()), rel=1e-6)
    assert_close(posterior.functions(setting.x).mean, exact.functions(setting.x).mean, 0.25)
    assert_close(posterior.functions(setting.x).cov, exact.functions(setting.x).cov, 0.25)


def training(setting: Setting) -> Data:
    return Data(problems.split(setting.x, setting.y, (4, 1, 4)), torch.device("cpu"))


@pytest.mark.parametrize("method", [lw.ELLA(8, 5), lw.VaLLA(6, optimiser="none")], ids=["ella", "valla"])
def test_held_out_data_pick_a_precision(method: Any) -> None:
    """The grid reads every variance off one Jacobian: the same as a prediction under each."""
    setting = SETTINGS["classification"]
    posterior, held = setting.fit(method), (setting.new, setting.y[:5])
    values = (0.01, 0.3, 10.0)
    scores = [-float(posterior.with_prior(v).predict(setting.new).log_prob(setting.y[:5]).mean()) for v in values]
    picked = posterior.tuned(lw.tuners.Grid([held], values))
    assert float(picked.prior.values) == pytest.approx(values[scores.index(min(scores))])
    assert_close(torch.tensor([s.score for s in picked.trace.steps], dtype=D), torch.tensor(scores, dtype=D))
