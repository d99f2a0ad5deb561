"""The fitted posterior that users hold: the result of ``fit``, ``train`` and ``load``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing import files
from lapwing.data.inputs import Inputs, as_tensors, check_finite, is_loader, move_inputs, wants_slopes
from lapwing.data.known_rows import KnownRows
from lapwing.data.processes import ALONE, Processes, in_all_processes
from lapwing.data.streams import InputStream
from lapwing.errors import DataError, UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.forward import outside_autocast, outside_inference
from lapwing.networks.network import Network
from lapwing.networks.passes import Functional
from lapwing.posteriors.base import (
    SAMPLES_RULE,
    SUM_OVER_DATA,
    EffectiveParameters,
    Posterior,
    Trace,
    effective_parameters,
    short_number,
)
from lapwing.predictives.base import Predictive
from lapwing.predictives.views import as_images, concat_batches, concat_beliefs, concat_processes
from lapwing.priors import BoundPrior, Prior
from lapwing.registry import prior_for
from lapwing.runtime.settings import FLAG, FUNCTION, GENERATOR, PATH, Rule, integer, on_device, usable_device
from lapwing.runtime.threads import should_show_progress
from lapwing.tangent import NetworkDesign, Operator, refuse_reordered, refuse_unsteady
from lapwing.tuners.base import MaximiseEvidence, Tuner, run_tuner
from lapwing.tuners.offsets import with_findings, with_held_out
from lapwing.values.gaussian import ChosenOutputs, FunctionGaussian, Query, differentiable_beliefs, isolate, pixels

if TYPE_CHECKING:
    from lapwing.decisions.evaluation import Evaluation
    from lapwing.decisions.guarantees import Abstention, ConformalIntervals, ConformalSets, Detector
    from lapwing.modules import ClosedForm, Predicting
    from lapwing.report.page import Report

GROUPED = "norm layers cancel the scale of the weights before them (lw.check lists these); each has its own precision."
NAIVE = (
    "norm layers cancel the scale of the weights before them (lw.check lists these), and the evidence, which chose the "
    "precision, depends on that scale. Validation data do not; nor does the corrected evidence, "
    "prior=lw.priors.per_normalised_group() with tuner=lw.tuners.LinearMode()."
)


@dataclass(frozen=True, eq=False, repr=False)
class Fitted:
    """A fitted posterior: error bars for a network. Made by ``fit``, ``train`` and ``load``.

    Every call first checks that the model still has the weights that the posterior was fitted to, and raises
    ``ModelError`` if not. ``posterior`` is the method's own result, for code that works below this interface.

    ``evaluate``, ``conformal``, ``abstain``, ``ood`` and ``report`` take held-out data. Calibration data must be drawn
    like the data that decisions are made for, and must not have been used before: not for training, not as
    ``validation=`` of ``fit``, not to choose between posteriors. Otherwise, and under a shift of the data, every
    guarantee is void. A posterior keeps a sketch of the rows of its training and validation data: where some of the
    calibration data are among them, a ``CalibrationWarning`` says their share, and where all are, the decision is
    refused. Scores of such data are a warning.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> lw.fit(torch.nn.Linear(1, 1), [(x, x)], lw.Gaussian(noise_std=0.1), prior=2.0)
    <Fitted: Kron, 2 weights, prior precision 2, noise variance 0.01>
    """

    posterior: Posterior  # that of the method
    fingerprint: Fingerprint
    method: str = ""  # the name of the method that was used
    why: str = ""  # the reason for the method, if ``Auto`` chose it
    processes: Processes = ALONE  # those that fitted it together
    rows: KnownRows = KnownRows()  # sketches of the data that it was fitted to and validated on
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names that ``lapwing fit`` was given

    def __repr__(self) -> str:
        return f"<Fitted: {self.method}, {self.network.selection.size:,} weights, {self._numbers()}>"

    def summary(self) -> str:
        """Return a few lines: how good the predictions are beside those of the network alone, and what was fitted.

        The first line compares on held-out data, if there are any; the others say how the hyperparameters came about.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> data = [(x, (x[:, 0] > 0.1).long())]
        >>> print(lw.fit(torch.nn.Linear(1, 2), data, "classification", prior=2.0).summary())
        Not checked on held-out data.
        Kron over all 4 weights, Categorical likelihood: prior precision 2
        Nothing was tuned.
        """
        selection, trace = self.network.selection, Trace("") if self.trace is None else self.trace
        total = sum(p.numel() for p in self.network.model.parameters())
        checked = trace.scored_on not in ("", "training")
        lines = [trace.verdict or " ".join([
            *([] if checked else ["Not checked on held-out data."]), *([f"{trace.comparison}."] if trace.scores else [])
        ])]  # fmt: skip
        share = "all" if selection.size == total else f"{selection.size:,} of"
        lines.append(
            f"{self.method} over {share} {total:,} weights, {type(self.likelihood).__name__} likelihood: "
            f"{self._numbers()}"
        )
        lines += [f"Chosen by Auto: {self.why}"] if self.why else []
        if self.posterior is not self.base:
            lines.append(self.posterior.describe())
        if not trace.tuner:
            lines.append("Nothing was tuned.")
        else:
            how = f" on {trace.scored_on} data" if trace.scored_on else f", after {len(trace.steps)} steps"
            lines.append(f"Tuned by {trace.tuner}{how}.")
        norms = [] if not self.network.normalised or checked else [GROUPED if self.prior.needs_groups else NAIVE]
        return "\n".join([*lines, *(f"Note: {finding}" for finding in (*self.findings, *norms))])

    @property
    def base(self) -> Posterior:
        """The posterior that was fitted: for a mixture the one that it varies, with evidence, prior and noise."""
        return self.posterior.base

    @property
    def network(self) -> Network:
        """The network as Lapwing sees it: the selected weights, outputs, Jacobians."""
        return self.posterior.problem.network

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with its learned noise."""
        return self.posterior.problem.likelihood

    @property
    def prior(self) -> BoundPrior:
        """The prior over the weights, with its learned precisions in ``prior.values``."""
        return self.posterior.problem.prior

    @property
    def trace(self) -> Trace | None:
        """The record of the tuner: values that it tried, with their evidence or score, and findings.

        For a mixture, the steps by which the evidence was maximised are in ``base.trace``.
        """
        return self.posterior.trace

    @property
    def findings(self) -> tuple[str, ...]:
        """Remarks in words on the posterior and from its tuner; ``summary`` shows them."""
        return (*(self.trace.findings if self.trace is not None else ()), *self.base.findings)

    def __call__(self, x: Inputs) -> Any:
        """Return the predictive over y; the same as ``predict``."""
        return self.predict(x)

    @outside_autocast
    @in_all_processes
    def predict(
        self,
        x: Inputs,
        samples: int | None = None,
        *,
        target_key: str | None = None,
        progress: bool | None = None,
        device: torch.device | str | None = None,
        process_group: Any = None,
    ) -> Any:
        """Return the predictive distribution over targets y, observation noise included.

        Cost: one forward pass and the work of a backward pass for each output; for more than 256 classes (times
        tokens) some 33 forward passes, however many they are.

        Args:
            x: A batch of inputs, as the model takes them: tensors, NumPy arrays or a data frame, whose floating-point
                numbers get the dtype of the model; or a loader: a DataLoader, a Dataset, a list of batches, a
                generator. It is read once; its batches are inputs, or hold targets, which are left out. The answer is
                one predictive for all rows in their order. Memory: the answer, and that of one batch.
            samples: How many functions, drawn in pairs around the network's output, to predict from; an odd number is
                rounded up. They are the same at every call. Zero computes the variances of all outputs instead. None
                takes 32 functions if classes times tokens are more than 256, and variances otherwise.
            target_key: The key of the target in batches of a loader that are mappings, as for ``fit``.
            progress: Whether to show a progress bar while a loader is read; None shows one on a terminal.
            device: Where the answer is. None leaves it on the device of the model, and that for a loader on the CPU.
            process_group: The processes that read a loader together, as for ``fit``. Each gives its part, and gets the
                answer for all rows, those of one process after those of another. None is this process alone.

        Returns:
            For classification ``.probs`` (B, C) and their ``.standard_error``, zero unless functions were drawn; for
            regression ``.mean``, ``.std``, ``.interval(level)``; for all ``.log_prob(y)``, ``.sample(n)`` and
            ``.distribution``. For images (B, C, H, W) in place of (B, C), and (B, H, W) in place of (B,).

        Raises:
            ModelError: If the model's weights have changed since the fit.
            DataError: If inputs are empty or not finite.
            UnsupportedError: If functions are asked for and the method has no draws of weights, or fewer; or if there
                are several processes and no loader.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> low, high = posterior.predict(x).interval(0.9)
        >>> bool((high > low).all())
        True
        """
        SAMPLES_RULE.check("samples", samples)
        if isinstance(x, Tensor) and all(option is None for option in (progress, device, process_group)):
            return self._predictive(x, samples)
        processes, x = Processes.of(process_group), as_tensors(x, self.network.arithmetic)
        batches, home = self._batches(x, target_key, progress, device, processes)
        if batches is None:
            return self._predictive(x, samples)
        each = (self._predictive(batch, samples) for batch in batches)
        if processes.group is None:
            return concat_batches(each, home)
        first = next(each, None)
        own = None if first is None else concat_batches(chain([first], each), torch.device("cpu"))
        return concat_processes(own, processes, home)

    @outside_autocast
    def functions(
        self,
        x: Inputs,
        joint: bool = False,
        outputs: Any = None,
        tokens: Any = None,
        *,
        target_key: str | None = None,
        progress: bool | None = None,
        device: torch.device | str | None = None,
    ) -> FunctionGaussian:
        """Return the Gaussian belief about the network's output f(x), without observation noise.

        Args:
            x: A batch of inputs, as the model takes them, or a loader, as for ``predict``.
            joint: Whether to include the covariance between inputs. Memory then grows with the square of the batch.
            outputs: The numbers of some outputs, in the order wanted: (k,) for all inputs, or (B, k) for each, such as
                its top classes; (B, T, k) for token-level outputs, (B, k, H, W) for images. None means all. The
                answer is that for all outputs at these numbers, and costs the backward passes of these alone.
            tokens: For token-level outputs, the numbers of some tokens: (S,) for all inputs, or (B, S) for each. For
                images those of some pixels, h W + w; the answer is then (B, S, C), no image.
            target_key: As for ``predict``.
            progress: As for ``predict``.
            device: As for ``predict``.

        Returns:
            A ``FunctionGaussian``: ``mean`` and ``std`` (B, C), ``cov`` (B, C, C), or (B, C, B, C) if joint; with k in
            place of C if outputs are chosen. For images ``mean`` and ``std`` are (B, C, H, W), ``cov`` is
            (B, H, W, C, C), or the shape of the mean twice if joint. For a loader of more than 32 outputs it has
            variances alone.

        Raises:
            ModelError: If the model's weights have changed since the fit.
            DataError: If inputs are empty or not finite, or chosen numbers do not exist.
            UnsupportedError: If ``joint`` is set for a loader.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> belief = posterior.functions(x[:5], joint=True)
        >>> belief.std.shape, belief.cov.shape
        (torch.Size([5, 1]), torch.Size([5, 1, 5, 1]))
        """
        FLAG.check("joint", joint)
        image_dims = len(self.network.image)
        if image_dims and isinstance(outputs, Tensor) and outputs.ndim == image_dims + 2:
            outputs = pixels(outputs)
        x = as_tensors(x, self.network.arithmetic)
        chosen = ChosenOutputs.given(outputs, tokens, self.network.output_shape, self.network.device, image_dims)
        batches, home = self._batches(x, target_key, progress, device)
        if not isinstance(batches, InputStream):
            belief = self._belief(x, joint, chosen)
            if joint:
                return replace(belief, mean=belief.mean.to(home), covariance=belief.cov.to(home))
            return belief if batches is None else concat_beliefs([belief], home)
        if joint or (chosen is not None and chosen.differ):
            raise UnsupportedError(
                "joint=True, or outputs for each input, and a loader were given; expected one batch of inputs for "
                "these. Ask for the batches one by one, or choose the same outputs for all."
            )
        return concat_beliefs((self._belief(batch, False, chosen) for batch in batches), home)

    @outside_autocast
    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n functions drawn from the posterior, evaluated at x: (n, B, C), or (n, B, C, H, W) of images.

        Each draw uses one set of weights for every input, and equal generators give the same functions at whatever
        inputs they are asked for.

        Args:
            x: A batch of inputs.
            n: The number of draws.
            generator: The source of randomness; the global generator if None.

        Raises:
            UnsupportedError: If the method has no function samples, or fewer than n.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> posterior.function_samples(x, 8, torch.Generator().manual_seed(0)).shape
        torch.Size([8, 40, 1])
        """
        integer().check("n", n)
        self.base.require(Posterior.function_samples, "function samples", self.method)
        x = self._check_inputs(x, slopes=True)
        (samples,) = isolate(lambda x: [self.posterior.function_samples(x, n, generator)], x)
        return self._as_images(samples, x)

    @outside_autocast
    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the weights, (n, P), around the trained ones.

        Args:
            n: The number of draws.
            generator: The source of randomness; the global generator if None, and for ``SWAG`` and ``IVON`` the seed of
                the method.

        Raises:
            UnsupportedError: If the method has no weight samples, or fewer than n.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> posterior.weight_samples(8, torch.Generator().manual_seed(0)).shape  # a slope and an offset each
        torch.Size([8, 2])
        """
        integer().check("n", n)
        self._refuse_changed()
        self.base.require(Posterior.weight_samples, "weight samples", self.method)
        return self.posterior.weight_samples(n, generator)

    @outside_autocast
    def network_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return outputs (n, B, C) of the real network, not the tangent model, with sampled weights.

        Those of images are (n, B, C, H, W).
        Usually worse than ``function_samples``: the posterior's spread belongs to the tangent model, and a network
        that far from its optimum underfits (Immer et al. 2021 report 84 % against 92 % accuracy on Fashion-MNIST).
        Here for comparison. Cost: n forward passes.

        Args:
            x: A batch of inputs.
            n: The number of draws.
            generator: The source of randomness; the global generator if None.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> posterior.network_samples(x, 8, torch.Generator().manual_seed(0)).shape
        torch.Size([8, 40, 1])
        """
        x, network = self._check_inputs(x), self.network
        steps = self.weight_samples(n, generator) - network.theta()
        with torch.no_grad():
            samples = torch.stack([network.at(step, x) for step in steps]).to(network.dtype)
        return self._as_images(samples, x)

    @outside_autocast
    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Return the posterior variance of a scalar function of the weights, or of the outputs at ``x``.

        To first order in the function for methods with a belief about weights.

        Args:
            function: Takes all weights by name, or, if ``x`` is given, the outputs f (B, C) there, as the model
                returns them; returns a scalar.
            x: A batch of inputs, for a function of the outputs.

        >>> import torch
        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=1.0)
        >>> bool(posterior.variance_of(lambda w: w["weight"][0, 0]) > 0)
        True
        >>> slope = posterior.variance_of(lambda f: (f[-1] - f[0]) / 2, x)
        >>> torch.allclose(slope, posterior.variance_of(lambda w: w["weight"][0, 0]))
        True
        """
        Rule("a function of the weights by name, or of the outputs", FUNCTION.holds).check("function", function)
        if x is None:
            self._refuse_changed()
        else:
            x = self._check_inputs(x)
            form = self.network.image_form(x)
            given = function
            function = given if form is None else lambda f: given(form.outputs(f))
        self.posterior.require(Posterior.variance_of, "variance of functions of the weights", self.method)
        return self.posterior.variance_of(function, x)

    @outside_autocast
    def jacobian(self, data: Iterable[object], *, progress: bool | None = None) -> Operator:
        """Return the Jacobian J of all outputs over these data as an operator (N C, P); no matrix is formed.

        ``J @ v`` and ``J.T @ u`` take many vectors at once. Rows of images are in the order (N, H, W, C).

        Args:
            data: Batches, as for ``fit``.
            progress: Whether to show a progress bar while data are read; None shows one on a terminal.

        >>> import torch
        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> (posterior.jacobian([(x, x)]) @ torch.ones(2)).shape  # of 40 outputs in the direction of both weights
        torch.Size([40])
        """
        design = self._design(data, "jacobian", progress)
        refuse_reordered(design)
        return Operator.jacobian(design, self._refuse_changed)

    @outside_autocast
    def ggn(self, data: Iterable[object], *, progress: bool | None = None) -> Operator:
        """Return the GGN Σ Jᵀ R Rᵀ J at unit dispersion over these data as an operator (P, P); no matrix is formed.

        Args:
            data: Batches, as for ``fit``.
            progress: As for ``jacobian``.

        >>> import torch
        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> (posterior.ggn([(x, x)]) @ torch.ones(2)).shape
        torch.Size([2])
        """
        design = self._design(data, "ggn", progress)
        refuse_unsteady(design)
        return Operator.ggn(design, self._refuse_changed)

    @outside_autocast
    def evaluate(
        self,
        data: Iterable[object],
        *,
        level: float = 0.95,
        confidence: float = 0.95,
        resamples: int = 1000,
        target_key: str | None = None,
        progress: bool | None = None,
        generator: torch.Generator | None = None,
    ) -> Evaluation:
        """Return all scores that fit the task beside those of the plain network, each with a bootstrap interval.

        The plain network is the same model under the same likelihood and noise, without error bars from its weights.
        Differences are paired: both predict the same resampled inputs. Inputs are drawn again as a whole, with all of
        their tokens or pixels, so that these need not be independent. Intervals are percentiles of the resampled
        scores; those of calibration errors, which are larger for data that repeat, are moved by this bias. A verdict is
        "better" or "worse" only if the interval of the difference is on one side of zero, and the difference is above a
        thousandth of the scores, or of one nat for the ``nll`` of numbers.

        Classes and labels: ``nll``, ``accuracy``, ``brier``, ``ece``, ``classwise_ece`` (of several labels, or of up to
        100 classes), ``adaptive_ece``, ``aurc``. Calibration errors of binary labels are those of the probability of
        one. ``classes`` has the mean probability of each class or label beside its frequency. Numbers: ``nll``,
        ``rmse``, ``mae``, ``crps``, ``coverage`` and ``width`` of central intervals, ``cqm`` (not for counts), and
        ``aurc`` of squared errors. See ``lw.metrics``. The ``nll`` is that of all outputs of an input together.

        Args:
            data: Data as for ``fit``, with targets, that were not used for the fit; read once.
            level: The probability of the intervals whose coverage and width are scored, for numbers.
            confidence: The probability of the bootstrap intervals.
            resamples: How often the inputs are drawn again.
            target_key: The key of the target in batches that are mappings, as for ``fit``.
            progress: Whether to show a progress bar; None shows one on a terminal.
            generator: For the bootstrap; a fixed seed by default.

        Returns:
            The scores; ``print`` shows a table, ``plot()`` a picture, ``json(path)`` writes a file, and
            ``evaluation["nll"].difference`` is one number with its interval.

        Raises:
            ModelError: If the model's weights have changed since the fit.
            DataError: If data are empty, not finite or do not fit the likelihood.

        Warns:
            CalibrationWarning: If targets seem to be in other units than those of the training data.

        Cost: the predictions, one forward pass, and ``resamples`` sums over the data.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 60).unsqueeze(1)
        >>> data = [(x, (x[:, 0] > 0.1).long())]
        >>> evaluation = lw.fit(torch.nn.Linear(1, 2), data, "classification").evaluate(data)
        >>> [row.name for row in evaluation.rows]
        ['nll', 'accuracy', 'brier', 'ece', 'classwise_ece', 'adaptive_ece', 'aurc']
        """
        from lapwing.decisions.evaluation import evaluation_of_parts

        return evaluation_of_parts(
            [(self, data)], level=level, confidence=confidence, resamples=resamples, target_key=target_key,
            progress=progress, generator=generator,
        )  # fmt: skip

    @outside_autocast
    def conformal(
        self,
        calibration: Iterable[object],
        level: float = 0.9,
        *,
        score: str | None = None,
        groups: Any = None,
        target_key: str | None = None,
        progress: bool | None = None,
        seed: int = 0,
    ) -> ConformalSets | ConformalIntervals:
        r"""Return prediction sets of classes, or intervals of numbers, that hold the target with this probability.

        Split conformal prediction: with scores s of the n calibration data, larger for stranger targets, a new target
        is in the set if its score is at most the ⌈(n + 1) level⌉-th smallest s.

        **Guarantee.** If the calibration data and the new datum are exchangeable, for instance drawn independently from
        one distribution, then P(target in the set) ≥ level, over both draws, whatever the posterior is. It is at most
        level + 1/(n + 1) where scores have no ties. This is a statement about the average input and the average
        calibration set. It says nothing about one class or one kind of input unless these are ``groups``: then it holds
        in each group. Several outputs of an input are each covered by themselves.

        Scores of classes. "adaptive" (APS, Romano et al. 2020), the default: the total probability of the classes that
        are more probable than the target, plus a uniform share of its own; randomised, so that coverage is exact, which
        makes some sets empty; the draws follow from ``seed``. "threshold" (LAC, Sadinle et al. 2019): one minus the
        probability of the target; the smallest sets on average, not randomised.

        Scores of numbers. "scaled", the default: |y - mean| / std with the standard deviation of the posterior's
        predictive, so that intervals are wide where noise or doubt are large. "constant": |y - mean|, for comparison.

        Args:
            calibration: Data as for ``fit``, with targets, that were not used before; read once.
            level: The probability to cover the target.
            score: "adaptive" or "threshold" for classes and for one binary label, "scaled" or "constant" for numbers.
            groups: For coverage in each group: a function from a batch of inputs to group numbers (B,), or the group
                numbers (N,) of the calibration data in their order, which then must not be shuffled; data with an
                ignored target have one too. ``predict`` and ``coverage`` then take ``groups=`` as well.
            target_key: The key of the target in batches that are mappings, as for ``fit``.
            progress: Whether to show a progress bar; None shows one on a terminal.
            seed: Of the uniform shares of "adaptive".

        Returns:
            ``ConformalSets`` or ``ConformalIntervals``, with ``predict(x)`` and ``coverage(data)``.

        Raises:
            DataError: If there are too few calibration data for the level; the message says how many it takes. Also if
                all of them are training or validation data.
            UnsupportedError: If the score does not fit the likelihood, or outputs are for tokens, pixels or labels.

        Cost: the predictions at the calibration data.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 60).unsqueeze(1)
        >>> y = (x[:, 0] > 0.1).long()
        >>> posterior = lw.fit(torch.nn.Linear(1, 2), (x[::2], y[::2]), "classification")
        >>> sets = posterior.conformal((x[1::2], y[1::2]), level=0.9)
        >>> sets.predict(x).members.shape
        torch.Size([60, 2])
        """
        from lapwing.decisions.guarantees import conformal_of

        return conformal_of(
            self, calibration, level, score=score, groups=groups, target_key=target_key, progress=progress, seed=seed
        )

    @outside_autocast
    def abstain(
        self,
        calibration: Iterable[object],
        risk: float,
        confidence: float = 0.95,
        *,
        by: str | None = None,
        tolerance: float | None = None,
        target_key: str | None = None,
        progress: bool | None = None,
    ) -> Abstention:
        """Return a rule for when to answer: the largest share of inputs whose risk is bounded.

        The risk is the probability that an answer is wrong, given that one is made: for classes that the most probable
        one is not the label, for binary labels that one of them is wrong, and for numbers that an error exceeds
        ``tolerance``. Answers are made where the uncertainty is at most a threshold.

        **Guarantee.** If the calibration data and later data are drawn independently from one distribution, then with
        probability at least ``confidence`` over the calibration data, the risk of what is answered is at most ``risk``.
        It holds for the average answered input, not for every class or kind of input. Twenty thresholds, at which
        5 %, 10 %, ... 100 % of the calibration data are answered, have an exact binomial bound each, of the level
        (1 - ``confidence``) / 20, so that all hold together; the highest one whose bound is at most ``risk`` is taken.

        Args:
            calibration: Data as for ``fit``, with targets, that were not used before; read once.
            risk: The largest share of wrong answers among those made, such as 0.01.
            confidence: The probability, over calibration data, that the bound holds.
            by: The uncertainty: "confidence" (one minus the largest probability; the default for labels), "entropy",
                "mutual_information", or "variance" (the default for numbers: that of the predictive).
            tolerance: For numbers, the error above which an answer is wrong.
            target_key: The key of the target in batches that are mappings, as for ``fit``.
            progress: Whether to show a progress bar; None shows one on a terminal.

        Returns:
            An ``Abstention``: ``answers(x)``, ``threshold``, ``share``, ``curve`` and ``area``.

        Raises:
            DataError: If no threshold satisfies the bound; the message says the smallest risk that one does. Also if
                all calibration data are training or validation data.
            UnsupportedError: If outputs are for tokens or pixels, or ``tolerance`` is missing or does not fit.

        Cost: the predictions at the calibration data.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 400).unsqueeze(1)
        >>> y, net = (x[:, 0] > 0).long(), torch.nn.Linear(1, 2)
        >>> with torch.no_grad():
        ...     _ = net.weight.copy_(torch.tensor([[-9.0], [9.0]])), net.bias.zero_()
        >>> posterior = lw.fit(net, (x[::2], y[::2]), "classification")
        >>> rule = posterior.abstain((x[1::2], y[1::2]), risk=0.05)
        >>> rule.answers(x).answered.shape
        torch.Size([400])
        """
        from lapwing.decisions.guarantees import abstention_of

        return abstention_of(
            self, calibration, risk, confidence, by=by, tolerance=tolerance, target_key=target_key, progress=progress
        )

    @outside_autocast
    def ood(
        self,
        calibration: Iterable[object],
        *,
        by: str | None = None,
        rate: float = 0.05,
        target_key: str | None = None,
        progress: bool | None = None,
    ) -> Detector:
        """Return a detector of inputs that are unlike the calibration data, with a bounded rate of false alarms.

        An input is flagged if its conformal p-value, (1 + number of calibration scores that reach its own) / (n + 1),
        is at most ``rate``.

        **Guarantee.** If the calibration inputs and a new input are exchangeable, it is flagged with probability at
        most ``rate``, over both draws; with many calibration data the rate for given ones is close to that. Nothing is
        guaranteed about inputs from elsewhere: how many of them are found depends on the score and on what they are.

        Args:
            calibration: Data as for ``fit``, or inputs alone, that are like the training data and were not used
                before. Targets are not used.
            by: The score: "scaled_information", the mutual information of targets and outputs under
                ``posterior.base``, which a mixture varies, times the standard deviation of its outputs;
                "extended_information" (the default for labels), where the logarithm of this standard deviation, from
                that which 1 % of the calibration inputs exceed, is added to the information;
                "base_information", without that factor; "mutual_information", that under all of the posterior;
                "variance" of the outputs, summed over them (the default for numbers); or "entropy" of the predictive
                (the default for a plain network, which has no error bars).
            rate: The largest probability of a false alarm.
            target_key: The key of the target in batches that are mappings, as for ``fit``.
            progress: Whether to show a progress bar; None shows one on a terminal.

        Returns:
            A ``Detector``: ``flags(x)``, ``score(x)``, ``p_values(x)`` and ``threshold``.

        Raises:
            DataError: If there are too few calibration data for the rate; the message says how many it takes. Also if
                all their inputs are those of training or validation data.
            UnsupportedError: If outputs are for tokens or pixels, or all scores are equal for want of error bars.

        Cost: the predictions at the calibration data; with "mutual_information" some tens of these for a mixture.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 60).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), (x[::2], x[::2]), "regression")
        >>> posterior.ood(x[1::2]).flags(torch.tensor([[0.0], [99.0]]))
        tensor([False,  True])
        """
        from lapwing.decisions.guarantees import detector_of

        return detector_of(self, calibration, by=by, rate=rate, target_key=target_key, progress=progress)

    @outside_autocast
    def acquire(
        self,
        pool: Inputs,
        n: int,
        *,
        by: str = "batch",
        candidates: int = 1000,
        samples: int | None = None,
        target_key: str | None = None,
        progress: bool | None = None,
    ) -> Tensor:
        r"""Return the numbers of the inputs of a pool whose labels would tell the most, in the order of choice.

        "bald": the largest mutual information of the target and the outputs (Houlsby et al. 2011), each input by
        itself, so that near copies are chosen together. "variance": the largest variance of the outputs, summed over
        them. "batch", the default: all n together, by the greedy maximum of

        $$ \log \det ( I + R^\top K R ), $$

        with K the joint covariance of the outputs at the inputs, and R Rᵀ the Fisher information of a target about its
        outputs: the inverse noise for numbers, diag(p) - p pᵀ for classes. For numbers with Gaussian noise it is twice
        the mutual information of the n targets and the network; the greedy choice reaches at least 63 % of the largest
        one (Nemhauser et al. 1978).

        Args:
            pool: A batch of inputs, ``(inputs, targets)``, or a loader whose order is fixed; targets are left out. Rows
                are numbered in order.
            n: How many inputs to choose.
            by: "batch", "bald" or "variance".
            candidates: For "batch": the number of inputs that are looked at together, those that tell most by
                themselves. Fewer are taken where they would exceed the byte budget (``lw.memory``).
            samples: For "batch": the number of drawn functions that K is estimated from, at least two; zero computes
                it. None computes it for up to 1000 outputs of all candidates together, and draws 256 functions beyond.
            target_key: The key of the target in batches that are mappings, as for ``fit``.
            progress: Whether to show a progress bar; None shows one on a terminal.

        Returns:
            Row numbers, (n,), without duplicates.

        Raises:
            DataError: If the pool has fewer than n inputs, or is a loader that shuffles.
            UnsupportedError: If outputs are for tokens or pixels.

        Cost: the belief, or for "bald" the prediction, at every input of the pool. "batch" with m candidates of C
        outputs takes in addition their joint belief with (m C)² P multiplications for P weights, or S drawn functions
        with S m P, and n² m C³ multiplications for the choice.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression")
        >>> sorted(posterior.acquire(x, 2).tolist())
        [0, 39]
        """
        from lapwing.decisions.acquisition import choose_inputs

        return choose_inputs(
            self, pool, n, by=by, candidates=candidates, samples=samples, target_key=target_key, progress=progress
        )

    @outside_autocast
    def report(
        self,
        data: Iterable[object],
        path: str | Path,
        *,
        title: str | None = None,
        level: float = 0.95,
        resamples: int = 1000,
        seed: int | None = None,
        command: str | None = None,
        date: str | None = None,
        target_key: str | None = None,
        progress: bool | None = None,
    ) -> Report:
        """Write one self-contained HTML page: is it calibrated, is it better than the plain network, where is it not.

        The page opens with a verdict in words, which follows from the numbers by rules that it states. Then come a
        table of scores with bootstrap intervals, pictures, the most uncertain inputs, what was learned, and how the
        posterior came about. It needs no network and is smaller than 1 MB; its numbers are in it as JSON. Equal calls
        write equal files. It needs ``pip install 'lapwing[report]'``.

        Args:
            data: Data as for ``fit``, with targets, that were not used for the fit; read twice, the second
                time 2,000 inputs at most.
            path: Where to write the page.
            title: Its heading; the name of the model by default.
            level: The probability of the intervals whose coverage is scored, for numbers.
            resamples: How often the inputs are drawn again for bootstrap intervals.
            seed: The seed of the training or the fit, to be noted in the page.
            command: The command that made the page, to be noted in it.
            date: A date to be noted in the page; none by default, so that equal calls write equal files.
            target_key: The key of the target in batches that are mappings, as for ``fit``.
            progress: Whether to show a progress bar; None shows one on a terminal.

        Returns:
            The report, with its ``path``, its ``verdict`` and its ``numbers``; ``print`` shows the verdict.

        Raises:
            ModelError: If the model's weights have changed since the fit.
            DataError: If data are empty, not finite or do not fit the likelihood.
            UnsupportedError: If Matplotlib or Jinja2 is not installed.
            FileError: If the page cannot be written.

        Cost: that of ``evaluate``, predictions for at most 2,000 inputs, 37 factorisations for the evidence curve, and
        a second or two for the pictures.

        >>> import tempfile, torch, lapwing as lw
        >>> x = torch.linspace(-1, 1, 60).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = posterior.report([(x, x.sin())], folder + "/report.html")
        >>> page.verdict.startswith("The error bars are")
        True
        """
        from lapwing.report.page import write_report

        return write_report(
            self, [(self, data)], path, title=title, level=level, resamples=resamples, seed=seed, command=command,
            date=date, target_key=target_key, progress=progress,
        )  # fmt: skip

    @outside_autocast
    @outside_inference
    def log_evidence(self) -> Tensor:
        """Return the log marginal likelihood of the tangent model, with every constant.

        A scalar tensor, differentiable in the prior and the noise where the method allows. ``evidence_error`` is its
        standard error where it is an estimate. For a mixture it is that of ``base``.

        Raises:
            UnsupportedError: If the method has no evidence.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> bool(posterior.log_evidence() > posterior.with_prior(1e6).log_evidence())
        True
        """
        self._refuse_changed()
        self.base.require(Posterior.log_evidence, "evidence", self.method)
        return self.base.log_evidence()

    @property
    @outside_autocast
    def evidence_error(self) -> float:
        """The standard error of ``log_evidence``; zero where it is computed and not estimated."""
        self._refuse_changed()
        return self.base.evidence_error

    @outside_autocast
    def effective_parameters(self) -> EffectiveParameters:
        """Return γ, the number of weights that the data determine: in total and for each layer. Print it to read it.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> 0 < posterior.effective_parameters().total < 2
        True
        """
        self._refuse_changed()
        self.base.require(Posterior.gammas, "evidence", self.method)
        return effective_parameters(self.base)

    @outside_autocast
    @torch.inference_mode(False)  # as for fit
    def tuned(self, tuner: Tuner | None = None) -> Fitted:
        """Return the same posterior under better hyperparameters; its ``trace`` lists what was tried.

        Args:
            tuner: An object from ``lw.tuners``; ``MaximiseEvidence()`` if None.

        Raises:
            DivergedError: If a hyperparameter has no optimum.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> tuned = posterior.tuned(lw.tuners.MaximiseEvidence())
        >>> bool(tuned.log_evidence() >= posterior.log_evidence())
        True
        """
        self._refuse_changed()
        chosen = MaximiseEvidence() if tuner is None else tuner
        with self.processes.share_errors():
            tuned = run_tuner(chosen, self.base, processes=self.processes)
            reused = with_held_out(self.rows, chosen, self.network, self.processes)
            return replace(self, posterior=with_findings(tuned, reused.findings), rows=reused.rows)

    @outside_autocast
    @torch.inference_mode(False)  # as for fit
    def updated(
        self,
        data: Iterable[object],
        *,
        target_key: str | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Fitted:
        """Return the posterior of the old data and these; the old data are not needed.

        Sums over the data are summed further, which equals a fit to all of them at the same weights, prior and noise.
        Those stay as they are, and so do the weights of a mixture: a posterior about data that the network was not
        trained on has its centre at the trained weights all the same. Call ``tuned()`` to choose the prior anew.

        Args:
            data: The new data alone, in the form that ``fit`` takes. Of several processes that fitted together, all
                call this, each with its part.
            target_key: As for ``fit``.
            generator: The source of randomness where the curvature is estimated from drawn labels; the sum is then one
                of estimates.
            progress: As for ``fit``.

        Raises:
            DataError: If the data are empty, not finite, or do not fit the likelihood.
            UnsupportedError: If the method is none of ``Full``, ``Diagonal``, ``Kron`` and ``KernelSpace``, whose sums
                add up.

        Cost: that of a fit to the new data.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1)
        >>> options = {"likelihood": lw.Gaussian(0.1), "prior": 1.0}
        >>> half, whole = (lw.fit(net, [(part, part)], **options) for part in (x[:20], x))
        >>> torch.allclose(half.updated([(x[20:], x[20:])]).functions(x).std, whole.functions(x).std)
        True
        """
        self._refuse_changed()
        GENERATOR.check("generator", generator)
        shown = should_show_progress(progress) and self.processes.is_main_process
        more = self.network.read_data(
            data, "new data", target_key=target_key, progress=shown, processes=self.processes, keep_sketch=True
        )
        self.posterior.require(Posterior.updated, SUM_OVER_DATA, self.method)
        with self.processes.share_errors():
            rows = self.rows.with_training(more.sketch())
            return replace(self, posterior=self.posterior.updated(more, generator), rows=rows)

    def with_prior(self, prior: Prior | float) -> Fitted:
        """Return the same posterior under another prior; no data are touched.

        Args:
            prior: A prior, or a number for an isotropic precision.

        Raises:
            UnsupportedError: If the method has no prior over weights, or its mean belongs to its prior
                (``LinearMode(mean="tangent")``).

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> posterior.with_prior(5.0)
        <Fitted: Kron, 2 weights, prior precision 5, noise variance ...>
        """
        if self.network.shift is not None:
            raise UnsupportedError(
                "the mean of this posterior was computed for its prior (LinearMode with mean='tangent'); fit again, or "
                "tune the posterior that it came from."
            )
        self.base.require(Posterior.with_problem, "prior over weights to change", self.method)
        bound = prior_for(prior).bound(self.network.selection, self.network.theta(), self.prior.network_groups)
        return replace(self, posterior=self.base.with_prior(bound))

    def to(self, device: torch.device | str) -> Fitted:
        """Return the posterior on another device. Its model is moved there too, as ``model.to`` does.

        Args:
            device: A device or its name.

        Raises:
            UnsupportedError: If this machine has no such device.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> posterior.to("cpu").network.device
        device(type='cpu')
        """
        model, target = self.network.model, usable_device(device)
        model.to(target)
        return replace(self, posterior=on_device(self.posterior, target, keep=model))

    @outside_autocast
    @outside_inference
    def as_module(self, returns: str = "logits") -> ClosedForm | Predicting:
        """Return the posterior as an ``nn.Module`` in evaluation mode that takes what the model takes.

        Its parameters are those of the model, which are shared and not copied. For a last-layer posterior it is a
        closed form of plain tensor operations, for ``torch.export`` and ``torch.onnx.export``; otherwise it calls
        ``predict``, and export is refused with the reason.

        Args:
            returns: "logits": what the model returns, in its shape, with the uncertainty inside: log-probabilities of
                classes, log-odds of binary labels, the mean of a regression. "probs": probabilities. "moments": two
                tensors, probabilities and variances of f, or mean and variance of the target.

        Raises:
            ModelError: If the model's weights have changed since the fit.
            UnsupportedError: If ``returns`` is none of these, or "probs" for a regression.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> data = [(x, (x[:, 0] > 0.1).long())]
        >>> posterior = lw.fit(torch.nn.Linear(1, 2), data, "classification", prior=2.0)
        >>> torch.allclose(posterior.as_module()(x).softmax(-1), posterior.predict(x).probs, atol=1e-5)
        True
        """
        from lapwing.modules import module_of

        self._refuse_changed()
        return module_of(self, returns)

    @outside_autocast
    def save(self, path: str | Path) -> None:
        """Write the posterior to a file, whole or not at all; the model itself is not in it.

        Of several processes that fitted it, the first writes the file and the others do nothing. Samples from linear
        systems need all processes to call this, since their evidence takes products with the data of all.

        Args:
            path: Where to write; ``lw.load(path, model)`` reads it.

        Raises:
            UnsupportedError: If the method has no file form.
            FileError: If the file cannot be written, or ``load`` would refuse it; an existing file is unchanged.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     posterior.save(f"{folder}/net.lapwing")
        ...     lw.load(f"{folder}/net.lapwing", posterior.network.model)
        <Fitted: Kron, 2 weights, prior precision 2, noise variance ...>
        """
        PATH.check("path", path)
        self._refuse_changed()
        if not self.processes.is_single_process and self.base.is_sampled:
            with self.processes.share_errors():
                self.posterior.state()  # its products over the data need all processes
        if self.processes.is_main_process:
            about = files.About(self.method, self.why, self.rows, self.columns)
            files.save(self.posterior, self.fingerprint, about, path)

    def _numbers(self) -> str:
        """Return the precisions and the noise of the posterior that was fitted, the centre of a mixture, as text."""
        mixture = "" if self.posterior is self.base else f"mixture of {self.posterior.cell_count} around "
        numbers = f"{mixture}prior precision {_first_three(self.prior.values)}"
        if self.likelihood.noise_variance is not None:
            numbers += f", noise variance {_first_three(self.likelihood.noise_variance)}"
        return numbers

    def _design(self, data: Iterable[object], curvature: str, progress: bool | None) -> NetworkDesign:
        """Return the rows of the Jacobian over these data, times the root of the likelihood's curvature for "ggn"."""
        self._refuse_changed()
        if not self.base.of_one_network:
            raise UnsupportedError(
                f"{self.method} has several networks, each with its own weights; expected a posterior of one network "
                f"for {curvature}(). Fit one to each: lw.fit(model, data, ...)."
            )
        network = self.network.with_shift(None)
        batches = network.read_data(data, progress=should_show_progress(None))
        batches = batches if progress is None else replace(batches, progress=should_show_progress(progress))
        return NetworkDesign.build(network, self.likelihood, batches, curvature=curvature)

    def _belief(self, x: Inputs, joint: bool, chosen: ChosenOutputs | None) -> FunctionGaussian:
        """Return the belief about all or some outputs of one batch."""
        x = self._check_inputs(x, slopes=True)
        if chosen is not None:
            chosen.refuse_other(self.network.count(x))
        query = Query(joint, chosen)
        (belief,) = differentiable_beliefs(lambda inner: [self.posterior.belief(inner, query)], x)
        check_finite(belief.mean, "outputs of the network")
        form = self.network.image_form(x) if chosen is None or chosen.tokens is None else None
        return belief if form is None else belief.as_images(form)  # some pixels of an image are not an image

    def _predictive(self, x: Inputs, samples: int | None) -> Predictive:
        """Return the predictive of one batch."""
        x = self._check_inputs(x, slopes=True)
        predictive, form = self.posterior.predict(x, samples), self.network.image_form(x)
        return predictive if form is None else as_images(predictive, form)

    def _as_images(self, samples: Tensor, x: Inputs) -> Tensor:
        """Return sampled outputs of pixels at x in the form of images; as they are without images."""
        check_finite(samples[0], "outputs of the network")
        form = self.network.image_form(x)
        return samples if form is None else form.outputs(samples)

    def _batches(
        self, x: Inputs, target_key: str | None, progress: bool | None, device: torch.device | str | None,
        processes: Processes = ALONE,
    ) -> tuple[Iterable[Inputs] | None, torch.device]:  # fmt: skip
        """Return the batches of a loader, None for one batch that stays where it is, and the device of the answer."""
        network, visible = self.network, should_show_progress(progress) and processes.is_main_process
        home = network.device if device is None else usable_device(device)
        if not is_loader(x, network.input_places):
            if not processes.is_single_process:
                raise UnsupportedError(
                    f"a process_group of {processes.size} and one batch of inputs; expected a loader or a Dataset: "
                    "each process reads its part. Leave out process_group: every process can predict by itself."
                )
            return (None if device is None else [x]), home
        stream = InputStream(
            x, network.device, network.input_places, target_key, visible, network.batch_size_for, processes,
            network.arithmetic,
        )  # fmt: skip
        return stream, torch.device("cpu") if device is None else home

    def _refuse_changed(self) -> None:
        """Raise if the model is in training mode or its weights have changed."""
        self.fingerprint.refuse_other(self.network.model)

    def _check_inputs(self, x: Inputs, slopes: bool = False) -> Inputs:
        """Return the inputs on the model's device; raise if they are empty or not finite, or the model has changed.

        With ``slopes``, those that require a gradient keep their path to it; raise if the method has none.
        """
        self._refuse_changed()
        device = self.network.device
        x = as_tensors(x, self.network.arithmetic)
        x = move_inputs(x, lambda t: (t if slopes or not t.requires_grad else t.detach()).to(device))
        if wants_slopes(x) and not self.posterior.differentiable:
            raise UnsupportedError(
                f"x requires a gradient, and the beliefs of {self.method} are not differentiable in the inputs. Use "
                "x.detach(), or a method such as Kron, Full, KernelSpace or Sampled."
            )
        if self.network.count(x) == 0:
            raise DataError("the batch is empty; expected at least one input.")
        check_finite(x, "inputs")
        return x


def _first_three(values: Tensor) -> str:
    """Return up to three numbers as text, and how many there are."""
    flat = values.detach().flatten().tolist()
    more = f", ... ({len(flat)})" if len(flat) > 3 else ""
    return ", ".join(short_number(value) for value in flat[:3]) + more
