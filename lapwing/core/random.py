"""Random numbers that depend only on the generator, if one is given.

Numbers are drawn on the device of the generator and then moved, so that one seed gives one result on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lapwing.errors import UnsupportedError


def normal(shape: tuple[int, ...], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Return standard normal numbers in the dtype and on the device of ``like``."""
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=_home(generator, like)).to(like.device)


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


@contextmanager
def global_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch's global generators of the CPU and of ``device``, and restore their states afterwards.

    ``torch.manual_seed`` would also seed the other GPUs, whose states are not restored.
    """
    gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpu):
        torch.default_generator.manual_seed(seed)
        for each in gpu:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def _home(generator: torch.Generator | None, like: Tensor) -> torch.device:
    """Return the device on which the numbers are drawn."""
    if generator is None:
        return like.device
    if not isinstance(generator, torch.Generator):
        raise UnsupportedError(f"generator is {generator!r:.80}; expected torch.Generator().manual_seed(...), or None.")
    return generator.device
