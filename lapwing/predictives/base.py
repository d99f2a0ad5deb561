"""The contracts of predictives, with everything that follows from a few members: labels with probabilities, numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution

from lapwing.errors import DataError, UnsupportedError
from lapwing.predictives.scores import ClassScoring, LabelScoring, NumberScoring, Scoring
from lapwing.runtime.memory import batch_size_for, chunks, concat_chunks
from lapwing.runtime.settings import PROBABILITY, TENSOR, describe, integer
from lapwing.runtime.threads import classes, uniform

P = TypeVar("P", bound="Predictive")


def entr(probs: Tensor) -> Tensor:
    """Return -p log p, zero at zero; torch's own takes twice as long on a CPU."""
    return -probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


class Predictive:
    """A distribution of the targets at every input."""

    main_members: ClassVar[tuple[str, ...]] = ("mean",)  # the names of the members that ``numpy`` returns

    @property
    def mean(self) -> Tensor:
        """The expected targets, or the probabilities of labels, (B, C)."""
        raise NotImplementedError

    @property
    def entropy(self) -> Tensor:
        """The entropy of the targets in nats, (B,)."""
        raise NotImplementedError

    @property
    def mutual_information(self) -> Tensor:
        """The mutual information of targets and outputs in nats, (B,): doubt that more data would remove."""
        raise NotImplementedError

    @property
    def distribution(self) -> Distribution:
        """The targets of one input, jointly, as a ``torch.distributions`` object."""
        raise NotImplementedError

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability or log-density of the targets, (B,), jointly over the outputs of an input."""
        raise NotImplementedError

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the targets, (n, B, C), or (n, B) class numbers; inputs are independent.

        Args:
            n: The number of draws.
            generator: Source of randomness; torch's global one if None.

        Raises:
            UnsupportedError: ``n`` is not a positive integer.
        """
        raise NotImplementedError

    @property
    def scoring(self) -> Scoring[Any]:
        """The scores that fit such targets."""
        raise NotImplementedError

    def numpy(self) -> dict[str, Any]:
        """Return the main members as NumPy arrays, by name: ``probs`` of labels, ``mean`` and ``std`` of numbers."""
        return {name: getattr(self, name).detach().cpu().numpy() for name in self.main_members}

    @staticmethod
    def mixed(components: tuple[Any, ...], weights: Tensor) -> Predictive:
        """Return the mixture of predictives of the same inputs; raise if there is none of this kind."""
        raise UnsupportedError(
            f"{type(components[0]).__name__} has no mixed(components, weights), which a mixture of predictives needs. "
            "Add it, or give fit() a prior or a tuner such as lw.tuners.MaximiseEvidence()."
        )

    if not TYPE_CHECKING:  # which would take every name for a member

        def __getattr__(self, name):
            """Raise an error that lists the members: numbers have no ``probs``, and classes no ``interval``."""
            if name.startswith("_") or hasattr(type(self), name):  # the error of a member itself
                return object.__getattribute__(self, name)
            members = ", ".join(each for each in dir(type(self)) if not each.startswith("_"))
            raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {members}.")

    def __repr__(self) -> str:
        """Return the shape in a line; the numbers are in the members."""
        listed = ", ".join(self.main_members)
        return f"<{type(self).__name__}: {listed} {tuple(self.mean.shape)}>"


class LabelPredictive(Predictive):
    """A predictive of labels, by the probabilities of their values."""

    main_members: ClassVar[tuple[str, ...]] = ("probs",)

    @property
    def probs(self) -> Tensor:
        """Probabilities of the classes, or of label one, (B, C)."""
        raise NotImplementedError

    @property
    def integrated_probs(self) -> Tensor:
        """Probabilities by quadrature or quasi-random draws of the logits, whatever the link is, (B, C)."""
        raise NotImplementedError

    @property
    def aleatoric(self) -> Tensor:
        """The expected entropy given the logits in nats, (B,): doubt that more data would not remove."""
        raise NotImplementedError

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        """Return the entropy of labels with these probabilities (..., C) in nats, (...)."""
        raise NotImplementedError

    @property
    def class_probs(self) -> Tensor:
        """Probabilities of all values of one label, (B, C): those of the classes, or of zero and one.

        Raises:
            UnsupportedError: If there are several binary labels.
        """
        raise NotImplementedError

    @property
    def mean(self) -> Tensor:
        """The expected labels: ``probs``."""
        return self.probs

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of labels with ``probs`` in nats, (B,)."""
        return self.entropy_of(self.probs)

    @cached_property
    def mutual_information(self) -> Tensor:
        """The mutual information of labels and logits in nats, (B,): doubt that more data would remove."""
        return (self.entropy_of(self.integrated_probs) - self.aleatoric).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        """Another name of ``mutual_information``."""
        return self.mutual_information


class ClassPredictive(LabelPredictive):
    """A predictive of one class out of C."""

    scoring: ClassVar[ClassScoring] = ClassScoring()

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities of the classes, (B, C); finite where the probability itself rounds to zero."""
        raise NotImplementedError

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities of the classes, (B, C)."""
        return self.log_probs.exp()

    @property
    def distribution(self) -> distributions.Categorical:
        """The class of each input as a ``torch.distributions`` object."""
        return distributions.Categorical(probs=self.probs, validate_args=False)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of the labels, (B,).

        Labels are class numbers (B,), or probabilities of the classes (B, C) in floating point: then it is the mean
        over them, Σ_c y_c log p_c.

        Raises:
            DataError: A label is not one of the classes, or a row is not a distribution.
        """
        if is_soft(y, self.log_probs):
            y = check_distributions(y.to(self.log_probs))
            return torch.where(y > 0, y * self.log_probs, 0.0).sum(-1)
        return self.log_probs.gather(-1, check_labels(y, self.log_probs)).squeeze(-1)

    @property
    def standard_error(self) -> Tensor:
        """The standard error of ``probs``, (B, C): zero unless they are averages over drawn functions."""
        return torch.zeros_like(self.probs)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        integer().check("n", n)
        return classes(self.probs.expand(n, *self.probs.shape), generator)

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        return entr(probs).sum(-1)

    @property
    def class_probs(self) -> Tensor:
        return self.probs


