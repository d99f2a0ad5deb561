"""Recipes for ``train``: how a network is trained, and whether the evidence chooses its regularisation meanwhile.

>>> online(epochs=20).optimiser, classic().optimiser
('adam', 'lbfgs')
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import FileError, UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.methods.base import METHOD, Method
from lapwing.methods.members import MapOnly
from lapwing.methods.weight_space import Full, Kron
from lapwing.priors import BoundPrior, Isotropic, PerLayer, Prior
from lapwing.runtime.settings import (
    FLAG,
    FUNCTION,
    NONE,
    POSITIVE,
    HasSettings,
    Rule,
    integer,
    on_device,
    one_of,
    refuse_other_calls,
    required,
    setting,
)
from lapwing.runtime.states import SMALLEST, Array, Either, Field, Known, Maybe, Real, State, Unread, Whole
from lapwing.tuners.base import Ascend, FixedPoint, Tuner

__all__ = ["Recipe", "classic", "fixed", "online"]

LISTS = ("old_dirs", "old_stps", "ro")  # the lists of L-BFGS, stored as one tensor each
UNSAVED = "al"  # working memory of L-BFGS
HISTORY = 100  # steps that L-BFGS remembers
Fields = Callable[[Sequence[nn.Parameter], int], dict[str, Field]]


@dataclass(frozen=True)
class Optimiser:
    """One of PyTorch's optimisers: how to build it, and the facts about it that training and files need."""

    build: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    fields: Fields  # what it remembers of the parameter with this number
    full_batch: bool = False  # whether a step uses all data and no learning rate


def _adam(parameters: Sequence[nn.Parameter], number: int) -> dict[str, Field]:
    shape, dtype = tuple(parameters[number].shape), parameters[number].dtype
    return {"step": Array((), 1), "exp_avg": Array(shape, stored=dtype), "exp_avg_sq": Array(shape, 0, stored=dtype)}


def _sgd(parameters: Sequence[nn.Parameter], number: int) -> dict[str, Field]:
    return {"momentum_buffer": Array(tuple(parameters[number].shape), stored=parameters[number].dtype)}


def _lbfgs(parameters: Sequence[nn.Parameter], number: int) -> dict[str, Field]:
    """Return the fields of the state, which L-BFGS keeps for all parameters together, at the first."""
    if number:
        raise FileError(f"L-BFGS has a state of the parameter {number}; expected one of the first alone")
    size, dtype = sum(p.numel() for p in parameters), parameters[0].dtype
    vector, rows = Array((size,), stored=dtype), Maybe(Array(("k", size), stored=dtype))
    return {
        "func_evals": Whole(), "n_iter": Whole(1), "d": vector, "t": _Number(0), "old_dirs": rows, "old_stps": rows,
        "ro": Maybe(Array(("k",), SMALLEST, stored=dtype)), "H_diag": _Number(SMALLEST), "prev_flat_grad": vector,
        "prev_loss": Real(),
    }  # fmt: skip


@dataclass(frozen=True)
class _Number(Field):
    """A number that is a tensor or none, as PyTorch left it; it is stored as a tensor, and ints as whole numbers."""

    least: float
    place = "tensors"

    def read(self, value: Tensor, known: Known) -> Any:
        if value.dtype == torch.int64:
            return int(Array((), self.least, whole=True).read(value, known))
        # A number of one entry was a Python number: see ``pack_optimiser``.
        number = Either(Array((), self.least), Array((1,), self.least)).read(value, known)
        return float(number) if value.ndim else number


# Without tolerance_change=0 L-BFGS would stop while the gradient is still large.
OPTIMISERS = {
    "adam": Optimiser(lambda parameters, rate: torch.optim.Adam(parameters, lr=rate), _adam),
    "sgd": Optimiser(lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True), _sgd),
    "lbfgs": Optimiser(
        lambda parameters, _: torch.optim.LBFGS(
            parameters, lr=1.0, max_iter=20, history_size=HISTORY, tolerance_change=0.0, line_search_fn="strong_wolfe"
        ),
        _lbfgs,
        full_batch=True,
    ),
}


def pack_optimiser(name: str, optimiser: torch.optim.Optimizer) -> State:
    """Return a copy on the CPU of what an optimiser remembers; its settings follow from the recipe."""
    states = optimiser.state_dict()["state"]
    return State(name, parts={str(number): _pack_parameter(entries) for number, entries in states.items() if entries})


