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
from lapwing.methods.base import Method
from lapwing.methods.cost import Cost, Work, Workload
from lapwing.networks.network import plain_passes, trained_names
from lapwing.problem import Problem
from lapwing.values.gaussian import FunctionGaussian

LONGEST = 10.0  # seconds that a trial of a method may take, by its count; longer ones are counted at measured speeds
SHORT = 0.5  # seconds up to which a call is repeated, and a trial with more data
BRIEF = 0.02  # seconds up to which a call is repeated more than three times
COPIES = 4  # factor between the numbers of copies of the batch in two trials
GROWTH = 3.0  # of the time between the first trial and the last, so that their difference is not noise
CLOCK = time.perf_counter
SQUARE = 384  # rows of the matrices whose product and decomposition are timed
LARGEST = 3072  # rows of the matrix that is decomposed on a GPU, where small ones are far slower by operation


@dataclass(frozen=True)
class Speeds:
    """Seconds of plain passes over the batch, and of one multiplication of each kind of work."""

    forward: float
    training: float
    each: Work  # seconds in place of multiplications

    def seconds(self, work: Work) -> float:
        """Return the time that the work takes at these speeds."""
        each = self.each
        return each.passes * work.passes + each.products * work.products + each.cubes * work.cubes


@dataclass(frozen=True)
class Run:
    """Seconds of one trial: of the fit, of what its first prediction adds, and of the predictions after it."""

    fit: float
    once: float
    predict: float


@dataclass(frozen=True, eq=False)
class Trials:
    """One batch of a problem, on which methods are timed."""

    problem: Problem
    inputs: Inputs
    targets: Tensor
    workload: Workload  # for all data
    speeds: Speeds

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, targets: Tensor | None, workload: Workload) -> Trials:
        """Time the plain passes; targets are drawn from the network's predictive if there are none."""
        network = problem.network
        if targets is None:
            targets = _drawn_targets(problem, inputs)
        count, names = network.count(inputs), trained_names(network.model)
        time_of = lambda call: clocked(call, network.device)
        with plain_passes(network, inputs, names) as plain:
            forward, training = time_of(plain.forward), time_of(plain.training)
        square, decomposed = (
            torch.eye(rows, dtype=torch.float64, device=network.device) + 1
            for rows in (SQUARE, decomposed_rows(workload))
        )
        each = Work(
            training / (count * workload.training),
            time_of(lambda: square @ square) / SQUARE**3,
            time_of(lambda: eigh(decomposed)) / len(decomposed) ** 3,
        )
        return cls(problem, inputs, targets, workload, Speeds(forward, training, each))

    @property
    def count(self) -> int:
        """The number of inputs in the batch."""
        return self.problem.network.count(self.inputs)

    def timed(self, method: Method, cost: Cost) -> Cost:
        """Return the cost with seconds, from a trial on the batch, or at the speed of plain passes."""
        if not cost.supported:
            return cost
        trial = method.trial(self.workload)
        counted = self._with_seconds(cost, self._sum(cost), self.count * self.speeds.seconds(cost.predict))
        if trial is None or trial.cost(self.workload) is None:
            return counted
        few = next((copies for copies in (1, COPIES, COPIES**2) if self._expected(trial, copies).supported), None)
        if few is None:  # it takes more data than that
            return counted
        first = self._expected(trial, few)
        if self._sum(first) + 2 * self.count * self.speeds.seconds(first.predict) > LONGEST:
            return counted
        try:
            run = self._run(trial, few, warm=False)
            more = self._longer(trial, few, run)
        except LapwingError as error:
            return replace(counted, note="; ".join(filter(None, (cost.note, f"not timed: {error}"))))
        if more is None:
            seconds = (run.fit + run.once) * self._sum(cost) / self._sum(first)
        else:
            seconds = self._extrapolated(cost, (first, run), more)
        return self._with_seconds(
            cost, seconds, run.predict * self.speeds.seconds(cost.predict) / self.speeds.seconds(first.predict)
        )

    def _longer(self, trial: Method, copies: int, run: Run) -> tuple[Cost, Run] | None:
        """Return cost and times of a trial with more copies of the batch; None if all of its work grows with the data.

        On a GPU a small fit takes hardly longer for four batches than for one, so copies are added until it does.
        """
        if run.fit >= SHORT:
            double = self._expected(trial, 2 * copies)
            useful = double.supported and double.once.total and 2 * run.fit + run.once < LONGEST
            return (double, self._run(trial, 2 * copies)) if useful else None
        longer = None
        while longer is None or (run.once < SHORT and longer[1].fit < min(GROWTH * run.fit, SHORT)):
            copies *= COPIES
            more = self._expected(trial, copies)
            if not more.supported or (longer is not None and copies * self.count > self.workload.data):
                break
            longer = more, self._run(trial, copies)
        return longer

    def _extrapolated(self, cost: Cost, first: tuple[Cost, Run], more: tuple[Cost, Run]) -> float:
        """Return the seconds of a fit, from trials with one batch and with several."""
        (one, few), (many, some) = first, more
        speed = self.speeds.seconds
        if many.once != one.once:  # it grows with the data as well
            return (some.fit + some.once) * self._sum(cost) / self._sum(many)
        slope = max(0.0, some.fit - few.fit) / max(1e-30, speed(many.fit) - speed(one.fit))
        once = max(0.0, few.fit - slope * speed(one.fit)) + min(few.once, some.once)
        return slope * speed(cost.fit) + once * (1.0 if cost.once == one.once else speed(cost.once) / speed(one.once))

    def _expected(self, trial: Method, copies: int) -> Cost:
        expected = trial.cost(replace(self.workload, data=copies * self.count))
        assert expected is not None
        return expected

    def _sum(self, cost: Cost) -> float:
        return self.speeds.seconds(cost.fit + cost.once)

    def _with_seconds(self, cost: Cost, fit: float, predict: float) -> Cost:
        epoch = self.speeds.training * self.workload.data / self.count
        return replace(
            cost, fit_seconds=fit, fit_epochs=fit / epoch, predict_seconds=predict,
            predict_passes=predict / self.speeds.forward,
        )  # fmt: skip

    def _run(self, method: Method, copies: int, warm: bool = True) -> Run:
        """Fit to copies of the batch and predict; twice on a GPU unless ``warm``: the first time loads kernels."""
        data = Data([(self.inputs, self.targets)] * copies, self.problem.network.device)
        device, posteriors = self.problem.network.device, []
        if device.type == "cuda" and not warm:
            used(method.fit(self.problem, data, None).predict(self.inputs))
        fit = clocked(lambda: posteriors.append(method.fit(self.problem, data, None)), device)
        predict = lambda: used(posteriors[-1].predict(self.inputs))
        first = clocked(predict, device, once=True)
        following = clocked(predict, device)
        if fit < SHORT and first > 2 * following:  # the first prediction ever, or the first of this posterior?
            posteriors.append(method.fit(self.problem, data, None))
            first = min(first, clocked(predict, device, once=True))
        return Run(fit, max(0.0, first - following), following)


