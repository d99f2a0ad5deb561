"""The private copy of a model that runs in its place.

The copy has modules of its own and shares the memory of the tensors, so nothing is stored twice. Weights are exchanged,
gradients recorded and attributes written in the copy alone. A call takes a copy that no other call uses: threads do not
meet, and a copy that an error or Ctrl-C leaves half changed is dropped. What a run writes is taken back after it, so
that a value which a model computes from its weights once and keeps is computed anew in every run.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lapwing.core.switches import LOCK
from lapwing.errors import ModelError

IDLE = "_lapwing_idle"  # attribute of private copies: those that nobody uses (of the first), or None (of the others)
OUTPUT = "_lapwing_output"  # attribute of private copies: the path of the output that is used, of several
WRITTEN = "_lapwing_written"  # attribute of private copies: what a run may write, and what was in it before
PLAIN = {bool, int, float, str, type(None)}  # types whose values lead nowhere
LARGE = 4096  # entries from which a container holds data, and neither layers nor weights
REBUILT = {"OptimizedModule", "RecursiveScriptModule", "TopLevelTracedModule"}  # cannot be copied part by part


class Idle(list[nn.Module]):
    """Copies that nobody uses; a deep copy of a model starts without."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Idle:
        return Idle()


@dataclass(eq=False)
class Replica:
    """A model and its private copy, in which the parameters of these ``names`` record gradients.

    ``private`` is False for a model that reaches its weights by other ways than its modules (see ``Bypass``). It runs
    itself, one call at a time. ``output`` is the path of the output that is used, of several.
    """

    source: nn.Module
    names: tuple[str, ...]
    private: bool = True
    output: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        if self.output and not self.private:
            raise ModelError(
                f"output is {self.output!r}, and the model is compiled, or reaches its weights through an object that "
                "is no module, so that no copy of it can run; expected a model of plain modules. Wrap it in a module "
                "whose forward returns the tensor."
            )
        self._made: _Made | None = None

    @property
    def model(self) -> nn.Module:
        """The copy; made again if the model was moved to another device or dtype."""
        return self._current().model if self.private else self.source

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of the copy by name; a copy has the same ones as long as it lives."""
        return self._current().parameters if self.private else dict(self.source.named_parameters())

    def _current(self) -> _Made:
        made = self._made
        if made is None or made.is_stale(self.source):
            with LOCK:
                made = self._made
                if made is None or made.is_stale(self.source):
                    made = self._made = _Made(self.source, self.names, self.output)
        return made

    def trial(self) -> nn.Module:
        """Return a copy for a single run, which shows what the run changed; without a private copy the model."""
        return copied(self.model) if self.private else self.source


class _Made:
    """A copy, and the tensors that it was made with."""

    def __init__(self, source: nn.Module, names: tuple[str, ...], output: tuple[str | int, ...]) -> None:
        leaves = {id(p): _leaf(p, name in names) for name, p in source.named_parameters() if _has_gradient(p)}
        self.source = source
        self.first = next(((p, leaves[id(p)]) for p in source.parameters() if id(p) in leaves), None)
        self.model = shareable(copied(source, leaves))
        vars(self.model)[OUTPUT] = output
        self.parameters: Mapping[str, nn.Parameter] = dict(self.model.named_parameters())

    def is_stale(self, source: nn.Module) -> bool:
        """Return whether the copy belongs to another model, or the model was moved; the first parameter tells.

        A parameter that was given other memory with equal values gives the same numbers, with other values it is
        refused (``Fingerprint``).
        """
        if source is not self.source or self.first is None:
            return source is not self.source
        p, leaf = self.first
        return p.dtype != leaf.dtype or (p.layout is torch.strided and p.data_ptr() != leaf.data_ptr())


def _has_gradient(p: Tensor) -> bool:
    return p.is_floating_point() or p.is_complex()


def _leaf(p: Tensor, recorded: bool) -> nn.Parameter:
    """Return a parameter that shares the memory of this one, and has a flag of its own."""
    leaf = nn.Parameter(p.detach(), requires_grad=recorded)
    leaf.__dict__.update(vars(p))
    return leaf


def can_be_copied(model: nn.Module) -> bool:
    """Return whether all modules are plain ones: compiled and scripted modules keep references of their own."""
    return not any(type(module).__name__ in REBUILT for module in model.modules())


def copied(model: nn.Module, tensors: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of the modules; ``tensors`` maps ids of tensors to others that take their place."""
    copy = _Copy(dict(tensors or {}))
    new = copy.module(model)
    before: list[tuple[Any, Any]] = []
    vars(new)[WRITTEN] = before
    before.extend((container, _content(container)) for container in copy.containers)
    return new


def _content(container: Any) -> Any:
    """Return what a dictionary, list or set has in it, as a plain one."""
    return dict(container) if isinstance(container, dict) else list(container)


