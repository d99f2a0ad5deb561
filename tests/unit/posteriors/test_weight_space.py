"""Gaussian posteriors over weights: chosen outputs, effective parameters, more data."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature.kronecker import BlockwisePrecision
from lapwing.errors import DataError, FileError, ModelError, UnsupportedError
from lapwing.networks.jacobians import Footprint
from lapwing.networks.network import Network
from lapwing.networks.tangent import Tangent
from lapwing.posteriors.base import Posterior
from tests import problems
from tests.cases import BY_NAME
from tests.conformance.declared import small_method
from tests.references import dense, structures
from tests.references.layout import assembled
from tests.tolerances import SOLVED, assert_close

# Chosen outputs of posteriors over weights: exact, and at the cost of the chosen ones alone.

D = torch.float64
MANY = 40  # more outputs than those for which a covariance is built at once


def wide(method: Any, prior: float | None = 2.0) -> tuple[lw.Fitted, Tensor]:
    """Return a posterior over a network of many outputs, and inputs."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, MANY)).double().eval()
    x, y = torch.randn(8, 3, dtype=D), torch.randint(0, MANY, (8,))
    return lw.fit(net, [(x, y)], "classification", method=method, prior=prior), x[:5]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the numbers of seeds of all Jacobians from now on."""
    counts: list[int] = []
    plain = Tangent.jacobians

    def jacobians(self: Tangent, *given: Any) -> Any:
        result = plain(self, *given)
        counts.append(result.outputs)
        return result

    monkeypatch.setattr(Tangent, "jacobians", jacobians)
    return counts


@pytest.mark.parametrize(
    "method",
    [lw.Kron(), lw.Diagonal(), lw.Full(), lw.LowRank(rank=5), lw.Sampled(num_samples=30), lw.HFL(mode="linearised")],
)
def test_only_the_chosen_outputs_are_differentiated(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = wide(method)
    top = posterior.functions(x).mean.topk(3).indices
    whole = posterior.functions(x).cov
    expected = whole.gather(1, top[:, :, None].expand(-1, -1, MANY)).gather(2, top[:, None].expand(-1, 3, -1))
    seeds = counted(monkeypatch)
    some = posterior.functions(x, outputs=top)
    assert_close(some.cov, expected, SOLVED)
    assert_close(some.std, expected.diagonal(dim1=1, dim2=2).sqrt(), SOLVED)
    assert set(seeds) == {3}
    posterior.functions(x, joint=True, outputs=top)
    assert set(seeds) == {3}


def test_few_samples_take_forward_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """With twice as many chosen outputs as samples, forward mode is cheaper than a backward pass for each output."""
    posterior, x = wide(lw.Sampled(num_samples=3))
    outputs = torch.arange(3, 9).expand(5, -1).clone()
    outputs[0] = outputs[0].flip(0)
    whole, rows, seeds = posterior.functions(x), torch.arange(5)[:, None], counted(monkeypatch)
    some = posterior.functions(x, outputs=outputs)
    assert not seeds
    assert_close(some.mean, whole.mean[rows, outputs])
    assert_close(some.cov, whole.cov[rows[:, :, None], outputs[:, :, None], outputs[:, None]], SOLVED)


def test_many_chosen_outputs_build_no_covariance_for_variances(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = wide(lw.Kron())
    outputs = torch.randperm(MANY)[:36]
    whole, some = posterior.functions(x), posterior.functions(x, outputs=outputs)
    built = posterior.posterior.precision
    forms: list[bool] = []
    plain = type(built).quadratic
    monkeypatch.setattr(
        type(built), "quadratic", lambda self, j, full=True: (forms.append(full), plain(self, j, full))[1]
    )
    assert_close(some.variance, whole.variance[:, outputs])
    assert not any(forms)
    assert_close(some.cov, whole.cov[:, outputs][:, :, outputs])
    assert some.centred_variance.shape == (5, 36)


def test_each_input_keeps_its_outputs_where_a_batch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = wide(lw.Kron())
    top = posterior.functions(x).mean.topk(4).indices
    whole = posterior.functions(x, outputs=top)
    plain, parts = Footprint.chunks, list[slice]()

    def chunks(self: Footprint, batch: int, seeds: int, dtype: Any, device: Any, most: int | None = None) -> Any:
        parts.extend(plain(self, batch, seeds, dtype, device, 2))
        return iter(parts)

    monkeypatch.setattr(Footprint, "chunks", chunks)
    cut = posterior.functions(x, outputs=top)
    assert len(parts) == 3
    assert_close(cut.mean, whole.mean)
    assert_close(cut.cov, whole.cov)


def test_a_mixture_shares_one_jacobian_of_the_chosen_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = wide(lw.Kron(), prior=None)
    assert len(posterior.posterior.members) > 1
    whole = posterior.functions(x)
    joint = posterior.functions(x, joint=True).cov
    seeds = counted(monkeypatch)
    some = posterior.functions(x, outputs=[7, 3])
    assert seeds == [2]
    assert_close(some.mean, whole.mean[:, [7, 3]])
    assert_close(some.cov, whole.cov[:, [7, 3]][:, :, [7, 3]])
    assert_close(posterior.functions(x, joint=True, outputs=[7, 3]).cov, joint[:, [7, 3]][:, :, :, [7, 3]])


@pytest.mark.parametrize("method", ["kron", "full", "sampled", "hfl", "hfl linearised", "dropout", "swag"])
def test_tokens_of_interest(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some positions of a text, with the top classes of each: no other position is differentiated."""
    case = BY_NAME["token_level"]
    model = case.build()
    if method == "dropout":
        model = nn.Sequential(model, nn.Dropout(0.3)).eval()
    data, likelihood = problems.batches(case), problems.likelihood(case)
    posterior = lw.fit(model, data, likelihood, method=small_method(method, model), prior=1e3)
    x = case.batch(3, seed=1)
    whole = posterior.functions(x)
    tokens = torch.tensor([[3, 0], [1, 2], [2, 2]])
    at = whole.mean[torch.arange(3)[:, None], tokens]
    top = at.topk(2).indices  # (B, S, k)
    seeds = counted(monkeypatch)
    some = posterior.functions(x, outputs=top, tokens=tokens)
    assert set(seeds) <= {4}
    assert_close(some.mean, at.gather(2, top))
    for b in range(3):
        for s in range(2):
            block = whole.cov[b, tokens[b, s]][top[b, s]][:, top[b, s]]
            assert_close(some.cov[b, s], block, SOLVED)
    joint = posterior.functions(x, joint=True, outputs=top, tokens=tokens)
    assert joint.cov.shape == (3, 2, 2, 3, 2, 2)
    assert_close(joint.marginal.cov, some.cov, SOLVED)


