"""Settings of the whole process, Ctrl-C, progress of long loops, and random numbers that depend only on a generator.

Settings of the whole process: changed while at least one thread needs it, restored by the last.

Gradient mode and autocast belong to a thread; the settings here do not. If each thread saved and restored them for
itself, one could restore what another has just changed.

Runs of a model without gradient checkpointing, whose parts would be hidden from the autograd graph.

``torch.utils.checkpoint`` drops the activations of a part of the model and computes them again in the backward pass.
Its reentrant form puts one opaque node into the graph for the whole part; the other form recomputes the part whenever
a saved tensor is read. Lapwing reads the graph, and keeps its own activations within the byte budget, so that the part
runs as it is. Outputs and derivatives are the same.

Ctrl-C while the library works: noted at once, raised where nothing is half done.

Python raises ``KeyboardInterrupt`` between any two instructions, also inside the ``__enter__`` or ``__exit__`` of a
context manager, whose change is then not undone. So a public call of the main thread notes the signal, and the loops
over data, steps and runs of the model ask for it. While the user's loader runs it is raised at once.

Random numbers that depend only on the generator, if one is given.

Numbers are drawn on the device of the generator and then moved, so that one seed gives one result on every device.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import functools
import logging
import math
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, TypeVar, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

from lapwing.errors import UnsupportedError
from lapwing.runtime.settings import FLAG, NONE

LOCK = threading.RLock()  # of the settings below, and of models that run themselves instead of a copy
FORWARD_MODE = threading.RLock()  # PyTorch has one level of forward mode for all threads: the first that leaves ends it


class Switch:
    """A context in which ``change`` is in force, which returns how to undo it; threads may be in it together."""

    def __init__(self, change: Callable[[], Callable[[], object]]) -> None:
        self._change, self._inside = change, 0
        self._undo: Callable[[], object] = change

    def __enter__(self) -> None:
        with LOCK:
            if self._inside == 0:
                self._undo = self._change()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with LOCK:
            self._inside -= 1
            if self._inside == 0:
                self._undo()


def _without_warnings() -> Callable[[], object]:
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    return stack.close


def _own_kernels() -> Callable[[], object]:
    stack = ExitStack()
    stack.callback(_without_warnings())
    stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
    stack.enter_context(torch.backends.cudnn.flags(enabled=False))
    return stack.close


def _with_flags(flags: Mapping[Callable[[bool], None], tuple[bool, bool]]) -> Callable[[], object]:
    """Set each flag to the first value, and return what sets it to the second one."""

    def put_all(number: int) -> None:
        for put, values in flags.items():
            put(values[number])

    put_all(0)
    return functools.partial(put_all, 1)


def _unfused_attention() -> Callable[[], object]:
    mha = torch.backends.mha
    return _with_flags({mha.set_fastpath_enabled: (False, mha.get_fastpath_enabled())})


def _math_attention() -> Callable[[], object]:
    # Not torch.nn.attention.sdpa_kernel: what one thread enters there, another cannot leave.
    cuda = torch.backends.cuda
    return _with_flags({
        cuda.enable_flash_sdp: (False, cuda.flash_sdp_enabled()),
        cuda.enable_mem_efficient_sdp: (False, cuda.mem_efficient_sdp_enabled()),
        cuda.enable_cudnn_sdp: (False, cuda.cudnn_sdp_enabled()),
        cuda.enable_math_sdp: (True, cuda.math_sdp_enabled()),
    })  # fmt: skip


quiet = Switch(_without_warnings)  # no warnings of PyTorch about its internals: no batching rule, no TF32
own_kernels = Switch(_own_kernels)  # PyTorch's own kernels instead of those of cuDNN and oneDNN
math_attention = Switch(_math_attention)  # attention that has all derivatives
# Not the fused path of nn.TransformerEncoder, which PyTorch takes where it records no gradients: it gives padded
# positions other outputs, so the mean would not be that of the network whose Jacobian is taken.
unfused_attention = Switch(_unfused_attention)


_here = threading.local()  # ``depth`` of the runs in this thread that take no checkpoints
REENTRANT = "CheckpointFunction"  # names in torch.utils.checkpoint, where its public functions look them up
NON_REENTRANT = "_checkpoint_without_reentrant_generator"


def _is_inside() -> bool:
    return getattr(_here, "depth", 0) > 0


class _Reentrant:
    """A replacement of ``CheckpointFunction`` that runs the part as it is in threads that take no checkpoints."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args) if _is_inside() else self._original.apply(function, preserve, *args)


