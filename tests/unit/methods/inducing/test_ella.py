"""Subspaces of the tangent kernel: how they are found, and what becomes of bad ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.methods.inducing import ella as module
from lapwing.methods.inducing.ella import leading_rows, within
from lapwing.methods.inducing.points import Anchors
from lapwing.networks.network import Network
from lapwing.problem import Problem
from tests import problems
from tests.cases import BY_NAME, cast
from tests.references import dense, inducing
from tests.tolerances import SOLVED, assert_close, assert_within

D = torch.float64
CPU = torch.device("cpu")
MLP = BY_NAME["mlp"]
M = 7


@cache
def network() -> Network:
    return Network.build(MLP.build(), MLP.batch(M))


def prior(kind: str = "per_layer") -> Any:
    given = lw.per_layer(torch.tensor([0.3, 1.0, 4.0], dtype=D)) if kind == "per_layer" else lw.isotropic(0.7)
    return given.bound(network().selection, network().theta())


def anchors(index: list[int] | None = None) -> tuple[Anchors, Tensor]:
    """Some landmarks, with their rows (M, P)."""
    chosen = torch.arange(M) if index is None else torch.tensor(index)
    outputs = torch.arange(M) % 3
    jac = dense.jacobian(MLP.build(), MLP.batch(M), M)[torch.arange(M), outputs]
    return Anchors(network(), MLP.batch(M)[chosen], outputs[chosen]), jac[chosen]


def fitted(method: Any, case: str = "mlp", **options: Any) -> lw.Fitted:
    chosen = BY_NAME[case]
    options.setdefault("prior", 0.8)
    return lw.fit(chosen.build(), problems.batches(chosen), problems.likelihood(chosen), method=method, **options)


# Directions.


@pytest.mark.parametrize("kind", ["isotropic", "per_layer"])
@pytest.mark.parametrize("rank", [1, 4, M, 100])
def test_directions_are_the_leading_ones_and_of_unit_length(kind: str, rank: int) -> None:
    """Under the prior: D A Dᵀ = I, and the kernel along them has the leading eigenvalues, largest first."""
    given, (points, z) = prior(kind), anchors()
    rows = leading_rows(points, given, rank)
    count = min(rank, M)
    assert_close(inducing.kernel(rows, rows, given.vector), torch.eye(count, dtype=D))
    expected = inducing.directions(z, given.vector, count) * given.vector
    signs = ((rows * expected).sum(1) > 0).to(D) * 2 - 1
    assert_close(rows * signs[:, None], expected, SOLVED)


def test_equal_landmarks_count_once() -> None:
    """Null directions of their kernel are rounding, and dropped."""
    given, (points, _) = prior(), anchors([0, 1, 2, 2, 1, 0, 3])
    rows = leading_rows(points, given, 100)
    assert rows.shape == (4, 83)
    alone, _ = anchors([0, 1, 2, 3])
    expected = leading_rows(alone, given, 100)
    assert_close(inducing.within(rows / given.vector, torch.diag(given.vector)),
                 inducing.within(expected / given.vector, torch.diag(given.vector)), SOLVED)  # fmt: skip


def test_a_rank_above_what_the_data_have() -> None:
    """Three data, each many times: nine rows, whatever is asked for."""
    x, y = MLP.batch(3).repeat(6, 1), problems.targets(MLP, 18)
    posterior = lw.fit(MLP.build(), [(x, y)], "classification", method=lw.ELLA(54, 54), prior=0.8)
    assert len(posterior.posterior.curvature.directions) == 9
    assert bool(torch.isfinite(posterior.functions(MLP.batch(3, seed=1)).cov).all())
    exact = lw.fit(MLP.build(), [(x, y)], "classification", method=lw.Full(), prior=0.8)
    assert_close(posterior.functions(x[:3]).cov, exact.functions(x[:3]).cov, SOLVED)


@pytest.mark.parametrize("name", ["mlp", "token_level", "squeezed", "embedding"])
def test_the_curvature_within_is_the_ggns(name: str) -> None:
    case = BY_NAME[name]
    _, ggn = problems.dense_ggn(case, case.build())
    d = torch.randn(5, len(ggn), dtype=D)
    whole = Network.build(case.build(), case.batch(3))
    problem = Problem(whole, problems.likelihood(case), lw.isotropic(1.0).bound(whole.selection, whole.theta()))
    found, statistics = within(problem, Data(problems.batches(case), CPU), d)
    assert_close(found, d @ ggn @ d.T)
    exact = fitted(lw.Full(), name).posterior.statistics
    assert (statistics.data, statistics.outputs) == (exact.data, exact.outputs)
    assert statistics.loss == pytest.approx(exact.loss, rel=1e-12)


def test_landmarks_are_drawn_by_the_generator() -> None:
    x = MLP.batch(3, seed=1)
    one, two, other = (
        fitted(lw.ELLA(4, 3), generator=torch.Generator().manual_seed(seed)).functions(x).cov for seed in (1, 1, 2)
    )
    assert_close(one, two)
    assert not torch.allclose(one, other)
    assert_close(fitted(lw.ELLA(4, 3)).functions(x).cov, fitted(lw.ELLA(4, 3)).functions(x).cov)


@pytest.mark.parametrize("seed", [0, 3])
def test_data_made_with_the_same_seed_are_drawn_all_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that made the inputs would order them, and all landmarks would lie at one end."""
    seen: list[Tensor] = []

    def noted(points: Anchors, *rest: Any) -> Tensor:
        seen.append(points.inputs)
        return leading_rows(points, *rest)

    monkeypatch.setattr(module, "leading_rows", noted)
    x = torch.rand(500, 1, dtype=D, generator=torch.Generator().manual_seed(seed))
    given = None if seed == 0 else torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    lw.fit(model, [(x, x)], lw.Gaussian(noise_std=1.0), method=lw.ELLA(20, 3), prior=1.0, generator=given)
    assert float(seen[0].min()) < 0.3
    assert float(seen[0].max()) > 0.7


