"""``compat.Laplace``: the native posterior under laplace-torch's names.

The comparison with laplace-torch itself is in tests/integrations/test_laplace_torch.py.
"""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.compat import HessianStructure, Laplace, Likelihood, PredType, SubsetOfWeights
from lapwing.errors import DataError, FileError, ModelError, UnsupportedError

X = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.stack([X[:, 0].sin(), X[:, 1] * X[:, 2]], 1)
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
NEW = 2 * X[:4] + 0.1


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.1), nn.Linear(5, outputs)).double()


def loader(targets: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, targets), 8)


def regression(structure: str = "full", subset: str = "all", **settings: Any) -> Laplace:
    la = Laplace(network(2), "regression", subset, structure, **({"sigma_noise": 0.7} | settings))
    la.fit(loader(Y))
    return la


def classification(structure: str = "full", subset: str = "all", **settings: Any) -> Laplace:
    la = Laplace(network(3), "classification", subset, structure, **settings)
    la.fit(loader(LABELS))
    return la


@pytest.fixture(scope="module")
def full() -> Laplace:
    return regression(prior_precision=2.0, temperature=1.5)


NATIVE = {"full": lw.Full(), "kron": lw.Kron(), "diag": lw.Diagonal(), "lowrank": lw.LowRank(), "gp": lw.KernelSpace()}


@pytest.mark.parametrize("structure", NATIVE)
def test_structures_are_the_native_methods(structure: str) -> None:
    la = regression(structure, prior_precision=2.0)
    posterior = lw.fit(la.model, [(X, Y)], lw.Gaussian(noise_std=0.7), method=NATIVE[structure], prior=2.0)
    belief = posterior.functions(NEW)
    torch.testing.assert_close(la(NEW), (belief.mean, belief.cov))
    torch.testing.assert_close(la.log_marginal_likelihood(), posterior.log_evidence())


def test_approximations_of_the_process_are_the_native_methods() -> None:
    """With inducing points ``fit`` learns precision and noise."""
    few = regression("gp", functional_approximation="nystrom", subsample_size=30, n_eigenvalues=9)
    ella = lw.fit(few.model, [(X, Y)], lw.Gaussian(noise_std=0.7), method=lw.ELLA(30, 9), prior=1.0)
    torch.testing.assert_close(few(NEW)[1], ella.functions(NEW).cov)
    settings = {"functional_approximation": "variational", "num_inducing": 4, "inducing_locations": "kmeans"}
    la = regression("gp", **settings, alpha=0.0)
    problem = la.posterior.base.problem
    torch.testing.assert_close(la.prior_precision, problem.prior.values.reshape(1))
    torch.testing.assert_close(la.sigma_noise.square(), problem.likelihood.dispersion)
    assert float(la.prior_precision) != 1.0


def test_scales_and_draws(full: Laplace) -> None:
    diagonal = regression("diag", prior_precision=2.0, prior_mean=0.1)
    variances = lw.fit(
        diagonal.model, [(X, Y)], lw.Gaussian(noise_std=0.7), method=lw.Diagonal(), prior=lw.isotropic(2.0, 0.1)
    ).base.precision.variances()  # fmt: skip
    torch.testing.assert_close(diagonal.posterior_precision, 1 / variances)
    torch.testing.assert_close(diagonal.posterior_scale, variances.sqrt())
    assert (diagonal.prior_mean, float(diagonal.sigma_noise)) == (0.1, pytest.approx(0.7))
    seeded = lambda: torch.Generator().manual_seed(2)
    draws = full.predictive_samples(NEW, n_samples=3, generator=seeded())
    torch.testing.assert_close(draws, full.posterior.function_samples(NEW, 3, seeded()))
    assert float((classification().predictive_samples(NEW, n_samples=3).sum(-1) - 1).abs().max()) < 1e-9


