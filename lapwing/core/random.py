"""Random numbers that depend only on the generator, if one is given.

Numbers are drawn on the device of the generator and then moved, so that one seed gives one result on every device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from lapwing.errors import UnsupportedError


def normal(shape: tuple[int, ...], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Return standard normal numbers in the dtype and on the device of ``like``."""
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=_home(generator, like)).to(like.device)


def normal_rows(rows: int, size: int, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Return standard normal numbers (rows, size), drawn row by row: the same rows, however many are drawn at once."""
    return torch.stack([normal((size,), generator, like) for _ in range(rows)])


def sequential_normal(shape: tuple[int, ...], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Return standard normal numbers, the same ones, however many are drawn at once.

    ``torch.randn`` fills blocks of numbers together, and the last block of a call in another way; uniform numbers come
    one by one.
    """
    draws = uniform(shape, generator, torch.empty(0, dtype=torch.float64, device=like.device))
    return torch.special.ndtri(draws + 2.0**-54).to(like)


def uniform(shape: tuple[int, ...], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1) in the dtype and on the device of ``like``."""
    return torch.rand(shape, generator=generator, dtype=like.dtype, device=_home(generator, like)).to(like.device)


def poisson(rate: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return one Poisson count for each rate."""
    return torch.poisson(rate.to(_home(generator, rate)), generator=generator).to(rate.device)


def classes(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return one class for each row of probabilities (..., C), by inverting the cumulative sum."""
    steps = probs.cumsum(-1)
    draw = uniform(tuple(probs.shape[:-1]), generator, probs).unsqueeze(-1) * steps[..., -1:]
    return (steps[..., :-1] <= draw).sum(-1)


def derived_generator(generator: torch.Generator | None, like: Tensor) -> torch.Generator:
    """Return a new generator whose seed is one draw from this one.

    Its numbers are not correlated with other numbers that were drawn from the same seed.
    """
    device = _home(generator, like)
    draw = torch.rand(1, generator=generator, dtype=torch.float64, device=device)
    return torch.Generator(device).manual_seed(int(draw * 2**53))


def generator_or_default(generator: torch.Generator | None) -> torch.Generator:
    """Return the generator, or a new one of seed 0 if it is None, so that equal calls give equal results."""
    return generator if generator is not None else torch.Generator().manual_seed(0)


def independent_generator(generator: torch.Generator | None) -> torch.Generator:
    """Return a generator whose draws are not correlated with data that were drawn from the same seed."""
    return derived_generator(generator_or_default(generator), torch.empty(0))


def numbered_generator(generator: torch.Generator | None, number: int) -> torch.Generator:
    """Return one of several independent generators, such as that of a process with this number."""
    for _ in range(number):
        generator = independent_generator(generator)
    return independent_generator(generator)


class _Turns:
    """Turns of threads at the global generators: one that changes their states, or many that draw from them as is.

    A thread that waits to change states goes before new readers, so that it is not kept waiting for ever. While it
    waits it draws nothing, so it does not count as a reader itself.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._readers: Counter[int] = Counter()
        self._owner, self._depth, self._waiting = 0, 0, 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread has a turn."""
        me = threading.get_ident()
        with self._free:
            reading = self._readers.pop(me, 0)
            self._waiting += 1
            self._free.notify_all()
            try:
                self._free.wait_for(lambda: self._owner in (0, me) and not self._readers)
                self._owner, self._depth = me, self._depth + 1
            finally:
                self._waiting -= 1
        try:
            yield
        finally:
            with self._free:
                self._depth -= 1
                self._owner = me if self._depth else 0
                if reading:
                    self._readers[me] = reading
                self._free.notify_all()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait until no other thread changes states."""
        me = threading.get_ident()
        with self._free:
            self._free.wait_for(lambda: self._owner == me or self._readers[me] or not (self._owner or self._waiting))
            self._readers[me] += 1
        try:
            yield
        finally:
            with self._free:
                self._readers[me] -= 1
                self._readers += Counter()  # without those that have left
                self._free.notify_all()


_turns = _Turns()
undisturbed = _turns.together  # for code of the user that may draw from the global generators, such as a loader


class Stream:
    """A sequence of random numbers for code that draws from PyTorch's global generators, such as dropout.

    The global generators of the CPU and of ``device`` have its state while such code runs, in one thread at a time;
    then they get their own back. Other threads that draw from them meanwhile would change the numbers.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Begin a new sequence."""
        devices = [generator.device for generator in _global(self._device)]
        self._states = [torch.Generator(device).manual_seed(seed).get_state() for device in devices]

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the code of this block draw from the sequence."""
        with _turns.alone():
            generators = _global(self._device)
            outside = [generator.get_state() for generator in generators]
            try:
                _set_states(generators, self._states)
                yield
                self._states = [generator.get_state() for generator in generators]
            finally:
                _set_states(generators, outside)


def global_seed(seed: int, device: torch.device) -> AbstractContextManager[None]:
    """Seed the global generators of the CPU and of ``device`` for one block of code; see ``Stream``."""
    return Stream(seed, device).drawing()


def _global(device: torch.device) -> list[torch.Generator]:
    """Return the global generators of the CPU and of a GPU."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()
    number = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[number]]


def _set_states(generators: list[torch.Generator], states: list[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _home(generator: torch.Generator | None, like: Tensor) -> torch.device:
    """Return the device on which the numbers are drawn."""
    if generator is None:
        return like.device
    if not isinstance(generator, torch.Generator):
        raise UnsupportedError(f"generator is {generator!r:.80}; expected torch.Generator().manual_seed(...), or None.")
    return generator.device
