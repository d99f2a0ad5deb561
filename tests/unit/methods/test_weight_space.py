"""KernelSpace gives the full posterior; labels that Full draws are independent of the data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.priors import PerLayer
from tests import problems
from tests.cases import BY_NAME, Case
from tests.references import dense
from tests.tolerances import SOLVED, assert_close

D = torch.float64
PRIORS: dict[str, Any] = {"isotropic": lw.isotropic(0.7), "per_layer": lw.per_layer(1.5), "g": lw.priors.g_prior(0.3)}


def fitted(case: Case, method: Any, prior: Any, **options: Any) -> lw.Fitted:
    data = options.pop("data", None) or problems.batches(case)
    likelihood = options.pop("likelihood", None) or problems.likelihood(case)
    return lw.fit(case.build(), data, likelihood, method=method, prior=prior, **options)


def by_layer(model: nn.Module) -> PerLayer:
    """A precision of its own for every layer, from a tenth to ten."""
    names = list(dict.fromkeys(n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad))
    return lw.per_layer(dict(zip(names, torch.logspace(-1, 1, len(names)).tolist(), strict=True)))


def assert_same(one: lw.Fitted, full: lw.Fitted, inputs: Any) -> None:
    """Covariances within and across inputs, evidence, the weights' own covariance, effective parameters."""
    belief, exact = one.functions(inputs), full.functions(inputs)
    assert_close(belief.mean, exact.mean)
    assert_close(belief.cov, exact.cov, SOLVED)
    assert_close(one.functions(inputs, joint=True).cov, full.functions(inputs, joint=True).cov, SOLVED)
    assert_close(one.log_evidence(), full.log_evidence(), SOLVED)
    assert_close(covariance(one), covariance(full), SOLVED)
    effective, theirs = one.effective_parameters(), full.effective_parameters()
    assert effective.total == pytest.approx(theirs.total, rel=1e-8)
    assert effective.layers == pytest.approx(theirs.layers, rel=1e-7, abs=1e-8 * theirs.total)


def covariance(posterior: lw.Fitted) -> Tensor:
    """Of samples: Λ^-½ of the standard basis, squared. No Monte Carlo needed."""
    rows = posterior.posterior.precision.sample(torch.eye(posterior.network.selection.size, dtype=D))
    return rows.T @ rows


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mlp", "isotropic"), ("cnn", "per_layer"), ("attention", "g"), ("lstm", "per_layer"), ("embedding", "g"),
     ("token_level", "isotropic"), ("squeezed", "g"), ("norms", "per_layer"), ("tied", "g"),
     ("free_parameter", "per_layer")],
)  # fmt: skip
def test_full(name: str, kind: str) -> None:
    """With one isotropic prior, all networks are in tests/conformance/test_networks.py."""
    case = BY_NAME[name]
    prior = by_layer(case.build()) if kind == "per_layer" else PRIORS[kind]
    one, full = (fitted(case, method, prior) for method in (lw.KernelSpace(), lw.Full()))
    assert_same(one, full, case.batch(3, seed=1))


@pytest.mark.parametrize(("name", "kind"), [*zip(["mlp", "token_level", "squeezed"], PRIORS, strict=True)])
def test_regression_with_noise_from_the_residuals(name: str, kind: str) -> None:
    case = BY_NAME[name]
    options: dict[str, Any] = {"data": problems.number_batches(case), "likelihood": lw.Gaussian()}
    one, full = (fitted(case, method, PRIORS[kind], **dict(options)) for method in (lw.KernelSpace(), lw.Full()))
    assert float(one.likelihood.dispersion) == pytest.approx(float(full.likelihood.dispersion), rel=1e-12)
    assert_same(one, full, case.batch(3, seed=1))


@pytest.mark.parametrize("std", [0.5, (0.5, 1.0, 2.0)], ids=["one", "each"])
def test_regression_with_given_noise(std: Any) -> None:
    case = BY_NAME["mlp"]
    options: dict[str, Any] = {"data": problems.number_batches(case), "likelihood": lw.Gaussian(noise_std=std)}
    one, full = (fitted(case, method, 0.7, **dict(options)) for method in (lw.KernelSpace(), lw.Full()))
    assert_same(one, full, case.batch(3, seed=1))


SELECTIONS = [lw.last_layer, lw.named("bias"), lw.subnetwork(torch.arange(0, 83, 3))]


@pytest.mark.parametrize(("weights", "kind"), [*zip(SELECTIONS, PRIORS, strict=True)], ids=["last", "bias", "some"])
def test_some_of_the_weights(weights: Any, kind: str) -> None:
    case = BY_NAME["mlp"]
    one, full = (fitted(case, method, PRIORS[kind], weights=weights) for method in (lw.KernelSpace(), lw.Full()))
    assert_same(one, full, case.batch(3, seed=1))


