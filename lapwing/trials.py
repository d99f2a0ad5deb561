"""Methods timed on one batch, and what follows for all data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs
from lapwing.errors import LapwingError
from lapwing.linalg.dense import eigh
from lapwing.methods.base import Cost, Method, Work, Workload
from lapwing.networks.network import plain_passes, trainable_names
from lapwing.problem import Problem
from lapwing.values.gaussian import FunctionGaussian

TRIAL_SECONDS = 10.0  # that a trial of a method may take, by its count; longer ones are counted at measured speeds
SHORT_SECONDS = 0.5  # seconds up to which a call is repeated, and a trial with more data
BRIEF_SECONDS = 0.02  # seconds up to which a call is repeated more than three times
COPY_FACTOR = 4  # factor between the numbers of copies of the batch in two trials
TIME_RATIO = 3.0  # of the time between the first trial and the last, so that their difference is not noise
CLOCK = time.perf_counter
TIMED_SIZE = 384  # rows of the matrices whose product and decomposition are timed
TIMED_SIZE_ON_GPU = 3072  # rows of the matrix that is decomposed on a GPU, where small ones are far slower by operation


@dataclass(frozen=True)
class Trial:
    """A fit to few data and a prediction: the cost by the method's formula, and the seconds that they took."""

    cost: Cost
    fit: float
    once: float  # what the first prediction takes longer than those after it
    predict: float