# What is left out.


@pytest.mark.parametrize("residual", [False, True])
def test_an_input_that_the_landmarks_do_not_see(residual: bool) -> None:
    """Orthogonal to the data: no variance, or with the residual the prior's."""
    model = nn.Linear(3, 1, bias=False).double()
    x = torch.randn(6, 3, dtype=D)
    x[:, 2] = 0
    data = [(x, torch.randn(6, 1, dtype=D))]
    posterior = lw.fit(model, data, lw.Gaussian(noise_std=0.5), method=lw.ELLA(6, 6, residual), prior=4.0)
    new = torch.tensor([[0.0, 0.0, 3.0]], dtype=D)
    expected = torch.tensor([[9 / 4 if residual else 0.0]], dtype=D)
    assert float((posterior.functions(new).variance - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["mlp", "cnn", "token_level"])
def test_the_residual_only_adds(name: str) -> None:
    x = BY_NAME[name].batch(3, seed=1)
    thin, thick = (fitted(lw.ELLA(6, 3, residual), name).functions(x) for residual in (False, True))
    gap = torch.linalg.eigvalsh(thick.cov - thin.cov)
    assert float(gap.min()) >= -1e-12 * float(thick.variance.max())
    assert float(gap.max()) > 1e-3 * float(thick.variance.max())


@pytest.mark.parametrize("residual", [False, True])
def test_more_rank_tells_more(residual: bool) -> None:
    """Within the directions the variance grows towards the exact one; with the residual it starts at the prior's."""
    x = MLP.batch(6)
    exact = fitted(lw.Full()).functions(x).variance
    gaps = [
        float((fitted(lw.ELLA(100, rank, residual)).functions(x).variance - exact).abs().max()) for rank in (1, 5, 18)
    ]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-10


# The same as for every method.


def test_effective_parameters_are_those_of_the_subspace() -> None:
    """γ = Σ a_i (prior variance - posterior variance), both within the directions, layer by layer."""
    posterior = fitted(lw.ELLA(100, 4), prior=lw.per_layer(torch.tensor([0.3, 1.0, 4.0], dtype=D)))
    precision, d = posterior.prior.vector, posterior.posterior.curvature.directions
    _, ggn = problems.dense_ggn(MLP, MLP.build())
    before, after = (inducing.within(d, m) for m in (torch.diag(precision), ggn + torch.diag(precision)))
    each = precision * (before - after).diagonal()
    effective = posterior.effective_parameters()
    assert effective.total == pytest.approx(float(each.sum()), rel=1e-10)
    assert effective.total < 4
    assert list(effective.layers.values()) == pytest.approx(
        [float(p.sum()) for p in each.split([30, 35, 18])], rel=1e-9
    )
    assert_close(effective.by_precision, torch.stack([p.sum() for p in each.split([30, 35, 18])]))


@pytest.mark.parametrize("residual", [False, True])
def test_float32(residual: bool) -> None:
    data = problems.batches(MLP, dtype=torch.float32)
    method = lw.ELLA(100, 6, residual)
    single = lw.fit(MLP.build(torch.float32), data, "classification", method=method, prior=0.8)
    wide = [(cast(x, D), y) for x, y in data]
    double = lw.fit(MLP.build(torch.float32).double(), wide, "classification", method=method, prior=0.8)
    x = MLP.batch(3, torch.float32, seed=1)
    assert single.functions(x).cov.dtype == torch.float32
    assert_close(single.functions(x).cov, double.functions(x.double()).cov, SOLVED)
    assert_close(single.log_evidence(), double.log_evidence(), SOLVED, dtype=torch.float32)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", ["mlp", "squeezed", "token_level"])
def test_joint_beliefs_and_samples(name: str, residual: bool, generator: torch.Generator) -> None:
    case = BY_NAME[name]
    posterior, x = fitted(lw.ELLA(8, 4, residual), name), case.batch(2, seed=1)
    joint, belief = posterior.functions(x, joint=True), posterior.functions(x)
    size, classes = joint.mean.numel(), case.outputs[-1]
    whole = joint.cov.reshape(size, size)
    blocks = torch.stack([whole[i : i + classes, i : i + classes] for i in range(0, size, classes)])
    assert_close(blocks, belief.cov.reshape(blocks.shape))
    assert_close(joint.variance, belief.variance)
    gap = (posterior.function_samples(x, 2000, generator) - joint.mean).flatten(1)
    assert_within(gap[:, :, None] * gap[:, None, :], whole)


def test_the_prior_is_learned_where_none_is_given() -> None:
    """By the evidence of the subspace."""
    posterior = fitted(lw.ELLA(100, 6), prior=None)
    values = [float(posterior.with_prior(float(posterior.prior.values) * f).log_evidence()) for f in (0.95, 1.0, 1.05)]
    assert values[1] > max(values[0], values[2])


# Refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_landmarks": 0}, "num_landmarks is 0; expected at least 1"),
        ({"num_landmarks": -3}, "num_landmarks is -3; expected at least 1"),
        ({"num_landmarks": None}, "num_landmarks is None; expected an integer"),
        ({"rank": 0}, "rank is 0; expected at least 1"),
        ({"rank": 2.5}, "rank is 2.5; expected an integer"),
        ({"residual": "no"}, "residual is 'no'; expected True or False"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        lw.ELLA(**settings)


def test_a_prior_that_needs_the_curvature_first() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"g_prior\(\) takes its scale from the curvature.* ELLA\(\)"):
        fitted(lw.ELLA(), prior=lw.priors.g_prior())


def test_a_g_prior_afterwards() -> None:
    """From the diagonal within the directions."""
    posterior = fitted(lw.ELLA(100, 100), prior=1.0).with_prior(lw.priors.g_prior(0.5))
    assert_close(posterior.prior.vector, 0.5 * posterior.posterior.curvature.diagonal())
    assert bool(torch.isfinite(posterior.functions(MLP.batch(3)).cov).all())


def test_a_kernel_that_overflows() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x, y = torch.full((3, 2), 1e160, dtype=D), torch.zeros(3, 1, dtype=D)
    with pytest.raises(lw.errors.NumericalError, match="the kernel of the landmarks is not finite"):
        lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.ELLA(), prior=1.0)


