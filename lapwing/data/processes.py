"""Several processes that read parts of one data set: sums, gathers and jobs over a group of ``torch.distributed``.

``Part`` is the sampler of a loader that gives each process its part.

Every exchange begins with a word from each process: what it is about to do, or that it has failed. So an error in one
process is raised in all of them, and processes that went different ways are told so instead of waiting for ever.
"""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from lapwing.errors import DataError, ProcessError, UnsupportedError
from lapwing.runtime.settings import FLAG, Rule, describe, integer

T = TypeVar("T")
Form = tuple[tuple[int, ...], torch.dtype]  # of a tensor that is sent

ACTS = ("end", "sum", "number", "value", "rows", "copy")  # what a process may be about to do
ONE_MESSAGE = 2**17  # numbers up to which a tensor is sent with others in one message
HALF_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Processes:
    """The processes that work on one problem: a group of ``torch.distributed``, or this process alone.

    Methods that exchange something are called by all processes at the same point. Alone they return what they get.
    Tensors go over the device of the group's backend and come back on their own.

    >>> alone = Processes.of(None)
    >>> alone.size, alone.sum([torch.ones(2)]), alone.gather_values("a value")
    (1, [tensor([1., 1.])], ['a value'])
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: object) -> Processes:
        """Return the processes of a group; this process alone if it is None."""
        if group is None:
            return ALONE
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            outside = group == dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else False
            given = "a group that this process is not in" if outside else describe(group)
            raise UnsupportedError(
                f"process_group is {given}; expected a group of torch.distributed that this process is in, such as "
                "torch.distributed.group.WORLD after init_process_group(), or None."
            )
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def __reduce__(self) -> tuple[type[Processes], tuple[()]]:
        return Processes, ()  # a copy in a file or in another process is alone

    def __deepcopy__(self, memo: object) -> Processes:
        return self

    @property
    def is_single_process(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    @property
    def is_main_process(self) -> bool:
        """Whether this process is the one that writes files and shows progress."""
        return self.rank == 0

    @contextmanager
    def share_errors(self) -> Iterator[None]:
        """Run a block that ends in all processes in the same way: an error in one of them is raised in all.

        Raises:
            ProcessError: If another process has failed, or this one and not all in the same way.
        """
        if self.group is None:
            yield
            return
        try:
            yield
        except ProcessError:
            raise  # the others have it too, or cannot be reached
        except BaseException as error:
            self._report_error(error)
            raise
        self._announce("end")

    def sum(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        """Return the sums over all processes, in the same bytes everywhere; the tensors may be overwritten.

        A process without data gives None for a sum whose shape it does not know. The result is None where all do.
        """
        if self.group is None:
            return list(tensors)
        unknown = any(t is None for t in tensors)
        count = sum(t.numel() for t in tensors if t is not None)
        if any(flag for _, flag in self._announce("sum", count, int(unknown))):
            tensors = self._with_zeros(tensors)
        known = [(i, t) for i, t in enumerate(tensors) if t is not None]
        results: list[Any] = [None] * len(tensors)
        for dtype in dict.fromkeys(t.dtype for _, t in known):
            same = [(i, t) for i, t in known if t.dtype == dtype]
            for i, t in same:
                if t.numel() > ONE_MESSAGE:
                    results[i] = self._all_reduce(t.contiguous()).reshape(t.shape)
            small = [(i, t) for i, t in same if t.numel() <= ONE_MESSAGE]
            if small:
                flat = self._all_reduce(torch.cat([t.reshape(-1).to(self._home) for _, t in small]))
                parts = flat.split([t.numel() for _, t in small])
                for (i, t), part in zip(small, parts, strict=True):
                    results[i] = part.reshape(t.shape).to(t.device)
        return results

    def gather_numbers(self, number: int) -> list[int]:
        """Return the number that each process gives, in the order of the processes."""
        return [number] if self.group is None else [given for given, _ in self._announce("number", number)]

    def all_true(self, flag: bool) -> bool:
        """Return whether the flag is true in all processes."""
        return all(self.gather_numbers(int(flag)))

    def offset_and_total(self, count: int) -> tuple[int, int]:
        """Return how many data come before those of this process, and how many there are in all."""
        ends = list(accumulate(self.gather_numbers(count), initial=0))
        return ends[self.rank], ends[-1]

    def gather_values(self, value: T) -> list[T]:
        """Return the value of each process, in the order of the processes; anything that can be pickled."""
        if self.group is None:
            return [value]
        return self._exchange_values(value, "value")

    def gather_rows(self, rows: Tensor | None, counts: Sequence[int] | None = None) -> Tensor | None:
        """Return the rows (n, ...) of all processes, one after another; None stands for no rows.

        ``counts`` is the number of rows of each process, if all know it and the form of a row.
        """
        if self.group is None:
            return rows
        device = None if rows is None else rows.device
        if counts is None:
            forms = self.gather_values(_shape_and_dtype(rows))
            known = [form for form in forms if form is not None]
            if len({(shape[1:], dtype) for shape, dtype in known}) > 1:
                raise self._out_of_step(f"rows of the forms {forms}")
            if not known:
                return None
            counts = [0 if form is None else form[0][0] for form in forms]
            if rows is None:
                rows = torch.empty(0, *known[0][0][1:], dtype=known[0][1])
        assert rows is not None
        self._announce("rows", sum(counts))
        return torch.cat(self._all_gather(rows.detach(), counts)).to(device or "cpu")

    def first_available(self, value: T | None) -> T | None:
        """Return the value; where it is None, that of the first process that has one."""
        flags = self.gather_numbers(int(value is not None))
        if all(flags) or not any(flags):
            return value
        offered = self.gather_values(value if self.rank == flags.index(1) else None)
        return offered[flags.index(1)] if value is None else value

    def copy_of_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the first process, whose rounding then decides for all."""
        if self.group is None:
            return list(tensors)
        self._announce("copy", sum(t.numel() for t in tensors))
        return [self._broadcast(t.detach(), 0).to(t.device) for t in tensors]

    def run_jobs(
        self, jobs: Sequence[Callable[[], Sequence[Tensor | None]]], work: Sequence[float], device: torch.device
    ) -> list[list[Any]]:
        """Return the results of independent jobs, each done by one process and sent to all.

        Args:
            jobs: Functions without arguments that return tensors, or None in the place of one.
            work: How long each job takes, in any unit: the longest is given away first, to the process with the least.
            device: Where the results shall be.
        """
        if self.group is None:
            return [list(job()) for job in jobs]
        owners = assign_jobs(work, self.size)
        done = {i: list(job()) for i, job in enumerate(jobs) if owners[i] == self.rank}
        forms: dict[int, list[Any]] = {}
        for part in self.gather_values({i: [_shape_and_dtype(t) for t in result] for i, result in done.items()}):
            forms |= part
        results: list[list[Any]] = [[None] * len(forms[i]) for i in range(len(jobs))]
        for owner in range(self.size):
            places = [(i, k) for i in range(len(jobs)) if owners[i] == owner for k, f in enumerate(forms[i]) if f]
            for dtype in dict.fromkeys(forms[i][k][1] for i, k in places):
                self._send_results(owner, [(i, k) for i, k in places if forms[i][k][1] == dtype], forms, done, results)
        return [[None if t is None else t.to(device) for t in result] for result in results]

    def _send_results(
        self, owner: int, places: list[tuple[int, int]], forms: dict[int, Any], done: dict[int, Any], results: Any
    ) -> None:
        """Send the results of one process and one dtype to all, in one message."""
        sizes = [torch.Size(forms[i][k][0]).numel() for i, k in places]
        if owner == self.rank:
            flat = torch.cat([done[i][k].detach().reshape(-1).to(self._home) for i, k in places])
        else:
            flat = torch.empty(sum(sizes), dtype=forms[places[0][0]][places[0][1]][1], device=self._home)
        for (i, k), part in zip(places, self._broadcast(flat, owner).split(sizes), strict=True):
            results[i][k] = part.reshape(forms[i][k][0])

    def common_generator(self, generator: torch.Generator | None) -> torch.Generator | None:
        """Return a generator in the state of that of the first process; the given one if this process is alone."""
        if self.group is None:
            return generator
        first = self.gather_values(None if generator is None else (str(generator.device), generator.get_state()))[0]
        if first is None:
            return None
        device = first[0] if generator is None else generator.device  # each process may have its own GPU
        return torch.Generator(device).set_state(first[1])

    def differentiable_sum(self, x: Tensor) -> Tensor:
        """Return the sum over the processes, differentiable: what follows from it is the same in all of them."""
        return x if self.group is None else _SumForward.apply(x, self)

    def sum_gradients(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return values that are the same in all processes and from here on meet the data of this one.

        Their gradients are sums over the processes. ``differentiable_sum`` is the other end of such a computation.
        """
        return values if self.group is None or not values else _SumBackward.apply(self, *values)

    @property
    def _home(self) -> torch.device:
        """The device over which the backend sends tensors."""
        backend = str(dist.get_backend(self.group))
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def _announce(self, act: str, number: int = 0, flag: int = 0) -> list[tuple[int, int]]:
        """Tell the others what comes next; return their numbers and flags. Raise if one failed or goes another way."""
        words = self._exchange_words((0, ACTS.index(act), number, flag))
        if any(word[0] for word in words):
            raise self._process_error(self._exchange_values(None))
        sizes = {word[2] for word in words if not word[3]} if act in ("sum", "rows", "copy") else set()
        if len({word[1] for word in words}) > 1 or len(sizes) > 1:
            raise self._out_of_step("; ".join(f"{i}: {ACTS[w[1]]} of {w[2]}" for i, w in enumerate(words)))
        return [(word[2], word[3]) for word in words]

    def _out_of_step(self, told: str) -> ProcessError:
        """Return the error for processes that do different things."""
        return ProcessError(
            f"the processes went different ways ({told}); expected the same calls with the same settings in all. "
            "Give every process the same model, method, prior and seed."
        )

    def _exchange_words(self, word: tuple[int, int, int, int]) -> list[list[int]]:
        words = self._all_gather(torch.tensor(word, dtype=torch.int64), [len(word)] * self.size)
        return torch.stack(words).tolist()

    def _all_gather(self, own: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Return the rows of every process, each so many; they are sent in tensors of equal length."""
        padded = own.new_zeros(max(counts), *own.shape[1:], device=self._home)
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in counts]
        self._run_exchange(lambda: dist.all_gather(parts, padded, group=self.group))
        return [part[:count] for part, count in zip(parts, counts, strict=True)]

    def _report_error(self, error: BaseException) -> None:
        """Tell the others of an error; raise it as the error of all, unless all have the same."""
        try:
            self._exchange_words((1, 0, 0, 0))
            told = self._exchange_values((type(error).__name__, str(error)))
        except ProcessError as lost:
            raise lost from error
        if isinstance(error, Exception) and any(each != told[0] for each in told):
            raise self._process_error(told) from error

    def _process_error(self, told: Sequence[tuple[str, str] | None]) -> ProcessError:
        """Return the error of all processes; ``told`` has the name and the message of an error, or None, for each."""
        failed = [(i, each) for i, each in enumerate(told) if each is not None]
        more = f" (so did {len(failed) - 1} more)" if len(failed) > 1 else ""
        rank, (name, message) = failed[0]
        return ProcessError(f"process {rank} of {self.size} failed{more}: {name}: {message}", rank)

    def _exchange_values(self, value: T, act: str = "") -> list[T]:
        """Return a value of each process; with an act, the word about it carries the size."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        if act:
            sizes = [size for size, _ in self._announce(act, len(own))]
        else:
            sizes = [word[2] for word in self._exchange_words((1, 0, len(own), 0))]
        return [pickle.loads(part.cpu().numpy().tobytes()) for part in self._all_gather(own, sizes)]

    def _with_zeros(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the tensors with zeros in the place of those that only other processes know."""
        forms = self._exchange_values([_shape_and_dtype(t) for t in tensors], "value")
        device = next((t.device for t in tensors if t is not None), torch.device("cpu"))
        filled: list[Tensor | None] = []
        if len({len(each) for each in forms}) > 1:
            raise self._out_of_step("; ".join(f"{i}: {len(each)} sums" for i, each in enumerate(forms)))
        for tensor, column in zip(tensors, zip(*forms, strict=True), strict=True):
            known = [form for form in column if form is not None]
            if len(set(known)) > 1:
                raise self._out_of_step(f"sums of the forms {known}")
            zeros = torch.zeros(known[0][0], dtype=known[0][1], device=device) if known and tensor is None else None
            filled.append(tensor if tensor is not None else zeros)
        return filled

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of one tensor, in place where the backend can; half precision is added in single."""
        sent = tensor.detach().to(self._home)
        sent = sent.float() if sent.dtype in HALF_PRECISION else sent
        self._run_exchange(lambda: dist.all_reduce(sent, group=self.group))
        return sent.to(tensor)

    def _broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        sent = tensor.to(self._home, copy=True).contiguous()
        assert self.group is not None
        source = dist.get_global_rank(self.group, owner)
        self._run_exchange(lambda: dist.broadcast(sent, source, group=self.group))
        return sent.reshape(tensor.shape)

    def _run_exchange(self, send: Callable[[], object]) -> None:
        """Run an exchange; raise if a process is lost."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                send()
        except RuntimeError as error:
            raise ProcessError(
                f"a process of the group has ended or does not answer: {error!s:.300}. See the output of the others; "
                "init_process_group(timeout=...) says how long to wait."
            ) from error


ALONE = Processes()
Call = TypeVar("Call", bound=Callable[..., Any])


def in_all_processes(call: Call) -> Call:
    """Decorate a function with an argument ``process_group``: an error in one of the processes is raised in all."""

    @functools.wraps(call)
    def run(*args: Any, process_group: dist.ProcessGroup | None = None, **kwargs: Any) -> Any:
        if process_group is None:
            return call(*args, **kwargs)
        with Processes.of(process_group).share_errors():
            return call(*args, process_group=process_group, **kwargs)

    return run  # type: ignore[return-value]


def _shape_and_dtype(tensor: Tensor | None) -> Form | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


def assign_jobs(work: Sequence[float], size: int) -> list[int]:
    """Return the process that ``run_jobs`` gives each job, with nearly equal work for all.

    >>> assign_jobs([5.0, 1.0, 2.0, 3.0], 2)
    [0, 0, 1, 1]
    """
    loads, owners = [0.0] * size, [0] * len(work)
    for job in sorted(range(len(work)), key=lambda i: -work[i]):
        owners[job] = min(range(size), key=lambda i: loads[i])
        loads[owners[job]] += work[job]
    return owners


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, processes: Processes) -> Tensor:
        return processes.sum([x.clone()])[0]

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, processes: Processes, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.processes = processes
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.processes.sum([slope.clone() for slope in slopes])