def take_back(model: nn.Module) -> None:
    """Undo what a run wrote into the modules of a copy, and into the dictionaries, lists and sets that they hold."""
    for container, before in vars(model)[WRITTEN]:
        if isinstance(container, dict):
            if len(container) != len(before) or not all(map(operator.is_, container.values(), before.values())):
                dict.clear(container)
                dict.update(container, before)
        elif len(container) != len(before) or not all(map(operator.is_, container, before)):
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)


def shareable(model: nn.Module) -> nn.Module:
    """Return a private model as one that ``lent`` copies for each call."""
    vars(model)[IDLE] = Idle()
    return model


def output_of(model: nn.Module) -> tuple[str | int, ...]:
    """Return the path of the output that is used, of a private copy; other models have none."""
    path: tuple[str | int, ...] = vars(model).get(OUTPUT, ())
    return path


@contextlib.contextmanager
def lent(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a copy of a private model for one call; another model itself, to one thread at a time."""
    if IDLE not in vars(model):
        with LOCK:
            yield model
        return
    idle: Idle | None = vars(model)[IDLE]
    if idle is None:
        yield model
        return
    try:
        one = idle.pop()
    except IndexError:
        one = copied(model)
    yield one
    take_back(one)
    idle.append(one)  # not after an error


class Bypass(TorchFunctionMode):
    """A watch over a run of the copy: whether operations use weights of the model itself (``seen``).

    A model may reach them through a global variable or an object that is no module, and then a copy is no use.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._ids, self.seen = {id(p) for p in model.parameters() if _has_gradient(p)}, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.seen = self.seen or any(map(self._uses, (*args, *kwargs.values())))
        return func(*args, **kwargs)

    def _uses(self, value: Any) -> bool:
        return any(map(self._uses, value)) if isinstance(value, tuple | list) else id(value) in self._ids


class _Copy:
    """One copy in the making: modules, and what leads to modules and replaced tensors, once each."""

    def __init__(self, done: dict[int, Any]) -> None:
        self.done = done  # by the id of the original
        self.containers: list[Any] = []  # the new ones that a run may write into

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) not in self.done:
            # Without the class's own __new__: that of a traced GraphModule makes a class without a forward.
            new = self.done[id(module)] = nn.Module.__new__(type(module))
            vars(new).update({key: self._attribute(key, v) for key, v in vars(module).items() if key != WRITTEN})
            vars(new)[IDLE] = None
            self.containers.append(vars(new))
        result: nn.Module = self.done[id(module)]
        return result

    def _attribute(self, key: str, value: Any) -> Any:
        """Return the value of an attribute. Hooks are those of the original, also if they come or go later."""
        if key == IDLE or type(value) in PLAIN:
            return None if key == IDLE else value
        hooks = "_hooks" in key and isinstance(value, dict)
        if hooks and not value:
            return value
        new = self.value(value)
        return value if hooks and all(new[name] is hook for name, hook in value.items()) else new

    def value(self, value: Any) -> Any:
        """Return the value with modules and tensors replaced in it; containers are copied, other objects shared."""
        if id(value) in self.done:
            return self.done[id(value)]
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, tuple | list | dict | set):
            if len(value) >= LARGE:
                return value
            new = self._container(value)
            if not isinstance(value, tuple):
                self.containers.append(new)
            return new
        return self.reference(value)

    def _container(self, value: Any) -> Any:
        if type(value) is dict:
            return {key: self.value(part) for key, part in value.items()}
        if isinstance(value, dict):
            new = copy.copy(value)
            for key, part in value.items():
                dict.__setitem__(new, key, self.value(part))
            return new
        parts = [self.value(part) for part in value]
        if isinstance(value, list):
            copied = copy.copy(value)
            copied[:] = parts
            return copied
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)

    def reference(self, value: Any) -> Any:
        """Return a method, function or reference for the copies where it leads to an original."""
        if isinstance(value, types.MethodType):
            owner = self._part(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, partial):
            function, parts = self._part(value.func), tuple(map(self._part, value.args))
            if function is value.func and all(map(operator.is_, parts, value.args)):
                return value
            new = partial(function, *parts, **value.keywords)
            vars(new).update(vars(value))
            return new
        if type(value) is weakref.ref:
            target = value()
            part = self._part(target)
            return value if part is target else weakref.ref(part)
        if isinstance(value, types.FunctionType) and value.__closure__:
            return self._function(value)
        return value

    def _part(self, value: Any) -> Any:
        """Return the copy of a module or tensor, or of a reference to one; data of the user stay as they are."""
        if id(value) in self.done:
            return self.done[id(value)]
        return self.module(value) if isinstance(value, nn.Module) else self.reference(value)

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        self.done[id(value)] = value  # a function may refer to itself
        cells = []
        for cell in value.__closure__ or ():
            try:
                part = self._part(cell.cell_contents)
            except ValueError:  # not yet assigned
                part = None
            same = part is None or part is cell.cell_contents
            cells.append(cell if same else types.CellType(part))
        if all(map(operator.is_, cells, value.__closure__ or ())):
            return value
        new = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
        new.__kwdefaults__ = value.__kwdefaults__
        vars(new).update(vars(value))
        self.done[id(value)] = new
        return new
