"""``lapwing.compat.Laplace`` against laplace-torch 0.3, on small networks in float64.

Where laplace-torch is right, numbers agree to rounding. Its full GGN has eight digits (1.1e-8 against a dense reference
in float64), so comparisons with "full" over whole layers have the tolerance 1e-6, all others 1e-9. Where it is not
right, a test shows which of the two agrees with a reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

from lapwing.compat import HessianStructure, Laplace, SubsetOfWeights

laplace = pytest.importorskip("laplace")
pytestmark = pytest.mark.filterwarnings("ignore")  # laplace-torch warns of its defaults
ROUNDING, EIGHT_DIGITS = 1e-9, 1e-6
CASES = {  # weights, structure, whether layers have biases, tolerance
    "all full": ("all", "full", True, EIGHT_DIGITS),
    "all diag": ("all", "diag", True, ROUNDING),
    "all kron": ("all", "kron", False, ROUNDING),  # with biases: see the test of these
    "last layer full": ("last_layer", "full", True, EIGHT_DIGITS),
    "last layer diag": ("last_layer", "diag", True, ROUNDING),
    "last layer kron": ("last_layer", "kron", False, ROUNDING),
    "subnetwork full": ("subnetwork", "full", True, ROUNDING),
    "subnetwork diag": ("subnetwork", "diag", True, ROUNDING),
}
LIKELIHOODS = ("regression", "classification")
NETWORKS = ("mlp", "cnn")


def network(name: str, outputs: int, bias: bool) -> nn.Module:
    torch.manual_seed(1)
    if name == "mlp":
        layers = [nn.Linear(3, 5, bias=bias), nn.Tanh(), nn.Linear(5, 4, bias=bias), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(4, outputs, bias=bias)).double()
    layers = [nn.Conv2d(2, 3, 3, bias=bias), nn.Tanh(), nn.Flatten(), nn.Linear(18, outputs, bias=bias)]
    return nn.Sequential(*layers).double()


def rows(name: str, likelihood: str) -> DataLoader[Any]:
    torch.manual_seed(2)
    x = torch.randn(23, 3).double() if name == "mlp" else torch.randn(17, 2, 4, 5).double()
    y = torch.randn(len(x), 2).double() if likelihood == "regression" else torch.randint(3, (len(x),))
    return DataLoader(TensorDataset(x, y), 7)  # the last batch is smaller


def both(case: str, likelihood: str, name: str = "mlp", **more: Any) -> tuple[Any, Laplace, Tensor, float]:
    """laplace-torch's result and Lapwing's, inputs, and the tolerance."""
    subset, structure, bias, tolerance = CASES[case]
    model, loader = network(name, 2 if likelihood == "regression" else 3, bias), rows(name, likelihood)
    settings = {"prior_precision": 2.3, "temperature": 1.7, "prior_mean": 0.1}
    settings |= {"sigma_noise": 0.6} if likelihood == "regression" else {}
    settings |= {"subnetwork_indices": torch.LongTensor([7, 3, 30, 11])} if subset == "subnetwork" else {}
    theirs = laplace.Laplace(model, likelihood, subset, structure, **(settings | more))
    ours = Laplace(model, likelihood, SubsetOfWeights(subset), HessianStructure(structure), **(settings | more))
    theirs.fit(loader)
    ours.fit(loader)
    return theirs, ours, loader.dataset[:5][0], tolerance


def assert_same(ours: Any, theirs: Any, tolerance: float) -> None:
    """Relative to the largest entry: small entries of a matrix carry the rounding of the large ones."""
    ours, theirs = torch.as_tensor(ours).detach().double(), torch.as_tensor(theirs).detach().double()
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < tolerance


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("case", CASES)
def test_regression_predictions(case: str, name: str) -> None:
    theirs, ours, x, tolerance = both(case, "regression", name)
    for arguments in ({}, {"joint": True}, {"diagonal_output": True}):
        for one, other in zip(ours(x, **arguments), theirs(x, **arguments), strict=True):
            assert_same(one, other, tolerance)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("case", CASES)
def test_probabilities(case: str, name: str) -> None:
    theirs, ours, x, tolerance = both(case, "classification", name)
    for link in ("probit", "bridge", "bridge_norm"):
        assert_same(ours(x, link_approx=link), theirs(x, link_approx=link), tolerance)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("case", CASES)
def test_marginal_likelihood_and_its_terms(case: str, likelihood: str) -> None:
    theirs, ours, _, tolerance = both(case, likelihood)
    for term in ("log_likelihood", "scatter", "log_det_ratio", "log_det_prior_precision", "prior_precision_diag"):
        assert_same(getattr(ours, term), getattr(theirs, term), tolerance)
    assert_same(ours.log_det_posterior_precision, theirs.log_det_posterior_precision, tolerance)
    changed = {"prior_precision": torch.tensor(7.1), "sigma_noise": torch.tensor(0.4)}
    changed = changed if likelihood == "regression" else {"prior_precision": torch.tensor(7.1)}
    assert_same(ours.log_marginal_likelihood(**changed), theirs.log_marginal_likelihood(**changed), tolerance)
    for name in ("n_data", "n_outputs"):
        assert getattr(ours, name) == getattr(theirs, name)


def gradient(la: Any) -> Tensor:
    """The gradient of the marginal likelihood in the precision and in the noise."""
    precision = torch.full((1,), 1.3, dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    la.log_marginal_likelihood(precision, sigma).backward()
    return torch.stack([precision.grad[0], sigma.grad])


@pytest.mark.parametrize("case", ["all full", "all diag", "subnetwork full"])
def test_gradients_of_the_marginal_likelihood(case: str) -> None:
    theirs, ours, _, tolerance = both(case, "regression")
    assert_same(gradient(ours), gradient(theirs), tolerance)


@pytest.mark.parametrize("case", ["all full", "all diag", "subnetwork full", "subnetwork diag", "last layer full"])
def test_posterior_over_weights(case: str) -> None:
    theirs, ours, _, tolerance = both(case, "classification")
    assert_same(ours.posterior_precision, theirs.posterior_precision, tolerance)
    full = case.endswith("full")
    name = "posterior_covariance" if full else "posterior_variance"
    assert_same(getattr(ours, name), getattr(theirs, name), 10 * tolerance)
    root = ours.posterior_scale
    assert_same(root @ root.mT if full else root.square(), getattr(theirs, name), 10 * tolerance)
    if not case.startswith("subnetwork"):
        value = ours.mean + 0.1
        assert_same(ours.log_prob(value), theirs.log_prob(value), tolerance)
        assert_same(ours.log_prob(value, normalized=False), theirs.log_prob(value, normalized=False), tolerance)


@pytest.mark.parametrize("case", ["all full", "all diag", "all kron"])
def test_functional_variance_of_given_jacobians(case: str) -> None:
    theirs, ours, _, tolerance = both(case, "regression")
    jacobians = torch.randn(4, 2, ours.n_params, dtype=torch.float64)
    assert_same(ours.functional_variance(jacobians), theirs.functional_variance(jacobians), tolerance)
    assert_same(ours.functional_covariance(jacobians), theirs.functional_covariance(jacobians), tolerance)


@pytest.mark.parametrize(
    ("case", "entries"), [("all full", 6), ("all diag", 6), ("all full", 54), ("all diag", 54), ("all kron", 3)]
)
def test_several_prior_precisions(case: str, entries: int) -> None:
    precisions = torch.linspace(0.5, 4, entries).double()
    theirs, ours, x, tolerance = both(case, "regression", prior_precision=precisions)
    assert_same(ours(x)[1], theirs(x)[1], tolerance)
    assert_same(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood(), tolerance)


@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
def test_precision_by_the_marginal_likelihood(structure: str) -> None:
    theirs, ours, _, _ = both("all diag", "classification")
    for each in (ours, theirs):
        each.optimize_prior_precision(method="marglik", prior_structure=structure, n_steps=30)
    assert_same(ours.prior_precision, theirs.prior_precision, 1e-6)


def test_precision_by_grid_search_with_a_loss() -> None:
    theirs, ours, _, _ = both("all kron", "classification")
    held_out = DataLoader(TensorDataset(torch.randn(30, 3).double(), torch.randint(3, (30,))), 16)
    loss = lambda probs, y: -probs.gather(1, y[:, None]).log().mean()
    for each in (ours, theirs):
        each.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=15, loss=loss)
    assert_same(ours.prior_precision, theirs.prior_precision.reshape(-1), 1e-6)


def test_precision_of_a_regression_by_grid_search_with_a_loss() -> None:
    held_out = DataLoader(TensorDataset(torch.randn(30, 3).double(), torch.randn(30, 2).double()), 16)

    def log_loss(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        total = variance.diagonal(dim1=-2, dim2=-1) + 0.36
        return ((y - mean).square() / total + total.log()).mean()

    theirs, ours, _, _ = both("all diag", "regression")
    for each in (ours, theirs):
        each.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=9, loss=log_loss)
    assert_same(ours.prior_precision, theirs.prior_precision.reshape(-1), 1e-6)


@pytest.mark.parametrize("case", ["all full", "all kron", "subnetwork diag"])
def test_moments_of_weight_samples(case: str) -> None:
    theirs, ours, _, _ = both(case, "regression")
    draws, n = ours.sample(4000, torch.Generator().manual_seed(0)), 4000
    others = theirs.sample(4000)
    assert draws.shape == others.shape
    spread = others.var(0)
    changed = spread > 1e-12
    assert torch.equal(changed, draws.var(0) > 1e-12)
    error = (draws.mean(0) - others.mean(0))[changed] / (2 * spread[changed] / n).sqrt()
    assert float(error.abs().max()) < 5  # standard errors
    ratio = draws.var(0)[changed] / spread[changed]
    assert float((ratio - 1).abs().max()) < 5 * (4 / n) ** 0.5  # a variance has the relative error √(2 / n), twice


@pytest.mark.parametrize("kind", ["glm", "nn"])
def test_sampled_predictions(kind: str) -> None:
    theirs, ours, x, _ = both("all diag", "classification", prior_precision=20.0)
    n = 1000
    ours_p = ours(x, pred_type=kind, link_approx="mc", n_samples=n)
    theirs_p = theirs(x, pred_type=kind, link_approx="mc", n_samples=n)
    each = theirs.predictive_samples(x, pred_type=kind, n_samples=n)
    assert float(((ours_p - theirs_p) / (2 * each.var(0) / n).sqrt()).abs().max()) < 5
    samples = ours.predictive_samples(x, kind, n)
    assert samples.shape == each.shape
    assert float(((samples.mean(0) - each.mean(0)) / (2 * each.var(0) / n).sqrt()).abs().max()) < 5
    ratio = ours.functional_samples(x, kind, n).var(0) / theirs.functional_samples(x, kind, n).var(0)
    assert float((ratio - 1).abs().max()) < 6 * (4 / n) ** 0.5


def test_sampled_regression() -> None:
    theirs, ours, x, _ = both("all diag", "regression", prior_precision=20.0)
    n = 1000
    (mean, variance), (other, spread) = (
        each(x, pred_type="nn", link_approx="mc", n_samples=n) for each in (ours, theirs)
    )
    assert float(((mean - other) / (2 * spread / n).sqrt()).abs().max()) < 5
    assert float((variance / spread - 1).abs().max()) < 6 * (4 / n) ** 0.5


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("case", ["all full", "all diag", "all kron", "last layer kron"])
def test_gradients_in_the_inputs(case: str, likelihood: str) -> None:
    theirs, ours, x, _ = both(case, likelihood, enable_backprop=True)
    gradients = []
    for each in (ours, theirs):
        inputs = x.clone().requires_grad_()
        output = each(inputs)
        sum(part.square().sum() for part in (output if isinstance(output, tuple) else (output,))).backward()
        gradients.append(inputs.grad)
    assert_same(gradients[0], gradients[1], EIGHT_DIGITS)


def test_inducing_points_learn_the_precision() -> None:
    model, loader = network("mlp", 2, True), rows("mlp", "regression")
    settings = {"functional_approximation": "variational", "num_inducing": 4, "inducing_locations": "kmeans"}
    la = Laplace(model, "regression", "all", "gp", alpha=0.0, **settings)
    la.fit(loader)
    assert la.posterior.method == "VaLLA"
    assert float(la.prior_precision) == pytest.approx(float(la.posterior.prior.values))
    assert abs(float(la.prior_precision) - 1) > 1e-3
    assert la(loader.dataset[:5][0])[1].shape == (5, 2, 2)


# Where laplace-torch is not right, or is another approximation.


def dense_variance(model: nn.Module, data: Tensor, x: Tensor, sigma: float, delta: float) -> Tensor:
    """The exact variance (B, C, C) of the tangent model for Gaussian noise, from dense Jacobians."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def rows_of(inputs: Tensor) -> Tensor:
        run = lambda w, one: functional_call(model, w, (one[None],))[0]
        return torch.cat([j.flatten(2) for j in vmap(jacrev(run), (None, 0))(weights, inputs).values()], -1)

    rows = rows_of(data).flatten(0, 1)
    precision = rows.mT @ rows / sigma**2 + delta * torch.eye(rows.shape[1]).double()
    jacobian = rows_of(x)
    return jacobian @ torch.linalg.inv(precision) @ jacobian.mT