class Part(Sampler[int]):
    """The part of a data set that this process reads: consecutive rows, every datum in one process exactly once.

    In contrast to ``torch.utils.data.DistributedSampler`` no datum is repeated or dropped to make the parts equal:
    their sizes differ by at most one, and with fewer data than processes some are empty. Without ``shuffle`` the parts
    of all processes, one after another, are the data set in its order.

    Args:
        dataset: The whole data set, the same in all processes.
        process_group: The group of ``torch.distributed``; None is this process alone.
        shuffle: Whether to draw the rows of all parts anew in every epoch; ``set_epoch`` changes the order, and
            ``lw.train`` calls it.
        seed: The seed of the order, the same in all processes.

    Raises:
        UnsupportedError: If the data set has no length, or a setting is out of range.

    >>> import lapwing as lw
    >>> data = torch.utils.data.TensorDataset(torch.arange(5.0))
    >>> list(lw.samples.Part(data, process_group=None))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, dataset: Sized, process_group: object, shuffle: bool = False, seed: int = 0) -> None:
        Rule("a data set with a length", lambda v: len(v) >= 0).check("dataset", dataset)
        FLAG.check("shuffle", shuffle)
        integer(0).check("seed", seed)
        processes = Processes.of(process_group)
        self.rank, self.parts, self.total = processes.rank, processes.size, len(dataset)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    @property
    def rows(self) -> range:
        """The positions of this part in the order of all data."""
        return range(self.total * self.rank // self.parts, self.total * (self.rank + 1) // self.parts)

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(self.rows)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.total, generator=generator).tolist()
        return iter(order[self.rows.start : self.rows.stop])

    def __len__(self) -> int:
        return len(self.rows)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, which decides on the order if the data are shuffled."""
        self.epoch = epoch