class MultilabelPredictive(LabelPredictive):
    """A predictive of one binary label or many."""

    scoring: ClassVar[LabelScoring] = LabelScoring()

    def known_log_prob(self, y: Tensor, known: Tensor) -> Tensor:
        """Return the log-probability of the labels that count, (B, [T]): of these together, zero where none does.

        Args:
            y: Labels (B, [T,] C) that were checked; those that do not count may have any value.
            known: Whether each counts, in the same shape.
        """
        raise NotImplementedError

    @property
    def distribution(self) -> Distribution:
        """The labels of one input, each with its own probability, as independent Bernoulli variables."""
        return distributions.Independent(distributions.Bernoulli(probs=self.probs, validate_args=False), 1)

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        return (entr(probs) + entr(1 - probs)).sum(-1)

    @property
    def class_probs(self) -> Tensor:
        if self.probs.shape[-1] != 1:
            raise UnsupportedError(
                f"{self.probs.shape[-1]} binary labels for each input; expected one label, or classes. Take the labels "
                "one by one."
            )
        return torch.cat([1 - self.probs, self.probs], -1)


class NumberPredictive(Predictive):
    """A predictive of C numbers, such as regression targets or counts."""

    main_members: ClassVar[tuple[str, ...]] = ("mean", "std")

    @property
    def epistemic_variance(self) -> Tensor:
        """The variance of y from f, which more data would lower, (B, C)."""
        raise NotImplementedError

    @property
    def aleatoric_variance(self) -> Tensor:
        """The variance of y that is expected at a known f, which more data would not lower, (B, C)."""
        raise NotImplementedError

    @property
    def known_entropy(self) -> Tensor:
        """The entropy of y in nats that is expected at a known f, (B,)."""
        raise NotImplementedError

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return the probability of at most y, for each output by itself, (B, C).

        Args:
            y: One number, or (B, C).

        Raises:
            DataError: ``y`` has another shape.
        """
        raise NotImplementedError

    def quantile(self, level: float) -> Tensor:
        """Return the numbers that y is below with probability ``level``, for each output by itself, (B, C)."""
        raise NotImplementedError

    @property
    def epistemic(self) -> Tensor:
        """Another name of ``epistemic_variance``."""
        return self.epistemic_variance

    @property
    def aleatoric(self) -> Tensor:
        """Another name of ``aleatoric_variance``."""
        return self.aleatoric_variance

    @cached_property
    def variance(self) -> Tensor:
        """The variance of y, (B, C)."""
        return self.epistemic_variance + self.aleatoric_variance

    @property
    def std(self) -> Tensor:
        """The standard deviation of y, (B, C)."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return (low, high), each (B, C): the quantiles of each output at (1 - level)/2 and (1 + level)/2.

        Raises:
            DataError: ``level`` is not between 0 and 1.
            NumericalError: Counts overflow.
        """
        PROBABILITY.check("level", level)
        return self.quantile(0.5 - 0.5 * level), self.quantile(0.5 + 0.5 * level)

    @property
    def mutual_information(self) -> Tensor:
        """The mutual information of y and f in nats, (B,): entropy minus that expected at a known f."""
        return (self.entropy - self.known_entropy.to(self.mean)).clamp_min(0)

    @property
    def scoring(self) -> NumberScoring:
        return NumberScoring()


@dataclass(frozen=True, eq=False, repr=False)
class Mixture(Predictive, Generic[P]):
    """An average of predictives of the same inputs.

    Args:
        components: The predictives.
        weights: Their weights (K,), which sum to one.
    """

    components: tuple[P, ...]
    weights: Tensor

    def _values(self, part: Callable[[P], Tensor]) -> list[Tensor]:
        """Return a part of the components, (k, B, ...) each: K leading entries together."""
        return [part(component).unsqueeze(0) for component in self.components]

    def average(self, part: Callable[[P], Tensor]) -> Tensor:
        """Return Σ w_k v_k of a part v of the components."""
        return self._over_inputs(part, lambda v: (self.weights.to(v).reshape(-1, *[1] * (v.ndim - 1)) * v).sum(0))

    def log_average(self, part: Callable[[P], Tensor]) -> Tensor:
        """Return log Σ w_k exp(v_k) of a part v of the components."""
        weights = lambda v: self.weights.log().to(v).reshape(-1, *[1] * (v.ndim - 1))
        return self._over_inputs(part, lambda v: torch.logsumexp(v + weights(v), 0))

    def _over_inputs(self, part: Callable[[P], Tensor], summed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a sum over the components (K, B, ...), for as many inputs at a time as fit the byte budget."""
        values = self._values(part)
        first, each = values[0], 3 * len(self.weights) * values[0].element_size()
        if first.ndim == 1 or not first.numel():
            return summed(torch.cat(values))
        count, width = first.shape[1], first[0, 0].numel()
        if batch_size_for(count, each * width, first.device) >= count:
            return summed(first if len(values) == 1 else torch.cat(values))
        some = chunks(count, each * width, first.device)
        return concat_chunks((summed(torch.cat([v[:, rows] for v in values])) for rows in some), count)

    def log_prob(self, y: Tensor) -> Tensor:
        return self.log_average(lambda component: component.log_prob(y))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws, (n, B, [T,] C): for each input a component, then a draw from it."""
        integer().check("n", n)
        mean = self.mean
        edges = self.weights.to(mean.device).cumsum(0)[:-1].contiguous()
        cells = torch.searchsorted(edges, uniform((n, *mean.shape[:-1]), generator, mean).to(edges), right=True)
        out = torch.zeros((n, *mean.shape), dtype=mean.dtype, device=mean.device)
        for k, component in enumerate(self.components):
            chosen = cells == k
            if bool(chosen.any()):
                out = torch.where(chosen.unsqueeze(-1), component.sample(n, generator), out)
        return out


SUM_TOLERANCE = 1e-3  # by which the sum of a row of soft targets may differ from one, as in half precision


def is_soft(y: object, like: Tensor) -> bool:
    """Return whether these are probabilities of the classes by their form, for logits or probabilities ``like``."""
    return isinstance(y, Tensor) and y.is_floating_point() and y.shape == like.shape


def check_distributions(y: Tensor) -> Tensor:
    """Return probabilities of classes (..., C); raise unless every row is a distribution."""
    low, sums = float(y.min()) if y.numel() else 0.0, y.double().sum(-1)
    wrong = (sums - 1).abs() > SUM_TOLERANCE
    if low < 0 or bool(wrong.any()):
        found = f"an entry {low:g}" if low < 0 else f"a row with the sum {float(sums[wrong][0]):g}"
        raise DataError(
            f"soft targets have {found}; expected probabilities of the classes, at least zero and with sum one for "
            "each datum. Use y.softmax(-1) for logits, or Bernoulli() for several labels at once."
        )
    return y


def check_labels(y: Any, like: Tensor) -> Tensor:
    """Return class numbers as (..., 1) for logits or probabilities ``like`` (..., C); raise unless they are such."""
    shape, count, y = like.shape[:-1], like.shape[-1], to_tensor(y)
    whole = isinstance(y, Tensor) and not y.is_floating_point() and not y.is_complex()
    if not whole or y.shape not in (shape, (*shape, 1)):
        raise DataError(
            f"y is {describe(y)}; expected whole class numbers of the shape {tuple(shape)}, or probabilities in "
            "floating "
            f"point of the shape {tuple(like.shape)}."
        )
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < count:
        low, high = int(y.min()), int(y.max())
        advice = (
            f" If {low} marks targets that do not count, leave these out: log_prob(y.clamp_min(0))[y >= 0]; the scores "
            "of lw.metrics leave -100 out by themselves."
        )
        raise DataError(f"classes run from {low} to {high}; expected 0..{count - 1}.{advice if low < 0 else ''}")
    return y.to(like.device).long().reshape(*shape, 1)


def check_numbers(y: object, like: Tensor, one: bool = True, within: tuple[float, float] | None = None) -> Tensor:
    """Return numbers in the shape and dtype of ``like``; raise for another shape, complex numbers and NaN.

    A single output may come without its dimension. ``one`` allows one number for all. ``within`` has the lowest and
    the highest that is possible.
    """
    given = to_tensor(y)
    TENSOR.check("y", given)
    if (given.ndim or not one) and given.shape != like.shape and (*given.shape, 1) != like.shape:
        expected = f"{tuple(like.shape)}, one number for each output" + (", or one for all" if one else "")
        raise DataError(f"y has the shape {tuple(given.shape)}; expected {expected}.")
    numbers = given.to(like)
    if within is not None and not bool(((numbers >= within[0]) & (numbers <= within[1])).all()):
        low, high = numbers.aminmax()
        raise DataError(f"y runs from {low:.4g} to {high:.4g}; expected numbers from {within[0]:g} to {within[1]:g}.")
    return numbers.reshape(like.shape) if numbers.ndim else numbers


def to_tensor(y: object) -> Any:
    """Return a number, a list or an array as a tensor; anything else as it is, for the error message."""
    try:
        return torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        return y
