"""Random numbers that depend on the generator alone, where one is given.

Numbers are drawn where the generator lives and then moved, so that one seed gives one result on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lapwing.errors import UnsupportedError


def normal(shape: tuple[int, ...], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Standard normal numbers in the dtype and on the device of ``like``."""
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=_home(generator, like)).to(like.device)


def uniform(shape: tuple[int, ...], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Numbers in [0, 1)."""
    return torch.rand(shape, generator=generator, dtype=like.dtype, device=_home(generator, like)).to(like.device)


def derived(generator: torch.Generator | None, like: Tensor) -> torch.Generator:
    """A generator seeded by a draw from this one: its numbers are not those that the same seed gave someone else."""
    seed = int(uniform((1,), generator, like.double()) * 2**53)
    return torch.Generator(_home(generator, like)).manual_seed(seed)


def poisson(rate: Tensor, generator: torch.Generator | None) -> Tensor:
    """Counts with these rates."""
    return torch.poisson(rate.to(_home(generator, rate)), generator=generator).to(rate.device)


def classes(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One class for each row of probabilities (..., C), by inverting the cumulative sum."""
    steps = probs.cumsum(-1)
    draw = uniform(tuple(probs.shape[:-1]), generator, probs).unsqueeze(-1) * steps[..., -1:]
    return (steps[..., :-1] <= draw).sum(-1)


def _home(generator: torch.Generator | None, like: Tensor) -> torch.device:
    if generator is None:
        return like.device
    if not isinstance(generator, torch.Generator):
        raise UnsupportedError(f"generator is {generator!r:.80}; expected torch.Generator().manual_seed(...), or None.")
    return generator.device


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The generator, or one of seed 0 where none is given: equal calls give equal results."""
    return generator if generator is not None else torch.Generator().manual_seed(0)


def apart(generator: torch.Generator | None) -> torch.Generator:
    """A generator for draws of one's own: data made with the same seed would hang together with them."""
    return derived(seeded(generator), torch.empty(0))


@contextmanager
def global_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of this seed, on the CPU and on the device; those of the caller are put back.

    ``torch.manual_seed`` would seed all GPUs, also those whose numbers are not put back.
    """
    gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpu):
        torch.default_generator.manual_seed(seed)
        for each in gpu:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield
