"""Bayesian optimisation with BoTorch: a fitted posterior as a model, and functions drawn from it.

Needs BoTorch: ``pip install 'lapwing[botorch]'``. Nothing else in the package imports this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lapwing.api import fit
from lapwing.errors import DataError, UnsupportedError
from lapwing.fitted import Fitted
from lapwing.likelihoods.numbers import Gaussian
from lapwing.linalg.dense import eigh
from lapwing.methods.weight_space import KernelSpace
from lapwing.networks.passes import outputs_along
from lapwing.networks.selection import last_layer
from lapwing.posteriors.base import Posterior
from lapwing.runtime.settings import POSITIVE, integer, of_class
from lapwing.runtime.threads import derived_generator, global_seed, normal
from lapwing.values.gaussian import isolate

try:
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.model import Model
    from botorch.models.transforms.input import InputTransform, Normalize
    from botorch.models.transforms.outcome import OutcomeTransform, Standardize
    from botorch.optim import optimize_acqf
    from botorch.posteriors.gpytorch import GPyTorchPosterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator
except ImportError as error:
    raise ImportError(
        "lapwing.botorch needs the package botorch, which is not installed: pip install 'lapwing[botorch]'."
    ) from error

__all__ = ["LapwingModel", "surrogate", "thompson"]


TOGETHER = 128  # inputs whose joint covariance is computed at once; only its blocks on the diagonal are kept
FITTED = of_class("a fitted posterior from lw.fit, lw.train or lw.load", Fitted)


class LapwingModel(Model):  # type: ignore[misc]
    """A fitted posterior as a BoTorch model, for every acquisition function that takes one.

    The belief about f(x) is the Gaussian of ``posterior.functions(x, joint=True)``, differentiable in x. A network in
    float64 (``model.double()``) is what BoTorch expects.

    Args:
        posterior: The result of ``lw.fit``, ``lw.train`` or ``lw.load`` for a regression with outputs (B, m).
        input_transform: A BoTorch transform that maps inputs of this model to those of the network.
        outcome_transform: A BoTorch transform of the targets that the network was trained on, such as ``Standardize``;
            the model's posterior is about the targets before it.

    Raises:
        UnsupportedError: If ``posterior`` is not a fitted posterior of such a network, or for a likelihood that has no
            noise variance.

    >>> import lapwing as lw
    >>> from botorch.acquisition.logei import qLogExpectedImprovement
    >>> from botorch.optim import optimize_acqf
    >>> X = torch.rand(20, 2, dtype=torch.float64)
    >>> Y = -(X - 0.4).square().sum(1, keepdim=True)
    >>> net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    >>> model = LapwingModel(lw.train(net, [(X, Y)], "regression", recipe=lw.recipes.classic(epochs=3)).posterior)
    >>> bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    >>> acquisition = qLogExpectedImprovement(model, best_f=Y.max())
    >>> candidates, _ = optimize_acqf(acquisition, bounds, q=2, num_restarts=2, raw_samples=16)
    >>> candidates.shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        posterior: Fitted,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> None:
        super().__init__()
        FITTED.check("posterior", posterior)
        shape = posterior.network.output_shape
        if len(shape) != 1 or posterior.likelihood.noise_variance is None:
            raise UnsupportedError(
                f"the posterior has {type(posterior.likelihood).__name__} targets and outputs (B, "
                f"{', '.join(map(str, shape))}); expected a regression with Gaussian() and outputs (B, m)."
            )
        self.fitted = posterior
        self._inputs = input_transform  # not as ``input_transform``: BoTorch would look for training inputs to change
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        self.eval()

    @property
    def num_outputs(self) -> int:
        """The number of outputs m of the network."""
        return self.fitted.network.output_shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of the model: none, since it is one network."""
        return torch.Size()

    def transform_inputs(self, X: Tensor, input_transform: nn.Module | None = None) -> Tensor:
        """Return the inputs of the network for inputs X of the model."""
        transform = self._inputs if input_transform is None else input_transform
        return X if transform is None else transform(X)

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """Return the joint belief about the outputs at the q inputs of every batch.

        Args:
            X: The inputs, (..., q, d).
            output_indices: The numbers of some outputs; all if None.
            observation_noise: Whether to add the noise of the targets; a tensor is added as the noise variance itself,
                in the units of the network's targets.
            posterior_transform: A BoTorch transform of the result.

        Returns:
            A BoTorch posterior with the event shape (..., q, m).
        """
        mean, cov = self._moments(self.transform_inputs(X), output_indices)
        noise = self._noise(mean, observation_noise, output_indices)
        if noise is not None:
            cov = cov + torch.diag_embed(noise.expand(mean.shape).flatten(-2))
        if mean.shape[-1] == 1:
            normal = MultivariateNormal(mean.squeeze(-1), to_linear_operator(cov))
        else:
            normal = MultitaskMultivariateNormal(mean, to_linear_operator(cov), interleaved=True)
        result = GPyTorchPosterior(normal)
        if hasattr(self, "outcome_transform"):
            transform = self.outcome_transform
            transform = transform if output_indices is None else transform.subset_output(output_indices)
            result = transform.untransform_posterior(result, X=X)
        return result if posterior_transform is None else posterior_transform(result)

    def _moments(self, x: Tensor, outputs: list[int] | None) -> tuple[Tensor, Tensor]:
        """Return the means (..., q, m) and covariances (..., q m, q m) in the dtype of x."""
        *batch, q, _ = x.shape
        each = x.to(self.fitted.network.dtype).reshape(-1, q, x.shape[-1])
        means, covs = zip(*self._blocks(each, outputs), strict=True)
        mean, cov = torch.cat(means), torch.cat(covs)
        return mean.reshape(*batch, q, -1).to(x.dtype), cov.reshape(*batch, *cov.shape[1:]).to(x.dtype)

    def _blocks(self, x: Tensor, outputs: list[int] | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield means (b, q, m) and covariances (b, q m, q m) of some batches (b, q, d) at a time."""
        count, q = x.shape[:2]
        if q == 1:
            belief = self.fitted.functions(x[:, 0], outputs=outputs)
            yield belief.mean.unsqueeze(1), belief.cov
            return
        step = max(1, TOGETHER // q)
        for start in range(0, count, step):
            some = x[start : start + step]
            belief = self.fitted.functions(some.flatten(0, 1), joint=True, outputs=outputs)
            size = q * belief.mean.shape[-1]
            blocks = belief.cov.reshape(len(some), size, len(some), size).diagonal(dim1=0, dim2=2).movedim(-1, 0)
            yield belief.mean.reshape(len(some), q, -1), blocks

    def _noise(self, mean: Tensor, given: bool | Tensor, outputs: list[int] | None) -> Tensor | None:
        """Return the noise variance that is added, in a shape that expands to that of the means; None for none."""
        if isinstance(given, Tensor):
            return given.to(mean)
        if not given:
            return None
        noise = self.fitted.likelihood.noise_variance
        assert noise is not None
        noise = noise.to(mean).expand(self.num_outputs)
        return noise if outputs is None else noise[outputs]

    def subset_output(self, idcs: list[int]) -> Model:
        """Refuse: ask ``posterior`` for some outputs instead."""
        raise UnsupportedError(
            "LapwingModel is one network and has no part for some outputs. Use posterior(X, output_indices=...), or an "
            "objective that takes some outputs."
        )

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> NoReturn:
        """Refuse: the network was trained on the data that it has."""
        raise UnsupportedError(
            "a network is not conditioned on new observations in closed form. Train it with them and fit again, such "
            "as by surrogate(X, Y, bounds). Acquisition functions without fantasies, such as qLogExpectedImprovement, "
            "do not need this."
        )

    def fantasize(self, X: Tensor, sampler: Any, **kwargs: Any) -> NoReturn:
        """Refuse: see ``condition_on_observations``."""
        self.condition_on_observations(X, X)

    def paths(self, n: int, generator: torch.Generator | None = None) -> Any:
        """Return n functions drawn from the posterior, as a deterministic BoTorch model with the batch shape (n,).

        Each is one function at all inputs and in all calls: its weights are drawn here.

        Args:
            n: The number of functions.
            generator: The source of randomness; the global generator if None.

        Returns:
            A model that maps X (..., q, d) to (n, ..., q, m); inputs (n, ..., q, d) have a batch for each function.

        Raises:
            UnsupportedError: If the method has no draws of the weights of a tangent model.
        """
        integer().check("n", n)
        fitted = self.fitted
        if not fitted.posterior.differentiable:
            raise UnsupportedError(
                f"{fitted.method} has no functions to draw that are differentiable; use Kron or Full."
            )
        fitted.base.require(Posterior.weight_samples, "draws of the weights", fitted.method)
        theta = fitted.base.theta
        steps = fitted.weight_samples(n, generator) - theta
        return GenericDeterministicModel(lambda X: self._along(steps, X), self.num_outputs)

    def _along(self, steps: Tensor, X: Tensor) -> Tensor:
        """Return the functions with these steps of the weights (n, P) at X (..., q, d): (n, ..., q, m)."""
        network, x = self.fitted.network, self.transform_inputs(X)
        flat = x.to(network.dtype).reshape(-1, x.shape[-1])

        def values(inner: Tensor) -> list[Tensor]:
            f, products = outputs_along(network, inner, steps)
            return [f + products]

        (drawn,) = isolate(values, flat)
        drawn = drawn.reshape(len(steps), *x.shape[:-1], -1).to(X.dtype)
        if hasattr(self, "outcome_transform"):
            drawn = self.outcome_transform.untransform(drawn, X=X)[0]
        return drawn


def require_bounds(bounds: Tensor, inputs: int | None) -> None:
    """Raise DataError unless the bounds are a tensor (2, d) with lower bounds below upper ones; None is any d."""
    if not isinstance(bounds, Tensor):
        raise DataError(f"bounds are of type {type(bounds).__name__}; expected a tensor, torch.tensor([lower, upper]).")
    if bounds.ndim != 2 or len(bounds) != 2 or (inputs is not None and bounds.shape[1] != inputs):
        columns = "d" if inputs is None else inputs
        raise DataError(
            f"bounds have the shape {tuple(bounds.shape)}; expected (2, {columns}): lower, then upper bounds."
        )
    if not bool(torch.isfinite(bounds).all()) or bool((bounds[0] >= bounds[1]).any()):
        raise DataError(
            f"bounds are {bounds.tolist()}; expected finite numbers, and every lower bound below its upper bound."
        )


UNITS = 128  # frequencies; each has a cosine and a sine
# Length scales as parts of the diagonal of the box, and variances of the function in units of those of the targets.
LENGTHS = torch.logspace(math.log10(0.1), math.log10(2.5), 8, dtype=torch.float64)
VARIANCES = torch.logspace(-1, 1.5, 11, dtype=torch.float64)


class Waves(nn.Module):
    """The cosine and the sine of every unit, so that their squares sum to one: (..., H) to (..., 2H)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the cosines, then the sines, divided by √H."""
        return torch.cat([x.cos(), x.sin()], -1) / x.shape[-1] ** 0.5


@dataclass(frozen=True, eq=False)
class FrequencyDraw:
    """Frequencies, the variance of the function before the data, and the log evidence of both."""

    frequencies: Tensor  # (H, d)
    variance: float
    log_evidence: float


def surrogate(
    X: Tensor, Y: Tensor, bounds: Tensor, *, noise_std: float = 0.01, generator: torch.Generator | None = None
) -> LapwingModel:
    """Fit a network of cosines and sines to observations and return its exact posterior as a BoTorch model.

    The network has one hidden layer of 128 random frequencies, each with a cosine and a sine, and a linear layer. Only
    the linear layer has error bars: before the data they are the same at every input, whereas those of networks with
    tanh or ReLU units are largest in the corners of the box, and an optimiser would evaluate corners. The evidence
    chooses the length scale of the frequencies and the precision of the prior. Inputs are scaled to [-1, 1] and targets
    standardised. The noise is fixed: with few data a learned noise often explains the whole function. Cost: below a
    tenth of a second of one core for 30 observations, two seconds for 1,000.

    Args:
        X: The inputs, (n, d).
        Y: The observations, (n, m).
        bounds: The lower and upper bounds of the inputs, (2, d).
        noise_std: The noise of an observation, as a part of the standard deviation of all.
        generator: The source of the frequencies; the global generator if None.

    Raises:
        DataError: If X and Y are not matrices with equally many rows, if bounds are not (2, d) with lower ones below
            upper ones, if a number is not finite, or a row of X is outside of the bounds, or if all observations are
            equal.
        UnsupportedError: If ``noise_std`` is not a positive number.

    >>> X = torch.rand(12, 2, dtype=torch.float64)
    >>> bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    >>> surrogate(X, X.sum(1, keepdim=True).sin(), bounds).posterior(X[:3]).mean.shape
    torch.Size([3, 1])
    """
    POSITIVE.check("noise_std", noise_std)
    _check(X, Y, bounds)
    inner = bounds.double().mean(0) + torch.tensor([[-0.25], [0.25]]).to(X.device) * (bounds[1] - bounds[0]).double()
    scaling = Normalize(X.shape[1], bounds=inner, center=0.0)  # half of the box has unit width: the box is [-1, 1]
    standard = Standardize(Y.shape[1])
    x, y = scaling(X.double()), standard(Y.double())[0]
    standard.eval()
    best = candidate(x, y, noise_std, generator)
    network = closed_form_network(best, x, y, noise_std)
    posterior = fit(
        network, [(x, y)], Gaussian(noise_std=noise_std), method=KernelSpace(), weights=last_layer,
        prior=1 / best.variance, progress=False,
    )  # fmt: skip
    return LapwingModel(posterior, scaling, standard)


def candidate(x: Tensor, y: Tensor, noise_std: float, generator: torch.Generator | None) -> FrequencyDraw:
    """Return the length scale and the variance with the largest evidence, for one draw of the frequencies.

    The evidence is that of linear regression on the features, N(y; 0, v K + φ), from the eigenvalues of K.
    """
    drawn = normal((UNITS, x.shape[1]), generator, x)
    variances = VARIANCES.to(x.device)
    best: FrequencyDraw | None = None
    for length in LENGTHS.tolist():
        frequencies = drawn / (length * 2 * x.shape[1] ** 0.5)
        values, vectors = eigh(_kernel(features(x, frequencies)))
        spread = variances[:, None] * values.clamp_min(0) + noise_std**2
        fits = ((vectors.mT @ y).square().sum(1) / spread).sum(1)
        scores = -0.5 * (fits + y.shape[1] * (2 * math.pi * spread).log().sum(1))
        at = int(scores.argmax())
        if best is None or float(scores[at]) > best.log_evidence:
            best = FrequencyDraw(frequencies, float(variances[at]), float(scores[at]))
    assert best is not None
    return best


def features(x: Tensor, frequencies: Tensor) -> Tensor:
    """Return the cosines and sines (n, 2H) of inputs (n, d)."""
    return Waves()(x @ frequencies.mT)


def closed_form_network(chosen: FrequencyDraw, x: Tensor, y: Tensor, noise_std: float) -> nn.Module:
    """Return the network whose linear layer is at the optimum of its regularised loss, in closed form."""
    phi, units = features(x, chosen.frequencies), len(chosen.frequencies)
    noise = noise_std**2 / chosen.variance * torch.eye(len(x), dtype=x.dtype, device=x.device)
    dual = torch.linalg.solve(_kernel(phi) + noise, y)
    hidden, output = nn.Linear(x.shape[1], units).to(x), nn.Linear(2 * units, y.shape[1]).to(x)
    with torch.no_grad():
        hidden.weight.copy_(chosen.frequencies)
        hidden.bias.zero_()
        output.weight.copy_(dual.mT @ phi)
        output.bias.copy_(dual.sum(0))
    return nn.Sequential(hidden, Waves(), output)


def _kernel(phi: Tensor) -> Tensor:
    """Return the kernel of the features and the bias for unit variance, (n, n)."""
    return phi @ phi.mT + 1


def _check(X: Tensor, Y: Tensor, bounds: Tensor) -> None:
    """Raise DataError for observations from which nothing can be learned."""
    for name, values in (("X", X), ("Y", Y)):
        if not isinstance(values, Tensor):
            raise DataError(
                f"{name} is of type {type(values).__name__}; expected a tensor, such as torch.as_tensor({name})."
            )
        if values.ndim != 2:
            raise DataError(
                f"{name} has the shape {tuple(values.shape)}; expected a row for each observation, (n, d) for X and "
                "(n, m) for Y. One number for each becomes a column by [:, None]."
            )
        if not bool(torch.isfinite(values).all()):
            raise DataError(f"{name} has a number that is not finite; leave such observations out.")
    if len(X) != len(Y) or len(X) < 2:
        raise DataError(f"X has {len(X)} rows and Y {len(Y)}; expected as many, and at least two observations.")
    require_bounds(bounds, X.shape[1])
    slack = 1e-6 * (bounds[1] - bounds[0])
    outside = int(((bounds[0] - slack > X) | (bounds[1] + slack < X)).any(1).sum())
    if outside:
        raise DataError(
            f"{outside} of {len(X)} rows of X are outside of the bounds; expected all inside, since the bounds set the "
            "scale of the inputs. Leave them out, or give wider bounds here than to the acquisition function."
        )
    if bool((Y[:1] == Y).all()):
        raise DataError(f"all {len(Y)} observations are equal; expected at least two different ones.")


def thompson(
    model: LapwingModel,
    bounds: Tensor,
    n: int,
    *,
    num_restarts: int = 4,
    raw_samples: int = 128,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return n points (n, d), each the maximum of a function drawn from the posterior: batch Thompson sampling.

    Args:
        model: A model with one output.
        bounds: The lower and upper bounds of the inputs, (2, d).
        n: The number of points.
        num_restarts: From how many points the gradient climbs.
        raw_samples: Among how many random points those are chosen.
        generator: The source of the functions and of the random points; the global generator if None.

    Raises:
        UnsupportedError: If the model has several outputs, or its method has no function draws.
        DataError: If the bounds are not (2, d) with lower ones below upper ones.
    """
    if model.num_outputs != 1:
        raise UnsupportedError(f"the model has {model.num_outputs} outputs; expected one to maximise.")
    require_bounds(bounds, None)
    paths, points, starts = model.paths(n, generator), [], derived_generator(generator, bounds)
    for number in range(n):
        one = lambda X, number=number: paths(X)[number].amax((-2, -1))
        with global_seed(starts.initial_seed() + number, bounds.device):  # BoTorch draws starts from the global one
            point, _ = optimize_acqf(one, bounds, q=1, num_restarts=num_restarts, raw_samples=raw_samples)
        points.append(point)
    return torch.cat(points)
