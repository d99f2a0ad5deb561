"""The Hessian of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.inputs import Inputs, check_finite
from lapwing.core.memory import runs
from lapwing.core.switches import math_attention
from lapwing.curvature.full import FullCurvature
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.likelihoods.weighted import as_count, weighted_count, weighted_loss
from lapwing.linalg.gram import symmetrise
from lapwing.networks.budget import near
from lapwing.networks.forward import raw_output, recording, shaped
from lapwing.networks.graph import read
from lapwing.networks.network import Network
from lapwing.networks.passes import seed_by_seed, vjp
from lapwing.problem import Statistics, sample_count


def full_hessian(network: Network, likelihood: Likelihood, data: Data) -> tuple[FullCurvature, Statistics]:
    """Return the Hessian of the loss in the weights, by double backward for many rows at once, summed in float64."""
    if network.shift is not None:
        raise UnsupportedError("the Hessian exists at the trained weights only; use curvature='ggn'.")
    selection = network.selection
    tensors = network.parameters
    chosen = [tensors[name] for name in selection.names]
    total = torch.zeros(selection.size, selection.size, dtype=torch.float64, device=network.device)
    loss_sum, count = 0.0, 0.0
    for inputs, targets, weights in _parts(network, data):
        with math_attention, recording(tensors, selection.names, network.plain):
            raw = raw_output(network.replica, inputs)
            f = shaped(raw)
            check_finite(f.detach(), "outputs of the network")
            y = likelihood.targets(f.detach(), targets)
            loss = weighted_loss(likelihood, f, y, weights).sum()
            grads = torch.autograd.grad(loss, chosen, create_graph=True, allow_unused=True, materialize_grads=True)
            gradient = selection.picked(torch.cat([g.reshape(-1) for g in grads]))
            if gradient.requires_grad:
                looped = seed_by_seed(read(raw), raw, network.recurrent)
                _add_slopes(total, gradient, network.for_inputs(inputs), raw.shape[0], looped)
        loss_sum += float(loss.detach())
        count += float(weighted_count(likelihood, f.detach(), y, weights))
    (total,) = data.processes.sum([total])
    symmetrise(total)
    statistics = Statistics(loss_sum, as_count(count), network.output_shape[-1]).over(data.processes)
    return FullCurvature(total, selection, definite=False), statistics


def _parts(network: Network, data: Data) -> Iterator[tuple[Inputs, Tensor, Tensor | None]]:
    """Yield inputs, targets and weights in parts whose graph, and that of their gradients, fits the byte budget."""
    for batch in data.batches("Hessian", weighted=True):
        count, sizes = sample_count(network, batch), network.for_inputs(batch.inputs).footprint
        each = 4 * torch.finfo(network.dtype).bits // 8 * (sizes.graph + sizes.width)
        for rows in runs(count, each, network.device):
            whole = rows == slice(0, count)
            inputs = batch.inputs if whole else network.take(batch.inputs, rows)
            yield inputs, batch.targets[rows], batch.weights_of(rows)


def _add_slopes(total: Tensor, gradient: Tensor, network: Network, batch: int, looped: bool) -> None:
    """Add ∂ gradient / ∂ θ to ``total``, as many rows at once as fit the byte budget; one by one if ``looped``."""
    size, width = len(gradient), 4 * batch * network.footprint.width  # forward, backward, and the gradients of both
    step = max(1, near(network.device) // (gradient.element_size() * (2 * size + width)))
    rows = partial(vjp, network.replica, network.selection, gradient)
    for start in range(0, size, step):
        stop = min(start + step, size)
        seeds = torch.nn.functional.one_hot(torch.arange(start, stop, device=gradient.device), size)
        try:
            slopes = rows(seeds, looped)
        except (RuntimeError, NotImplementedError):  # an operation without a batching rule
            slopes = rows(seeds, True)
        total[start:stop] += slopes.double()