def test_more_data_than_weights() -> None:
    """The kernel is singular then, and has as many eigenvalues as there are weights."""
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(17, 4, dtype=D), torch.randn(17, 3, dtype=D)
    likelihood = lw.Gaussian(noise_std=0.7)
    one, full = (lw.fit(model, [(x, y)], likelihood, method=m, prior=0.6) for m in (lw.KernelSpace(), lw.Full()))
    assert one.posterior.curvature.values.shape == (15,)
    assert_same(one, full, torch.randn(5, 4, dtype=D))


@pytest.mark.parametrize("name", ["mlp", "token_level"])
def test_other_priors_and_noise_without_data(name: str) -> None:
    case = BY_NAME[name]
    passes = []

    class Counting:
        def __iter__(self) -> Iterator[Any]:
            passes.append(1)
            yield from problems.number_batches(case)

    start = lw.fit(case.build(), Counting(), lw.Gaussian(), method=lw.KernelSpace(), prior=1.0)
    before = len(passes)
    options: dict[str, Any] = {"data": problems.number_batches(case), "likelihood": lw.Gaussian()}
    for prior in (20.0, by_layer(case.build()), lw.priors.g_prior(0.3)):
        assert_same(start.with_prior(prior), fitted(case, lw.Full(), prior, **dict(options)), case.batch(3, seed=1))
    noisy = start.posterior.problem.with_likelihood(start.likelihood.with_dispersion(torch.tensor(4.0, dtype=D)))
    moved = lw.Fitted(start.posterior.with_problem(noisy), start.fingerprint)
    options["likelihood"] = lw.Gaussian(noise_std=2.0)
    assert_close(
        moved.functions(case.batch(3)).cov, fitted(case, lw.Full(), 1.0, **options).functions(case.batch(3)).cov, SOLVED
    )
    assert len(passes) == before


@pytest.mark.parametrize(("likelihood", "noise"), [("gaussian", True), ("categorical", False)])
def test_the_evidence_has_the_same_optimum(likelihood: str, noise: bool) -> None:
    case = BY_NAME["mlp"]
    options: dict[str, Any] = {}
    if likelihood == "gaussian":
        options = {"data": problems.number_batches(case), "likelihood": lw.Gaussian()}
    tuner = lw.tuners.MaximiseEvidence(noise=noise)
    one, full = (fitted(case, m, None, tuner=tuner, **dict(options)) for m in (lw.KernelSpace(), lw.Full()))
    assert float(one.prior.values) == pytest.approx(float(full.prior.values), rel=1e-6)
    assert float(one.likelihood.dispersion) == pytest.approx(float(full.likelihood.dispersion), rel=1e-6)
    assert_close(one.log_evidence(), full.log_evidence(), SOLVED)


def test_too_many_rows_are_refused() -> None:
    """Twelve rows: six data of three classes have two each."""
    case = BY_NAME["mlp"]
    with pytest.raises(lw.errors.UnsupportedError, match=r"over 12 rows .* the limit is 11. Use Full\(\), Kron\(\)"):
        fitted(case, lw.KernelSpace(limit=11), 1.0)
    _, ggn = problems.dense_ggn(case, case.build())
    assert len(fitted(case, lw.KernelSpace(limit=12), 1.0).posterior.curvature.values) == int(
        torch.linalg.matrix_rank(ggn)
    )


@pytest.mark.parametrize("prior", [1e-3, 10.0])
def test_float32_where_eigenvalues_are_far_apart(prior: float) -> None:
    """400 of them, over a range that float32 does not have: those that matter are all there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 20), nn.ReLU(), nn.Linear(20, 10))
    x, y, new = torch.randn(40, 1, 8, 8), torch.randint(0, 10, (40,)), torch.randn(5, 1, 8, 8)
    single, double = (
        lw.fit(net, [(inputs, y)], "classification", method=lw.KernelSpace(), prior=prior)
        for net, inputs in ((model, x), (copy.deepcopy(model).double(), x.double()))
    )
    exact = double.functions(new.double()).cov
    assert float((single.functions(new).cov - exact).norm()) < 1e-5 * float(exact.norm())
    assert float(single.log_evidence()) == pytest.approx(float(double.log_evidence()), rel=1e-6)


@cache
def smooth() -> tuple[nn.Module, Tensor, Tensor]:
    """A network fitted to 80 points of a curve: its singular values run down to the rounding."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 80, dtype=D)[:, None]
    y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    problems.descend(model, lambda model: (model(x) - y).square().mean(), 300, 1e-2)
    return model, x, y