def _pack_parameter(entries: Mapping[str, Any]) -> State:
    """Return what an optimiser remembers of one parameter."""
    settings: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in entries.items():
        if isinstance(value, Tensor):
            tensors[name] = value.detach().clone().cpu()
        elif name in LISTS and value:
            tensors[name] = torch.stack(list(value)).cpu()
        elif name in ("t", "H_diag") and value is not None:  # a tensor or a number
            is_whole = type(value) is int
            dtype = torch.int64 if is_whole else torch.float64
            tensors[name] = torch.tensor(value if is_whole else [value], dtype=dtype)
        elif value is not None and name != UNSAVED and name not in LISTS:
            settings[name] = value
    return State("parameter", settings, tensors)


def unpack_optimiser(name: str, state: State, parameters: Sequence[nn.Parameter]) -> dict[int, dict[str, Any]]:
    """Return what the optimiser of this name remembers of these parameters, each value checked.

    Raises:
        FileError: If the state is of another optimiser or other parameters, or a value is out of range.
    """
    if state.name != name:
        raise FileError(f"its optimiser is {state.name!r:.20}, not {name}")
    numbers = {str(number): number for number in range(len(parameters))}
    parts = state.read(**{key: Maybe(Unread()) for key in numbers})
    states = {}
    for key, part in parts.items():
        if part is None or (name == "lbfgs" and part.settings.get("n_iter") == 0):  # nothing to remember yet
            continue
        values = part.read(**OPTIMISERS[name].fields(parameters, numbers[key]))
        for entry in set(LISTS) & set(values):
            values[entry] = [] if values[entry] is None else list(values[entry].unbind())
        if len({len(values[entry]) for entry in LISTS if entry in values}) > 1:
            raise FileError("the lists of L-BFGS have different lengths; expected one length")
        if any(len(values[entry]) > HISTORY for entry in LISTS if entry in values):
            raise FileError(f"the lists of L-BFGS are longer than {HISTORY}")
        states[numbers[key]] = values
    return states


PRIOR = Rule("an object such as lw.per_layer()", lambda v: isinstance(v, Prior) and not isinstance(v, type | nn.Module))
TUNER = Rule("a tuner, such as lw.tuners.Ascend()", FUNCTION.holds)