@pytest.mark.parametrize("name", NETWORKS)
def test_kernel_posterior_of_all_data_is_exact(name: str) -> None:
    model, loader = network(name, 2, True), rows(name, "regression")
    settings = {"sigma_noise": 0.6, "prior_precision": 2.3, "n_subset": len(loader.dataset)}
    ours, theirs = Laplace(model, "regression", "all", "gp", **settings), None
    ours.fit(loader)
    theirs = laplace.Laplace(model, "regression", "all", "gp", **settings)
    theirs.fit(loader)
    x, (data, _) = loader.dataset[:5][0], loader.dataset[:]
    exact = dense_variance(model, data, x, 0.6, 2.3)
    assert_same(ours(x)[1], exact, ROUNDING)
    assert float((theirs(x)[1] - exact).abs().max() / exact.abs().max()) > 1e-3


def test_weight_and_bias_of_a_layer_share_a_block() -> None:
    # One linear layer with Gaussian noise: a Kronecker product over weight and bias together is the exact curvature.
    model, loader = nn.Linear(3, 2).double(), rows("mlp", "regression")
    settings = {"sigma_noise": 0.6, "prior_precision": 2.3}
    ours, theirs = Laplace(model, "regression", "all", "kron", **settings), None
    ours.fit(loader)
    theirs = laplace.Laplace(model, "regression", "all", "kron", **settings)
    theirs.fit(loader)
    x, (data, _) = loader.dataset[:5][0] + 1, loader.dataset[:]
    exact = dense_variance(model, data, x, 0.6, 2.3)
    assert_same(ours(x)[1], exact, ROUNDING)
    assert float((theirs(x)[1] - exact).abs().max() / exact.abs().max()) > 1e-3


