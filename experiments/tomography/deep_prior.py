"""Deep image priors: networks trained on the measurements of one image each, one at a time or many at once."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from experiments.tomography.total_variation import total_variation
from experiments.tomography.unet import UNet, dropout_masks
from lapwing.errors import DataError, NumericalError, UnsupportedError
from lapwing.runtime.settings import (
    GENERATOR,
    NOT_NEGATIVE,
    POSITIVE,
    HasSettings,
    Rule,
    describe,
    integer,
    required,
    setting,
)
from lapwing.runtime.threads import ProgressBar

SHOWN_EVERY = 100  # steps between two numbers beside the progress bar, each of which waits for the device
MASKS_AT_ONCE = 64  # steps whose dropout masks are drawn together
WARM = 3  # steps on a GPU before a step is recorded, in which kernels are chosen and the optimiser makes its state
FINITE = Rule(
    "a tensor of finite real numbers",
    lambda v: isinstance(v, Tensor) and v.is_floating_point() and bool(v.isfinite().all()),
    DataError,
)


class Operator(Protocol):
    """A linear map from flat images (..., dx) to measurements (..., dy), differentiable."""

    def forward(self, v: Tensor, /) -> Tensor:
        """Apply the map to the last dimension."""
        ...


@dataclass(frozen=True)
class Training(HasSettings):
    """Settings of the training: mean squared error of the measurements plus γ times the total variation, by Adam.

    Args:
        weight_of_tv: γ, one number or one for each network.
        steps: The number of steps.
        rate: The learning rate.
        clip: The largest norm of a network's gradient; longer ones are shortened to it.

    Raises:
        UnsupportedError: A setting is out of range.
        DataError: A weight of the total variation is negative or not finite.
    """

    weight_of_tv: float | tuple[float, ...] = required(NOT_NEGATIVE)
    steps: int = required(integer())
    rate: float = setting(1e-4, POSITIVE)
    clip: float = setting(1.0, POSITIVE)


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """A trained network and its image.

    ``unet`` has the parameters of the smallest training loss. ``image`` (H, W) is its output, without dropout.
    ``losses`` (steps,) are those before each step. ``seconds`` is the time of the run, which networks that were trained
    together share.
    """

    unet: UNet
    image: Tensor
    losses: Tensor
    seconds: float

    @property
    def best_step(self) -> int:
        """The number of steps after which the training loss was smallest."""
        return int(self.losses.nan_to_num(nan=torch.inf).argmin())


def reconstruct(
    unet: UNet,
    operator: Operator,
    y: Tensor,
    z: Tensor,
    training: Training,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Reconstruction:
    """Train a network on the measurements of one image.

    Args:
        unet: The network at its initial parameters; it is not changed.
        operator: The map from the image to the measurements.
        y: Measurements (dy,).
        z: The input of the network (H, W), such as a filtered back-projection.
        training: The settings.
        generator: For the dropout masks, if the network has dropout; seed 0 if it is None.
        progress: Whether to show a progress bar.

    Returns:
        The trained network in evaluation mode, its image and the losses.

    Raises:
        DataError: Measurements or input are not finite or do not fit the operator.
        NumericalError: No loss was finite.

    >>> from experiments.tomography.unet import seeded_unet
    >>> class Mask:
    ...     def forward(self, v):
    ...         return v[..., ::2]
    >>> training = Training(weight_of_tv=1e-4, steps=5, rate=1e-2)
    >>> trained = reconstruct(seeded_unet(0, channels=3), Mask(), torch.ones(15), torch.rand(5, 6), training)
    >>> trained.image.shape, bool(trained.losses[-1] < trained.losses[0])
    (torch.Size([5, 6]), True)
    """
    FINITE.check("y", y)
    FINITE.check("z", z)
    if y.ndim != 1 or z.ndim != 2:
        raise DataError(f"y is {describe(y)}, z is {describe(z)}; expected measurements (dy,) and one image (H, W).")
    GENERATOR.check("generator", generator)
    generators = None if generator is None else [generator]
    return reconstruct_many([unet], operator, y[None], z[None], training, generators=generators, progress=progress)[0]


def reconstruct_many(
    unets: Sequence[UNet],
    operator: Operator,
    y: Tensor,
    z: Tensor,
    training: Training,
    *,
    generators: Sequence[torch.Generator] | None = None,
    progress: bool = False,
) -> tuple[Reconstruction, ...]:
    """Train N networks on the measurements of one image each, all at once.

    The result equals that of N calls of ``reconstruct``, up to rounding: gradients are clipped for each network, and
    each keeps the parameters of its own smallest loss.

    Args:
        unets: N networks of the same settings at their initial parameters; they are not changed.
        operator: The map from an image to its measurements, which all images share.
        y: Measurements (N, dy).
        z: Inputs of the networks (N, H, W).
        training: The settings.
        generators: One for each network, for its dropout masks; seeds 0, 1, 2, … if None.
        progress: Whether to show a progress bar.

    Returns:
        One reconstruction for each network, in evaluation mode.

    Raises:
        DataError: Measurements or inputs are not finite, or do not fit the operator or each other.
        UnsupportedError: The networks have different settings.
        NumericalError: No loss of some network was finite.
    """
    _check_networks(unets, y, z, training, generators)
    _check_measured(operator, y, z)
    start = time.perf_counter()
    joint = _Joint(unets, operator, y, z, training)
    masks = _masks(unets[0], generators, len(unets), training.steps, z)
    losses = torch.empty(training.steps, len(unets), dtype=y.dtype, device=y.device)
    bar = ProgressBar(range(training.steps), "reconstructing", progress)
    for step, mask in zip(bar, masks, strict=False):
        losses[step] = joint.step(mask)
        if progress and (step + 1) % SHOWN_EVERY == 0:
            bar.show(loss=float(losses[step].mean()))
    images = joint.images(joint.best, None)
    bad = (~joint.lowest.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise NumericalError(
            f"no training loss of the networks {bad[:8]} was finite; expected finite losses. Lower the learning rate."
        )
    seconds = time.perf_counter() - start
    trained = [_with_parameters(unet, joint.best, i) for i, unet in enumerate(unets)]
    return tuple(
        Reconstruction(unet, image, loss, seconds)
        for unet, image, loss in zip(trained, images, losses.unbind(1), strict=True)
    )


class _Joint:
    """The mutable state of N networks in training: parameters stacked along the first dimension."""

    def __init__(self, unets: Sequence[UNet], operator: Operator, y: Tensor, z: Tensor, training: Training) -> None:
        stacked, _ = stack_module_state(list(unets))  # type: ignore[arg-type]
        self.parameters = {name: p.detach().to(z).requires_grad_() for name, p in stacked.items()}
        self.best = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.lowest = torch.full((len(unets),), torch.inf, dtype=y.dtype, device=y.device)
        self._shape = copy.deepcopy(unets[0]).eval().to("meta")  # the module without its numbers
        self._operator, self._y, self._z, self._clip = operator, y, z, training.clip
        self._gamma = torch.as_tensor(training.weight_of_tv, dtype=y.dtype, device=y.device)
        kind, leaves = z.device.type, list(self.parameters.values())
        self._gpu = kind == "cuda"
        self._adam = torch.optim.Adam(leaves, lr=training.rate, fused=kind in ("cpu", "cuda"), capturable=self._gpu)
        self._graph: Any = None  # a step as recorded on a GPU, with its masks and losses
        self._masks: Tensor | None = None
        self._losses = self.lowest
        self._steps = 0

    def step(self, masks: Tensor | None) -> Tensor:
        """Make one step of every network; return the losses before it, (N,). Nothing waits for the device.

        On a GPU a step is some thousand small kernels, which take longer to launch than to run. So one is recorded as
        a CUDA graph, and the others replay it.
        """
        if not self._gpu or self._steps < WARM:
            self._steps += 1
            return self._plain_step(masks)
        if self._graph is None:
            self._masks = None if masks is None else masks.clone()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._losses = self._plain_step(self._masks)
        if self._masks is not None and masks is not None:
            self._masks.copy_(masks)
        self._graph.replay()
        return self._losses

    def _plain_step(self, masks: Tensor | None) -> Tensor:
        images = self.images(self.parameters, masks)
        # The operator is applied outside of vmap: sparse matrices do not support every transform of functions.
        residual = self._operator.forward(images.flatten(1)) - self._y
        loss = residual.square().mean(1) + self._gamma * total_variation(images)
        leaves = list(self.parameters.values())
        grads = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
        self._keep(loss.detach())
        norm = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
        factor = (self._clip / (norm + 1e-6)).clamp_max(1.0)
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad * factor.reshape(-1, *[1] * (grad.ndim - 1))
        self._adam.step()
        return loss.detach()

    def images(self, parameters: dict[str, Tensor], masks: Tensor | None) -> Tensor:
        """Return the images of all networks, (N, H, W)."""

        def image(parameters: dict[str, Tensor], z: Tensor, masks: Tensor | None) -> Tensor:
            return functional_call(self._shape, parameters, (z[None, None], masks))[0, 0]

        if len(self._z) == 1:  # without vmap, which makes convolutions grouped and slower
            one = {name: parameter[0] for name, parameter in parameters.items()}
            return image(one, self._z[0], None if masks is None else masks[0])[None]
        dims = (0, 0, None if masks is None else 0)
        images: Tensor = vmap(image, in_dims=dims)(parameters, self._z, masks)
        return images

    @torch.no_grad()
    def _keep(self, loss: Tensor) -> None:
        """Copy the parameters of those networks whose loss is their smallest so far."""
        better = loss < self.lowest
        torch.where(better, loss, self.lowest, out=self.lowest)
        for name, parameter in self.parameters.items():
            mask = better.reshape(-1, *[1] * (parameter.ndim - 1))
            torch.where(mask, parameter, self.best[name], out=self.best[name])


def _masks(
    unet: UNet, generators: Sequence[torch.Generator] | None, count: int, steps: int, like: Tensor
) -> Iterator[Tensor | None]:
    """Return the dropout masks (N, n_masks, channels) of each step, or None for a network without dropout."""
    if not unet.dropout:
        return repeat(None)
    seeded = [torch.Generator().manual_seed(i) for i in range(count)] if generators is None else generators

    def drawn() -> Iterator[Tensor]:
        for start in range(0, steps, MASKS_AT_ONCE):
            n = min(MASKS_AT_ONCE, steps - start)
            yield from torch.stack([dropout_masks(unet, n, generator, like) for generator in seeded], 1)

    return drawn()


def _with_parameters(unet: UNet, stacked: dict[str, Tensor], index: int) -> UNet:
    """Return a copy of the network with these parameters, in evaluation mode."""
    trained = copy.deepcopy(unet).to(next(iter(stacked.values()))).eval()
    trained.load_state_dict({name: parameter[index] for name, parameter in stacked.items()})
    return trained


def _check_networks(
    unets: Sequence[UNet], y: Tensor, z: Tensor, training: Training, generators: Sequence[Any] | None
) -> None:
    """Raise unless there is one network of the same settings for each row of y and z."""
    FINITE.check("y", y)
    FINITE.check("z", z)
    if not unets or not all(isinstance(unet, UNet) for unet in unets):
        raise UnsupportedError(f"unets is {describe(unets)}; expected a list of at least one UNet.")
    if len({(str(unet), unet.skips, unet.sigmoid, unet.dropout) for unet in unets}) > 1:
        raise UnsupportedError("the networks have different settings; expected the same ones. Train them apart.")
    if y.ndim != 2 or z.ndim != 3 or not len(unets) == len(y) == len(z):
        raise DataError(
            f"{len(unets)} networks, y is {describe(y)}, z is {describe(z)}; expected measurements (N, dy) and images "
            "(N, H, W), one for each network."
        )
    if y.dtype != z.dtype or y.device != z.device:
        raise DataError(f"y is {y.dtype} on {y.device}, z is {z.dtype} on {z.device}; expected the same. Move one.")
    if not isinstance(training.weight_of_tv, float | int) and len(training.weight_of_tv) != len(unets):
        raise DataError(f"weight_of_tv has {len(training.weight_of_tv)} numbers; expected 1 or {len(unets)}.")
    if generators is not None and len(generators) != len(unets):
        raise DataError(f"there are {len(generators)} generators; expected one for each of {len(unets)} networks.")


def _check_measured(operator: Operator, y: Tensor, z: Tensor) -> None:
    """Raise unless the operator maps images of the size of z to measurements of the size of y."""
    if not hasattr(operator, "forward"):
        raise DataError(
            f"the operator is {describe(operator)}; expected an object with forward, such as a SparseOperator."
        )
    try:
        measured = operator.forward(z[:1].flatten(1))
    except RuntimeError as error:
        raise DataError(f"the operator does not take images of shape {tuple(z.shape[1:])}: {error}") from error
    if measured.shape != (1, y.shape[1]):
        raise DataError(
            f"the operator returns {describe(measured)} for one image; y has {y.shape[1]} measurements each."
        )