def test_covariances_of_tokens_in_pieces_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, and two runs of its outputs at a time."""
    case = BY_NAME["token_level"]
    posterior = problems.fit(case, lw.Full(), prior=2.0)
    x = case.batch(3, seed=1)
    whole, seeds = posterior.functions(x).cov, counted(monkeypatch)
    with lw.memory.limited(1):
        assert_close(posterior.functions(x).cov, whole)
    assert max(seeds) < case.outputs[-1]


def test_a_shifted_network_gives_its_own_outputs() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double().eval()
    x, y = torch.randn(30, 3, dtype=D), torch.randn(30, 4, dtype=D)
    posterior = lw.fit(net, [(x, y)], "regression", tuner=lw.tuners.LinearMode(mean="tangent"))
    assert isinstance(posterior.network, Network)
    assert posterior.network.shift is not None
    assert_close(posterior.functions(x, outputs=[3, 1]).mean, posterior.functions(x).mean[:, [3, 1]])


# Effective parameters, and the solves and variances that they stand on, against dense inverses.

MLP = BY_NAME["mlp"]
P = 83
METHODS: dict[str, Any] = {
    "full": lw.Full(), "diagonal": lw.Diagonal(), "kron": lw.Kron(), "ekron": lw.EKron(),
    "low_rank": lw.LowRank(rank=18), "low_rank_3": lw.LowRank(rank=3),
}  # fmt: skip
PRIORS = ["isotropic", "per_layer", "by_input", "diagonal", "g", "about a mean"]
NOISE = 0.49
LAYERS = ("0", "2", "4")


def supported(method: str, prior: str) -> bool:
    if method == "kron":
        return prior != "diagonal"
    return method != "ekron" or prior in ("isotropic", "per_layer", "about a mean")


PAIRS = [(m, p) for m in METHODS for p in PRIORS if supported(m, p)]


@cache
def curvature_of(method: str) -> Tensor:
    """H of the small regression at unit noise, in the structure of a method, by brute force."""
    model, x = MLP.build(), MLP.batch(6)
    return structures.structured(method, dense.unit_ggn(model, x), model, x)


def matrix_of(method: str, posterior: lw.Fitted) -> Tensor:
    """At a lower rank than the GGN's, what the eigenpairs span; that they are the leading ones is tested elsewhere."""
    if method != "low_rank_3":
        return curvature_of(method)
    values, vectors = posterior.posterior.curvature.values, posterior.posterior.curvature.vectors
    assert len(values) == 3
    return vectors.T @ torch.diag(values) @ vectors


