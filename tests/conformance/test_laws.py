"""Laws that hold for every exact method, on any network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.base import Exactness
from lapwing.posteriors.base import Posterior
from tests import problems
from tests.cases import BY_NAME, Case
from tests.conformance.declared import LAWFUL, lawful_entries, power
from tests.references import dense
from tests.references.layout import assembled
from tests.tolerances import EXACT, assert_close, assert_within

D = torch.float64
MOST = 400  # more than the weights, and than the rows, of any named network with six data
SOME = ["mlp", "cnn", "lstm", "token_level", "squeezed", "norms"]


@pytest.fixture(scope="module", params=SOME)
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


@pytest.fixture(scope="module", params=LAWFUL)
def entry(request: pytest.FixtureRequest) -> Exactness:
    return lawful_entries()[request.param]


@pytest.fixture(scope="module")
def method(entry: Exactness) -> Any:
    return entry.settings(MOST, MOST)


@pytest.fixture(scope="module")
def near(entry: Exactness) -> float:
    """The tolerance, as a power of the rounding unit."""
    return power(entry)


@pytest.fixture(scope="module")
def posterior(case: Case, method: Any) -> lw.Fitted:
    """One fit for all laws: a posterior is a value, so no test can change it for another."""
    return fit(case, method, problems.batches(case))


def fit(case: Case, method: Any, data: list[Any], **options: Any) -> lw.Fitted:
    options.setdefault("prior", 1.5)
    return lw.fit(case.build(), data, problems.likelihood(case), method=method, **options)


def same(one: lw.Fitted, two: lw.Fitted, inputs: Any, near: float = EXACT) -> None:
    assert_close(one.functions(inputs).cov, two.functions(inputs).cov, near)
    if has_evidence(one):
        assert_close(one.log_evidence(), two.log_evidence())


def has_evidence(posterior: lw.Fitted) -> bool:
    """Return whether there is an evidence; without one, check that asking for it is refused."""
    if posterior.posterior.provides(Posterior.log_evidence):
        return True
    with pytest.raises(lw.errors.UnsupportedError, match="has no evidence"):
        posterior.log_evidence()
    return False


def has_samples(posterior: lw.Fitted, inputs: Any) -> bool:
    """Return whether weights and functions can be drawn; otherwise check that asking for them is refused."""
    if posterior.posterior.provides(Posterior.weight_samples) and posterior.posterior.provides(
        Posterior.function_samples
    ):
        return True
    with pytest.raises(lw.errors.UnsupportedError, match="has no weight samples"):
        posterior.weight_samples(2)
    with pytest.raises(lw.errors.UnsupportedError, match="has no function samples"):
        posterior.function_samples(inputs, 2)
    return False


def test_batch_size_and_order_do_not_matter(case: Case, method: Any, near: float, posterior: lw.Fitted) -> None:
    """``posterior`` has seen the same data in unequal batches."""
    total = problems.TOTAL
    inputs, y = case.batch(total), problems.targets(case, total)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    shuffled = fit(case, method, problems.split(problems.rows(inputs, order), y[order], (total,)))
    assert shuffled.posterior.statistics.data == total * (case.outputs[0] if len(case.outputs) == 2 else 1)
    same(posterior, shuffled, case.batch(3, seed=1), near)


def test_another_prior_equals_refitting(case: Case, method: Any, near: float, posterior: lw.Fitted) -> None:
    stronger = fit(case, method, problems.batches(case), prior=4.0)
    new = case.batch(3, seed=1)
    same(posterior.with_prior(4.0), stronger, new, near)
    gap = (posterior.functions(new).variance - stronger.functions(new).variance).min()
    assert float(gap) > 0  # a stronger prior leaves less variance


@pytest.mark.parametrize("name", ["mlp", "cnn", "token_level"])
def test_another_noise_equals_refitting(name: str, method: Any, near: float) -> None:
    case = BY_NAME[name]
    inputs, y = case.batch(6), torch.randn(6, *case.outputs, dtype=D)
    data = problems.split(inputs, y, (3, 1, 2))
    first, second = (lw.fit(case.build(), data, lw.Gaussian(noise_std=s), method=method, prior=1.5) for s in (0.5, 2.0))
    noisier = first.posterior.problem.with_likelihood(first.likelihood.with_dispersion(torch.tensor(4.0, dtype=D)))
    again = lw.Fitted(first.posterior.with_problem(noisier), first.fingerprint)
    same(again, second, case.batch(3, seed=1), near)


def test_a_temperature_divides_the_curvature(method: Any, near: float) -> None:
    case = BY_NAME["mlp"]
    data = problems.batches(case)
    warm = lw.fit(case.build(), data, lw.Categorical(temperature=2.0), method=method, prior=1.5)
    plain = lw.fit(case.build(), data, lw.Categorical(), method=method, prior=3.0)
    new = case.batch(3, seed=1)  # H/2 + 1.5 = (H + 3)/2
    assert_close(warm.functions(new).cov, 2 * plain.functions(new).cov, near)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_permuting_classes_permutes_outputs(method: Any, weights: str, near: float) -> None:
    case = BY_NAME["mlp"]
    model, twin = case.build(), case.build()
    order = torch.tensor([2, 0, 1])  # new output k is old output order[k]
    twin[4].weight.data = model[4].weight.data[order]
    twin[4].bias.data = model[4].bias.data[order]
    inputs, y = case.batch(6), problems.targets(case, 6)
    renamed = order.argsort()[y]
    plain = lw.fit(
        model, problems.split(inputs, y, (4, 2)), "classification", method=method, weights=weights, prior=1.5
    )
    turned = lw.fit(twin, problems.split(inputs, renamed, (4, 2)), "classification", method=method, weights=weights,
                    prior=1.5)  # fmt: skip
    new = case.batch(3, seed=1)
    assert_close(turned.functions(new).cov, plain.functions(new).cov[:, order][:, :, order], near)
    assert_close(turned.predict(new).probs, plain.predict(new).probs[:, order], near)
    if has_evidence(plain):
        assert_close(turned.log_evidence(), plain.log_evidence())


def test_last_layer_of_one_layer_is_all_weights(method: Any, near: float) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.Dropout(0.5)).double().eval()
    x, y = torch.randn(7, 2, 3, dtype=D), torch.randint(0, 3, (7,))
    one, two = (
        lw.fit(model, [(x, y)], "classification", method=method, weights=w, prior=1.5) for w in ("all", "last_layer")
    )
    assert one.network.selection.names == two.network.selection.names
    same(one, two, x[:4], near)


def test_function_samples_are_the_tangent_of_the_weight_samples(case: Case, posterior: lw.Fitted) -> None:
    inputs = case.batch(3, seed=1)
    if not has_samples(posterior, inputs):
        return
    weights = posterior.weight_samples(4, torch.Generator().manual_seed(5))
    functions = posterior.function_samples(inputs, 4, torch.Generator().manual_seed(5))
    model = case.build()
    jac = dense.jacobian(model, inputs, 3)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
    f = torch.cat([dense.output(model, dense.one(inputs, b)) for b in range(3)]).detach()
    tangent = torch.einsum("bcp,np->nbc", jac, weights - theta).reshape(4, 3, *case.outputs)
    assert_close(functions, f + tangent)


@pytest.mark.parametrize("name", ["mlp", "attention", "token_level"])
def test_function_samples_have_the_joint_covariance(name: str, method: Any, generator: torch.Generator) -> None:
    case = BY_NAME[name]
    posterior = fit(case, method, problems.batches(case))
    inputs = case.batch(2, seed=1)
    if not has_samples(posterior, inputs):
        return
    joint = posterior.functions(inputs, joint=True)
    n = 3000
    gap = (posterior.function_samples(inputs, n, generator) - joint.mean).flatten(1)
    size = gap.shape[1]
    assert_within(gap[:, :, None] * gap[:, None, :], joint.cov.reshape(size, size))


def test_network_samples_push_weights_through_the_real_network(case: Case, posterior: lw.Fitted) -> None:
    inputs = case.batch(3, seed=1)
    if not has_samples(posterior, inputs):
        return
    weights = posterior.weight_samples(2, torch.Generator().manual_seed(5))
    samples = posterior.network_samples(inputs, 2, torch.Generator().manual_seed(5))
    assert samples.shape == (2, 3, *case.outputs)
    twin = case.build()
    for draw, outputs in zip(weights, samples, strict=True):
        nn.utils.vector_to_parameters(draw, [p for p in twin.parameters() if p.requires_grad])
        expected = torch.cat([dense.output(twin, dense.one(inputs, b)) for b in range(3)])
        assert_close(outputs, expected)


# Curvatures that add up, and how their matrix (P, P) is written out.
ADDITIVE: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "full": (lw.Full(), lambda curvature: curvature.matrix),
    "diagonal": (lw.Diagonal(), assembled),
    "kron": (lw.Kron(), assembled),
    "kron_reduce": (lw.Kron(sharing="reduce"), assembled),
    "low_rank": (lw.LowRank(rank=MOST), lambda c: c.vectors.T @ torch.diag(c.values) @ c.vectors),
}


@pytest.mark.parametrize("kind", ADDITIVE)
def test_curvatures_of_two_data_sets_add_up(case: Case, kind: str) -> None:
    method, matrix = ADDITIVE[kind]
    inputs, y = case.batch(6), problems.targets(case, 6)
    data = problems.split(inputs, y, (4, 2))
    first, second, both = (fit(case, method, part) for part in (data[:1], data[1:], data))
    assert_close(matrix(first.posterior.curvature + second.posterior.curvature), matrix(both.posterior.curvature))


def test_low_rank_curvatures_add_up_beyond_the_rank_of_either() -> None:
    """Two data sets of rank 20 each: their sum has rank 40."""
    model = nn.Sequential(nn.Linear(9, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    x, y = torch.randn(40, 9, dtype=D), torch.randn(40, 1, dtype=D)
    options = {"method": lw.LowRank(rank=100), "prior": 1.0}
    first, second = (
        lw.fit(model, [(x[part], y[part])], lw.Gaussian(noise_std=1.0), **options).posterior.curvature
        for part in (slice(0, 20), slice(20, 40))
    )
    total = first + second
    jac = dense.jacobian(model, x, 40)
    expected = dense.ggn(jac, torch.ones(40, 1, 1, dtype=D))
    assert_close(total.vectors.T @ torch.diag(total.values) @ total.vectors, expected)


def test_eigenvalue_corrected_curvatures_do_not_add() -> None:
    case = BY_NAME["mlp"]
    posterior = fit(case, lw.EKron(), problems.batches(case))
    with pytest.raises(lw.errors.UnsupportedError, match=r"do not add; add Kron\(\) curvatures"):
        _ = posterior.posterior.curvature + posterior.posterior.curvature


@pytest.mark.parametrize("kind", ["full", "diagonal", "kron", "low_rank"])
def test_curvatures_of_different_networks_do_not_add(kind: str) -> None:
    mlp, other = BY_NAME["mlp"], BY_NAME["norms"]
    one, two = (fit(c, ADDITIVE[kind][0], problems.batches(c)) for c in (mlp, other))
    with pytest.raises(lw.errors.UnsupportedError, match="different networks or weights and do not add"):
        _ = one.posterior.curvature + two.posterior.curvature


def test_low_rank_prior_variance_is_never_undercut(case: Case) -> None:
    """Directions left out keep their prior variance, so less rank means more variance."""
    inputs = case.batch(3, seed=1)
    thin, full = (
        fit(case, m, problems.batches(case)).functions(inputs).variance for m in (lw.LowRank(rank=2), lw.Full())
    )
    assert bool((thin >= full * (1 - 1e-8)).all())