@pytest.mark.parametrize("case", ["all kron", "last layer kron"])
def test_gradients_in_the_noise_include_the_determinant(case: str) -> None:
    theirs, ours, _, _ = both(case, "regression")
    found, other = gradient(ours), gradient(theirs)
    step = 1e-5
    ends = [ours.log_marginal_likelihood(1.3, sigma) for sigma in (0.8 + step, 0.8 - step)]
    difference = float(ends[0] - ends[1]) / (2 * step)
    assert float(found[1]) == pytest.approx(difference, rel=1e-6)  # of the order step²
    assert abs(float(other[1]) - difference) > 1
    assert_same(found[0], other[0], ROUNDING)


def test_samples_at_two_inputs_have_the_correlation_of_the_posterior() -> None:
    theirs, ours, x, _ = both("all full", "regression")
    n = 4000
    cov = ours(x[:2], joint=True)[1].reshape(2, 2, 2, 2)[:, 0, :, 0]
    expected = float(cov[0, 1] / (cov[0, 0] * cov[1, 1]).sqrt())
    error = (1 - expected**2) / n**0.5
    found = torch.corrcoef(ours.functional_samples(x[:2], n_samples=n)[..., 0].mT)[0, 1]
    other = torch.corrcoef(theirs.functional_samples(x[:2], n_samples=n)[..., 0].mT)[0, 1]
    assert abs(float(found) - expected) < 5 * error
    assert float(other) > 0.999 > expected + 0.1  # one noise vector for all inputs