def test_a_network_without_slopes() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    x, y = torch.zeros(3, 2, dtype=D), torch.zeros(3, 1, dtype=D)
    with pytest.raises(lw.errors.NumericalError, match="no output depends on the selected weights at any landmark"):
        lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.ELLA(), prior=1.0)


def test_the_methods_name() -> None:
    x = MLP.batch(3, seed=1)
    assert_close(fitted("ella").functions(x).cov, fitted(lw.ELLA()).functions(x).cov)


def test_with_the_residual_the_evidence_is_a_bound() -> None:
    """As in VaLLA; without the trace of what is left out a prior that lets it run free would look the best."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.randn(30, 2, dtype=torch.float64)
    data = [(x, x.sum(1, keepdim=True).sin())]
    fit = lambda method: lw.fit(model, data, lw.Gaussian(noise_std=0.2), method=method, prior=0.5)
    full = float(fit(lw.Full()).log_evidence())
    found = [float(fit(lw.ELLA(30, rank, residual=True)).log_evidence()) for rank in (2, 5, 10, 25)]
    assert found == sorted(found)
    assert found[0] < full - 1
    assert found[-1] == pytest.approx(full, abs=1e-6)
    assert float(fit(lw.ELLA(30, 2)).log_evidence()) > found[0]  # the subspace alone has no such term


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (7, 5), (4, 4, 4)])
def test_a_context_for_all_samples(sizes: tuple[int, ...]) -> None:
    """Kept once, however the data are cut; landmarks at all data are then exact."""
    torch.manual_seed(0)
    network, context = problems.InContext().double(), 0.3 * torch.randn(5, 3, dtype=torch.float64)
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)
    data, new = [((a, context), b) for a, b in problems.split(x, y, sizes)], (x[:8] + 0.1, context)
    fit = lambda m: lw.fit(network, data, lw.Gaussian(noise_std=0.3), method=m, prior=1.0)
    posterior, full = fit(lw.ELLA(100, 100, residual=True)), fit(lw.Full())
    assert_close(posterior.functions(new).cov, full.functions(new).cov, SOLVED)
    assert_close(posterior.log_evidence(), full.log_evidence(), SOLVED)