def given(prior: str) -> Any:
    """A prior to give to fit()."""
    where = structures.layers(MLP.build())
    by_input = torch.full((P,), 0.6, dtype=D)
    for index in where.values():
        by_input[index] = torch.linspace(0.2, 2.0, index.shape[1], dtype=D).expand(index.shape)
    return {
        "isotropic": lw.isotropic(0.6),
        "per_layer": lw.per_layer(torch.tensor([0.3, 2.0, 0.7], dtype=D)),
        "by_input": lw.priors.diagonal(by_input),
        "diagonal": lw.priors.diagonal(torch.linspace(0.2, 2.0, P, dtype=D)),
        "g": lw.priors.g_prior(0.6),
        "about a mean": lw.isotropic(0.6, 0.7),
    }[prior]


def precisions(method: str, prior: str, matrix: Tensor) -> Tensor:
    """(P,) from the definition."""
    where = structures.layers(MLP.build())
    if prior == "g":
        by = structures.scale_by_factor if method == "kron" else structures.scale_by_layer
        return 0.6 * by(matrix.diagonal(), where)
    if prior == "per_layer":
        diagonal = torch.empty(P, dtype=D)
        for index, value in zip(where.values(), (0.3, 2.0, 0.7), strict=True):
            diagonal[index] = value
        return diagonal
    chosen = given(prior)
    fixed = chosen.precisions if prior in ("by_input", "diagonal") else chosen.precision
    return fixed if isinstance(fixed, Tensor) else torch.full((P,), fixed, dtype=D)


def regression(method: Any, prior: Any, dtype: torch.dtype = D, **options: Any) -> lw.Fitted:
    data, noise = problems.number_batches(MLP, dtype), lw.Gaussian(noise_std=math.sqrt(NOISE))
    return lw.fit(MLP.build(dtype), data, noise, method=method, prior=prior, **options)


@pytest.mark.parametrize(("method", "prior"), PAIRS)
def test_gamma_is_the_trace(method: str, prior: str) -> None:
    """γ = tr(Λ⁻¹ H/φ), and for a layer the part of the trace that lies on its weights."""
    posterior = regression(METHODS[method], given(prior))
    matrix = matrix_of(method, posterior)
    each = precisions(method, prior, matrix)
    shares = torch.linalg.solve(matrix / NOISE + torch.diag(each), matrix / NOISE).diagonal()
    effective = posterior.effective_parameters()
    power = SOLVED if "low_rank" in method else 2 / 3
    assert_close(torch.tensor(effective.total, dtype=D), shares.sum(), power)
    where = structures.layers(MLP.build())
    assert tuple(effective.layers) == LAYERS
    by_layer = torch.stack([shares[where[name]].sum() for name in LAYERS])
    assert_close(torch.tensor([effective.layers[name] for name in LAYERS], dtype=D), by_layer, power)
    assert effective.sizes == {"0": 30, "2": 35, "4": 18}
    assert effective.weights == P
    grouped = {"per_layer": by_layer, "by_input": shares, "diagonal": shares}.get(prior, shares.sum()[None])
    assert_close(effective.by_precision, grouped, power)


