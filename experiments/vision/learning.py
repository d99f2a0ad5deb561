"""Training on a GPU: several networks in one loop, or one large network in half precision."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from lapwing.errors import DataError


@dataclass(frozen=True)
class Schedule:
    """Adam (or SGD with momentum for ``train_large``), with a rate that falls to zero by a cosine."""

    epochs: int
    batch_size: int = 512
    rate: float = 1e-3

    def rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of a step."""
        return self.rate * 0.5 * (1 + math.cos(math.pi * step / steps))


def train_together(
    models: Sequence[nn.Module], x: Tensor, y: Tensor, schedule: Schedule, decays: Sequence[float], seed: int
) -> None:
    """Train several networks of one architecture in place, each with its own order of the data, and its own decay.

    Their weights are stacked, so that a step of all takes little more time than one of a single network. Afterwards
    they are in evaluation mode. The networks may have dropout, but no running statistics.

    Args:
        models: Networks that differ in their weights alone.
        x: Standardised images, on the device of the networks.
        y: Their classes.
        schedule: Epochs, batch size and learning rate.
        decays: The L2 decay of each network: a prior precision over the number of data.
        seed: The seed of the orders and of dropout.

    Raises:
        DataError: If the number of decays is not that of the networks, or a network has buffers.
    """
    if len(decays) != len(models) or not models:
        raise DataError(f"{len(models)} networks and {len(decays)} decays; expected one for each.")
    if any(True for _ in models[0].buffers()):
        raise DataError("the networks have buffers, such as running statistics, which cannot be trained together.")
    for model in models:
        model.train()
    stacked, _ = stack_module_state(list(models))
    weights = list(stacked.values())
    shared = torch.tensor(decays, dtype=weights[0].dtype, device=x.device)
    each = [shared.view(-1, *(1,) * (weight.ndim - 1)) for weight in weights]

    def loss(parameters: dict[str, Tensor], images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(models[0], parameters, (images,)), classes)

    losses = vmap(loss, randomness="different")
    optimiser = torch.optim.Adam(weights, lr=schedule.rate, fused=x.is_cuda)
    with _seeded(seed, x), tensor_cores():
        for step, steps, rows in _batches(len(models), len(x), schedule, seed, x.device):
            for group in optimiser.param_groups:
                group["lr"] = schedule.rate_at(step, steps)
            optimiser.zero_grad()
            losses(stacked, x[rows], y[rows]).sum().backward()
            with torch.no_grad():
                for weight, decay in zip(weights, each, strict=True):
                    assert weight.grad is not None
                    weight.grad.addcmul_(decay, weight)
            optimiser.step()
    with torch.no_grad():
        for number, model in enumerate(models):
            for name, parameter in model.named_parameters():
                parameter.copy_(stacked[name][number])
            model.eval()


def _batches(
    n_models: int, n: int, schedule: Schedule, seed: int, device: torch.device
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the number of the step, that of all steps, and the rows of a batch for every network, (M, B)."""
    generator = torch.Generator().manual_seed(seed)
    steps = schedule.epochs * math.ceil(n / schedule.batch_size)
    step = 0
    for _ in range(schedule.epochs):
        orders = torch.stack([torch.randperm(n, generator=generator) for _ in range(n_models)]).to(device)
        for rows in orders.split(schedule.batch_size, 1):
            yield step, steps, rows
            step += 1


def train_large(model: nn.Module, x: Tensor, y: Tensor, schedule: Schedule, decay: float, seed: int) -> None:
    """Train one network with norms in place by SGD with momentum, on flipped and shifted images.

    On a GPU in bfloat16 with channels last. The rate rises over the first fifth of the steps. Afterwards the network
    is in evaluation mode and in its old format.
    """
    on_gpu = x.is_cuda
    layout = torch.channels_last if on_gpu else torch.contiguous_format
    model.to(memory_format=layout)  # type: ignore[call-overload]
    model.train()
    optimiser = torch.optim.SGD(
        model.parameters(), lr=schedule.rate, momentum=0.9, nesterov=True, weight_decay=decay, fused=on_gpu
    )
    generator = torch.Generator().manual_seed(seed)
    with _seeded(seed, x), tensor_cores():
        for step, steps, rows in _batches(1, len(x), schedule, seed, x.device):
            for group in optimiser.param_groups:
                group["lr"] = schedule.rate_at(step, steps) * min(1.0, (step + 1) / (0.2 * steps))
            images = augmented(x[rows[0]], generator).contiguous(memory_format=layout)
            optimiser.zero_grad()
            with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
                loss = F.cross_entropy(model(images), y[rows[0]], label_smoothing=0.0)
            loss.backward()
            optimiser.step()
    optimiser.zero_grad()
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    model.eval()


def augmented(x: Tensor, generator: torch.Generator, reach: int = 4) -> Tensor:
    """Return images, each flipped or not, and all shifted by the same random number of pixels.

    >>> augmented(torch.ones(2, 3, 8, 8), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 8, 8])
    """
    flips = (torch.rand(len(x), generator=generator) < 0.5).to(x.device)
    x = torch.where(flips[:, None, None, None], x.flip(-1), x)
    down, right = torch.randint(0, 2 * reach + 1, (2,), generator=generator).tolist()
    padded = F.pad(x, (reach,) * 4, mode="reflect")
    return padded[:, :, down : down + x.shape[2], right : right + x.shape[3]]


@contextmanager
def tensor_cores(allowed: bool = True) -> Iterator[None]:
    """Allow products in TF32 for one block of code, or forbid them: enough for training, not for what is measured."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def _seeded(seed: int, x: Tensor) -> Iterator[None]:
    """Seed the global random state, which dropout draws from, for one block of code."""
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        yield
