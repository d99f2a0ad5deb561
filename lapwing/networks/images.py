"""Networks with images or tokens as outputs: how many pixels or tokens inputs give, and targets in that form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.core.batches import Batch
from lapwing.core.images import ImageForm
from lapwing.core.inputs import Inputs, map_tensors, placed
from lapwing.errors import DataError, InputError
from lapwing.networks.forward import model_output, plain_kernels

if TYPE_CHECKING:
    from lapwing.networks.network import Network

ADVICE = "Has x a batch dimension? For one input, give x[None]."


def shapes_of_sample(inputs: Inputs, per_sample: Sequence[bool]) -> tuple[torch.Size, ...] | None:
    """Return the shapes of the tensors that one sample is made of; None if there are sets of samples among them."""
    leaves = [leaf for _, leaf in placed(inputs)]
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    return tuple(leaf.shape[1:] if each else leaf.shape for each, leaf in zip(per_sample, leaves, strict=True))


def seen_sizes(network: Network, inputs: Inputs) -> tuple[int, ...]:
    """Return (H, W) or (D, H, W) of the images that these inputs give, or (T,) of tokens.

    By a forward pass of one sample.
    """
    one = map_tensors(network.take(inputs, slice(0, 1)), lambda t: t.to(network.device))
    try:
        with torch.no_grad(), plain_kernels(network.plain):
            out = model_output(network.replica, one)
    except InputError as error:
        raise InputError(f"{error} This was the first sample alone. {ADVICE}") from error
    dims, channels = len(network.image) or 1, network.output_shape[-1]
    if out.ndim != dims + 2 or out.shape[1 if network.image else 2] != channels:
        form = f"{channels}, {', '.join('DHW'[-dims:])}), images" if network.image else f"T, {channels}), tokens"
        raise DataError(
            f"the first of these inputs gives outputs of shape {tuple(out.shape)}; expected (1, {form} as before. "
            f"{ADVICE}"
        )
    return tuple(out.shape[2:] if network.image else out.shape[1:2])


def pixel_targets(batch: Batch, form: ImageForm, channels: int) -> Batch:
    """Return the batch with the targets of images as those of their pixels; raise if their sizes are others."""
    y, advice = batch.targets, ""
    if tuple(y.shape[1:]) == (channels, *form.sizes[:-1]) and not y.is_floating_point():
        advice = (
            " The targets fit outputs with the channels last: wrap the model in a module whose forward returns "
            "model(x).movedim(-1, 1)."
        )
    try:
        return replace(batch, targets=form.targets(y))
    except DataError as error:
        raise DataError(f"{error}{advice}") from error