@pytest.mark.parametrize("method", METHODS)
def test_gamma_is_the_slope_of_the_log_determinant(method: str) -> None:
    """d log det Λ / d log φ = -γ, whatever the structure."""
    fitted = regression(METHODS[method], 0.6)
    phi, step = torch.tensor(NOISE, dtype=D), 1e-4
    high, low = (fitted.posterior.curvature.logdet(phi * math.exp(s * step), fitted.prior) for s in (1, -1))
    assert fitted.effective_parameters().total == pytest.approx(-float(high - low) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("method", ["full", "diagonal", "low_rank"])
def test_gamma_of_single_weights(method: str) -> None:
    chosen = torch.tensor([1, 5, 40, 66, 77, 82])
    ggn = curvature_of("full")[chosen][:, chosen]
    matrix = torch.diag(ggn.diagonal()) if method == "diagonal" else ggn
    shares = torch.linalg.solve(matrix / NOISE + 0.6 * torch.eye(6, dtype=D), matrix / NOISE).diagonal()
    method_of_six = lw.LowRank(rank=6) if method == "low_rank" else METHODS[method]
    effective = regression(method_of_six, 0.6, weights=lw.subnetwork(chosen)).effective_parameters()
    assert_close(torch.tensor(effective.total, dtype=D), shares.sum(), SOLVED)
    assert effective.sizes == {"0": 2, "2": 1, "4": 3}
    expected = torch.stack([shares[:2].sum(), shares[2], shares[3:].sum()])
    assert_close(torch.tensor(list(effective.layers.values()), dtype=D), expected, SOLVED)


def line(n: int, noise: float, prior: float) -> lw.Fitted:
    """Three weights and n data."""
    torch.manual_seed(2)
    model, x = nn.Linear(2, 1).double(), torch.randn(n, 2, dtype=D)
    data = [(x, torch.randn(n, 1, dtype=D))]
    return lw.fit(model, data, lw.Gaussian(noise_std=noise), method=lw.Full(), prior=prior)


def test_advice_where_all_weights_are_decided() -> None:
    decided = line(200, 0.1, 1.0).effective_parameters()
    assert decided.total > 2.9
    (advice,) = decided.findings
    assert advice.startswith("gamma is 3.0 of 3 weights")
    assert "too small. Try a larger one and compare the evidence" in advice
    assert advice in str(decided)


def test_advice_where_a_layer_is_not_decided() -> None:
    undecided = line(5, 1.0, 1e4).effective_parameters()
    (advice,) = undecided.findings
    assert advice.startswith("layer (top): gamma is ")
    assert "of 3 weights; the data decide almost none" in advice
    mixed = regression(lw.Full(), lw.per_layer({"0": 1e6, "2": 1e-4, "4": 1e-4})).effective_parameters()
    assert [text.split(":")[0] for text in mixed.findings] == ["layer 0"]


@pytest.mark.parametrize("method", ["full", "kron", "diagonal"])
def test_no_advice_otherwise(method: str) -> None:
    effective = regression(METHODS[method], 0.6).effective_parameters()
    assert all(gamma > 0.01 * effective.sizes[name] for name, gamma in effective.layers.items())
    assert effective.findings == ()


def test_as_a_table() -> None:
    effective = regression(lw.Full(), 0.6).effective_parameters()
    lines = str(effective).splitlines()
    assert lines[0].split() == ["layer", "weights", "gamma", "share"]
    assert [row.split()[0] for row in lines[1:]] == ["0", "2", "4", "total", "gamma:"]
    assert lines[-2].split()[1:3] == ["83", f"{effective.total:.2f}"]
    assert lines[1].split()[3] == f"{effective.layers['0'] / 30:.1%}"


def test_without_a_posterior_there_is_none() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match="MapOnly has no evidence"):
        regression(lw.baselines.MapOnly(), 1.0).effective_parameters()


# Solves and variances.


def assert_inverse(inverse: Any, precision: Tensor, power: float = 2 / 3) -> None:
    covariance = torch.linalg.inv(precision)
    assert_close(inverse.variances(), covariance.diagonal(), power)
    v = torch.randn(4, len(precision), dtype=D)
    kept = v.clone()
    assert_close(inverse.solve(v), v @ covariance, power)
    assert torch.equal(v, kept)
    assert_close(inverse.solve(v[:1]) @ precision, v[:1], power)
    eye = torch.eye(len(precision), dtype=D)
    assert_close(inverse.adjoint(eye), inverse.sample(eye).T, power)  # as rows: the transpose of the transpose
    assert_close(inverse.sample(inverse.adjoint(v)), v @ covariance, power)