@dataclass(frozen=True)
class Share:
    """The part of the data that a loader gives, as its sampler describes it."""

    number: int  # of the part
    parts: int
    rows: int | None = None  # data that are its own, if the sampler repeats some after them
    repeated: int = 0  # data after those
    dropped: int = 0  # data of the whole set that no process reads
    mixed: bool = False  # whether consecutive data are in different parts

    def refuse_other(self, processes: Processes, name: str) -> None:
        """Raise unless this is the part of this process."""
        if (self.number, self.parts) != (processes.rank, processes.size):
            raise DataError(
                f"the sampler of the {name} gives part {self.number} of {self.parts}, and this is process "
                f"{processes.rank} of {processes.size}; expected its own part. Build the loader with "
                "sampler=lw.samples.Part(dataset, process_group)."
            )

    def refuse_order(self, name: str) -> None:
        """Raise if the parts, one after another, are not the data in their order."""
        if self.mixed:
            raise DataError(
                f"the sampler of the {name} deals the data out to the processes or shuffles them, so its parts, one "
                "after another, are in another order; expected sampler=lw.samples.Part(dataset, process_group)."
            )


def samplers_of(source: object) -> tuple[object, ...]:
    """Return the samplers of a loader; None in the place of one that it does not have."""
    source = getattr(source, "loader", source)  # of lw.samples.unpacked
    batches = getattr(source, "batch_sampler", None)
    return getattr(source, "sampler", None), batches, getattr(batches, "sampler", None)