def test_selections_are_the_native_weights() -> None:
    last = regression(subset="last_layer")
    by_name = regression(subset="last_layer", last_layer_name="3")
    assert last.n_params == by_name.n_params == 12
    torch.testing.assert_close(last(NEW), by_name(NEW))
    first = regression(subset="last_layer", last_layer_name="0")
    assert first.posterior.network.selection.names == ("0.weight", "0.bias")
    some = regression(subset="subnetwork", subnetwork_indices=torch.tensor([30, 2, 9]))
    assert some.n_params == 3


def test_precision_and_covariance_of_a_tempered_posterior(full: Laplace) -> None:
    weights = list(full.model.parameters())
    rows = []
    for x in X:
        f = full.model(x[None])[0]
        rows += [torch.cat([g.flatten() for g in torch.autograd.grad(c, weights, retain_graph=True)]) for c in f]
    design = torch.stack(rows)
    precision = design.mT @ design / (0.7**2 * 1.5) + 2 * torch.eye(full.n_params)
    torch.testing.assert_close(full.posterior_precision, precision)
    torch.testing.assert_close(full.posterior_covariance @ precision, torch.eye(full.n_params).double())
    root = full.posterior_scale
    torch.testing.assert_close(root @ root.mT, full.posterior_covariance)
    normal = torch.distributions.MultivariateNormal(full.mean, precision_matrix=precision)
    torch.testing.assert_close(full.log_prob(full.mean + 0.1), normal.log_prob(full.mean + 0.1))
    assert float(full.log_prob(full.mean, normalized=False)) == 0


def test_marginal_likelihood_is_the_sum_of_its_terms(full: Laplace) -> None:
    f = full.model(X)
    loss = 0.5 * (f - Y).square().sum()
    count = Y.numel()
    log_likelihood = -loss / (0.7**2 * 1.5) - count * math.log(
        0.7 * math.sqrt(2 * math.pi)
    )  # the normaliser is that of σ
    torch.testing.assert_close(full.log_likelihood, log_likelihood.detach())
    torch.testing.assert_close(full.scatter, 2 * full.mean.square().sum())
    ratio = torch.linalg.slogdet(full.posterior_precision)[1] - full.n_params * math.log(2)
    torch.testing.assert_close(full.log_det_ratio, ratio)
    total = full.log_likelihood - 0.5 * (full.log_det_ratio + full.scatter)
    torch.testing.assert_close(full.log_marginal_likelihood(), total)
    assert full.loss == pytest.approx(loss.item())
    assert (full.n_data, full.n_outputs, full.n_layers) == (30, 2, 4)


def test_new_hyperparameters_are_kept_and_equal_a_new_fit() -> None:
    la = regression("kron")
    value = la.log_marginal_likelihood(prior_precision=torch.tensor(3.0), sigma_noise=0.4)
    again = regression("kron", prior_precision=3.0, sigma_noise=0.4)
    torch.testing.assert_close(value, again.log_marginal_likelihood())
    torch.testing.assert_close(la(NEW), again(NEW))
    la.prior_precision = torch.tensor([1.0, 2.0, 3.0, 4.0])  # one for each parameter tensor
    assert la.prior_precision_diag.tolist() == [1.0] * 15 + [2.0] * 5 + [3.0] * 10 + [4.0] * 2
    la.prior_mean = 0.5
    torch.testing.assert_close(la.scatter, (la.prior_precision_diag * (la.mean - 0.5).square()).sum())


def test_data_are_added_without_override() -> None:
    parts = [DataLoader(TensorDataset(X[rows], Y[rows]), 8) for rows in (slice(11), slice(11, None))]
    la = Laplace(network(2), "regression", "all", "kron", sigma_noise=0.7)
    for part in parts:
        la.fit(part, override=False)
    whole = regression("kron")
    torch.testing.assert_close(la(NEW), whole(NEW))
    torch.testing.assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood())
    la.fit(parts[0])
    assert la.n_data == 11


def test_gradients_reach_precision_and_noise() -> None:
    la = regression("kron")
    values = torch.tensor([1.3, 0.8], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda v: la.log_marginal_likelihood(v[0], v[1]), values)