@pytest.mark.parametrize(("method", "prior"), PAIRS)
def test_solves_and_variances_are_the_dense_inverse(method: str, prior: str) -> None:
    posterior = regression(METHODS[method], given(prior))
    matrix = matrix_of(method, posterior)
    precision = matrix / NOISE + torch.diag(precisions(method, prior, matrix))
    assert_inverse(posterior.posterior.precision, precision, SOLVED if "low_rank" in method else 2 / 3)


@pytest.mark.parametrize("case", ["conv_zoo", "embedding", "norms", "lstm", "conv_transpose"])
@pytest.mark.parametrize("method", ["kron", "ekron", "diagonal"])
def test_solves_and_variances_of_other_blocks(case: str, method: str) -> None:
    """Groups, lookups, norms, recurrent weights, turned kernels: blocks and theta have different orders."""
    chosen = BY_NAME[case]
    fitted = problems.fit(chosen, METHODS[method], prior=lw.per_layer(0.6))
    fitted = fitted.with_prior(lw.per_layer(torch.linspace(0.2, 2, len(fitted.prior.values), dtype=D)))
    precision = assembled(fitted.posterior.curvature) + torch.diag(fitted.prior.vector)
    assert_inverse(fitted.posterior.precision, precision)


@pytest.mark.parametrize("chosen", [torch.tensor([1, 5, 40, 66, 77, 82]), torch.arange(83) % 4 == 1])
@pytest.mark.parametrize("method", ["full", "diagonal", "low_rank"])
def test_solves_and_variances_of_single_weights(method: str, chosen: Tensor) -> None:
    ggn = curvature_of("full")[chosen][:, chosen]
    matrix = torch.diag(ggn.diagonal()) if method == "diagonal" else ggn
    each = torch.linspace(0.2, 2, len(ggn), dtype=D)
    fitted = regression(METHODS[method], lw.priors.diagonal(each), weights=lw.subnetwork(chosen))
    assert_inverse(fitted.posterior.precision, matrix / NOISE + torch.diag(each), SOLVED)


@pytest.mark.parametrize("method", ["full", "diagonal", "kron", "ekron", "low_rank"])
def test_solves_in_float32(method: str) -> None:
    inverse = regression(METHODS[method], 0.6, torch.float32).posterior.precision
    covariance = torch.linalg.inv(matrix_of(method, None) / NOISE + 0.6 * torch.eye(P, dtype=D))  # type: ignore[arg-type]
    v = torch.randn(3, P, dtype=torch.float32)
    assert inverse.solve(v).dtype == torch.float32
    assert_close(inverse.sample(inverse.adjoint(v)), inverse.solve(v), SOLVED, torch.float32)
    assert_close(inverse.solve(v), v.double() @ covariance, SOLVED)
    assert_close(inverse.variances(), covariance.diagonal(), SOLVED, torch.float32)


# More data: the same posterior as a fit to all of them, at equal weights, prior and noise.

N, OLD = 23, slice(0, 13)
NEW = slice(13, N)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


X, NUMBERS, LABELS = drawn(1, N, 3), drawn(2, N, 4), torch.arange(N) % 4
UPDATING_METHODS = [
    lw.Full(), lw.Full(curvature="empirical"), lw.Diagonal(), lw.Kron(), lw.Kron(sharing="reduce", full_limit=3),
    lw.KernelSpace(),
]  # fmt: skip


def assert_same(one: Any, other: Any) -> None:
    """Two posteriors under the same hyperparameters."""
    assert one.statistics.data == other.statistics.data == N
    assert_close(one(X).cov, other(X).cov)
    assert_close(one.log_evidence(), other.log_evidence())


@pytest.mark.parametrize("method", UPDATING_METHODS, ids=repr)
def test_equals_the_fit_to_all_data(net, method):
    likelihood, y = (lw.Gaussian(0.3), NUMBERS) if method == lw.KernelSpace() else (lw.Categorical(), LABELS)
    options = {"likelihood": likelihood, "method": method, "prior": 2.0}
    whole = lw.fit(net, [(X, y)], **options)
    more = lw.fit(net, [(X[OLD], y[OLD])], **options).updated([(X[13:16], y[13:16]), (X[16:], y[16:])])
    assert_same(more.base, whole.base)
    assert_close(more.predict(X).log_prob(y), whole.predict(X).log_prob(y))