def share_of(source: object, name: str = "data") -> Share | None:
    """Return the part that a loader gives, or None if its sampler does not say; raise if a repeated row is not last."""
    sampler = next((each for each in samplers_of(source) if isinstance(each, Part | DistributedSampler)), None)
    if sampler is None:
        return None
    if isinstance(sampler, Part):
        return Share(sampler.rank, sampler.parts, mixed=sampler.shuffle)
    total, parts = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]
    if sampler.drop_last:
        return Share(sampler.rank, parts, dropped=total - sampler.total_size, mixed=True)
    rows = len(range(sampler.rank, total, parts))
    if rows == sampler.num_samples:
        return Share(sampler.rank, parts, mixed=True)
    source = getattr(source, "loader", source)
    if type(getattr(source, "batch_sampler", None)) is not BatchSampler or not getattr(source, "in_order", True):
        raise DataError(
            f"the DistributedSampler of the {name} repeats data to make {parts} equal parts of {total}, and its "
            "batches come in another order, so the repeated ones cannot be left out. Use "
            "sampler=lw.samples.Part(dataset, process_group), which repeats none."
        )
    return Share(sampler.rank, parts, rows, sampler.num_samples - rows, mixed=True)


def next_epoch(source: object, epoch: int) -> None:
    """Tell the sampler of a loader the number of the epoch, as PyTorch asks for one that shuffles parts."""
    for sampler in samplers_of(source):
        if isinstance(sampler, Part | DistributedSampler):
            sampler.set_epoch(epoch)


def refuse_copies(marks: Sequence[T | None], name: str, same: Callable[[T, T], bool] = operator.eq) -> None:
    """Raise if two processes have the same mark of their data; None stands for no mark."""
    known = [(rank, mark) for rank, mark in enumerate(marks) if mark is not None]
    for (one, first), (other, second) in combinations(known, 2):
        if same(first, second):
            raise DataError(
                f"{name}: processes {one} and {other} read the same rows, which would count twice; expected a part for "
                "each process. Give the Dataset itself, or a loader with "
                "sampler=lw.samples.Part(dataset, process_group), or cut a list: batches[rank::size]."
            )