@dataclass(frozen=True, eq=False)
class Recipe(HasSettings):
    """The settings of ``train``: train on the regularised loss, and update prior and noise after some of the epochs.

    The loss has the prior's penalty of the weights, divided by the number of data. An update fits a posterior by
    ``method`` at the present weights and applies ``update`` to it. ``online``, ``classic`` and ``fixed`` make the usual
    recipes.

    Cost: training, and for each update a fit of ``method`` and the cost of ``update``.

    Args:
        epochs: The number of passes over the data.
        method: The method that computes the evidence, such as ``Kron()``.
        prior: The prior to start from, such as ``per_layer()``.
        update: A tuner, such as ``lw.tuners.Ascend()``; None keeps prior and noise as they are.
        burn_in: The first epoch (from 0) after which prior and noise are updated.
        frequency: The number of epochs between updates from then on; always after the last.
        optimiser: "adam", "sgd" or "lbfgs" (all data in one step).
        rate: The first learning rate; it falls to ``last_rate`` by a cosine. Not used by L-BFGS.
        last_rate: The last learning rate.
        keep_best: Whether the result has the weights and hyperparameters with the best evidence, or the last ones.
        seed: The seed of all random numbers in training.

    Raises:
        UnsupportedError: If a setting is out of range or of the wrong kind.

    >>> recipe = Recipe(10, Full(), Isotropic(1.0), FixedPoint(max_steps=1), burn_in=4, frequency=3)
    >>> [epoch for epoch in range(10) if recipe.updates_after(epoch)]
    [4, 7, 9]
    """

    epochs: int = required(integer())
    method: Method = required(METHOD)
    prior: Prior = required(PRIOR)
    update: Tuner | None = required(TUNER | NONE)
    burn_in: int = setting(0, integer(0))
    frequency: int = setting(1, integer())
    optimiser: str = setting("adam", one_of(OPTIMISERS))
    rate: float = setting(1e-3, POSITIVE)
    last_rate: float = setting(1e-6, POSITIVE)
    keep_best: bool = setting(True, FLAG)
    seed: int = setting(0, integer(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last_rate > self.rate:
            raise UnsupportedError(f"rate is {self.rate} and last_rate {self.last_rate}; expected 0 < last <= first.")

    @property
    def full_batch(self) -> bool:
        """Whether a step of the optimiser uses all data and no learning rate."""
        return OPTIMISERS[self.optimiser].full_batch

    def updates_after(self, epoch: int) -> bool:
        """Return whether prior and noise are updated after this epoch.

        Args:
            epoch: The number of the epoch, from 0.

        Returns:
            True for every ``frequency``-th epoch from ``burn_in`` on, and for the last; never without a tuner.
        """
        if self.update is None:
            return False
        due = epoch >= self.burn_in and (epoch - self.burn_in) % self.frequency == 0
        return due or epoch == self.epochs - 1

    def rate_at(self, progress: float) -> float:
        """Return the learning rate.

        Args:
            progress: The share of training that is done, from 0 to 1.

        Returns:
            The rate on a cosine from ``rate`` to ``last_rate``.
        """
        return self.last_rate + 0.5 * (self.rate - self.last_rate) * (1 + math.cos(math.pi * min(progress, 1.0)))

    def as_state(self, likelihood: Likelihood, prior: BoundPrior) -> State:
        """Return the recipe as plain data for the state of a run, with the prior that the run starts from."""
        names = ("optimiser", "seed", "epochs", "rate", "last_rate", "burn_in", "frequency", "keep_best")
        kinds = {"method": type(self.method).__name__, "likelihood": type(likelihood).__name__}
        start = on_device(prior.state(), torch.device("cpu"))
        return State("recipe", {**{name: getattr(self, name) for name in names}, **kinds}, parts={"prior": start})

    def optimiser_for(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimiser of these parameters, at the first learning rate."""
        return OPTIMISERS[self.optimiser].build(list(parameters), self.rate)


def online(epochs: int = 100, **changes: Any) -> Recipe:
    """Return the recipe of the online Kronecker evidence (Immer et al. 2021), for networks of any size.

    Adam on mini-batches, one precision for each layer, and after every epoch a Kronecker-factored curvature and 100
    gradient steps on the evidence.

    Args:
        epochs: The number of passes over the data.
        **changes: Other settings of ``Recipe``, such as ``burn_in=5`` or ``rate=1e-2``.

    Returns:
        The recipe.

    Raises:
        UnsupportedError: If a setting is out of range or of the wrong kind.

    >>> online(epochs=20, burn_in=5).frequency
    1
    """
    return _with_changes(Recipe(epochs, Kron(), PerLayer(1.0), Ascend()), changes)


def classic(epochs: int = 30, **changes: Any) -> Recipe:
    """Return the recipe of the classic loop (MacKay 1992; Foresee and Hagan 1997), for small networks.

    L-BFGS on all data, one precision for all weights, and after every epoch the full curvature and one update
    α = γ/|w|², β = (N - γ)/SSE. The weights at the end are the last, not those with the best evidence.

    Args:
        epochs: The number of cycles of at most 20 L-BFGS iterations.
        **changes: Other settings of ``Recipe``; ``prior=per_layer()`` gives every layer its own α.

    Returns:
        The recipe.

    Raises:
        UnsupportedError: If a setting is out of range or of the wrong kind.

    >>> classic().optimiser
    'lbfgs'
    """
    recipe = Recipe(epochs, Full(), Isotropic(1.0), FixedPoint(max_steps=1), optimiser="lbfgs", keep_best=False)
    return _with_changes(recipe, changes)


def fixed(epochs: int = 100, precision: float = 1.0, **changes: Any) -> Recipe:
    """Return the recipe of plain training, for networks to compare with or to fit a posterior to later.

    Adam on mini-batches with a fixed prior and noise: the squared loss has unit noise. No evidence is computed. The
    posterior is that of ``lw.baselines.MapOnly()``, the plain network.

    Args:
        epochs: The number of passes over the data.
        precision: The precision A of the prior over every weight; the weight decay of the mean loss is A/n for n data.
        **changes: Other settings of ``Recipe``, such as ``seed=3``, ``rate=1e-2`` or ``optimiser="sgd"``.

    Returns:
        The recipe.

    Raises:
        UnsupportedError: If a setting is out of range or of the wrong kind.

    >>> fixed(epochs=20).updates_after(19)
    False
    """
    POSITIVE.check("precision", precision)
    return _with_changes(Recipe(epochs, MapOnly(), Isotropic(precision), None), changes)


def _with_changes(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with other settings; raise for a name that is none."""
    settings = one_of([each.name for each in fields(Recipe)])
    for name in changes:
        settings.check("the name of a setting", name)
    if recipe.update is not None and changes.get("update", recipe.update) is None:
        raise UnsupportedError(
            "update is None; expected a tuner, such as lw.tuners.Ascend(). For plain training use fixed(...)."
        )
    return replace(recipe, **changes)


refuse_other_calls(globals())
