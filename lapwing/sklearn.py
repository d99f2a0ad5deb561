"""Estimators for scikit-learn: a small network that they train themselves, and its Lapwing posterior."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from lapwing.api import fit
from lapwing.crossfit import crossfit
from lapwing.errors import DataError, ModelError, NumericalError
from lapwing.methods.base import Method
from lapwing.networks.selection import Weights
from lapwing.priors import Prior
from lapwing.runtime.settings import FLAG, NONE, POSITIVE, PROBABILITY, Rule, integer, is_integer, is_real, one_of
from lapwing.runtime.threads import EarlyStopping

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        "lapwing.sklearn needs scikit-learn, which is not installed: pip install 'lapwing[sklearn]'."
    ) from error

__all__ = ["LapwingClassifier", "LapwingRegressor"]

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}
Loss = Callable[[Tensor, Tensor], Tensor]
E = TypeVar("E", bound="LapwingEstimator")


class Standardised(nn.Module):
    """Inputs (B, d) to zero mean and unit variance; a feature that is constant is only shifted."""

    mean: Tensor
    scale: Tensor

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        mean, scale = column_scales(x)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


class InUnitsOfTargets(nn.Module):
    """A network that was trained on standardised targets, with outputs in the units of the targets."""

    mean: Tensor
    scale: Tensor

    def __init__(self, module: nn.Module, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) * self.scale + self.mean


def column_scales(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each column; one in place of a deviation of zero."""
    mean, scale = values.mean(0), values.std(0, correction=0)
    rounding = values.abs().amax(0) * 10 * torch.finfo(values.dtype).eps
    return mean, torch.where(scale > rounding, scale, torch.ones_like(scale))


def small_network(x: Tensor, outputs: int, hidden: Sequence[int], activation: str) -> nn.Sequential:
    """Return an untrained multilayer perceptron in float64 that standardises its inputs first."""
    one_of(ACTIVATIONS).check("activation", activation)
    sizes = [x.shape[1], *hidden]
    layers: list[nn.Module] = [Standardised(x.double())]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs)).double()


