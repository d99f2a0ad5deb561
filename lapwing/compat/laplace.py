"""``Laplace`` with the interface of laplace-torch 0.3 and the numbers of Lapwing."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.api import fit, load
from lapwing.compat import settings as tuning
from lapwing.compat.settings import (
    NUMBER_OR_TENSOR,
    HessianStructure,
    LikelihoodName,
    LinkApprox,
    PredType,
    Settings,
    SubsetOfWeights,
    from_arguments,
    likelihood_of,
    method_of,
    option,
    prior_of,
    weights_of,
)
from lapwing.curvature.dense import FullCurvature
from lapwing.data.inputs import Inputs
from lapwing.errors import ModelError, UnsupportedError
from lapwing.fitted import Fitted
from lapwing.posteriors.base import Posterior
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.predictives.labels import SoftmaxPredictive
from lapwing.runtime.settings import FLAG, GENERATOR, POSITIVE, integer
from lapwing.runtime.threads import normal
from lapwing.values.gaussian import FunctionGaussian

Prediction = Tensor | tuple[Tensor, Tensor]  # probabilities, or mean and variance


def conditioned_bridge(mean: Tensor, cov: Tensor, normalised: bool) -> Tensor:
    r"""Return the mean (B, C) of the Dirichlet distribution that the Laplace bridge gives (Hobbhahn et al. 2022).

    The logits are first conditioned on a sum of zero, m - S 1 (1ᵀm) / (1ᵀS1) and S - S 1 1ᵀ S / (1ᵀS1). With
    ``normalised`` they are then scaled so that the mean of their variances is √(C / 2). The native link "bridge"
    projects the logits instead, since a shift of all logits does not change a softmax.
    """
    count = mean.shape[-1]
    rows, total = cov.sum(-1), cov.sum((-2, -1)).unsqueeze(-1)
    mean = mean - rows * mean.sum(-1, keepdim=True) / total
    variance = cov.diagonal(dim1=-2, dim2=-1) - rows.square() / total
    if normalised:
        scale = variance.mean(-1, keepdim=True) / (count / 2) ** 0.5
        mean, variance = mean / scale.sqrt(), variance / scale
    peak = (mean + torch.logsumexp(-mean, -1, keepdim=True)).clamp_max(80).exp() / count**2
    alpha = (1 - 2 / count + peak) / variance
    return alpha / alpha.sum(-1, keepdim=True)


def pack_posterior(posterior: Fitted) -> Tensor:
    """Return the file of a posterior as a tensor of bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.lapwing"
        posterior.save(path)
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def unpack_posterior(content: Tensor, model: nn.Module) -> Fitted:
    """Return the posterior from the bytes of ``pack_posterior``, for this model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.lapwing"
        path.write_bytes(bytes(content.tolist()))
        return load(path, model)


_NATIVE = {
    "H": "the curvature is la.posterior.base.current",
    "H_facs": "the curvature is la.posterior.base.current",
    "backend": "Lapwing computes all curvatures itself",
    "posterior_precision": "la.posterior.base.precision has solve(v), sample(eps), logdet() and variances()",
    "posterior_covariance": "la.posterior.base.precision.solve(v) multiplies with it",
    "posterior_scale": "la.posterior.base.precision.sample(eps) multiplies with it",
    "posterior_variance": "la.posterior.base.precision.variances() is its diagonal",
    "functional_variance_fast": "la.posterior.functions(x).variance is fast for all structures",
    "predictive_moments": "la.posterior.functions(x) has mean and cov",
}


class MissingNameError(UnsupportedError, AttributeError):
    """A name of laplace-torch that does not exist here; the message says how to do the same."""


SEEDS = 2**31 - 1


def probabilities(
    belief: FunctionGaussian, link: str, n: int, independent: bool, generator: torch.Generator | None
) -> Tensor:
    """Return class probabilities (B, C) by a link of laplace-torch; ``independent`` leaves out covariances for "mc"."""
    if link in ("bridge", "bridge_norm"):
        return conditioned_bridge(belief.mean, belief.cov, link == "bridge_norm")
    if link == "probit":
        return SoftmaxPredictive(belief, "probit").probs
    seed = int(torch.randint(SEEDS, (), generator=generator))
    if independent:
        belief = FunctionGaussian(belief.mean, torch.diag_embed(belief.variance))
    return SoftmaxPredictive(belief, "mc", n, seed).probs


def functions(posterior: Fitted, x: Inputs, n: int, independent: bool, generator: torch.Generator | None) -> Tensor:
    """Return draws of the tangent model at x, (n, B, C); with ``independent`` from the variances alone."""
    if not independent:
        return posterior.function_samples(x, n, generator)
    belief = posterior.functions(x)
    return belief.mean + belief.std * normal((n, *belief.mean.shape), generator, belief.mean)


class Laplace:
    """Laplace approximation with the interface of laplace-torch 0.3.

    Results are those of laplace-torch where these are right; docs/from_laplace_torch.md lists where they differ.
    ``posterior`` is the native posterior, for everything else that Lapwing does.

    Args:
        model: The trained network.
        likelihood: "classification" or "regression".
        subset_of_weights: "last_layer", "all" or "subnetwork".
        hessian_structure: "kron", "full", "diag", "lowrank" or "gp".
        settings: The further arguments of laplace-torch by name: ``sigma_noise``, ``prior_precision`` (one, one for
            each parameter tensor, or one for each weight), ``prior_mean``, ``temperature``, ``last_layer_name``,
            ``subnetwork_indices``, ``dict_key_y``, ``backend`` (its kind, GGN, EF or Hessian), ``enable_backprop``, and
            those of "gp".

    Raises:
        UnsupportedError: If an argument does not exist, or Lapwing has nothing that corresponds to it.

    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sin()), 10)
    >>> la = Laplace(nn.Linear(1, 1), "regression", subset_of_weights="all", hessian_structure="full")
    >>> la.fit(loader)
    >>> mean, variance = la(x[:3])
    >>> mean.shape, variance.shape
    (torch.Size([3, 1]), torch.Size([3, 1, 1]))
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodName | str,
        subset_of_weights: SubsetOfWeights | str = SubsetOfWeights.LAST_LAYER,
        hessian_structure: HessianStructure | str = HessianStructure.KRON,
        **settings: Any,
    ) -> None:
        self.model = model
        self.likelihood = option("likelihood", likelihood, LikelihoodName)
        self._settings = from_arguments(Settings, "Laplace", settings)
        subset = option("subset_of_weights", subset_of_weights, SubsetOfWeights)
        self._structure = option("hessian_structure", hessian_structure, HessianStructure)
        self._method = method_of(self._structure, subset, self._settings)
        self._weights = weights_of(subset, self._settings)
        self._fitted: Fitted | None = None
        self.enable_backprop = self._settings.enable_backprop
        self.temperature = self._settings.temperature
        self.prior_mean = self._settings.prior_mean
        self.prior_precision = self._settings.prior_precision
        self.sigma_noise = self._settings.sigma_noise
        likelihood_of(self.likelihood, self._dispersion)

    def fit(self, train_loader: Iterable[object], override: bool = True, progress_bar: bool = False) -> None:
        """Fit the posterior to the data. The model is put into evaluation mode, as laplace-torch does.

        Args:
            train_loader: The training data, in any form that ``lw.fit`` takes.
            override: Whether the data take the place of those of an earlier fit; False adds them, at the same weights.
            progress_bar: Whether to show a progress bar.
        """
        FLAG.check("override", override)
        self.model.eval()
        self._check_subset(train_loader)
        if not override and self._fitted is not None:
            self._fitted = self._fitted.updated(train_loader, target_key=self.target_key, progress=progress_bar)
            self._refresh()
            return
        settings: dict[str, Any] = {
            "method": self._method, "weights": self._weights, "progress": progress_bar,
            "generator": torch.Generator().manual_seed(self._settings.seed),
            "target_key": self.target_key,
        }  # fmt: skip
        if self._settings.functional_approximation == "variational":
            likelihood = likelihood_of(self.likelihood, self._dispersion)
            self._fitted = fit(self.model, train_loader, likelihood, **settings)
            problem = self._fitted.base.problem
            self.prior_precision = problem.prior.values.detach()
            if self.likelihood == "regression":
                self.sigma_noise = (problem.likelihood.dispersion.detach() / self.temperature).sqrt()
        else:  # at unit dispersion and precision: others take a factorisation
            likelihood = likelihood_of(self.likelihood, torch.ones((), dtype=torch.float64))
            self._fitted = fit(self.model, train_loader, likelihood, prior=1.0, **settings)
        self._refresh()

    def _check_subset(self, train_loader: Iterable[object]) -> None:
        """Raise if the structure "gp" is asked to use some of the data only."""
        count, rows = self._settings.n_subset, getattr(train_loader, "dataset", None)
        if count is not None and rows is not None and count < len(rows):
            raise UnsupportedError(
                f"n_subset is {count} for {len(rows)} data; expected all of them: the structure 'gp' is exact here. "
                "Give torch.utils.data.Subset(dataset, ...) itself, or use functional_approximation='nystrom'."
            )

    # Hyperparameters: a change takes a new factorisation and no data.

    @property
    def prior_precision(self) -> Tensor:
        """The prior precision: (1,), one for each parameter tensor, or one for each weight (P,)."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        NUMBER_OR_TENSOR.check("prior_precision", value)
        self._prior_precision = torch.as_tensor(value, **self._kind).reshape(-1)
        self._refresh()

    @property
    def prior_mean(self) -> float | Tensor:
        """The prior mean: a number, or one for each weight (P,)."""
        return self._prior_mean

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        NUMBER_OR_TENSOR.check("prior_mean", value)
        self._prior_mean = value
        self._refresh()

    @property
    def sigma_noise(self) -> Tensor:
        """The standard deviation of the noise; one for classification."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        sigma = torch.as_tensor(value, **self._kind)
        if sigma.numel() != 1:
            raise UnsupportedError("sigma_noise has several entries; expected one: lw.Gaussian(per_output=True).")
        if self.likelihood != "regression" and float(sigma.detach()) != 1:
            raise UnsupportedError(f"sigma_noise is {float(sigma):g} for classification; expected 1.")
        POSITIVE.check("sigma_noise", float(sigma.detach()))
        self._sigma_noise = sigma.reshape(())
        self._refresh()

    @property
    def _kind(self) -> dict[str, Any]:
        first = next(self.model.parameters())
        return {"dtype": first.dtype, "device": first.device}

    @property
    def target_key(self) -> str | None:
        """The key of the target in batches that are mappings; None finds the usual ones, such as "labels"."""
        return None if self._settings.dict_key_y == "labels" else self._settings.dict_key_y

    @property
    def _dispersion(self) -> Tensor:
        """σ² T, by which the curvature is divided."""
        return (self._sigma_noise.square() * self.temperature).double()

    def _refresh(self) -> None:
        """Compute the posterior anew when it is asked for next."""
        self._current: Fitted | None = None

    @property
    def posterior(self) -> Fitted:
        """The native posterior under the present hyperparameters.

        Raises:
            ModelError: If ``fit`` was not called.
        """
        if self._fitted is None:
            raise ModelError("this Laplace has no posterior yet; expected la.fit(train_loader) first.")
        if self._current is None:
            base = self._fitted.base
            base.require(Posterior.with_problem, "prior to change", type(self._method).__name__)
            network = self._fitted.network
            prior = prior_of(self._prior_precision.double(), self._prior_mean, network.selection)
            changed = base.with_prior(prior.bound(network.selection, network.theta()))
            likelihood = changed.problem.likelihood.with_dispersion(self._dispersion)
            posterior = changed.with_problem(changed.problem.with_likelihood(likelihood))
            self._current = replace(self._fitted, posterior=posterior)
        return self._current

    def optimize_prior_precision(
        self, pred_type: PredType | str = "glm", method: tuning.TuningMethod | str = "marglik", **more: Any
    ) -> None:
        """Choose the prior precision by the marginal likelihood or by a grid search over held-out data.

        Args:
            pred_type: As for a call; for "gridsearch".
            method: "marglik": ``n_steps`` steps of Adam with learning rate ``lr`` from ``init_prior_prec``, with the
                ``prior_structure`` "scalar", "layerwise" or "diag". "gridsearch": the best of ``grid_size`` precisions
                by ``loss`` on ``val_loader``; the default loss is minus the log-likelihood, noise included.
            more: The further arguments of laplace-torch, by name.
        """
        self.prior_precision = tuning.optimise_prior(self, option("pred_type", pred_type, PredType), method, more)

    # Predictions.

    def __call__(
        self,
        x: Inputs,
        pred_type: PredType | str = "glm",
        joint: bool = False,
        link_approx: LinkApprox | str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
    ) -> Prediction:
        """Return probabilities (B, C), or mean (B, C) and covariance (B, C, C) of f(x), without noise.

        Args:
            x: A batch of inputs.
            pred_type: "glm", the tangent model, or "nn", the network with sampled weights.
            joint: Whether to return the mean (B C,) and the covariance (B C, B C) of all inputs, for regression.
            link_approx: "probit", "bridge", "bridge_norm" or "mc"; only "mc" for "nn".
            n_samples: The number of draws for "mc" and "nn".
            diagonal_output: Whether to leave out covariances between outputs: (B, C) for regression.
            generator: The source of randomness; the global generator if None.
            fitting: Has no effect; laplace-torch uses it for reward models.
        """
        kind, link = option("pred_type", pred_type, PredType), option("link_approx", link_approx, LinkApprox)
        GENERATOR.check("generator", generator)
        integer().check("n_samples", n_samples)
        if kind == "nn" and self.likelihood == "classification" and link != "mc":
            raise UnsupportedError(f"link_approx is {link!r} for pred_type 'nn'; expected 'mc'.")
        regression = self.likelihood == "regression"
        if kind == "nn":
            draws = self.posterior.network_samples(x, n_samples, generator)
            return (draws.mean(0), draws.var(0)) if regression else draws.softmax(-1).mean(0)
        belief = self.posterior.functions(x, joint=joint and regression)
        if regression:
            mean, cov = self._detach_unless_differentiable(belief.mean), self._detach_unless_differentiable(belief.cov)
            if joint:
                return mean.flatten(), cov.reshape(mean.numel(), -1)
            return mean, cov.diagonal(dim1=-2, dim2=-1) if diagonal_output else cov
        return self._detach_unless_differentiable(probabilities(belief, link, n_samples, diagonal_output, generator))

    def predictive(
        self, x: Inputs, pred_type: PredType | str, link_approx: LinkApprox | str, n_samples: int
    ) -> Prediction:
        """Return the same as a call."""
        return self(x, pred_type=pred_type, link_approx=link_approx, n_samples=n_samples)

    def functional_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return draws of f(x), (n, B, C): one draw of the weights for all inputs.

        With ``diagonal_output`` outputs and inputs are independent of each other.
        """
        if option("pred_type", pred_type, PredType) == "nn":
            return self.posterior.network_samples(x, n_samples, generator)
        return functions(self.posterior, x, n_samples, diagonal_output, generator)

    def predictive_samples(self, x: Inputs, *args: Any, **kwargs: Any) -> Tensor:
        """Return draws of f(x), or of the probabilities for classification; arguments as ``functional_samples``."""
        draws = self.functional_samples(x, *args, **kwargs)
        return draws if self.likelihood == "regression" else draws.softmax(-1)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Return draws of the weights, (n, P); of a subnetwork with all other weights beside them."""
        draws = self.posterior.weight_samples(n_samples, generator)
        selection = self.posterior.network.selection
        if selection.index is None:
            return draws
        full = torch.nn.utils.parameters_to_vector([p for p in self.model.parameters() if p.requires_grad]).detach()
        samples = full.repeat(n_samples, 1)
        samples[:, self._settings.subnetwork_indices] = draws  # in the order in which they were given
        return samples

    def _detach_unless_differentiable(self, value: Tensor) -> Tensor:
        return value if self.enable_backprop else value.detach()

    # Files.

    def state_dict(self) -> dict[str, object]:
        """Return the posterior as tensors and plain values, for ``torch.save``; ``posterior.save(path)`` is native."""
        return {
            "lapwing": pack_posterior(self.posterior), "temperature": self.temperature, "structure": self._structure,
            "prior_precision": self._prior_precision.detach(), "sigma_noise": self._sigma_noise.detach(),
            "prior_mean": self._prior_mean, "likelihood": self.likelihood,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the posterior of ``state_dict()``, for a model with the same weights.

        Raises:
            UnsupportedError: If it belongs to another structure or likelihood.
            FileError: If it is damaged, or belongs to a model with other weights.
        """
        for name, own in (("structure", self._structure), ("likelihood", self.likelihood)):
            if state_dict.get(name) != own:
                raise UnsupportedError(f"the state has the {name} {state_dict.get(name)!r}; expected {own!r}.")
        self.model.eval()
        self._fitted = unpack_posterior(state_dict["lapwing"], self.model)
        self.temperature, self.prior_mean = state_dict["temperature"], state_dict["prior_mean"]
        self.sigma_noise, self.prior_precision = state_dict["sigma_noise"], state_dict["prior_precision"]

    # The numbers of a posterior: marginal likelihood and its terms, precision, covariance, sizes.

    def __getattr__(self, name: str) -> Any:
        if name in _NATIVE:
            structure = vars(self).get("_structure")
            raise MissingNameError(f"compat.Laplace has no {name} for the structure {structure!r}: {_NATIVE[name]}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def log_marginal_likelihood(
        self, prior_precision: float | Tensor | None = None, sigma_noise: float | Tensor | None = None
    ) -> Tensor:
        """Return the log marginal likelihood, differentiable in the prior precision and the noise.

        Args:
            prior_precision: A new prior precision, which is kept.
            sigma_noise: A new noise, which is kept.
        """
        if prior_precision is not None:
            self.prior_precision = prior_precision
        if sigma_noise is not None:
            self.sigma_noise = sigma_noise
        base = self.posterior.base
        base.require(Posterior.log_evidence, "evidence", self.posterior.method)
        return base.log_evidence() + self._untempered

    @property
    def _untempered(self) -> float:
        """The term by which the normaliser of the noise σ² exceeds that of σ² T, which a native posterior has."""
        statistics = self.posterior.base.statistics
        count = statistics.data * statistics.outputs if self.likelihood == "regression" else 0
        return 0.5 * count * math.log(self.temperature)

    @property
    def log_likelihood(self) -> Tensor:
        """The log-likelihood of the training data at the trained weights."""
        return self.posterior.base.log_likelihood() + self._untempered

    @property
    def scatter(self) -> Tensor:
        """(θ - μ)ᵀ A (θ - μ) at the trained weights."""
        return self.posterior.prior.penalty(self.mean.double())

    @property
    def log_det_prior_precision(self) -> Tensor:
        """log det A."""
        return self.posterior.prior.logdet()

    @property
    def log_det_ratio(self) -> Tensor:
        """log det Λ - log det A."""
        return -2 * self._core.log_occam() - self.scatter

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """log det Λ."""
        return self.log_det_ratio + self.log_det_prior_precision

    @property
    def prior_precision_diag(self) -> Tensor:
        """The prior precision of each weight, (P,)."""
        return self.posterior.prior.vector

    @property
    def mean(self) -> Tensor:
        """The trained weights, (P,)."""
        return self.posterior.base.theta

    @property
    def loss(self) -> float:
        """The loss of the training data at the trained weights, at unit dispersion."""
        return float(self.posterior.base.statistics.loss)

    @property
    def n_data(self) -> int:
        """The number of training data."""
        return int(self.posterior.base.statistics.data)

    @property
    def n_outputs(self) -> int:
        """The number of outputs C."""
        return int(self.posterior.network.output_shape[-1])

    @property
    def n_params(self) -> int:
        """The number of uncertain weights P."""
        return self.posterior.network.selection.size

    @property
    def n_layers(self) -> int:
        """The number of parameter tensors with uncertain weights."""
        return len(self.posterior.network.selection.names)

    def _only(self, *structures: str) -> None:
        """Raise unless the structure is one of these. In a property, ``__getattr__`` then says what to use instead."""
        if self._structure not in structures:
            raise AttributeError

    @property
    def _core(self) -> WeightPosterior:
        base = self.posterior.base
        assert isinstance(base, WeightPosterior)  # as every structure has
        return base

    @property
    def posterior_precision(self) -> Tensor:
        """Λ (P, P) for the structure "full", its diagonal (P,) for "diag"."""
        self._only("full", "diag")
        base = self._core
        if self._structure == "diag":
            return 1 / base.precision.variances()
        assert isinstance(base.current, FullCurvature)
        scaled = base.current.matrix.double() / base.problem.likelihood.dispersion.detach()
        return scaled + torch.diag(self.prior_precision_diag.detach())

    @property
    def posterior_covariance(self) -> Tensor:
        """Λ⁻¹ (P, P), for the structure "full"."""
        self._only("full")
        return self._core.precision.solve(torch.eye(self.n_params).to(self.prior_precision_diag))

    @property
    def posterior_variance(self) -> Tensor:
        """The diagonal of Λ⁻¹ (P,), for the structure "diag"."""
        self._only("diag")
        return self._core.precision.variances()

    @property
    def posterior_scale(self) -> Tensor:
        """A root R of the covariance, R Rᵀ = Λ⁻¹, (P, P) for the structure "full", (P,) for "diag"."""
        self._only("full", "diag")
        if self._structure == "diag":
            return self.posterior_variance.sqrt()
        return self._core.precision.sample(torch.eye(self.n_params).to(self.prior_precision_diag)).mT

    def square_norm(self, value: Tensor) -> Tensor:
        """Return (θ - w̃)ᵀ Λ (θ - w̃) for weights θ (P,), for the structures "full" and "diag"."""
        delta, precision = (value - self.mean).double(), self.posterior_precision
        return delta @ (precision * delta if precision.ndim == 1 else precision @ delta)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Return the log-density of the posterior at weights θ (P,), for the structures "full" and "diag"."""
        square = -0.5 * self.square_norm(value)
        if not normalized:
            return square
        return square + 0.5 * (self.log_det_posterior_precision - self.n_params * math.log(2 * math.pi))

    def functional_variance(self, Js: Tensor) -> Tensor:
        """Return J Λ⁻¹ Jᵀ (B, C, C) for Jacobians (B, C, P); ``la.posterior.functions(x)`` needs none."""
        return torch.einsum("bcp,bdp->bcd", self._solve_rows(Js), Js.double()).to(Js)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """Return the covariance (B C, B C) of all outputs for Jacobians (B, C, P)."""
        return (self._solve_rows(Js).flatten(0, 1) @ Js.double().flatten(0, 1).mT).to(Js)

    def _solve_rows(self, Js: Tensor) -> Tensor:
        if Js.ndim != 3 or Js.shape[-1] != self.n_params:
            raise UnsupportedError(f"Js has the shape {tuple(Js.shape)}; expected (B, C, {self.n_params}).")
        return self._core.precision.solve(Js.double().flatten(0, 1)).reshape(Js.shape)
