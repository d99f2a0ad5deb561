"""The front door: a model and its data in, a posterior with error bars out."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import files
from lapwing.auto import Auto
from lapwing.core.data import Data, Inputs, batch_size, check_finite, map_tensors
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.settings import refuse_other_than_whole
from lapwing.core.trace import Trace
from lapwing.errors import DataError, ModelError, UnsupportedError
from lapwing.likelihoods.protocol import ChecksOutputs, Likelihood, NeedsResiduals
from lapwing.losses import checked_targets, mean_squared_residual
from lapwing.methods.diagonal import Diagonal
from lapwing.methods.kron import Kron
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.forward import outside_autocast, outside_inference, raw_output, refuse_training_mode, shaped
from lapwing.networks.functionals import Functional
from lapwing.networks.network import Network
from lapwing.networks.normalised import members, scale_free_groups
from lapwing.networks.selection import Weights
from lapwing.posteriors.effective import EffectiveParameters, effective_parameters
from lapwing.posteriors.protocols import (
    HasEvidence,
    HasFunctionSamples,
    HasVarianceOf,
    HasWeightSamples,
    Method,
    NeedsData,
    NeedsPrior,
    Posterior,
    Reweightable,
)
from lapwing.posteriors.sampled import SampledPosterior
from lapwing.priors.gaussian import Prior, isotropic
from lapwing.problem import Problem
from lapwing.registry import likelihood_named, method_named, weights_named
from lapwing.tangent.design import NetworkDesign, refuse_reordered, refuse_unsteady
from lapwing.tangent.operator import Operator
from lapwing.training import loop as training
from lapwing.training.loop import Epoch, State
from lapwing.training.recipe import Recipe, online
from lapwing.tuners.maximise_evidence import MaximiseEvidence
from lapwing.tuners.sample_em import SampleEM

Tuner = Callable[[Any], Any]


@outside_autocast
@torch.inference_mode(False)  # what is kept must be able to take part in a gradient later
def fit(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood | str,
    *,
    method: Method | Auto | str | None = None,
    weights: Weights | str | None = None,
    prior: Prior | float | None = None,
    tuner: Tuner | None = None,
    target_key: str | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Fitted:
    """Fit a posterior around the trained weights of ``model``.

    ``data`` is the training data: a DataLoader, a list of ``(inputs, targets)`` batches, mappings with a target
    key, or one pair of tensors. ``prior=None`` learns an isotropic precision by the evidence (``tuner``, by
    default ``MaximiseEvidence()``, or ``SampleEM()`` for samples); a given prior is used as given, and a number is an
    isotropic precision. ``progress=None`` shows a bar on a terminal. The model is not changed.

    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> posterior = fit(net, [(x, x.sin())], "regression")
    >>> posterior.predict(x[:3]).std.shape
    torch.Size([3, 1])
    """
    device = _device(model)
    batches = Data(data, device, target_key, _shown(progress))
    first = next(iter(Data(data, device, target_key).batches("first batch")))
    network = Network.build(model, _several(Data(data, device, target_key)), weights_named(weights))
    chosen = likelihood_named(likelihood, network.output_shape[-1])
    f = network(first.inputs)
    chosen.targets(f, first.targets)
    if isinstance(chosen, ChecksOutputs):
        chosen.check_outputs(f)
    if isinstance(chosen, NeedsResiduals) and chosen.needs_residuals:
        chosen = chosen.prepared(mean_squared_residual(network, chosen, batches))
    given = isotropic(1.0) if prior is None else _prior(prior)
    groups = None
    if given.kind == "per_normalised_group":
        groups = members(network, scale_free_groups(network, first.inputs))
    problem = Problem(network, chosen, given.bound(network.selection, network.theta(), groups), prior is None)
    chosen_method, why = _method(method, problem, batches)
    if isinstance(chosen_method, NeedsPrior) and chosen_method.needs_prior:
        problem, tuner = _with_prior(problem, tuner, batches, generator), None
    fitted = chosen_method.fit(problem, batches, generator)
    if fitted.problem.learn_prior and isinstance(fitted, HasEvidence):
        fitted = _tuned(fitted, tuner, batches)
    elif tuner is not None:
        fitted = _on(tuner, batches)(fitted)
    return Fitted(fitted, Fingerprint.of(network.model), why)


def _with_prior(problem: Problem, tuner: Tuner | None, data: Data, generator: torch.Generator | None) -> Problem:
    """For a method without an evidence: the prior as given, or learned by that of ``Kron``, which takes layers, or
    for single weights by that of ``Diagonal``."""
    if problem.learn_prior:
        method = Kron() if problem.network.selection.index is None else Diagonal()
        return replace(_tuned(method.fit(problem, data, generator), tuner, data).problem, learn_prior=False)
    if tuner is not None:
        raise UnsupportedError(
            "this method has no evidence for a tuner to use, and the prior was given; leave out the tuner, or the "
            "prior, which is then learned beforehand."
        )
    return problem


def _tuned(posterior: Any, tuner: Tuner | None, data: Data) -> Any:
    """With the prior learned, from a start near the optimum."""
    start = posterior.problem.with_starting_precision(posterior.statistics)
    begun = posterior.with_problem(start) if isinstance(posterior, Reweightable) else posterior
    usual: Tuner = SampleEM(mode="network") if isinstance(posterior, SampledPosterior) else MaximiseEvidence()
    found = _on(tuner or usual, data)(begun)
    before, after = getattr(posterior, "trace", None), getattr(found, "trace", None)
    if before is None or after is None or not before.findings:
        return found
    return found.with_trace(replace(after, findings=(*before.findings, *after.findings)))


def _method(method: Method | Auto | str | None, problem: Problem, data: Data) -> tuple[Method, str]:
    """The method, and why it was picked where that was left open."""
    auto = Auto() if method == "auto" else method
    if not isinstance(auto, Auto):
        return method_named(auto), ""
    auto = replace(auto, gpu=auto.gpu or problem.network.device.type == "cuda")
    network, selection = problem.network, problem.network.selection
    # Ignored data too: they have rows of noughts in a design.
    rows = sum(checked_targets(network, problem.likelihood, batch)[0].numel() for batch in data.batches("counting"))
    found = auto.choose(selection.size, rows, selection.index is not None, problem.learn_prior)
    return found.method, found.why


def _prior(given: Prior | float) -> Prior:
    """The prior, or the isotropic one with this precision."""
    if isinstance(given, Prior):
        return given
    if isinstance(given, str) or callable(given):
        raise UnsupportedError(f"prior is {given!r:.80}; expected a precision, or an object such as lw.per_layer().")
    return isotropic(given)


def _on(tuner: Tuner, data: Data | None = None) -> Tuner:
    """The tuner, with the data of the fit where it needs some and has none."""
    if isinstance(tuner, type):
        raise UnsupportedError(f"tuner is the class {tuner.__name__}; expected an object: call it, with its settings.")
    if not callable(tuner):
        raise UnsupportedError(
            f"tuner is {tuner!r:.80}; expected an object such as lw.tuners.FixedPoint(), not its name."
        )
    return tuner.with_data(data) if data is not None and isinstance(tuner, NeedsData) else tuner


@outside_autocast
@torch.inference_mode(False)  # as for fit
def train(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood | str,
    recipe: Recipe | None = None,
    *,
    weights: Weights | str | None = None,
    target_key: str | None = None,
    resume: State | str | Path | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Trained:
    """Train a copy of ``model`` with the evidence choosing the regularisation; no validation data are needed.

    ``recipe`` is ``online()`` (Kronecker evidence, the default) or ``classic()`` (MacKay's loop), with their settings.
    ``checkpoint`` names a file that is written after every epoch; ``resume`` takes one, or the state of an earlier
    result, and ends where an uninterrupted run would (unless a loader draws from a generator of its own, which only
    its owner can reset). ``model`` itself is not changed, and the trained copy is in evaluation mode.

    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> from lapwing.training.recipe import classic
    >>> trained = train(net, [(x, x.sin())], "regression", classic(epochs=5))
    >>> trained.posterior.predict(x[:3]).std.shape
    torch.Size([3, 1])
    """
    device = _device(model)
    batches = Data(data, device, target_key)
    inputs = _several(batches)
    recipe = online() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise UnsupportedError(f"recipe is {recipe!r:.80}; expected online(...), classic(...) or a Recipe.")
    network_of = lambda copied: Network.build(copied, inputs, weights_named(weights))
    with torch.no_grad():  # a copy: in training mode a forward pass moves running statistics
        f = shaped(raw_output(copy.deepcopy(model).eval(), inputs))
    chosen = likelihood_named(likelihood, f.shape[-1])
    if isinstance(chosen, ChecksOutputs):
        chosen.check_outputs(f)
    if isinstance(chosen, NeedsResiduals) and chosen.needs_residuals:
        raise UnsupportedError("training learns one noise for all outputs; use Gaussian(), and per_output in fit().")
    outcome = training.run(
        model,
        batches,
        chosen,
        network_of,
        recipe,
        resume=State.load(resume) if isinstance(resume, str | Path) else resume,
        checkpoint=None if checkpoint is None else Path(checkpoint),
        bar=training.progress_bar if _shown(progress) else training.no_bar,
    )
    fitted = Fitted(outcome.posterior, Fingerprint.of(outcome.model))
    return Trained(outcome.model, fitted, outcome.history, outcome.state)


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network, its posterior, what happened epoch by epoch, and the state to go on from."""

    model: nn.Module
    posterior: Fitted
    history: tuple[Epoch, ...]
    state: State


def _shown(progress: bool | None) -> bool:
    """Whether there are bars: on a terminal, where it is left open."""
    return sys.stderr.isatty() if progress is None else progress


def _device(model: nn.Module) -> torch.device:
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}; expected a torch.nn.Module.")
    for parameter in model.parameters():
        return parameter.device
    raise ModelError("the model has no parameters, so there is nothing to be uncertain about; expected at least one.")