def place(module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and targets as the first parameter is; raise if there is none. Class numbers keep their dtype."""
    for parameter in module.parameters():
        return x.to(parameter), y.to(parameter if y.is_floating_point() else parameter.device)
    raise ModelError("module() returned a network without parameters; expected at least one to train.")


@dataclass(frozen=True)
class Schedule:
    """How a network is trained: steps of Adam over shuffled batches, until the score has not improved for a while."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    max_epochs: int
    patience: int
    seed: int

    def train(
        self, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, held_out: tuple[Tensor, Tensor] | None
    ) -> tuple[int, int]:
        """Train the module in place, leave it in evaluation mode at its best epoch, and return the number of epochs.

        The second number is that of the best epoch, which has the lowest loss on the held-out rows. Without such rows
        the module stays as it is after the last one.
        """
        generator = torch.Generator().manual_seed(self.seed)
        optimiser = torch.optim.Adam(module.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        stopping: EarlyStopping[Any] | None = None
        epochs = best = 0
        if held_out is not None:
            now = lambda: (_score(module, loss, held_out), (epochs, copy.deepcopy(module.state_dict())))
            stopping = EarlyStopping(now, 1, self.patience)
        while epochs < self.max_epochs:
            module.train()
            for rows in torch.randperm(len(x), generator=generator).split(self.batch_size):
                optimiser.zero_grad()
                loss(module(x[rows]), y[rows]).backward()
                optimiser.step()
            epochs += 1
            if stopping is not None and stopping.should_stop(epochs - 1):
                break
        if stopping is not None:
            best, state = stopping.best_state
            module.load_state_dict(state)
        module.eval()
        if not all(bool(p.isfinite().all()) for p in module.parameters()):
            raise NumericalError(
                "the training diverged: weights are not finite; lower learning_rate_init, or scale the inputs."
            )
        return epochs, best


def _score(module: nn.Module, loss: Loss, rows: tuple[Tensor, Tensor]) -> float:
    """Return minus the loss of the module on these rows."""
    module.eval()
    with torch.no_grad():
        return -float(loss(module(rows[0]), rows[1]))


CALIBRATES = 100  # held-out rows from which they calibrate the error bars, and are not data of the posterior
FOLDS, FOLDED = 5, range(100, 1000)  # of cv="auto", and for how many rows: experiments/crossfit.md
FEWEST = 5  # held-out rows from which they stop the training; with fewer all rows train, and stop it
BATCH = 64
SIZES = Rule(
    "a tuple of positive integers, such as (50, 50)",
    lambda v: all(is_integer(size) and size >= 1 for size in v) and not isinstance(v, str),
)
FACTORY = Rule(
    "a function without arguments that returns a torch.nn.Module",
    lambda v: callable(v) and not isinstance(v, nn.Module),
)

SETTINGS = {
    "hidden_layer_sizes": SIZES, "module": FACTORY | NONE, "learning_rate_init": POSITIVE,
    "alpha": Rule("a number that is not negative", lambda v: is_real(v) and v >= 0), "max_iter": integer(),
    "batch_size": integer() | NONE, "n_iter_no_change": integer(), "validation_fraction": PROBABILITY,
    "cv": Rule("'auto'", lambda v: v == "auto") | integer(2) | NONE,
}  # fmt: skip


class LapwingEstimator(BaseEstimator):  # type: ignore[misc]
    """The part that both estimators share: the settings, the split of the rows, training, and the posterior."""

    def __init__(
        self,
        hidden_layer_sizes: tuple[int, ...] = (100,),
        *,
        activation: str = "silu",
        module: Callable[[], nn.Module] | None = None,
        method: Method | str | None = None,
        weights: Weights | str | None = None,
        prior: Prior | float | None = None,
        alpha: float = 1e-4,
        learning_rate_init: float = 3e-3,
        batch_size: int | None = None,
        max_iter: int = 200,
        n_iter_no_change: int = 20,
        validation_fraction: float = 0.15,
        cv: int | str | None = "auto",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.module = module
        self.method = method
        self.weights = weights
        self.prior = prior
        self.alpha = alpha
        self.learning_rate_init = learning_rate_init
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.n_iter_no_change = n_iter_no_change
        self.validation_fraction = validation_fraction
        self.cv = cv
        self.random_state = random_state

    def _check_settings(self) -> None:
        """Raise unless the settings are as expected: scikit-learn wants this in ``fit``, not in the constructor."""
        for name, rule in SETTINGS.items():
            rule.check(name, getattr(self, name))

    def _rows(self, x: ArrayLike, **settings: Any) -> Any:
        """Return the inputs, and targets if there are any, as scikit-learn checks them; images only for a module."""
        return validate_data(self, x, dtype=[np.float64, np.float32], allow_nd=self.module is not None, **settings)

    def _fit_posterior(
        self: E, rows: NDArray[Any], y: Tensor, outputs: int, likelihood: str, strata: NDArray[Any] | None = None
    ) -> E:
        """Train the network and fit its posterior; y are targets for the network, (n,) or (n, C)."""
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        given = torch.tensor(rows)  # a copy: arrays may be read-only
        train, held_out = self._split(len(given), seed, strata)
        schedule = Schedule(
            self.learning_rate_init, self.alpha, self.batch_size or BATCH, self.max_iter, self.n_iter_no_change, seed
        )
        watched = held_out if len(held_out) else train
        every = torch.arange(len(given))
        network, (self.n_iter_, best) = self._trained(given, y, outputs, schedule, every, train, watched)
        x, y = place(network, given, y)
        settings: dict[str, Any] = {
            "method": self.method,
            "weights": self.weights,
            "prior": self.prior,
            "progress": False,
        }
        self.__dict__.pop("crossfit_", None)  # of an earlier fit
        calibrates = len(held_out) >= CALIBRATES
        folds = self.cv
        if folds == "auto":
            folds = FOLDS if len(given) in FOLDED and not calibrates else None
        if folds is not None:
            again = replace(schedule, max_epochs=max(1, best))
            whole = lambda rows, seed: self._trained(
                given, y, outputs, replace(again, seed=seed % 2**32), rows, rows, None
            )[0]
            self.crossfit_ = crossfit(
                whole, (x, y), likelihood, model=whole(every, seed), folds=folds, seed=seed, **settings
            )
            self.posterior_ = self.crossfit_.posterior
            return self
        data = (x[train], y[train]) if calibrates else (x, y)
        held = (x[held_out], y[held_out]) if calibrates else None
        self.posterior_ = fit(network, data, likelihood, validation=held, **settings)
        return self

    def _trained(
        self, given: Tensor, y: Tensor, outputs: int, schedule: Schedule, known: Tensor, train: Tensor,
        watched: Tensor | None,
    ) -> tuple[nn.Module, tuple[int, int]]:  # fmt: skip
        """Return a network, with outputs in the units of the targets, and the numbers of its epochs.

        Inputs and targets are standardised by the ``known`` rows; the others are the rows that train it, and those that
        stop the training.
        """
        network = self._network(given[known], outputs, schedule.seed)
        x, y = place(network, given, y)
        mean, scale = column_scales(y[known]) if y.is_floating_point() else (y.new_zeros(()), y.new_ones(()))
        loss = F.mse_loss if y.is_floating_point() else F.cross_entropy
        scaled = (y - mean) / scale if y.is_floating_point() else y
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(schedule.seed)  # of dropout
            self._check_outputs(network, x, outputs)
            stopping = None if watched is None else (x[watched], scaled[watched])
            epochs = schedule.train(network, loss, x[train], scaled[train], stopping)
        return InUnitsOfTargets(network, mean, scale).eval() if y.is_floating_point() else network, epochs

    def _network(self, x: Tensor, outputs: int, seed: int) -> nn.Module:
        """Return a new network: that of the user, or a small one, both with random weights from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.module is None:
                return small_network(x, outputs, self.hidden_layer_sizes, self.activation)
            network = self.module()
        if not isinstance(network, nn.Module):
            raise ModelError(f"module() returned a {type(network).__name__}; expected a torch.nn.Module.")
        return network

    def _check_outputs(self, network: nn.Module, x: Tensor, outputs: int) -> None:
        """Raise unless the network has an output for each class or target."""
        with torch.no_grad():
            shape = tuple(network.eval()(x[:2]).shape)
        if shape != (len(x[:2]), outputs):
            raise ModelError(
                f"the network returns the shape {shape} for {len(x[:2])} rows; expected {(len(x[:2]), outputs)}: one "
                "output for each class or target."
            )

    def _split(self, count: int, seed: int, strata: NDArray[Any] | None) -> tuple[Tensor, Tensor]:
        """Return the numbers of the rows to train on and of those held out; none of these if there are few rows."""
        size = round(count * self.validation_fraction)
        if size < FEWEST:
            return torch.arange(count), torch.arange(0)
        settings = {"test_size": size, "random_state": seed}
        if strata is not None:
            counts = np.bincount(strata)
            strata = strata if counts.min() > 1 and len(counts) <= min(size, count - size) else None
        train, held_out = train_test_split(np.arange(count), stratify=strata, **settings)
        return torch.as_tensor(np.sort(train)), torch.as_tensor(np.sort(held_out))

    def _predictive(self, x: ArrayLike) -> Any:
        """Return the predictive distribution of the targets at these inputs."""
        check_is_fitted(self)
        x = self._rows(x, reset=False)
        return self.posterior_.predict(torch.tensor(x, dtype=self.posterior_.network.dtype))


class LapwingClassifier(ClassifierMixin, LapwingEstimator):  # type: ignore[misc]
    """Classifier for scikit-learn: a neural network whose probabilities take its own uncertainty into account.

    Its settings have the names of scikit-learn's ``MLPClassifier`` where they mean the same.

    Args:
        hidden_layer_sizes: The width of each hidden layer of the network. It is a multilayer perceptron in float64,
            which standardises its inputs itself.
        activation: The nonlinearity: "silu", "relu" or "tanh".
        module: A function without arguments that returns an untrained ``torch.nn.Module`` with one output for each
            class. The estimator trains it in place of its own network, on inputs as they are, in its dtype; they may
            have more than two dimensions.
        method: As for ``lw.fit``.
        weights: As for ``lw.fit``.
        prior: As for ``lw.fit``.
        alpha: The weight decay.
        learning_rate_init: The learning rate of Adam.
        batch_size: The number of rows in a step; 64 if None.
        max_iter: The largest number of epochs.
        n_iter_no_change: Stop after this many epochs without a lower loss on the held-out rows.
        validation_fraction: The share of the rows that are held out; the network with the lowest loss on them is
            kept. From 100 such rows on, they also calibrate the error bars, as ``validation`` of ``lw.fit`` does.
            With fewer than 5, all rows train and none is held out.
        cv: A number of folds, such as 5: held-out rows then say how many epochs to train for, and the network is
            trained again on all rows, and calibrated by networks of the folds (``lw.crossfit``). That takes ``cv + 2``
            trainings, and two more if they are quick. None trains one network. "auto" takes 5 folds for 100 to 999
            rows, if fewer than 100 of them are held out, and else none.
        random_state: The seed of weights, split and batches: an integer, a ``numpy.random.RandomState`` or None.

    Attributes:
        posterior_: The posterior of the network, a ``lw.Fitted``.
        crossfit_: With folds, what ``lw.crossfit`` returned.
        classes_: The labels, sorted; the columns of ``predict_proba``.
        n_iter_: The number of epochs.

    >>> from sklearn.datasets import load_iris
    >>> x, y = load_iris(return_X_y=True)
    >>> classifier = LapwingClassifier((20,), learning_rate_init=1e-2, random_state=0).fit(x, y)
    >>> classifier.predict_proba(x[:2]).shape, classifier.score(x, y) > 0.9
    ((2, 3), True)
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> LapwingClassifier:
        """Train the network and fit its posterior.

        Args:
            X: The inputs, (n, features).
            y: The labels, (n,).

        Returns:
            The estimator itself.

        Raises:
            DataError: If there is only one class.
            UnsupportedError: If a setting is not as expected.
        """
        self._check_settings()
        x, labels = self._rows(X, y=y)
        check_classification_targets(labels)
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y has one class, {self.classes_[0]!r}; expected two or more classes.")
        return self._fit_posterior(x, torch.as_tensor(numbers), len(self.classes_), "classification", numbers)

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:
        """Return the probability of every class, (n, classes), averaged over the posterior."""
        return self._predictive(X).probs.detach().double().cpu().numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable labels, (n,)."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(1)]


class LapwingRegressor(RegressorMixin, LapwingEstimator):  # type: ignore[misc]
    """Regressor for scikit-learn: a neural network with error bars.

    The network learns standardised targets. ``posterior_`` and predictions are in the units of the targets.

    Args:
        hidden_layer_sizes: As for ``LapwingClassifier``, and so are all other settings.
        activation: As there.
        module: As there; the module has one output for each target, for standardised targets.
        method: As there.
        weights: As there.
        prior: As there.
        alpha: As there.
        learning_rate_init: As there.
        batch_size: As there.
        max_iter: As there.
        n_iter_no_change: As there.
        validation_fraction: As there.
        cv: As there.
        random_state: As there.

    Attributes:
        posterior_: The posterior of the network, a ``lw.Fitted``.
        crossfit_: As for ``LapwingClassifier``.
        n_iter_: The number of epochs.

    >>> from sklearn.datasets import load_diabetes
    >>> x, y = load_diabetes(return_X_y=True)
    >>> regressor = LapwingRegressor((10,), max_iter=20, random_state=0).fit(x, y)
    >>> mean, std = regressor.predict(x[:2], return_std=True)
    >>> mean.shape, std.shape
    ((2,), (2,))
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output, tags.target_tags.multi_output = True, True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> LapwingRegressor:
        """Train the network and fit its posterior.

        Args:
            X: The inputs, (n, features).
            y: The targets, (n,) or (n, targets).

        Returns:
            The estimator itself.

        Raises:
            UnsupportedError: If a setting is not as expected.
        """
        self._check_settings()
        x, numbers = self._rows(X, y=y, multi_output=True, y_numeric=True)
        self._is_vector = np.ndim(numbers) == 1
        targets = torch.tensor(np.asarray(numbers, dtype=np.float64).reshape(len(numbers), -1))
        return self._fit_posterior(x, targets, targets.shape[1], "regression")

    def predict(self, X: ArrayLike, return_std: bool = False) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]:
        """Return the means of the targets, shaped like the targets of ``fit``.

        Args:
            X: The inputs, (n, features).
            return_std: Whether to return the standard deviations of the targets too, noise included.
        """
        FLAG.check("return_std", return_std)
        predictive = self._predictive(X)
        mean = self._in_shape_of_targets(predictive.mean)
        return (mean, self._in_shape_of_targets(predictive.std)) if return_std else mean

    def _in_shape_of_targets(self, values: Tensor) -> NDArray[Any]:
        """Return numbers (n, C) as an array; (n,) if the targets of ``fit`` were."""
        array = values.detach().double().cpu().numpy()
        return array[:, 0] if self._is_vector else array