@pytest.mark.parametrize("likelihood", [lw.Gaussian(), lw.Gaussian(per_output=True)])
def test_prior_and_noise_stay_and_then_equal_the_fit_to_all_data(net, likelihood):
    before = lw.fit(net, [(X[OLD], NUMBERS[OLD])], likelihood, tuner=lw.tuners.MaximiseEvidence())
    after = before.updated((X[NEW], NUMBERS[NEW]))
    assert torch.equal(after.prior.values, before.prior.values)
    assert torch.equal(after.likelihood.noise_variance, before.likelihood.noise_variance)
    whole = lw.fit(net, [(X, NUMBERS)], likelihood, prior=1.0).base
    assert_same(after.base, whole.with_problem(after.base.problem))
    noise = 2 * after.base.noise  # the losses of the outputs are right apart, too
    assert_close(
        after.base.with_noise(noise).log_evidence(),
        whole.with_problem(after.base.problem).with_noise(noise).log_evidence(),
    )


@pytest.mark.parametrize("y", [LABELS, NUMBERS], ids=["classes", "numbers"])
def test_default_mixture_updates_all_its_posteriors(net, y, tmp_path):
    likelihood = "classification" if y is LABELS else "regression"
    before = lw.fit(net, [(X[OLD], y[OLD])], likelihood)
    before.save(tmp_path / "net")
    after = before.updated([(X[NEW], y[NEW])])
    assert torch.equal(after.posterior.weights, before.posterior.weights)
    for base in after.posterior.bases:
        method = base.method
        whole = lw.fit(net, [(X, y)], likelihood, method=method, prior=1.0).base
        assert_same(base, whole.with_problem(base.problem))
    again = lw.load(tmp_path / "net", net).updated([(X[NEW], y[NEW])])
    assert_close(again.predict(X).log_prob(y), after.predict(X).log_prob(y))
    assert "10 data were added later" in after.summary()
    after.save(tmp_path / "more")
    assert lw.load(tmp_path / "more", net).base.statistics.data == N


def test_images_and_weights_are_read_as_in_the_fit():
    torch.manual_seed(0)
    net = nn.Conv2d(2, 3, 1).double()
    x, y = drawn(4, 5, 2, 4, 3), torch.arange(60).reshape(5, 4, 3) % 3
    w = torch.tensor([1.0, 2, 0.5, 1, 3])
    whole = lw.fit(net, lw.samples.weighted((x, y, w)), "classification", prior=1.0)
    half = lw.fit(net, lw.samples.weighted((x[:2], y[:2], w[:2])), "classification", prior=1.0)
    more = half.updated(lw.samples.weighted((x[2:], y[2:], w[2:])))
    assert more.base.statistics.data == whole.base.statistics.data == 12 * 7.5
    assert_close(more.functions(x).variance, whole.functions(x).variance)
    assert_close(more.log_evidence(), whole.log_evidence())


@pytest.mark.parametrize("limit", [8192, 100])
def test_wide_factors_take_the_form_that_all_data_give_them(limit, tmp_path):
    """Rows that become more: they stay rows, or above the limit of the method become a diagonal, after a file too."""
    torch.manual_seed(0)
    wide = nn.Linear(600, 2).double()
    x, y = drawn(6, 23, 600), LABELS % 2
    options = {"likelihood": "classification", "method": lw.Kron(factor_limit=limit), "prior": 1.0}
    whole = lw.fit(wide, [(x, y)], **options)
    half = lw.fit(wide, [(x[OLD], y[OLD])], **options)
    half.save(tmp_path / "half")
    for before in (half, lw.load(tmp_path / "half", wide)):
        more = before.updated([(x[NEW], y[NEW])])
        assert type(more.base.curvature.blocks[0].inp) is type(whole.base.curvature.blocks[0].inp)
        assert_close(more.functions(x).cov, whole.functions(x).cov)
        assert_close(more.log_evidence(), whole.log_evidence())