def test_generators_decide_predictions() -> None:
    theirs, ours, x, _ = both("all diag", "classification")
    call = lambda la, seed: la(x, link_approx="mc", n_samples=10, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(call(ours, 3), call(ours, 3))
    assert not torch.equal(call(ours, 3), call(ours, 4))
    assert not torch.equal(call(theirs, 3), call(theirs, 3))


class Recorder:
    """A metric with the interface of torchmetrics that scores a call by how often it was called."""

    def __init__(self) -> None:
        self.calls, self.total = 0, 0.0

    def reset(self) -> None:
        self.total = 0.0

    def update(self, probs: Tensor, y: Tensor) -> None:
        self.total += abs(self.calls - 2)
        self.calls += 1

    def compute(self) -> Tensor:
        return torch.tensor(self.total)


def test_metrics_are_reset_for_every_precision() -> None:
    _, ours, _, _ = both("all diag", "classification")
    held_out = [(torch.randn(30, 3).double(), torch.randint(3, (30,)))]
    ours.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=5, loss=Recorder())
    assert float(ours.prior_precision) == pytest.approx(1)  # the third of 1e-4, 1e-2, 1, 1e2, 1e4


def test_default_grid_search_finds_the_best_precision_of_the_grid() -> None:
    model, loader = network("mlp", 3, True), rows("mlp", "classification")
    with torch.no_grad():
        model[-1].weight.mul_(12)  # confident, and wrong for every twelfth row
    x = 2 * torch.randn(60, 3).double()
    y = model(x).argmax(1)
    y[::12] = (y[::12] + 1) % 3
    held_out = DataLoader(TensorDataset(x, y), 16)
    theirs, ours = (make(model, "classification", "all", "diag") for make in (laplace.Laplace, Laplace))
    for each in (ours, theirs):
        each.fit(loader)
    loss = lambda la: -float(la(x)[range(60), y].log().mean())
    for each in (ours, theirs):
        each.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=9)
    chosen, other = loss(ours), loss(theirs)
    losses = []
    for precision in torch.logspace(-4, 4, 9):
        ours.prior_precision = precision
        losses.append(loss(ours))
    assert chosen == pytest.approx(min(losses), rel=1e-6)
    assert other > min(losses) + 1e-4  # its scores are means over all precisions tried so far


def test_default_grid_search_of_regression_depends_on_the_precision() -> None:
    theirs, ours, _, _ = both("all diag", "regression")
    x = 4 * torch.randn(30, 3).double()
    held_out = DataLoader(TensorDataset(x, ours.model(x).detach() + 0.5), 16)  # residuals no larger than the noise
    for each in (ours, theirs):
        each.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=9)
    assert float(theirs.prior_precision) == pytest.approx(1e-4)  # its squared error is the same at every precision
    assert float(ours.prior_precision) > 1e-3