def _other(original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Return a generator in place of the one that drops what is saved between its start and its end."""

    def run(*args: Any, **kwargs: Any) -> Iterator[None]:
        if _is_inside():
            yield
        else:
            yield from original(*args, **kwargs)

    return run


def _replace_checkpoints() -> Callable[[], object]:
    module = torch.utils.checkpoint
    kinds: dict[str, Callable[[Any], Any]] = {REENTRANT: _Reentrant, NON_REENTRANT: _other}
    before = {name: getattr(module, name) for name in kinds if hasattr(module, name)}
    for name, original in before.items():
        setattr(module, name, kinds[name](original))
    return lambda: vars(module).update(before)


class _WithoutCheckpoints(Switch):
    """A run of checkpointed parts of models as they are, in this thread; others are not affected."""

    def __enter__(self) -> None:
        super().__enter__()
        _here.depth = getattr(_here, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _here.depth -= 1
        super().__exit__()


without_checkpoints = _WithoutCheckpoints(_replace_checkpoints)


SIGINT = int(
    signal.SIGINT
)  # with _signal, whose functions look up no names: a prediction takes a tenth of a millisecond
HANG_SECONDS = 5.0  # seconds after which a second Ctrl-C is raised at once: the model may hang


class _Waiting:
    """A handler of SIGINT that notes the signal for later."""

    def __init__(self, previous: Callable[[int, FrameType | None], object]) -> None:
        self.previous, self.at_once = previous, False
        self.since: float | None = None  # the time of the first signal that was not delivered

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        hangs = self.since is not None and now - self.since > HANG_SECONDS
        self.since = now if self.since is None else self.since
        if self.at_once or hangs:
            self.at_once = False
            self.deliver(frame)

    def deliver(self, frame: FrameType | None = None) -> None:
        """Call the handler that was there before, which raises ``KeyboardInterrupt``, if there was a signal."""
        if self.since is not None:
            self.since = None
            self.previous(signal.SIGINT, frame)


_waiting: _Waiting | None = None  # of the main thread, which is the only one that gets signals


def _own() -> _Waiting | None:
    return _waiting if _waiting is not None and threading.current_thread() is threading.main_thread() else None


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Note Ctrl-C until ``poll`` or the end of the outermost such block; in other threads do nothing."""
    global _waiting
    outer = _waiting is None and threading.current_thread() is threading.main_thread()
    previous = _signal.getsignal(SIGINT) if outer else None
    if not callable(previous):  # not ours to change: ignored, or the default, which ends the process
        yield
        return
    waiting = _Waiting(previous)
    try:
        _waiting = waiting
        _signal.signal(SIGINT, waiting)
        yield
    finally:
        _waiting = None
        if _signal.getsignal(SIGINT) is waiting:
            _signal.signal(SIGINT, previous)
        waiting.deliver()


def poll() -> None:
    """Raise ``KeyboardInterrupt`` here if Ctrl-C was noted."""
    if _waiting is not None and _waiting.since is not None and (waiting := _own()):
        waiting.deliver()


@contextmanager
def allow_interrupts() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` at once while code of the user runs that may take any time, such as a loader."""
    poll()
    waiting = _own()
    if waiting is None:
        yield
        return
    try:
        waiting.at_once = True
        yield
    finally:
        waiting.at_once = False


T = TypeVar("T")
S = TypeVar("S")
Call = TypeVar("Call", bound=Callable[..., Any])

_SHOWING: ContextVar[bool] = ContextVar("showing", default=False)


LOG = logging.getLogger("lapwing.progress")
EVERY = 30.0  # seconds between two messages


@dataclass(eq=False)
class _Whereabouts:
    """The loops of a call that have no visible bar, and when they were last logged; mutable, one for each call."""

    start: float = field(default_factory=lambda: time.monotonic())
    last: float = field(default_factory=lambda: time.monotonic())
    running: list[ProgressBar[Any]] = field(default_factory=list)

    def log(self) -> None:
        """Log where the loops are if the last message is long ago."""
        now = time.monotonic()
        if now - self.last >= EVERY:
            self.last = now
            LOG.info("%s, after %.0f s", "; ".join(bar.place for bar in self.running), now - self.start)


_WHEREABOUTS: ContextVar[_Whereabouts | None] = ContextVar("whereabouts", default=None)


@contextmanager
def show_inner_progress(visible: bool) -> Iterator[None]:
    """Let computations that know no data show their progress meanwhile, in this thread."""
    token, call = _SHOWING.set(visible), _WHEREABOUTS.set(_WHEREABOUTS.get() or _Whereabouts())
    try:
        yield
    finally:
        _SHOWING.reset(token)
        _WHEREABOUTS.reset(call)


def should_show_progress(progress: bool | None) -> bool:
    """Return whether to show progress bars; None means: only on a terminal."""
    (FLAG | NONE).check("progress", progress)
    return sys.stderr.isatty() if progress is None else progress


def with_inner_progress(call: Call) -> Call:
    """Decorate a function with an argument ``progress``: computations inside show theirs if it says so."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with show_inner_progress(should_show_progress(kwargs.get("progress"))):
            return call(*args, **kwargs)

    return cast(Call, run)


def is_showing() -> bool:
    """Return whether progress is shown: inside ``show_inner_progress(True)``."""
    return _SHOWING.get()


class ProgressBar(Generic[T]):
    """An iteration over ``items`` with a progress bar, if it is ``visible`` and tqdm is installed.

    Without a bar, long ones say where they are by ``logging``, as INFO of "lapwing.progress" every half minute.

    ``first`` is the number of items that an earlier run has done; ``leave`` keeps the finished bar on the screen.

    >>> list(ProgressBar(range(3), "learning", visible=False))
    [0, 1, 2]
    """

    def __init__(self, items: Iterable[T], label: str, visible: bool, first: int = 0, leave: bool = False) -> None:
        self._items, self._label, self._first, self._done, self._text = items, label, first, first, ""
        self._bar = _bar(self._total, label, first, leave) if visible else None

    def __iter__(self) -> Iterator[T]:
        call = _WHEREABOUTS.get() or _Whereabouts()
        call.running.append(self)
        try:
            for item in self._items:
                poll()
                yield item
                self._done += 1
                if self._bar is not None:
                    self._bar.update()
                else:
                    call.log()
        finally:
            call.running.remove(self)
            if self._bar is not None:
                self._bar.close()

    @property
    def _total(self) -> int | None:
        try:
            return self._first + len(self._items)  # type: ignore[arg-type]
        except TypeError:  # no length, such as a loader over a stream
            return None

    @property
    def place(self) -> str:
        """Where the iteration is, in words."""
        total = "" if self._total is None else f" of {self._total:,}"
        return f"{self._label}: {self._done:,}{total}{self._text and f' ({self._text})'}"

    def show(self, **numbers: float) -> None:
        """Show these numbers by name beside the bar."""
        self._text = ", ".join(f"{name} {value:.5g}" for name, value in numbers.items())
        if self._bar is not None:
            self._bar.set_postfix({name: f"{value:.5g}" for name, value in numbers.items()}, refresh=False)

    def show_text(self, text: str) -> None:
        """Show this text beside the bar at once."""
        self._text = text
        if self._bar is not None:
            self._bar.set_postfix_str(text)


def _bar(total: int | None, label: str, first: int, leave: bool) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(total=total, initial=first, desc=label, leave=leave)


@dataclass(eq=False)
class EarlyStopping(Generic[S]):
    """Early stopping that evaluates a score every ``every`` steps and keeps the state with the best one.

    It also evaluates after 1, 2, 4, ... steps below ``every``, so that a state that is best very early is not missed.
    Only the regular evaluations count towards ``patience``: while they still improve among themselves, they may yet
    exceed the best early score.

    >>> evaluations = iter([(1.0, "a"), (3.0, "b"), (2.0, "c"), (2.5, "d")])
    >>> stopping = EarlyStopping(lambda: next(evaluations), every=1, patience=2)
    >>> [stopping.should_stop(step) for step in range(4)], stopping.best_score, stopping.best_state
    ([False, False, False, True], 3.0, 'b')
    """

    evaluate: Callable[[], tuple[float, S]]  # the current score, higher is better, and the state that has it
    every: int
    patience: int
    best_score: float = field(default=-math.inf, init=False)
    _kept_state: S | None = field(default=None, init=False)
    _best_regular_score: float = field(default=-math.inf, init=False)
    _n_without_gain: int = field(default=0, init=False)  # regular evaluations since the best of them

    def should_stop(self, step: int) -> bool:
        """Evaluate if it is due after this step (from 0); return whether ``patience`` evaluations brought no gain."""
        done = step + 1
        early = done < self.every and done & (done - 1) == 0
        if done % self.every and not early:
            return False
        score, state = self.evaluate()
        if score > self.best_score:
            self.best_score, self._kept_state = score, state
        if early:
            return False
        if score > self._best_regular_score:
            self._best_regular_score, self._n_without_gain = score, 0
            return False
        self._n_without_gain += 1
        return self._n_without_gain >= self.patience

    @property
    def best_state(self) -> S:
        """The state with the best score; the current one if there was no evaluation or every score was NaN."""
        return self.evaluate()[1] if self._kept_state is None else self._kept_state


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