def test_drawn_labels_give_a_sum_of_estimates(net):
    method = lw.Full(curvature="fisher_mc", draws=2)
    fits = {"likelihood": lw.Categorical(), "method": method, "prior": 1.0}
    one = lw.fit(net, [(X[OLD], LABELS[OLD])], **fits)
    generator = lambda: torch.Generator().manual_seed(3)
    other = lw.fit(net, [(X[NEW], LABELS[NEW])], generator=generator(), **fits)
    total = one.updated([(X[NEW], LABELS[NEW])], generator=generator())
    assert_close(total.base.curvature.matrix, one.base.curvature.matrix + other.base.curvature.matrix)
    assert total.base.estimate.draws == 2


@pytest.mark.parametrize("method", [lw.EKron(), lw.LowRank(), lw.Sampled(), lw.ELLA(), lw.VaLLA()], ids=repr)
def test_methods_that_are_not_sums_over_data_refuse(net, method):
    fitted = lw.fit(net, [(X, LABELS)], "classification", method=method, prior=1.0)
    with pytest.raises(UnsupportedError, match="Full, Diagonal, Kron"):
        fitted.updated([(X, LABELS)])


def test_an_optimum_of_the_old_data_is_refused(net):
    fitted = lw.fit(net, [(X, NUMBERS)], lw.Gaussian(0.3), method=lw.Full(), prior=1.0, tuner=lw.tuners.LinearMode())
    with pytest.raises(UnsupportedError, match="belongs to the old data"):
        fitted.updated([(X, NUMBERS)])


def test_other_data_and_other_weights_are_refused(net):
    fitted = lw.fit(net, [(X, LABELS)], "classification", prior=1.0)
    with pytest.raises(DataError, match="targets run from 0 to 9"):
        fitted.updated([(X, torch.arange(N) % 10)])
    with pytest.raises(DataError, match="new data is empty"):
        fitted.updated([])
    with pytest.raises(UnsupportedError, match="generator is 3"):
        fitted.updated([(X, LABELS)], generator=3)
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    fitted = lw.fit(other, [(X, LABELS)], "classification", prior=1.0)
    with torch.no_grad():
        other[0].weight.add_(1)
    with pytest.raises(ModelError, match="changed"):
        fitted.updated([(X, LABELS)])


def test_two_methods_of_one_name_are_refused():
    from lapwing.posteriors.weight_space import SumsData

    with pytest.raises(UnsupportedError, match="already know a method 'Kron'"):
        type("Kron", (SumsData,), {})


def test_a_damaged_method_is_refused(net):
    from lapwing.posteriors.weight_space import SummedBy
    from lapwing.runtime.states import State

    state = SummedBy.state(lw.Kron(sharing="reduce"))
    assert SummedBy.from_state(state) == lw.Kron(sharing="reduce")
    for settings in ({**state.settings, "name": "Other"}, {**state.settings, "draws": 0}, {"name": "Kron"}):
        with pytest.raises(FileError):
            SummedBy.from_state(State("SummedBy", settings))


# The methods that errors name, for members that another posterior lacks.

MEMBERS = (
    Posterior.log_evidence, Posterior.gammas, Posterior.log_likelihood, Posterior.with_problem, Posterior.with_noise,
    Posterior.variance_of, Posterior.weight_samples, Posterior.deviations, Posterior.numbered_steps,
    Posterior.function_samples, Posterior.covariance, Posterior.updated,
)  # fmt: skip


@pytest.mark.parametrize("method", [lw.Kron(), lw.Full(), lw.KernelSpace()], ids=lambda method: type(method).__name__)
def test_the_methods_that_errors_name_have_every_member(method: Any) -> None:
    x = torch.randn(6, 2)
    posterior = lw.fit(nn.Linear(2, 1), [(x, x[:, :1])], lw.Gaussian(0.1), method=method, prior=1.0).base
    assert [member.__name__ for member in MEMBERS if not posterior.provides(member)] == []


def test_covariances_of_many_outputs_take_few_inputs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products between the Jacobians of all inputs would cost a square of their number."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 60)).eval()
    data = [(torch.randn(60, 4), torch.randint(0, 60, (60,)))]
    fitted = lw.fit(net, data, "classification", weights=lw.last_layer, prior=1.0)
    at_once = fitted.functions(data[0][0]).cov
    monkeypatch.setattr(BlockwisePrecision, "cross", None)
    with lw.memory.limited("1MB"):
        assert_close(fitted.functions(data[0][0]).cov, at_once)