def test_links() -> None:
    la = classification(prior_precision=5.0)
    belief = la.posterior.functions(NEW)
    variances = belief.variance
    torch.testing.assert_close(la(NEW), (belief.mean / (1 + math.pi / 8 * variances).sqrt()).softmax(-1))
    draws = torch.distributions.MultivariateNormal(belief.mean, belief.cov).sample((20_000,)).softmax(-1)
    error = draws.std(0) / 20_000**0.5
    assert bool(((la(NEW, link_approx="mc", n_samples=4096) - draws.mean(0)).abs() < 6 * error).all())
    for link in ("bridge", "bridge_norm"):
        probs = la(NEW, link_approx=link)
        torch.testing.assert_close(probs.sum(-1), torch.ones(4).double())
        assert float((probs - draws.mean(0)).abs().max()) < 0.2
    other = la(NEW, link_approx="mc", diagonal_output=True, n_samples=512)
    assert other.shape == (4, 3)


def test_forms_of_regression(full: Laplace) -> None:
    mean, cov = full(NEW)
    assert torch.equal(full(NEW, diagonal_output=True)[1], cov.diagonal(dim1=-2, dim2=-1))
    joint_mean, joint = full(NEW, joint=True)
    assert torch.equal(joint_mean, mean.flatten())
    blocks = torch.stack([joint[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] for i in range(4)])
    torch.testing.assert_close(blocks, cov)
    assert torch.equal(full.predictive(NEW, "glm", "probit", 5)[0], mean)
    with torch.no_grad():
        jacobian = torch.randn(4, 2, full.n_params, dtype=torch.float64)
        expected = jacobian @ full.posterior_covariance @ jacobian.mT
        torch.testing.assert_close(full.functional_variance(jacobian), expected)
        rows = jacobian.flatten(0, 1)
        torch.testing.assert_close(full.functional_covariance(jacobian), rows @ full.posterior_covariance @ rows.mT)


def test_gradients_in_the_inputs_only_where_they_are_asked_for() -> None:
    inputs = NEW.clone().requires_grad_()
    assert not regression("diag")(inputs)[1].requires_grad
    la = regression("diag", enable_backprop=True)
    torch.autograd.gradcheck(lambda x: la(x)[1], inputs)