def _several(data: Data) -> Inputs:
    """The first inputs with more than one sample: with one alone, nothing shows whether samples mix."""
    inputs: Inputs = None
    for batch in islice(data.batches("first batch"), 3):
        if inputs is None or batch_size(batch.inputs) > 1:
            inputs = batch.inputs
        if batch_size(inputs) > 1:
            break
    return inputs


def load(path: str | Path, model: nn.Module) -> Fitted:
    """Read a saved posterior for ``model``, which must have the weights that it was fitted to."""
    return Fitted(*files.load(path, model))


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted posterior: error bars for a network. Made by ``fit`` and ``load``.

    Every prediction checks that the model still has the weights it was fitted to.
    """

    posterior: Posterior
    fingerprint: Fingerprint
    why: str = ""  # which method was picked and for what reason, where that was left open

    def __repr__(self) -> str:
        problem = self.problem
        numbers = [f"{name} {_few(values)}" for name, values in (
            ("precision", problem.prior.values), ("noise variance", getattr(self.likelihood, "noise_variance", None)),
        ) if values is not None]  # fmt: skip
        kind = type(getattr(self.posterior, "curvature", self.posterior)).__name__
        return f"<Fitted: {kind}, {self.network.selection.size:,} weights, {', '.join(numbers)}>"

    def __call__(self, x: Inputs) -> Any:
        """The predictive over y; the same as ``predict``."""
        return self.predict(x)

    @outside_autocast
    def functions(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        """The belief about f(x): mean (B, C), cov (B, C, C); across inputs too with ``joint=True``."""
        belief = self.posterior(self._checked(x), joint)
        check_finite(belief.mean, "outputs of the network")
        return belief

    @outside_autocast
    def predict(self, x: Inputs) -> Any:
        """The predictive over y: probabilities, or mean, std and intervals with the noise included."""
        return self.likelihood.predict(self.functions(x))

    @outside_autocast
    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, C) consistent functions: each draw uses one set of weights for every input.

        Equal generators give the same functions at whatever inputs they are asked for.
        """
        refuse_other_than_whole("n", n)
        drawn = self._with(HasFunctionSamples, "function samples").function_samples(self._checked(x), n, generator)
        check_finite(drawn[0], "outputs of the network")
        return drawn

    @outside_autocast
    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, P) around the trained weights."""
        refuse_other_than_whole("n", n)
        self._unchanged()
        return self._with(HasWeightSamples, "weight samples").weight_samples(n, generator)

    @outside_autocast
    def network_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, C): outputs of the real network with sampled weights instead of the tangent model.

        Usually worse than ``function_samples``: the posterior's spread belongs to the tangent model, and a network
        pushed that far from its optimum underfits (Immer et al. 2021 report 84 % against 92 % accuracy on
        Fashion-MNIST). Here to compare with.
        """
        x, network = self._checked(x), self.network
        steps = self.weight_samples(n, generator) - network.theta()
        with torch.no_grad():
            drawn = torch.stack([network.under(network.weights(step), x) for step in steps]).to(network.dtype)
        check_finite(drawn[0], "outputs of the network")
        return drawn

    @outside_autocast
    @outside_inference
    def log_evidence(self) -> Tensor:
        """The log marginal likelihood of the tangent model, with every constant."""
        self._unchanged()
        return self._with(HasEvidence, "evidence").log_evidence()

    @property
    @outside_autocast
    def evidence_error(self) -> float:
        """The standard error of ``log_evidence``: nought where its log-determinant is computed and not estimated."""
        self._unchanged()
        return float(getattr(self.posterior, "evidence_error", 0.0))

    @outside_autocast
    @torch.inference_mode(False)  # as for fit
    def tuned(self, tuner: Tuner | None = None) -> Fitted:
        """The same posterior under better hyperparameters; ``trace`` says how they were found."""
        self._unchanged()
        return Fitted(_on(tuner or MaximiseEvidence())(self.posterior), self.fingerprint, self.why)

    @outside_autocast
    def effective_parameters(self) -> EffectiveParameters:
        """γ, the number of weights that the data decide: in all and layer by layer, with the classic advice."""
        self._unchanged()
        self._with(HasEvidence, "evidence")
        return effective_parameters(self.posterior)

    @outside_autocast
    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """The posterior variance of a scalar function of the weights, given them by name: a weight, a layer's norm.

        With inputs ``x`` the function takes the outputs there, f (B, C), instead: a probability averaged over them. To
        first order in the function for a belief about the weights; by a push for ``HFL``.

        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = fit(nn.Linear(1, 1), [(x, x)], "regression", prior=1.0)
        >>> bool(posterior.variance_of(lambda w: w["weight"][0, 0]) > 0)
        True
        >>> slope = posterior.variance_of(lambda f: (f[-1] - f[0]) / 2, x)
        >>> torch.allclose(slope, posterior.variance_of(lambda w: w["weight"][0, 0]))
        True
        """
        if x is None:
            self._unchanged()
        else:
            x = self._checked(x)
        return self._with(HasVarianceOf, "variance of functions of the weights").variance_of(function, x)

    @property
    def trace(self) -> Trace | None:
        """What the tuner did: every value it tried, with its evidence or score."""
        return getattr(self.posterior, "trace", None)

    @outside_autocast
    def jacobian(self, data: Iterable[Any], *, progress: bool | None = None) -> Operator:
        """J over these data as an operator (N C, P): ``J @ v`` and ``J.T @ u`` for many vectors at once.

        ``progress=None`` shows a bar on a terminal, as ``fit`` does: while the data are read, and at every product
        where the factors of all data do not fit and are computed anew.
        """
        return self._operator(data, "jacobian", progress)

    @outside_autocast
    def ggn(self, data: Iterable[Any], *, progress: bool | None = None) -> Operator:
        """The GGN Σ Jᵀ R Rᵀ J at unit dispersion over these data as an operator (P, P); the matrix is never formed.

        ``progress`` as for ``jacobian``.
        """
        return self._operator(data, "ggn", progress)

    def _operator(self, data: Iterable[Any], kind: str, progress: bool | None) -> Operator:
        self._unchanged()
        batches = data if isinstance(data, Data) else Data(data, self.network.device, progress=_shown(None))
        batches = batches if progress is None else replace(batches, progress=progress)
        design = NetworkDesign.build(self.network.shifted(None), self.likelihood, batches, curvature=kind)
        if kind == "jacobian":
            refuse_reordered(design)
        else:
            refuse_unsteady(design)
        return Operator(design, kind, self._unchanged)

    @property
    def problem(self) -> Problem:
        return self.posterior.problem

    @property
    def prior(self) -> Prior:
        return self.problem.prior

    @property
    def likelihood(self) -> Likelihood:
        return self.problem.likelihood

    @property
    def network(self) -> Network:
        return self.problem.network

    @property
    def curvature(self) -> Any:
        """H at unit dispersion, for methods in weight space."""
        return getattr(self.posterior, "curvature", None)

    def with_prior(self, prior: Prior | float) -> Fitted:
        """The same curvature under another prior: no data is touched.

        The optimum that ``LinearMode`` found belongs to the prior it was found for: the evidence is at w̃ again, and a
        posterior whose mean is there is refused.
        """
        if self.network.shift is not None:
            raise UnsupportedError(
                "the mean of this posterior was found for its prior (LinearMode with mean='tangent'); fit again, or "
                "tune the posterior that it came from."
            )
        if not isinstance(self.posterior, Reweightable):
            raise UnsupportedError(f"{type(self.posterior).__name__} has no prior over weights to change.")
        given = _prior(prior)
        mine, names = self.prior, self.network.selection.names
        groups = dict(zip(names, mine.members, strict=True)) if mine.kind == "per_normalised_group" else None
        bound = given.bound(self.network.selection, self.network.theta(), groups)
        if bound.needs_curvature and self.curvature is not None:
            bound = bound.scaled(self.posterior.current.diagonal())  # type: ignore[attr-defined]
        moved = self.posterior.with_problem(self.problem.with_prior(bound))
        if getattr(moved, "mode", None) is not None:
            moved = replace(moved, mode=None)  # type: ignore[type-var]
        return Fitted(moved, self.fingerprint, self.why)

    def to(self, device: torch.device | str) -> Fitted:
        """The same posterior with its model on another device. The model is moved there, as ``model.to`` does.

        It goes by way of a file: what has no file form is refused, and samples (``Sampled``) keep the prior and noise
        that they were drawn for, since a file does not hold the data that others would need.
        """
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "moving.lapwing"
            self.save(path)
            try:
                model = self.network.model.to(device)
            except (AssertionError, RuntimeError) as error:
                raise UnsupportedError(f"device is {device!r}; expected one that this machine has: {error}") from error
            moved = load(path, model)
        if self.trace is not None:
            moved = replace(moved, posterior=replace(moved.posterior, trace=self.trace))  # type: ignore[type-var]
        return replace(moved, why=self.why)

    @outside_autocast
    def save(self, path: str | Path) -> None:
        """Write to a file (safetensors with JSON); the model itself is not in it."""
        self._unchanged()
        files.save(self.posterior, self.fingerprint, path)

    def _unchanged(self) -> None:
        model = self.network.model
        if any(module.training for module in model.modules()):
            refuse_training_mode(model)
        self.fingerprint.refuse_other(model)

    def _checked(self, x: Inputs) -> Inputs:
        self._unchanged()
        device = self.network.device
        x = map_tensors(x, lambda t: t.to(device))
        if batch_size(x) == 0:
            raise DataError("the batch is empty; expected at least one input.")
        check_finite(x, "inputs")
        return x

    def _with(self, capability: Any, what: str) -> Any:
        if not isinstance(self.posterior, capability):
            raise UnsupportedError(f"{type(self.posterior).__name__} has no {what}; choose a method that has.")
        return self.posterior


def _few(values: Tensor) -> str:
    """Up to three numbers, and how many there are."""
    flat = values.detach().flatten().tolist()
    more = f", ... ({len(flat)})" if len(flat) > 3 else ""
    return ", ".join(f"{value:.3g}" for value in flat[:3]) + more
