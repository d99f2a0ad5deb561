"""Bayesian optimisation with BoTorch: a fitted posterior as a model, and functions drawn from it.

Needs BoTorch: ``pip install 'lapwing[integrations]'``. Nothing else in the package imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lapwing.api import fit, train
from lapwing.core.random import derived_generator, global_seed, uniform
from lapwing.core.settings import Rule, require_integer
from lapwing.core.slopes import isolated
from lapwing.errors import DataError, UnsupportedError
from lapwing.fitted import Fitted
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.methods.kernel_space import KernelSpace
from lapwing.networks.directional import outputs_along
from lapwing.posteriors.protocols import HasWeightSamples, required
from lapwing.priors import per_layer
from lapwing.training.recipe import classic
from lapwing.tuners.linear_mode import LinearMode

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
        "lapwing.botorch needs the package botorch, which is not installed: pip install 'lapwing[integrations]'."
    ) from error

TOGETHER = 128  # inputs whose joint covariance is computed at once; only its blocks on the diagonal are kept
UNITS = 32  # of the network that ``surrogate`` trains
CYCLES = 10  # of its training: 20 steps of L-BFGS and one update of the precisions each
FITTED = Rule("a fitted posterior from lw.fit, lw.train or lw.load", lambda value: isinstance(value, Fitted))


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
        UnsupportedError: If ``posterior`` is no fitted posterior of such a network, or for a likelihood that has no
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
        require_integer("n", n)
        fitted = self.fitted
        if not fitted.posterior.differentiable:
            raise UnsupportedError(
                f"{fitted.method} has no functions to draw that are differentiable; use Kron or Full."
            )
        theta = required(fitted.base, HasWeightSamples, "draws of the weights", fitted.method).theta
        steps = fitted.weight_samples(n, generator) - theta
        return GenericDeterministicModel(lambda X: self._along(steps, X), self.num_outputs)

    def _along(self, steps: Tensor, X: Tensor) -> Tensor:
        """Return the functions with these steps of the weights (n, P) at X (..., q, d): (n, ..., q, m)."""
        network, x = self.fitted.network, self.transform_inputs(X)
        flat = x.to(network.dtype).reshape(-1, x.shape[-1])

        def values(inner: Tensor) -> list[Tensor]:
            f, products = outputs_along(network, inner, steps)
            return [f + products]

        (drawn,) = isolated(values, flat)
        drawn = drawn.reshape(len(steps), *x.shape[:-1], -1).to(X.dtype)
        if hasattr(self, "outcome_transform"):
            drawn = self.outcome_transform.untransform(drawn, X=X)[0]
        return drawn


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
    """
    if model.num_outputs != 1:
        raise UnsupportedError(f"the model has {model.num_outputs} outputs; expected one to maximise.")
    paths, points, starts = model.paths(n, generator), [], derived_generator(generator, bounds)
    for number in range(n):
        one = lambda X, number=number: paths(X)[number].amax((-2, -1))
        with global_seed(starts.initial_seed() + number, bounds.device):  # BoTorch draws starts from the global one
            point, _ = optimize_acqf(one, bounds, q=1, num_restarts=num_restarts, raw_samples=raw_samples)
        points.append(point)
    return torch.cat(points)


def surrogate(
    X: Tensor, Y: Tensor, bounds: Tensor, *, noise_std: float = 0.01, generator: torch.Generator | None = None
) -> LapwingModel:
    """Train a small network on observations and return its exact posterior as a BoTorch model.

    Inputs are scaled to [-1, 1] and targets standardised. L-BFGS minimises the regularised loss of two hidden layers of
    32 tanh units on all data, while the evidence chooses a precision for each layer. The evidence of the tangent model
    then chooses the precision of its posterior. The noise is fixed: with few data a learned noise often explains the
    whole function. Cost: about one second of one core for 30 observations.

    Args:
        X: The inputs, (n, d).
        Y: The observations, (n, m).
        bounds: The lower and upper bounds of the inputs, (2, d).
        noise_std: The noise of an observation, as a part of the standard deviation of all.
        generator: The source of the initial weights; the global generator if None.

    Raises:
        DataError: If X and Y are no matrices with as many rows, or bounds are not (2, d).

    >>> X = torch.rand(12, 2, dtype=torch.float64)
    >>> bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    >>> surrogate(X, X.sum(1, keepdim=True).sin(), bounds).posterior(X[:3]).mean.shape
    torch.Size([3, 1])
    """
    if X.ndim != 2 or Y.ndim != 2 or len(X) != len(Y) or bounds.shape != (2, X.shape[1]):
        raise DataError(
            f"X has the shape {tuple(X.shape)}, Y {tuple(Y.shape)} and bounds {tuple(bounds.shape)}; expected (n, d), "
            "(n, m) and (2, d)."
        )
    inner = bounds.double().mean(0) + torch.tensor([[-0.25], [0.25]]).to(X.device) * (bounds[1] - bounds[0]).double()
    scaling = Normalize(X.shape[1], bounds=inner, center=0.0)  # half of the box has unit width: the box is [-1, 1]
    standard = Standardize(Y.shape[1])
    x, y = scaling(X.double()), standard(Y.double())[0]
    standard.eval()
    likelihood, data = Gaussian(noise_std=noise_std), [(x, y)]
    recipe = classic(CYCLES, method=KernelSpace(), prior=per_layer(1.0))
    network = train(_initial(x, Y.shape[1], generator), data, likelihood, recipe=recipe, progress=False).model
    fitted = fit(network, data, likelihood, method=KernelSpace(), tuner=LinearMode(), progress=False)
    return LapwingModel(fitted, scaling, standard)


def _initial(x: Tensor, outputs: int, generator: torch.Generator | None) -> nn.Module:
    """Return a network of two hidden layers with weights as PyTorch draws them, but from the generator."""
    sizes = [x.shape[1], UNITS, UNITS, outputs]
    layers = [nn.Linear(*pair).to(x) for pair in pairwise(sizes)]
    with torch.no_grad():
        for layer in layers:
            for p in layer.parameters():
                p.copy_((2 * uniform(tuple(p.shape), generator, p) - 1) * layer.in_features**-0.5)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