def test_samples_follow_their_generator_and_restore_the_model() -> None:
    la = regression("diag", prior_precision=10.0)
    before = [p.clone() for p in la.model.parameters()]
    calls = {
        "weights": lambda g: la.sample(5, g),
        "functions": lambda g: la.functional_samples(NEW, n_samples=5, generator=g),
        "independent": lambda g: la.functional_samples(NEW, n_samples=5, diagonal_output=True, generator=g),
        "network": lambda g: la.functional_samples(NEW, PredType.NN, 5, generator=g),
        "mean": lambda g: la(NEW, pred_type="nn", n_samples=5, generator=g)[0],
    }
    for call in calls.values():
        first, second, third = (call(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, second)
        assert not torch.equal(first, third)
    assert all(torch.equal(p, q) for p, q in zip(before, la.model.parameters(), strict=True))
    weights = la.sample(3, torch.Generator().manual_seed(1))
    outputs = la.functional_samples(NEW, "nn", 3, generator=torch.Generator().manual_seed(1))
    nn.utils.vector_to_parameters(weights[2], la.model.parameters())
    torch.testing.assert_close(la.model(NEW).detach(), outputs[2])


def test_samples_of_a_subnetwork_hold_all_weights() -> None:
    la = regression("diag", "subnetwork", subnetwork_indices=torch.tensor([30, 2, 9]), prior_precision=1e6)
    whole = nn.utils.parameters_to_vector(la.model.parameters()).detach()
    step = la.sample(50, torch.Generator().manual_seed(0)) - whole
    assert step.any(0).nonzero().flatten().tolist() == [2, 9, 30]
    assert float(step.abs().max()) < 1e-2  # ten prior deviations of 1e-3


def test_precision_by_steps_on_the_evidence() -> None:
    la = regression("diag")
    la.optimize_prior_precision(n_steps=150)
    best = float(la.prior_precision)
    value = float(la.log_marginal_likelihood())
    for factor in (0.9, 1.1):
        assert float(la.log_marginal_likelihood(prior_precision=factor * best)) < value
    la.optimize_prior_precision(prior_structure="layerwise", n_steps=2)
    assert la.prior_precision.shape == (4,)
    la.optimize_prior_precision(prior_structure="diag", init_prior_prec=2.0, n_steps=1, lr=1e-9)
    torch.testing.assert_close(la.prior_precision, torch.full((32,), 2.0).double())


def test_precision_by_grid_search() -> None:
    la = classification("kron")
    held_out = [(NEW, torch.tensor([0, 1, 2, 0])), (X[:3], LABELS[:3])]
    la.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=4, log_prior_prec_max=2)
    best = float(la.prior_precision)
    losses = {}
    for precision in (1e-4, 1e-2, 1.0, 1e2):
        la.prior_precision = precision
        losses[precision] = sum(-la(x)[range(len(y)), y].log().sum().item() for x, y in held_out)
    assert best == pytest.approx(min(losses, key=losses.__getitem__))
    count = iter(range(100))
    loss = lambda p, y: -next(count)
    loss.update = None  # a metric has compute() as well
    la.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=3, loss=loss)
    assert float(la.prior_precision) == pytest.approx(1e4)  # that of the last call


class MeanSquare:
    """A metric as those of torchmetrics: it takes the means alone."""

    def reset(self) -> None:
        self.values: list[Tensor] = []

    def update(self, mean: Tensor, target: Tensor) -> None:
        self.values.append((mean - target).square().mean())

    def compute(self) -> Tensor:
        return torch.stack(self.values)


def test_precision_by_grid_search_of_numbers() -> None:
    """By the negative log-density with the noise, and by a metric."""
    la, held_out, metric = regression("kron"), [(NEW, NEW[:, :2]), (X[:3], Y[:3])], MeanSquare()
    la.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=4, log_prior_prec_max=2)
    best, losses = float(la.prior_precision), {}
    for precision in (1e-4, 1e-2, 1.0, 1e2):
        la.prior_precision = precision
        pairs = [(la(x), y) for x, y in held_out]
        stds = [(cov.diagonal(dim1=1, dim2=2) + 0.7**2).sqrt() for (_, cov), _ in pairs]
        normals = [torch.distributions.Normal(mean, std) for ((mean, _), _), std in zip(pairs, stds, strict=True)]
        losses[precision] = -sum(float(p.log_prob(y).sum()) for p, (_, y) in zip(normals, pairs, strict=True))
    assert best == pytest.approx(min(losses, key=losses.__getitem__))
    la.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=2, loss=metric)
    means = torch.cat([la(x)[0] for x, _ in held_out]), torch.cat([y for _, y in held_out])
    torch.testing.assert_close(metric.values, [(means[0] - means[1]).square().mean()])
    with pytest.raises(DataError, match="val_loader is None"):
        la.optimize_prior_precision(method="gridsearch")


def test_state_is_loaded_without_pickle() -> None:
    la = regression("kron", prior_precision=torch.tensor([1.0, 2.0, 3.0, 4.0]), temperature=2.0)
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    again = Laplace(la.model, "regression", "all", "kron")
    again.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(again(NEW), la(NEW))
    torch.testing.assert_close(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    with pytest.raises(UnsupportedError, match="structure"):
        Laplace(la.model, "regression", "all", "diag").load_state_dict(la.state_dict())
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.1), nn.Linear(5, 2)).double()
    with pytest.raises(FileError):
        Laplace(other, "regression", "all", "kron").load_state_dict(la.state_dict())


