"""The pass over the data: seeds, draws, the empirical Fisher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature.base import DEFAULT_DRAWS, EXACT_SEEDS, JACOBIAN_ALONE, DrawError, Seeds, root_seeds
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.networks.jacobians import DenseJacobian, Footprint
from lapwing.networks.network import Network
from lapwing.networks.tangent import Tangent
from tests import problems
from tests.cases import BY_NAME
from tests.references.layout import assembled
from tests.tolerances import assert_close, assert_within

# A pass in runs of seeds gives the same curvature; for many outputs the default is an estimate that says so.

METHODS = {
    "kron": lw.Kron("ggn"), "reduce": lw.Kron("ggn", "reduce"), "no full blocks": lw.Kron("ggn", full_limit=0),
    "diagonal": lw.Diagonal("ggn"), "ekron": lw.EKron("ggn"), "full": lw.Full("ggn"),
}  # fmt: skip


def matrix(posterior: lw.Fitted) -> Tensor:
    curvature = posterior.posterior.curvature
    return curvature.matrix if hasattr(curvature, "matrix") else assembled(curvature)


@pytest.mark.parametrize("name", ["cnn", "token_level", "embedding"])
@pytest.mark.parametrize("method", METHODS)
def test_runs_of_seeds(monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    """With room for two seeds, whatever the chunk: no pass takes more, and the sums are the same."""
    case = BY_NAME[name]
    data, options = problems.batches(case), {"method": METHODS[method], "prior": 1.0}
    whole = lw.fit(case.build(), data, problems.likelihood(case), **options)
    taken = []
    jacobians = Tangent.jacobians

    def watched(self: Tangent, seeds: Tensor | None = None) -> Any:
        taken.append(len(seeds) if seeds is not None else 0)
        return jacobians(self, seeds)

    monkeypatch.setattr(Footprint, "seeds_at_once", lambda *_: 2)
    monkeypatch.setattr(Tangent, "jacobians", watched)
    parts = lw.fit(case.build(), data, problems.likelihood(case), **options)
    assert max(taken) <= 2
    assert_close(matrix(parts), matrix(whole), power=0.5 if method == "ekron" else 2 / 3)
    assert parts.posterior.statistics.data == whole.posterior.statistics.data


def test_the_seeds_of_one_sample_fit_the_budget() -> None:
    """One that is too large for all seeds takes some of them, and at least one."""
    footprint, cpu = Footprint(width=2**20, patches=0), torch.device("cpu")
    few = footprint.seeds_at_once(1, torch.float32, cpu)
    assert 1 < few < 1000
    assert footprint.seeds_at_once(2, torch.float32, cpu) == few // 2
    assert footprint.seeds_at_once(1, torch.float64, cpu, width=2 * 2**20) == few // 4
    assert footprint.seeds_at_once(10_000, torch.float32, cpu) == 1


def wide(classes: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    x = torch.randn(30, 3, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, classes)).double().eval()
    return model, [(x, torch.arange(30) % classes)]


@pytest.mark.parametrize("make", [lw.Kron, lw.Diagonal, lw.EKron])
def test_many_outputs_are_estimated_by_default(make: Any) -> None:
    few, many = wide(EXACT_SEEDS), wide(EXACT_SEEDS + 1)
    fit = lambda problem, method, **options: lw.fit(*problem, "classification", method=method, prior=1.0, **options)
    assert fit(few, make()).findings == ()
    assert_close(matrix(fit(few, make())), matrix(fit(few, make("ggn"))))
    default = fit(many, make())
    assert f"{DEFAULT_DRAWS} labels drawn for each datum, relative error about" in default.findings[0]
    assert "Note: the curvature is estimated" in default.summary()
    assert_close(matrix(default), matrix(fit(many, make("fisher_mc"))))  # the same seed, the same labels
    assert fit(many, make("ggn")).findings == ()
    assert "from 9 labels" in fit(many, make(draws=9)).findings[0]
    assert "from one label" in fit(many, make(draws=1)).findings[0]
    assert fit(many, make(), weights="last_layer").findings == ()  # a closed form
    assert fit(many, make("fisher_mc"), weights="last_layer").findings == ()


def test_the_full_matrix_is_exact_by_default_and_says_if_not() -> None:
    fit = lambda method, **options: lw.fit(
        *wide(EXACT_SEEDS + 1), "classification", method=method, prior=1.0, **options
    )
    assert fit(lw.Full()).findings == ()
    assert "from 4 labels drawn for each datum;" in fit(lw.Full("fisher_mc")).findings[0]
    assert "from 2 labels" in fit(lw.Full("fisher_mc", draws=2), weights="last_layer").findings[0]


def test_a_noise_for_each_output_stays_exact() -> None:
    """It takes a pass for each output with one seed, which no number of draws would be cheaper than."""
    model, ((x, _),) = wide(EXACT_SEEDS + 1)
    likelihood = lw.Gaussian(per_output=True)
    posterior = lw.fit(
        model, [(x, torch.randn(30, EXACT_SEEDS + 1).double())], likelihood, method=lw.Diagonal(), prior=1.0
    )
    assert posterior.findings == ()


def test_the_remark_stays_with_tuning_and_files(tmp_path: Path) -> None:
    model, data = wide(EXACT_SEEDS + 1)
    tuned = lw.fit(model, data, "classification", method=lw.Diagonal(), tuner=lw.tuners.MaximiseEvidence())
    tuned.save(tmp_path / "posterior")
    again = lw.load(tmp_path / "posterior", model)
    retuned = lw.fit(model, data, "classification", method=lw.Diagonal(), prior=1.0).tuned(lw.tuners.Grid())
    for posterior in (tuned, again, retuned, tuned.with_prior(2.0), tuned.to("cpu")):
        assert sum("labels drawn for each datum" in finding for finding in posterior.findings) == 1


def test_statistics_come_from_the_same_pass() -> None:
    model, data = wide(7)
    one = lw.fit(model, data, "classification", prior=1.0).posterior.statistics
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(data[0][0]), data[0][1], reduction="sum")
    assert one.loss == pytest.approx(float(loss), rel=1e-10)


# Seeds: in runs they are the same as whole; drawn ones are unbiased, and their error falls with their number.

D = torch.float64
OUTPUTS = {"classes": (3, 5), "tokens": (3, 4, 5)}


class Rooted(lw.Gaussian):
    """A likelihood of a user, with a root alone."""

    hessian = Likelihood.hessian


LIKELIHOODS: dict[str, Any] = {
    "softmax": lw.Categorical(), "multilabel": lw.Bernoulli(), "noises": lw.Gaussian((0.5, 1.0, 2.0, 0.3, 0.7)),
    "user": Rooted(noise_std=0.5),
}  # fmt: skip


def outputs(shape: str, likelihood: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    f = torch.randn(OUTPUTS[shape], generator=generator, dtype=D)
    classes = torch.randint(0, 5, f.shape[:-1], generator=generator)
    return f, classes if likelihood == "softmax" else (f > 0).to(D)


@pytest.mark.parametrize("most", [1, 3, 5, 9, 100])
@pytest.mark.parametrize("shape", OUTPUTS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_runs_are_the_whole(likelihood: str, shape: str, most: int) -> None:
    chosen, (f, y) = LIKELIHOODS[likelihood], outputs(shape, likelihood)
    runs = list(Seeds().runs(chosen, f, y, most))
    assert max(len(run) for run in runs) <= most
    assert_close(torch.cat(runs), root_seeds(chosen.root(f, y)))
    assert_close(torch.cat(runs), Seeds().at(chosen, f, y))


@pytest.mark.parametrize("shape", OUTPUTS)
def test_runs_of_one_output(shape: str) -> None:
    chosen, (f, y) = LIKELIHOODS["noises"], outputs(shape, "noises")
    for seeds in (Seeds(output=3), Seeds(JACOBIAN_ALONE)):
        assert_close(torch.cat(list(seeds.runs(chosen, f, y, 2))), seeds.at(chosen, f, y))


def test_only_one_run_of_the_root_is_in_memory() -> None:
    """8,000 outputs have a root of 512 MB in float64; two columns of it are 128 kB."""
    f, y = torch.zeros(1, 8000, dtype=D), torch.zeros(1, dtype=torch.long)
    for likelihood, targets in ((lw.Categorical(), y), (lw.Poisson(), torch.ones_like(f))):
        run = next(Seeds().runs(likelihood, f, targets, 2))
        assert run.shape == (2, 1, 8000)
        assert run.untyped_storage().nbytes() <= 4 * run.nbytes


@pytest.mark.parametrize("likelihood", ["softmax", "multilabel", "noises"])
def test_draws_are_unbiased(likelihood: str) -> None:
    """The sum of their outer products is R Rᵀ on average, with no terms between tokens."""
    chosen, (f, y) = LIKELIHOODS[likelihood], outputs("tokens", likelihood)
    seeds = Seeds("fisher_mc", torch.Generator().manual_seed(0), draws=3)
    root = root_seeds(chosen.root(f, y)).flatten(2)[:, 0]  # of the first sample
    draws = []
    for _ in range(3000):
        drawn = seeds.at(chosen, f[:1], y[:1]).flatten(2)[:, 0]
        assert drawn.shape == (3, 20)
        draws.append(drawn.T @ drawn)
    assert_within(torch.stack(draws), root.T @ root)


def test_the_labels_do_not_depend_on_the_chunk() -> None:
    """The memory that is free must not change the result."""
    chosen, (f, y) = LIKELIHOODS["softmax"], outputs("tokens", "softmax")
    draw = lambda: Seeds("fisher_mc", torch.Generator().manual_seed(2), draws=4)
    whole, parts = draw(), draw()
    pieces = [parts.at(chosen, f[rows], y[rows]) for rows in (slice(0, 1), slice(1, 3))]
    assert_close(torch.cat(pieces, 1), whole.at(chosen, f, y))


# The stated error of a curvature from drawn labels is the spread over repetitions.


@pytest.mark.parametrize("draws", [1, 2, 6])
def test_the_stated_error_is_that_of_repetitions(draws: int) -> None:
    """Against the spread of the sums over 800 repetitions, known to 2.5 %; for one draw it is a bound."""
    chosen, f = lw.Categorical(), torch.randn(60, 5, generator=torch.Generator().manual_seed(1), dtype=D)
    y = f.argmax(-1)
    seeds = Seeds("fisher_mc", torch.Generator().manual_seed(5), draws=draws)
    sums, stated = [], []
    for _ in range(800):
        drawn = seeds.at(chosen, f, y)
        error = DrawError()
        error.add(0, DenseJacobian(drawn.transpose(0, 1)))
        sums.append(drawn.square().sum((0, 1)))
        stated.append(error.relative() ** 2)
    spread, mean = torch.stack(sums).var(0).sum(), torch.stack(sums).mean(0)
    true = float(spread / mean.square().sum()) ** 0.5
    seen = (sum(stated) / len(stated)) ** 0.5
    if draws == 1:
        assert 0.9 * true < seen < 4 * true
    else:
        assert seen == pytest.approx(true, rel=0.1)


def test_an_error_without_draws_is_zero() -> None:
    assert DrawError().relative() == 0.0
    error = DrawError()
    error.add(0, DenseJacobian(torch.zeros(2, 3, 4)))
    assert error.relative() == 0.0


@pytest.mark.parametrize("name", ["mlp", "cnn", "embedding", "norms"])
def test_squares_of_units_are_those_of_the_output_factor(name: str) -> None:
    """Their sum is the diagonal of the factor, and where a block is kept whole that of its matrix."""
    case = BY_NAME[name]
    inputs = case.batch(3)
    network = Network.build(case.build(), inputs)
    f = network(inputs)
    for block, part in network.linearise(inputs).jacobians(torch.randn(4, *f.shape, dtype=D)):
        squares = part.unit_squares()
        assert squares.shape == (4, 3, block.groups * block.d_out if block.linear else block.size)
        if block.linear:
            rows = part.kronecker_rows(reduce=False).outputs
            assert rows is not None
            expected = rows.reshape(block.groups, -1, block.d_out).square().sum(1).flatten()
        else:
            expected = part.whole().square().sum((0, 1)).flatten()
        assert_close(squares.sum((0, 1)), expected)


# The empirical Fisher: Σ g gᵀ over the gradients of log p(y | f) at the targets, one backward pass for each datum.

N, NOISE = 7, 0.3


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fisher(net: nn.Module, x: Tensor, y: Tensor, log_prob: Any, weights: Tensor | None = None) -> Tensor:
    """Sum over all data, (P, P); each token of an output (B, T, C) is a datum."""
    total, parameters = 0.0, list(net.parameters())
    for b in range(len(x)):
        outputs, targets = net(x[b : b + 1])[0], y[b]
        rows = zip(outputs, targets, strict=True) if outputs.ndim == 2 else [(outputs, targets)]
        for f, t in rows:
            grads = torch.autograd.grad(log_prob(f, t), parameters, retain_graph=True)
            g = torch.cat([each.reshape(-1) for each in grads])
            total = total + (1.0 if weights is None else weights[b]) * torch.outer(g, g)
    return total


def categorical(f: Tensor, y: Tensor) -> Tensor:
    return -nn.functional.cross_entropy(f, y)


def normal(f: Tensor, y: Tensor) -> Tensor:
    return torch.distributions.Normal(f, NOISE).log_prob(y).sum()


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


X, NUMBERS, LABELS = drawn(1, N, 3), drawn(2, N, 4), torch.arange(N) % 4
CASES = {"classes": (lw.Categorical(), LABELS, categorical), "numbers": (lw.Gaussian(NOISE), NUMBERS, normal)}


def dense(curvature: Any) -> Tensor:
    if hasattr(curvature, "matrix"):
        return curvature.matrix
    return (curvature.vectors.mT * curvature.values) @ curvature.vectors


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", [lw.Full, lw.KernelSpace, lw.LowRank])
def test_whole_matrix_is_that_of_the_definition(net, method, case):
    """Λ = H/φ + A, and H/φ is the empirical Fisher of the log-likelihood, noise included."""
    likelihood, y, log_prob = CASES[case]
    weights = torch.linspace(0.5, 2, N).double()
    data = lw.samples.weighted([(X[:3], y[:3], weights[:3]), (X[3:], y[3:], weights[3:])])
    fitted = lw.fit(net, data, likelihood, method=method(curvature="empirical"), prior=1.0)
    expected = fisher(net, X, y, log_prob, weights)
    assert_close(dense(fitted.base.curvature) / likelihood.dispersion, expected)
    precision = expected + torch.eye(len(expected)).double()
    assert_close(fitted.variance_of(lambda w: w["0.weight"][1, 2]), torch.linalg.inv(precision)[5, 5])


def test_diagonal_is_that_of_the_definition(net):
    fitted = lw.fit(net, [(X, LABELS)], "classification", method=lw.Diagonal(curvature="empirical"), prior=1.0)
    assert_close(fitted.base.curvature.plain_diagonal(), fisher(net, X, LABELS, categorical).diagonal())


@pytest.mark.parametrize("method", [lw.Kron, lw.EKron])
def test_kronecker_blocks_of_one_datum_are_exact(net, method):
    """Within a layer; the last one too, which has no closed form here."""
    x, y = X[:1], LABELS[2:3]
    fitted = lw.fit(net, [(x, y)], "classification", method=method(curvature="empirical"), prior=1.0)
    whole = fisher(net, x, y, categorical)
    for block, layer in zip(fitted.base.curvature.blocks, (net[0], net[2]), strict=True):
        size, inputs = layer.weight.numel(), layer.in_features
        start = 0 if layer is net[0] else 20
        columns = torch.arange(start, start + size).reshape(-1, inputs)
        bias = torch.arange(start + size, start + size + layer.out_features)[:, None]
        order = torch.cat([columns, bias], 1).reshape(-1)  # a row of the weight, then its bias
        assert_close(block.dense(), whole[order][:, order])


def test_every_token_is_a_datum():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 4)).double()
    x, y = drawn(3, 3, 2, 3), torch.tensor([[0, 3], [2, 1], [1, 1]])
    method = lw.Full(curvature="empirical")
    fitted = lw.fit(net, [(x, y)], lw.Categorical(), method=method, prior=1.0)
    assert_close(fitted.base.curvature.matrix, fisher(net, x, y, categorical))


def test_it_vanishes_where_the_targets_are_fitted(net):
    """Unlike the GGN, it says nothing about data that the network fits exactly: the pitfall that the docs describe."""
    with torch.no_grad():
        y = net(X)
    fitted = lw.fit(net, [(X, y)], lw.Gaussian(NOISE), method=lw.Full(curvature="empirical"), prior=1.0)
    assert float(fitted.base.curvature.matrix.abs().max()) == 0


@pytest.mark.parametrize("method", [lw.Kron, lw.LowRank, lw.KernelSpace])
def test_noise_that_is_not_known_is_refused(net, method):
    with pytest.raises(UnsupportedError, match="expected a known noise"):
        lw.fit(net, [(X, NUMBERS)], lw.Gaussian(), method=method(curvature="empirical"))


def test_methods_without_it_refuse_it():
    with pytest.raises(UnsupportedError, match="curvature is 'empirical'"):
        lw.Sampled(curvature="empirical")


def test_cost_is_one_backward_pass_for_each_datum(net):
    cheap, dear = (lw.Kron(curvature).cost(lw.check(net, X).workload) for curvature in ("empirical", "ggn"))
    assert cheap.fit_epochs < dear.fit_epochs
