"""The memory that a call may take, and pieces of work that fit into it.

Whoever makes intermediate results asks ``chunks`` or ``batch_size_for`` how much of the work to do at once. Each takes
a share of the budget, so that what exists at the same time stays within it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapwing.errors import UnsupportedError
from lapwing.runtime.settings import Rule, is_integer

VARIABLE = "LAPWING_MEMORY"
FREE_SHARE = 0.25  # share of the free memory that is taken by default
MAX_DEFAULT = {"cpu": 2**32, "cuda": 2**35}  # by default never more
MAX_WORKING_MEMORY = {"cpu": 2**30, "cuda": 2**34}  # above this much memory for intermediate results nothing is faster
ASSUMED_FREE = 2**34  # free bytes that are assumed where the system does not tell
MIN_DEFAULT = 2**20  # of the default, however little is free; no less is ever refused
MAX_AGE = 10.0  # seconds after which the free memory is read again
RESULT_FACTOR = 4  # times the budget that a result which cannot be cut may take
PIECE_SHARE = 0.25  # share for one kind of intermediate result

UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
SIZE_RULE = Rule(
    'a number of bytes, a text such as "4GB" or "512MiB", or None for the default', lambda v: parse_size(v) is not None
)

_LOCK = threading.Lock()
_default: dict[torch.device, tuple[float, int]] = {}  # when it was read, and bytes
_process: list[int | None] = []  # one entry once the environment was read
_block: ContextVar[int | None] = ContextVar("lapwing_memory", default=None)


def parse_size(size: int | str) -> int | None:
    """Return the bytes that a number or a text stands for; None if it stands for no positive number of bytes.

    >>> parse_size("4GB"), parse_size("512 MiB"), parse_size(1000), parse_size("much")
    (4000000000, 536870912, 1000, None)
    """
    if is_integer(size):
        return max(0, int(size)) or None
    match = SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        return None
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** UNITS[unit.lower()]) or None


def budget(device: torch.device | str | None = None) -> int:
    """Return the bytes that a call may take on a device, besides its answer and what a posterior stores.

    The first of these that is set: the innermost ``limited`` of this thread, ``limit``, the environment variable
    ``LAPWING_MEMORY``. Otherwise a quarter of what is free, rounded down to a power of two, so that equal calls do
    equal work, and at most 4 GiB on a CPU and 32 GiB on a GPU.

    Args:
        device: Where the results are; None stands for the CPU.

    >>> with limited("64MiB"):
    ...     budget()
    67108864
    """
    given = _block.get() or _limit()
    return given if given is not None else _share_of_what_is_free(torch.device("cpu" if device is None else device))


def limit(size: int | str | None) -> None:
    """Set the budget of this process, for every device and thread; None stands for the default.

    Args:
        size: Bytes, or a text such as "4GB".

    Raises:
        UnsupportedError: If it is neither.

    >>> limit("2GB")
    >>> budget()
    2000000000
    >>> limit(None)
    """
    if size is not None:
        SIZE_RULE.check("size", size)
    with _LOCK:
        _process[:] = [None if size is None else parse_size(size)]


@contextmanager
def limited(size: int | str) -> Iterator[None]:
    """Set the budget for the calls of this thread inside the block.

    Args:
        size: Bytes, or a text such as "4GB".

    Raises:
        UnsupportedError: If it is neither.

    >>> with limited("500MB"):
    ...     budget()
    500000000
    """
    SIZE_RULE.check("size", size)
    token = _block.set(parse_size(size))
    try:
        yield
    finally:
        _block.reset(token)


def working_memory(device: torch.device) -> int:
    """Return the bytes that all intermediate results may take together: the budget, or less where more is no faster."""
    return min(budget(device), MAX_WORKING_MEMORY.get(device.type, MAX_WORKING_MEMORY["cuda"]))


def batch_size_for(count: int, each: int, device: torch.device, share: float = PIECE_SHARE) -> int:
    """Return how many of ``count`` pieces of ``each`` bytes fit into a share of ``working_bytes``: at least one.

    >>> with limited(4000):
    ...     batch_size_for(7, 300, torch.device("cpu")), batch_size_for(7, 5000, torch.device("cpu"))
    (3, 1)
    """
    return max(1, min(count, int(share * working_memory(device)) // max(1, each)))


def chunks(
    count: int, each: int, device: torch.device, share: float = PIECE_SHARE, most: int | None = None
) -> Iterator[slice]:
    """Yield ``count`` pieces of ``each`` bytes in runs of even size that fit into a share of ``working_bytes``.

    A run has at most ``most`` pieces, and at least one, however large it is.

    >>> with limited(4000):
    ...     list(chunks(7, 200, torch.device("cpu")))
    [slice(0, 4, None), slice(4, 7, None)]
    """
    step = batch_size_for(count, each, device, share)
    return even_chunks(count, step if most is None else min(step, most))


def even_chunks(count: int, most: int) -> Iterator[slice]:
    """Yield ``count`` pieces in as few runs as have at most ``most`` pieces each, and at least one, of even size."""
    number = -(-count // max(1, most))  # of runs
    step = -(-count // max(1, number))
    for start in range(0, count, max(1, step)):
        yield slice(start, min(count, start + step))


def refuse_large_result(needed: int, device: torch.device, what: str, advice: str) -> None:
    """Raise if one result that cannot be cut needs more than four times the budget: by default, about what is free.

    Raises:
        UnsupportedError: With the bytes that are needed, and how to allow them.
    """
    allowed = max(MIN_DEFAULT, RESULT_FACTOR * budget(device))
    if needed > allowed:
        raise UnsupportedError(
            f"{what} takes {needed / 2**30:.3g} GiB at once; expected at most {allowed / 2**30:.3g} GiB, "
            f"{RESULT_FACTOR} times the byte budget. {advice}, or raise it: "
            f'lw.memory.limit("{-(-needed // (RESULT_FACTOR * 2**20))}MiB").'
        )


def concat_chunks(parts: Iterable[Tensor], count: int, dim: int = 0) -> Tensor:
    """Return consecutive parts as one tensor with ``count`` entries along a dimension.

    ``torch.cat`` would hold all parts and their copy at once; here a part is freed before the next one is made.
    """
    each = iter(parts)
    part: Tensor | None = next(each)
    assert part is not None
    if part.shape[dim] == count:
        return part
    if part.requires_grad:
        return torch.cat([part, *each], dim)
    whole = part.new_empty([*part.shape[:dim], count, *part.shape[dim:][1:]])
    start = 0
    while part is not None:
        whole.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
        del part
        part = next(each, None)
    assert start == count, "as many entries as there are parts for"
    return whole


def _limit() -> int | None:
    """Return the limit of the process; the environment is read once."""
    if _process:
        return _process[0]
    with _LOCK:
        if not _process:
            text = os.environ.get(VARIABLE)
            size = None if text is None else parse_size(text)
            if text is not None and size is None:
                raise UnsupportedError(
                    f'the environment variable {VARIABLE} is {text!r:.80}; expected bytes, such as "4GB" or "512MiB".'
                )
            _process.append(size)
        return _process[0]


def _share_of_what_is_free(device: torch.device) -> int:
    """Return the default of a device. What is free is read again only after a while: it takes a system call."""
    now = time.monotonic()
    read, size = _default.get(device, (now - MAX_AGE, 0))
    if now - read >= MAX_AGE:
        with _LOCK:
            share = max(MIN_DEFAULT, int(FREE_SHARE * _free(device)))
            size = min(MAX_DEFAULT.get(device.type, MAX_DEFAULT["cuda"]), 2 ** (share.bit_length() - 1))
            _default[device] = now, size
    return size


def _free(device: torch.device) -> int:
    """Return the free bytes of a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # PyTorch keeps what was freed; to the driver it is taken.
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return min(_free_of_the_system(), _free_of_the_group())