def test_mappings_have_their_target_under_a_key() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, pixels: Tensor) -> Tensor:
            return self.layer(pixels)

    batches = [{"pixels": X, "answer": Y}]
    la = Laplace(Mapped(), "regression", "all", "full", dict_key_y="answer")
    la.fit(batches)
    assert la({"pixels": NEW})[0].shape == (4, 2)


def test_enums_are_accepted() -> None:
    la = Laplace(network(2), Likelihood.REGRESSION, SubsetOfWeights.ALL, HessianStructure.DIAG)
    la.fit(loader(Y))
    assert la.likelihood == "regression"
    assert la.posterior.method == "Diagonal"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"likelihood": "counts"}, "likelihood"),
        ({"likelihood": "reward_modeling"}, "binary"),
        ({"hessian_structure": "kronecker"}, "kron"),
        ({"subset_of_weights": "first_layer"}, "last_layer"),
        ({"subset_of_weights": "subnetwork", "hessian_structure": "full"}, "subnetwork_indices"),
        ({"subset_of_weights": "subnetwork", "hessian_structure": "kron"}, "'full' or 'diag'"),
        ({"prior_prec": 1.0}, "prior_precision"),
        ({"prior_precision": "large"}, "prior_precision"),
        ({"sigma_noise": 0.5, "likelihood": "classification"}, "sigma_noise"),
        ({"sigma_noise": torch.ones(2)}, "per_output"),
        ({"sigma_noise": -1.0}, "sigma_noise"),
        ({"temperature": 0.0}, "temperature"),
        ({"damping": True}, "damping"),
        ({"feature_reduction": "average"}, "feature_reduction"),
        ({"backend": dict}, "backend"),
        ({"hessian_structure": "gp", "independent_outputs": True}, "independent_outputs"),
        ({"hessian_structure": "gp", "functional_approximation": "nystrom"}, "subsample_size"),
        ({"hessian_structure": "gp", "functional_approximation": "variational"}, "num_inducing"),
        ({"hessian_structure": "gp", "functional_approximation": "sparse"}, "functional_approximation"),
    ],
)
def test_bad_settings_are_refused_at_once(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        Laplace(**({"model": network(2), "likelihood": "regression"} | settings))


def test_calls_that_do_not_exist_are_refused(full: Laplace) -> None:
    with pytest.raises(ModelError, match=r"la\.fit"):
        Laplace(network(2), "regression")(NEW)
    with pytest.raises(UnsupportedError, match="not a sum over the data"):
        regression("lowrank").fit(loader(Y), override=False)
    with pytest.raises(UnsupportedError, match="n_subset"):
        regression("gp", n_subset=5)
    with pytest.raises(UnsupportedError, match="'mc'"):
        classification("diag")(NEW, pred_type="nn")
    with pytest.raises(UnsupportedError, match="pred_type"):
        full(NEW, pred_type="map")
    with pytest.raises(DataError, match="val_loader"):
        full.optimize_prior_precision(method="gridsearch")
    with pytest.raises(UnsupportedError, match="n_steps"):
        full.optimize_prior_precision(steps=3)
    with pytest.raises(UnsupportedError, match=r"\(B, C, 32\)"):
        full.functional_variance(torch.ones(2, 3))


def test_missing_names_tell_the_native_way() -> None:
    la = regression("kron")
    for name in (
        "H",
        "backend",
        "posterior_precision",
        "posterior_covariance",
        "posterior_variance",
        "posterior_scale",
    ):
        assert not hasattr(la, name)
        with pytest.raises(UnsupportedError, match=r"Lapwing computes|la\.posterior"):
            getattr(la, name)
    with pytest.raises(AttributeError, match="colour"):
        _ = la.colour
    with pytest.raises(ImportError, match=r"lw\.train"):
        from lapwing.compat import marglik_training  # noqa: F401
    with pytest.raises(ImportError, match="one class"):
        from lapwing.compat import KronLaplace  # noqa: F401
