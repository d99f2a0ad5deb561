"""The decisions that every posterior makes from held-out data, each one call on what ``fit`` returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.decisions.abstaining import Abstention, abstention_of
from lapwing.decisions.acquisition import acquired
from lapwing.decisions.conformal import ConformalIntervals, ConformalSets, conformal_of
from lapwing.decisions.evaluation import Evaluation, evaluation_of
from lapwing.decisions.strange import Detector, detector_of
from lapwing.likelihoods.base import Likelihood
from lapwing.networks.forward import outside_autocast
from lapwing.networks.network import Network
from lapwing.values.gaussian import FunctionGaussian


@runtime_checkable
class Decides(Protocol):
    """A posterior with a network and a likelihood, and the decisions that follow from its predictions.

    ``Fitted`` inherits from it. Calibration data must be drawn like the data that decisions are made for, and must not
    have been used before: not for training, not as ``validation=`` of ``fit``, not to choose between posteriors. Every
    guarantee below is void otherwise, and under a shift of the data. A posterior keeps a sketch of the rows of its
    training and validation data: where some of the calibration data are among them, a ``CalibrationWarning`` says their
    share, and where all are, the decision is refused. Scores of such data are a warning.
    """

    posterior: Any  # the posterior of the method

    @property
    def likelihood(self) -> Likelihood: ...

    @property
    def network(self) -> Network: ...

    @property
    def base(self) -> Any: ...

    def predict(self, x: Inputs) -> Any:
        """Return the predictive over targets at a batch of inputs or at those of a loader."""
        ...

    def functions(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        """Return the Gaussian belief about the outputs at x."""
        ...

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n functions drawn from the posterior, evaluated at x, (n, B, C)."""
        ...

    def _unchanged(self) -> None:
        """Raise if the model has changed since the fit."""
        ...

    def _checked(self, x: Inputs) -> Inputs:
        """Return inputs as the model takes them, on its device; raise if they are unusable."""
        ...

    @outside_autocast
    def evaluate(
        self,
        data: Iterable[Any],
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
        return evaluation_of(
            self, data, level=level, confidence=confidence, resamples=resamples, target_key=target_key,
            progress=progress, generator=generator,
        )  # fmt: skip

    @outside_autocast
    def conformal(
        self,
        calibration: Iterable[Any],
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
        return conformal_of(
            self, calibration, level, score=score, groups=groups, target_key=target_key, progress=progress, seed=seed
        )

    @outside_autocast
    def abstain(
        self,
        calibration: Iterable[Any],
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
        return abstention_of(
            self, calibration, risk, confidence, by=by, tolerance=tolerance, target_key=target_key, progress=progress
        )

    @outside_autocast
    def ood(
        self,
        calibration: Iterable[Any],
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
            by: The score: "scaled_information" (the default for labels), the mutual information of targets and outputs
                under ``posterior.base``, which a mixture varies, times the standard deviation of its outputs;
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
        the mutual information of the n targets and the network, of which the greedy choice reaches at least 63 % of the
        best one (Nemhauser et al. 1978).

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
        return acquired(
            self, pool, n, by=by, candidates=candidates, samples=samples, target_key=target_key, progress=progress
        )