@dataclass(frozen=True, eq=False)
class Trials:
    """One batch of a problem, on which methods are timed, and the speed of this machine with it."""

    problem: Problem
    inputs: Inputs
    targets: Tensor
    workload: Workload  # for all data
    forward: float  # seconds of a plain forward pass of the batch
    training: float  # seconds of a plain forward and backward pass of the batch
    each: Work  # seconds of one multiplication of each kind

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, targets: Tensor | None, workload: Workload) -> Trials:
        """Time the plain passes; targets are drawn from the network's predictive if there are none."""
        network = problem.network
        if targets is None:
            targets = _draw_targets(problem, inputs)
        time_of = lambda call: shortest_time(call, network.device)
        with plain_passes(network, inputs, trainable_names(network.model)) as plain:
            forward, training = time_of(plain.forward), time_of(plain.training)
        rows = TIMED_SIZE
        if network.device.type != "cpu":  # as many as the largest factor has
            sides = [side for block in workload.blocks if block.form is not None for side in block.form[1:]]
            rows = min(max([TIMED_SIZE, *sides]), TIMED_SIZE_ON_GPU)
        square, larger = (torch.eye(n, dtype=torch.float64, device=network.device) + 1 for n in (TIMED_SIZE, rows))
        each = Work(
            training / (network.count(inputs) * workload.training),
            time_of(lambda: square @ square) / TIMED_SIZE**3,
            time_of(lambda: eigh(larger)) / rows**3,
        )
        return cls(problem, inputs, targets, workload, forward, training, each)

    @property
    def count(self) -> int:
        """The number of inputs in the batch."""
        return self.problem.network.count(self.inputs)

    def with_times(self, method: Method, cost: Cost) -> Cost:
        """Return the cost with seconds, from a trial on the batch, or at the speed of plain passes."""
        if not cost.supported:
            return cost
        counted = self._with_seconds(cost, self._fit_seconds(cost), self.count * self._seconds(cost.predict))
        form = method.trial(self.workload)
        copies = (1, COPY_FACTOR, COPY_FACTOR**2)  # some methods take more data than one batch
        few = next((n for n in copies if form is not None and self._expected(form, n).supported), None)
        if form is None or few is None:
            return counted
        expected = self._expected(form, few)
        if self._fit_seconds(expected) + 2 * self.count * self._seconds(expected.predict) > TRIAL_SECONDS:
            return counted
        try:
            short = self._run(form, few, warm=False)
            long = self._run_longer(form, few, short)
        except LapwingError as error:
            return replace(counted, note="; ".join(filter(None, (cost.note, f"not timed: {error}"))))
        if long is None:
            fit = (short.fit + short.once) * self._fit_seconds(cost) / self._fit_seconds(expected)
        else:
            fit = self._extrapolate(cost, short, long)
        ratio = self._seconds(cost.predict) / self._seconds(expected.predict)
        return self._with_seconds(cost, fit, short.predict * ratio)

    def _run_longer(self, form: Method, copies: int, short: Trial) -> Trial | None:
        """Run a trial with more copies of the batch; return None if all of its work grows with the data.

        On a GPU a small fit takes hardly longer for four batches than for one, so copies are added until it does.
        """
        if short.fit >= SHORT_SECONDS:
            twice = self._expected(form, 2 * copies)
            useful = twice.supported and twice.once.total and 2 * short.fit + short.once < TRIAL_SECONDS
            return self._run(form, 2 * copies) if useful else None
        long = None
        while long is None or (short.once < SHORT_SECONDS and long.fit < min(TIME_RATIO * short.fit, SHORT_SECONDS)):
            copies *= COPY_FACTOR
            too_many = long is not None and copies * self.count > self.workload.data
            if too_many or not self._expected(form, copies).supported:
                break
            long = self._run(form, copies)
        return long

    def _extrapolate(self, cost: Cost, short: Trial, long: Trial) -> float:
        """Return the seconds of a fit that costs so much, from two trials with different numbers of data."""
        if long.cost.once != short.cost.once:  # it grows with the data as well
            return (long.fit + long.once) * self._fit_seconds(cost) / self._fit_seconds(long.cost)
        expected, of_short = self._seconds(cost.fit), self._seconds(short.cost.fit)
        slope = max(0.0, long.fit - short.fit) / max(1e-30, self._seconds(long.cost.fit) - of_short)
        once = max(0.0, short.fit - slope * of_short) + min(short.once, long.once)
        same = cost.once == short.cost.once
        return slope * expected + once * (1.0 if same else self._seconds(cost.once) / self._seconds(short.cost.once))

    def _expected(self, form: Method, copies: int) -> Cost:
        return form.cost(replace(self.workload, data=copies * self.count)) or Cost.unsupported("cost unknown")

    def _seconds(self, work: Work) -> float:
        each = self.each
        return each.passes * work.passes + each.products * work.products + each.cubes * work.cubes

    def _fit_seconds(self, cost: Cost) -> float:
        return self._seconds(cost.fit + cost.once)

    def _with_seconds(self, cost: Cost, fit: float, predict: float) -> Cost:
        epochs = fit / (self.training * self.workload.data / self.count)
        passes = predict / self.forward
        return replace(cost, fit_seconds=fit, fit_epochs=epochs, predict_seconds=predict, predict_passes=passes)

    def _run(self, form: Method, copies: int, warm: bool = True) -> Trial:
        """Fit to copies of the batch and predict; twice on a GPU unless ``warm``: the first time loads kernels."""
        data = Data([(self.inputs, self.targets)] * copies, self.problem.network.device)
        device, posteriors = self.problem.network.device, []
        if device.type == "cuda" and not warm:
            evaluate(form.fit(self.problem, data, None).predict(self.inputs))
        fit = shortest_time(lambda: posteriors.append(form.fit(self.problem, data, None)), device)
        predict = lambda: evaluate(posteriors[-1].predict(self.inputs))
        first = shortest_time(predict, device, once=True)
        later = shortest_time(predict, device)
        if fit < SHORT_SECONDS and first > 2 * later:  # the first prediction ever, or the first of this posterior?
            posteriors.append(form.fit(self.problem, data, None))
            first = min(first, shortest_time(predict, device, once=True))
        return Trial(self._expected(form, copies), fit, max(0.0, first - later), later)


def evaluate(predictive: Any) -> None:
    """Compute the probabilities of a predictive, or its mean and standard deviation."""
    _ = predictive.probs if hasattr(predictive, "probs") else (predictive.mean, predictive.std)


def shortest_time(call: Callable[[], object], device: torch.device, once: bool = False) -> float:
    """Return the seconds of the shortest of a few calls; a long one is not repeated."""
    seconds: list[float] = []
    while not seconds or (
        not once and sum(seconds) < SHORT_SECONDS and (len(seconds) < 3 or sum(seconds) < BRIEF_SECONDS)
    ):
        _wait(device)
        start = CLOCK()
        call()
        _wait(device)
        seconds.append(CLOCK() - start)
    return min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _draw_targets(problem: Problem, inputs: Inputs) -> Tensor:
    """Draw targets from the plain network's predictive."""
    f = problem.network(inputs).to(problem.network.dtype)
    belief = FunctionGaussian(f, 1e-6 * torch.eye(f.shape[-1]).to(f).expand(*f.shape, f.shape[-1]))
    return problem.likelihood.predict(belief).sample(1, torch.Generator(f.device).manual_seed(0))[0]
