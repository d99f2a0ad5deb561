"""The BoTorch model: batch shapes, transforms, gradients, acquisition functions, Thompson sampling, refusals."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("botorch")

from botorch.acquisition import PosteriorMean
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from torch.distributions import MultivariateNormal

import lapwing as lw
from lapwing.botorch import LENGTHS, UNITS, VARIANCES, LapwingModel, candidate, surrogate, thompson
from lapwing.errors import DataError, UnsupportedError
from tests.tolerances import SOLVED, assert_close

DT = torch.float64
ROWS, INPUTS = 14, 2
NOISE = 0.1


def generated(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=DT, generator=torch.Generator().manual_seed(seed))


X = generated(ROWS, INPUTS)
BOUNDS = torch.tensor([[0.0] * INPUTS, [1.0] * INPUTS], dtype=DT)


@cache
def fitted(outputs: int, method: Any = None) -> lw.Fitted:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    y = generated(ROWS, outputs, seed=2)
    return lw.fit(net, [(X, y)], lw.Gaussian(noise_std=NOISE), method=method or lw.Kron(), prior=1.0)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("shape", [(4,), (1,), (5, 1), (2, 3, 4)], ids=str)
def test_batches_of_joint_beliefs(outputs: int, shape: tuple[int, ...]) -> None:
    """Each batch against a call of functions by itself."""
    x = generated(*shape, INPUTS, seed=3)
    posterior = LapwingModel(fitted(outputs)).posterior(x)
    assert posterior.mean.shape == posterior.variance.shape == (*shape, outputs)
    assert posterior.rsample(torch.Size([7])).shape == (7, *shape, outputs)
    q = shape[-1]
    means, covs = posterior.mean.reshape(-1, q, outputs), posterior.distribution.covariance_matrix
    for each, mean, cov in zip(
        x.reshape(-1, q, INPUTS), means, covs.reshape(-1, q * outputs, q * outputs), strict=True
    ):
        belief = fitted(outputs).functions(each, joint=True)
        assert_close(mean, belief.mean)
        assert_close(cov, belief.cov.reshape(cov.shape))


def test_noise_some_outputs_and_transforms() -> None:
    model, x = LapwingModel(fitted(3)), generated(4, INPUTS, seed=3)
    plain = model.posterior(x)
    assert_close(model.posterior(x, observation_noise=True).variance, plain.variance + NOISE**2)
    given = torch.full((4, 3), 0.5, dtype=DT)
    assert_close(model.posterior(x, observation_noise=given).variance, plain.variance + 0.5)
    assert_close(model.posterior(x, output_indices=[2, 0]).mean, plain.mean[:, [2, 0]])
    inputs, standard = Normalize(INPUTS, bounds=3 * BOUNDS), Standardize(3)
    standard(generated(ROWS, 3, seed=4) * 5 + 2)
    standard.eval()
    scaled = LapwingModel(fitted(3), inputs, standard).posterior(3 * x)
    assert_close(scaled.mean, standard.untransform(plain.mean)[0])
    assert_close(scaled.variance, plain.variance * standard.stdvs.square())


def test_gradients_of_an_acquisition_function() -> None:
    sampler = SobolQMCNormalSampler(torch.Size([16]), seed=0)
    acquisition = qLogExpectedImprovement(LapwingModel(fitted(1)), best_f=0.6, sampler=sampler)
    x = generated(2, 3, INPUTS, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(acquisition, (x,), fast_mode=True)


def bowl(x: Tensor) -> Tensor:
    return -(x - 0.3).square().sum(1, keepdim=True)


@cache
def of_bowl(seed: int) -> LapwingModel:
    return surrogate(X, bowl(X), BOUNDS, generator=torch.Generator().manual_seed(seed))


def test_the_surrogate_knows_where_it_knows_and_finds_the_maximum() -> None:
    """It fits its data, its errors elsewhere are of the size of its error bars, and its mean has the right maximum."""
    model, x = of_bowl(0), generated(200, INPUTS, seed=7)
    at_data, far = model.posterior(X), model.posterior(x.unsqueeze(1))
    assert float((at_data.mean - bowl(X)).abs().max()) < 0.05 * float(bowl(X).std())  # noise_std is 0.01
    assert float(far.variance.mean()) > 4 * float(at_data.variance.mean())
    z = (far.mean.squeeze(1) - bowl(x)) / far.variance.squeeze(1).sqrt()
    assert 0.1 < float(z.square().mean().sqrt()) < 2  # one in the mean over problems; smooth ones are below
    torch.manual_seed(0)
    point, value = optimize_acqf(PosteriorMean(model), BOUNDS, q=1, num_restarts=3, raw_samples=32)
    assert float(value) >= float(far.mean.max()) - 1e-6
    assert float((point - 0.3).norm()) < 0.1


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_surrogate_is_the_exact_posterior_of_its_features(outputs: int) -> None:
    """Against a Gaussian process with the kernel of the features, for the candidate with the largest evidence."""
    x, noise, y = 2 * X - 1, 0.1, generated(ROWS, outputs, seed=8)
    y = (y - y.mean(0)) / y.std(0)
    normal = lambda kernel: MultivariateNormal(torch.zeros(ROWS, dtype=DT), kernel + noise**2 * torch.eye(ROWS))
    scores = {}
    for length in LENGTHS:
        drawn = torch.randn(UNITS, INPUTS, dtype=DT, generator=torch.Generator().manual_seed(5))
        frequencies = drawn / (length * 2 * INPUTS**0.5)
        for variance in VARIANCES:
            kernel = variance * (1 + ((x[:, None] - x) @ frequencies.T).cos().mean(-1))
            scores[length, variance] = float(normal(kernel).log_prob(y.T).sum()), frequencies
    (_, variance), (evidence, frequencies) = max(scores.items(), key=lambda item: item[1][0])
    best = candidate(x, y, noise, torch.Generator().manual_seed(5))
    assert_close(best.frequencies, frequencies)
    assert best.log_evidence == pytest.approx(evidence, rel=1e-9)
    assert best.variance == pytest.approx(float(variance))

    model = surrogate(X, y, BOUNDS, noise_std=noise, generator=torch.Generator().manual_seed(5))
    assert float(model.fitted.log_evidence().detach()) == pytest.approx(evidence, rel=1e-8)
    new = generated(4, INPUTS, seed=9)
    kernel = lambda a, b: variance * (1 + (2 * (a[:, None] - b) @ frequencies.T).cos().mean(-1))
    gain = torch.linalg.solve(kernel(X, X) + noise**2 * torch.eye(ROWS), kernel(X, new)).T
    posterior = model.posterior(new)
    assert_close(posterior.mean, gain @ y, SOLVED)
    cov = kernel(new, new) - gain @ kernel(X, new)
    assert_close(posterior.variance, cov.diagonal()[:, None].expand(-1, outputs), SOLVED)


def test_before_the_data_the_surrogate_is_equally_wide_everywhere() -> None:
    """Noise far above the targets leaves the prior. A network of tanh units is wider in the corners of the box."""
    corner, centre = torch.ones(1, 5, dtype=DT), torch.full((1, 5), 0.5, dtype=DT)
    x, bounds = generated(9, 5), torch.stack([torch.zeros(5, dtype=DT), torch.ones(5, dtype=DT)])
    ratio = lambda model: float(model.posterior(corner).variance / model.posterior(centre).variance)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    noise = lw.Gaussian(noise_std=1e4)
    wide = lw.fit(net, [(2 * x - 1, x[:, :1])], noise, method=lw.KernelSpace(), prior=1.0)
    box = Normalize(5, bounds=torch.stack([bounds[0] + 0.25, bounds[1] - 0.25]), center=0.0)
    assert ratio(surrogate(x, x[:, :1], bounds, noise_std=1e4)) == pytest.approx(1, abs=1e-6)
    assert ratio(LapwingModel(wide, box)) > 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"Y": torch.ones(ROWS, 1)}, "are equal"),
        ({"Y": torch.full((ROWS, 1), torch.nan)}, "not finite"),
        ({"Y": X[:, 0]}, r"Y has the shape \(14,\).*\[:, None\]"),
        ({"Y": X[:9]}, "14 rows and Y 9"),
        ({"X": X[:1], "Y": X[:1]}, "at least two"),
        ({"X": X.numpy()}, "X is .*torch.as_tensor"),
        ({"X": 3 * X}, "outside of the bounds"),
        ({"bounds": BOUNDS.flip(0)}, "below its upper bound"),
        ({"bounds": 0 * BOUNDS}, "below its upper bound"),
        ({"bounds": BOUNDS.tolist()}, "bounds are .*expected a tensor"),
        ({"bounds": torch.cat([BOUNDS, BOUNDS], 1)}, r"expected \(2, 2\)"),
    ],
)
def test_surrogates_refuse_data_that_say_nothing(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        surrogate(**{"X": X, "Y": X[:, :1], "bounds": BOUNDS, **changes})


def test_bounds_and_noise_are_checked() -> None:
    with pytest.raises(UnsupportedError, match="noise_std"):
        surrogate(X, bowl(X), BOUNDS, noise_std=0.0)
    with pytest.raises(DataError, match="below its upper bound"):
        thompson(of_bowl(0), BOUNDS.flip(0), 1)


def test_surrogate_and_thompson_depend_on_their_generator_alone() -> None:
    points = []
    for state in (1, 2):
        torch.manual_seed(state)
        model = surrogate(X, bowl(X), BOUNDS, generator=torch.Generator().manual_seed(0))
        assert_close(model.posterior(X).mean, of_bowl(0).posterior(X).mean)
        points.append(thompson(model, BOUNDS, 2, generator=torch.Generator().manual_seed(3)))
    assert_close(*points)


def test_expected_improvement_beats_random_search() -> None:
    """Three points by qLogEI and the maximum of the mean, against four random points, both after the same fourteen."""
    best = lambda x: -float(bowl(x).max())
    random = torch.tensor([best(torch.cat([X, generated(4, INPUTS, seed=seed)])) for seed in range(20, 220)])
    x = X
    torch.manual_seed(0)
    for step in range(4):
        model = surrogate(x, bowl(x), BOUNDS, generator=torch.Generator().manual_seed(step))
        acquisition = qLogExpectedImprovement(model, best_f=bowl(x).max()) if step < 3 else PosteriorMean(model)
        new, _ = optimize_acqf(acquisition, BOUNDS, q=1, num_restarts=3, raw_samples=32, options={"maxiter": 30})
        x = torch.cat([x, new])
    assert best(x) < 0.2 * float(random.mean())


def test_noisy_acquisition_and_batches() -> None:
    acquisition = qLogNoisyExpectedImprovement(LapwingModel(fitted(1)), X_baseline=X)
    points, _ = optimize_acqf(acquisition, BOUNDS, q=2, num_restarts=2, raw_samples=8, options={"maxiter": 5})
    assert points.shape == (2, INPUTS)


@pytest.mark.parametrize("method", [lw.Kron(), lw.Full(), lw.KernelSpace()], ids=lambda m: type(m).__name__)
def test_paths_are_consistent_functions(method: Any) -> None:
    """Equal at equal inputs in every call, and the draws of function_samples from the same generator."""
    model, x = LapwingModel(fitted(1, method)), generated(3, 4, INPUTS, seed=6)
    draws = lambda: torch.Generator().manual_seed(9)
    paths = model.paths(5, draws())
    values = paths(x)
    assert values.shape == (5, 3, 4, 1)
    assert_close(paths(x[1:2, :2]), values[:, 1:2, :2])
    samples = model.fitted.function_samples(x.flatten(0, 1), 5, draws())
    assert_close(values.flatten(1, 2), samples, SOLVED)
    assert torch.autograd.gradcheck(paths, (x.requires_grad_(),), fast_mode=True)


def test_thompson_points_maximise_their_functions() -> None:
    model, draws = LapwingModel(fitted(1)), lambda: torch.Generator().manual_seed(4)
    torch.manual_seed(0)
    points = thompson(model, BOUNDS, 3, generator=draws())
    assert points.shape == (3, INPUTS)
    others = generated(200, INPUTS, seed=8)
    paths = model.paths(3, draws())
    best = torch.stack([paths(points[None])[k, 0, k, 0] for k in range(3)])
    assert bool((best >= paths(others[None])[:, 0, :, 0].amax(1) - 1e-6).all())


def test_refusals() -> None:
    model = LapwingModel(fitted(1))
    with pytest.raises(lw.errors.UnsupportedError, match="fit again"):
        model.fantasize(X[:1], SobolQMCNormalSampler(torch.Size([2])))
    with pytest.raises(lw.errors.UnsupportedError, match="output_indices"):
        model.subset_output([0])
    with pytest.raises(lw.errors.UnsupportedError, match="posterior"):
        LapwingModel(nn.Linear(2, 1))  # type: ignore[arg-type]
    labels = lw.fit(nn.Linear(INPUTS, 3).double(), [(X, torch.arange(ROWS) % 3)], "classification", prior=1.0)
    with pytest.raises(lw.errors.UnsupportedError, match="expected a regression"):
        LapwingModel(labels)
    with pytest.raises(lw.errors.UnsupportedError, match="3 outputs"):
        thompson(LapwingModel(fitted(3)), BOUNDS, 1)