@pytest.mark.parametrize("noise", [1e-2, 1e-3])
@pytest.mark.parametrize("kind", ["isotropic", "per_layer"])
def test_a_weak_prior(noise: float, kind: str) -> None:
    """Singular values that the kernel does not know decide here. By those of the Jacobian, weighted by the prior."""
    model, x, y = smooth()
    prior = lw.isotropic(1e-6) if kind == "isotropic" else lw.per_layer({"0": 1e-6, "2": 3e-6, "4": 1e-5})
    posterior = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=noise), method=lw.KernelSpace(), prior=prior)
    root = posterior.prior.vector.rsqrt()
    _, singular, turn = torch.linalg.svd(dense.jacobian(model, x, 80).flatten(0, 1) * root, full_matrices=False)
    gained = (singular / noise).square().log1p().sum()
    penalty = (posterior.posterior.theta.square() / root.square()).sum()
    assert float(posterior.posterior.log_occam()) == pytest.approx(-0.5 * float(penalty + gained), abs=1e-4)
    new = torch.linspace(-2.5, 2.5, 41, dtype=D)[:, None]
    rows = dense.jacobian(model, new, 41).flatten(0, 1) * root
    within = rows @ turn.mT
    outside = (rows - within @ turn).square().sum(1)
    exact = outside + (within / (1 + (singular / noise).square()).sqrt()).square().sum(1)
    gap = (posterior.functions(new).variance[:, 0] / exact - 1).abs().max()
    assert float(gap) < 1e-6


def test_columns_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["mlp"]
    monkeypatch.setattr("lapwing.methods.weight_space.COLUMNS", 7)
    assert_same(fitted(case, lw.KernelSpace(), 0.7), fitted(case, lw.Full(), 0.7), case.batch(3, seed=1))


def test_the_eigenvectors_are_orthonormal() -> None:
    model, x, y = smooth()
    curvature = lw.fit(
        model, [(x, y)], lw.Gaussian(noise_std=0.1), method=lw.KernelSpace(), prior=1.0
    ).posterior.curvature
    # Singular values down to 1e-8 of the largest.
    known = curvature.vectors[curvature.values > 1e-16 * curvature.values[0]]
    assert len(known) > 20
    gap = known @ known.mT - torch.eye(len(known), dtype=D)
    assert float(gap.abs().max()) < 1e-6


def test_a_kernel_that_overflows_is_refused() -> None:
    """Outputs and loss are finite, squares of the inputs are not."""
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x, y = torch.full((3, 2), 1e160, dtype=D), torch.zeros(3, 1, dtype=D)
    with pytest.raises(lw.errors.NumericalError, match="not finite; check the data"):
        lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.KernelSpace(), prior=1.0)


def test_a_network_without_slopes_has_its_prior() -> None:
    """All inputs are zero, and so is the kernel: the posterior is the prior, for the evidence too."""
    model = nn.Linear(2, 1, bias=False).double()
    x, y = torch.zeros(3, 2, dtype=D), torch.zeros(3, 1, dtype=D)
    posterior = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.KernelSpace(), prior=4.0)
    new = torch.tensor([[1.0, 2.0]], dtype=D)
    assert_close(posterior.functions(new).variance, torch.tensor([[5 / 4]], dtype=D))
    assert_close(covariance(posterior), torch.eye(2, dtype=D) / 4)
    full = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.Full(), prior=4.0)
    assert_close(posterior.log_evidence(), full.log_evidence())


def test_data_in_another_order_at_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held or not: all rows come from one pass, whatever their order."""
    case, gen = BY_NAME["mlp"], torch.Generator().manual_seed(3)

    class Shuffled:
        def __iter__(self) -> Iterator[Any]:
            order = torch.randperm(6, generator=gen)
            yield case.batch(6)[order], problems.targets(case, 6)[order]

    fit = lambda: lw.fit(case.build(), Shuffled(), "classification", method=lw.KernelSpace(), prior=0.7)
    assert_same(fit(), fitted(case, lw.Full(), 0.7), case.batch(3, seed=1))
    monkeypatch.setattr("lapwing.tangent.CACHE_SHARE", 0)
    assert_same(fit(), fitted(case, lw.Full(), 0.7), case.batch(3, seed=1))
    assert_same(fitted(case, lw.KernelSpace(), 0.7), fitted(case, lw.Full(), 0.7), case.batch(3, seed=1))


def test_sampled_labels_do_not_follow_data_of_the_same_seed() -> None:
    """Inputs drawn with seed 0 and labels with the same numbers would make x² of what is 1 on average."""
    torch.manual_seed(0)
    x = torch.randn(2000, 1, dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False).double().eval()
    data, options = [(x, torch.zeros(2000, 1).double())], {"prior": 1.0}
    sampled, exact = (
        lw.fit(model, data, lw.Gaussian(noise_std=1.0), method=lw.Full(curvature), **options)
        .functions(x[:1]).variance.item() for curvature in ("fisher_mc", "ggn")
    )  # fmt: skip
    assert sampled == pytest.approx(exact, rel=0.3)  # the standard error is a twentieth; in step it would be a third