def _free_of_the_system() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):  # not POSIX
        return ASSUMED_FREE


GROUPS = (  # of containers and batch systems: limit, use, and statistics that name what of the use can be dropped
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _free_of_the_group() -> int:
    """Return the bytes that the control groups of this process leave it; a large number without such a limit."""
    free = 2**62
    for root, most, used, droppable in GROUPS:
        for folder in _folders(Path(root)):
            try:
                left = int((folder / most).read_text()) - int((folder / used).read_text())
                lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free = min(free, left + int(lines.get(droppable, 0)))
            except (OSError, ValueError):  # no such group, or no limit ("max")
                continue
    return max(0, free)


def _folders(root: Path) -> list[Path]:
    """Return the folder of this process's group and those above it, which limit it too."""
    try:
        text = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return [root]
    paths = [line.split(":", 2)[2].strip("/") for line in text.splitlines() if line.count(":") >= 2]
    folders = {root}
    for path in paths:
        folder = root / path
        folders |= {each for each in (folder, *folder.parents) if root in each.parents}
    return sorted(folders)


class LargestResult(TorchDispatchMode):
    """Notes how many numbers the largest result inside a ``with`` block has.

    >>> x, w = torch.ones(4, 3), torch.ones(3, 2)
    >>> with LargestResult() as largest:
    ...     y = (x @ w).sum()
    >>> largest.numbers
    8
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not leaf.is_nested]
            self.numbers = max(self.numbers, *sizes, 0)
        return result