def decomposed_rows(workload: Workload) -> int:
    """Return the rows of the matrix whose decomposition is timed: on a GPU, as many as the largest factor has."""
    if workload.device.type == "cpu":
        return SQUARE
    sides = [side for block in workload.blocks if block.form is not None for side in block.form[1:]]
    return min(max([SQUARE, *sides]), LARGEST)


def used(predictive: Any) -> Any:
    """Use a predictive: its probabilities, or its mean and standard deviation."""
    return predictive.probs if hasattr(predictive, "probs") else (predictive.mean, predictive.std)


def clocked(call: Callable[[], Any], device: torch.device, once: bool = False) -> float:
    """Return the seconds of the shortest of a few calls; a long one is not repeated."""
    seconds: list[float] = []
    while not seconds or (not once and sum(seconds) < SHORT and (len(seconds) < 3 or sum(seconds) < BRIEF)):
        _wait(device)
        start = CLOCK()
        call()
        _wait(device)
        seconds.append(CLOCK() - start)
    return min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _drawn_targets(problem: Problem, inputs: Inputs) -> Tensor:
    """Return targets drawn from the plain network's predictive."""
    f = problem.network(inputs).to(problem.network.dtype)
    belief = FunctionGaussian(f, 1e-6 * torch.eye(f.shape[-1]).to(f).expand(*f.shape, f.shape[-1]))
    drawn: Tensor = problem.likelihood.predict(belief).sample(1, torch.Generator(f.device).manual_seed(0))[0]
    return drawn
