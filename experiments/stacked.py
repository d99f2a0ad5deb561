"""Several small networks for regression, trained side by side, because calls cost more than their arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from lapwing.demo.training import TrainingSettings, mlp

MOMENTUM, SQUARES, TINY = 0.9, 0.999, 1e-8  # of Adam
NEW = 0.01  # weight of a batch in the running mean of squared residuals


@dataclass(frozen=True)
class StackedTraining:
    """Settings of a training: tanh networks, Adam in float32, and a learning rate that falls to zero by a cosine.

    The weights have a Gaussian prior with mean zero and this ``precision``, and the noise is learned: with the mean
    squared residual φ so far and n rows the weight decay is precision φ / n.
    """

    hidden: tuple[int, ...] = (50,)
    steps: int = 4000
    batch_size: int = 128
    learning_rate: float = 1e-2
    precision: float = 5.0
    dropout: float = 0.05  # after every activation, of the networks that have it


@dataclass(frozen=True, eq=False)
class Stack:
    """The weights of K networks in one flat vector, and views of it: (K, D_in, D_out) and (K, 1, D_out) by layer."""

    flat: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]

    @property
    def parts(self) -> list[Tensor]:
        """The weights and biases of all layers."""
        return [part for layer in self.layers for part in layer]

    @classmethod
    def zeros(cls, sizes: tuple[int, ...], count: int) -> Stack:
        """Return K networks whose weights are all zero."""
        shapes = [shape for a, b in pairwise(sizes) for shape in ((count, a, b), (count, 1, b))]
        lengths = [math.prod(shape) for shape in shapes]
        flat = torch.zeros(sum(lengths))
        views = [part.view(shape) for part, shape in zip(flat.split(lengths), shapes, strict=True)]
        return cls(flat, tuple(zip(views[::2], views[1::2], strict=True)))

    @classmethod
    def of(cls, networks: list[nn.Sequential]) -> Stack:
        """Return a stack with the weights of networks of the same sizes."""
        linear = [[layer for layer in net if isinstance(layer, nn.Linear)] for net in networks]
        sizes = (linear[0][0].in_features, *(layer.out_features for layer in linear[0]))
        stack = cls.zeros(sizes, len(networks))
        with torch.no_grad():
            for k, layers in enumerate(linear):
                for layer, (weight, bias) in zip(layers, stack.layers, strict=True):
                    weight[k].copy_(layer.weight.T)
                    bias[k, 0].copy_(layer.bias)
        return stack

    def write(self, networks: list[nn.Sequential]) -> None:
        """Copy the weights into the networks."""
        with torch.no_grad():
            for k, net in enumerate(networks):
                linear = [layer for layer in net if isinstance(layer, nn.Linear)]
                for layer, (weight, bias) in zip(linear, self.layers, strict=True):
                    layer.weight.copy_(weight[k].T)
                    layer.bias.copy_(bias[k, 0])


def loss_slope(stack: Stack, slope: Stack, x: Tensor, y: Tensor, masks: tuple[Tensor | None, ...]) -> Tensor:
    """Write the gradient of half the mean squared error of every network into ``slope``.

    Written out, because automatic differentiation takes twice as long for networks of this size.

    Args:
        stack: The networks.
        slope: A stack of the same sizes.
        x: Inputs (K, B, D).
        y: Targets (K, B, 1).
        masks: What every hidden layer is multiplied by, (K, B, units), or None.

    Returns:
        The mean squared errors, (K, 1, 1).
    """
    inputs, activations = [x], list[Tensor]()
    for (weight, bias), mask in zip(stack.layers[:-1], masks, strict=True):
        activations.append(torch.baddbmm(bias, inputs[-1], weight).tanh_())
        inputs.append(activations[-1] if mask is None else activations[-1] * mask)
    weight, bias = stack.layers[-1]
    error = torch.baddbmm(bias, inputs[-1], weight).sub_(y)
    mean_square = error.square().mean(1, keepdim=True)
    error.div_(y.shape[1])
    for i in range(len(stack.layers) - 1, -1, -1):
        torch.bmm(inputs[i].mT, error, out=slope.layers[i][0])
        torch.sum(error, 1, keepdim=True, out=slope.layers[i][1])
        if i:
            error = error @ stack.layers[i][0].mT
            mask = masks[i - 1]
            error = error if mask is None else error.mul_(mask)
            error.mul_(1 - activations[i - 1].square())
    return mean_square


def trained_stack(
    x: Tensor, y: Tensor, settings: StackedTraining, seed: int, plain: int, dropping: int = 0
) -> list[nn.Sequential]:
    """Train networks on the same rows, each from its own initial weights and with its own order of the rows.

    Args:
        x: Standardised inputs (N, D).
        y: Standardised targets (N, 1).
        settings: Sizes and training.
        seed: Network k starts from the seed ``1000 * seed + k``.
        plain: The number of networks without dropout.
        dropping: The number of networks with dropout, which follow the others.

    Returns:
        The networks in float64, in evaluation mode.
    """
    rates = [0.0] * plain + [settings.dropout] * dropping
    recipes = [TrainingSettings(hidden=settings.hidden, dropout=rate) for rate in rates]
    networks = [mlp(x.shape[1], 1, recipe, 1000 * seed + k) for k, recipe in enumerate(recipes)]
    stack = Stack.of(networks)
    _descend(stack, x.float(), y.float(), settings, seed, dropping)
    stack.write(networks)
    return [net.double().eval() for net in networks]


def _descend(stack: Stack, x: Tensor, y: Tensor, settings: StackedTraining, seed: int, dropping: int) -> None:
    """Run Adam on all networks of the stack, in place."""
    count, generator = len(stack.layers[0][0]), torch.Generator().manual_seed(seed)
    slope = Stack.zeros((x.shape[1], *settings.hidden, 1), count)
    noise = torch.empty(0)
    first, second = torch.zeros_like(stack.flat), torch.zeros_like(stack.flat)
    for step, rows in enumerate(_batches(len(x), count, settings, generator)):
        masks = tuple(_mask((count, rows.shape[1], h), dropping, settings, generator) for h in settings.hidden)
        mean_square = loss_slope(stack, slope, x[rows], y[rows], masks)
        noise = mean_square if step == 0 else noise.lerp_(mean_square, NEW)
        for part, weights in zip(slope.parts, stack.parts, strict=True):
            part.addcmul_(weights, noise, value=settings.precision / len(x))
        gradient = slope.flat
        first.lerp_(gradient, 1 - MOMENTUM)
        second.mul_(SQUARES).addcmul_(gradient, gradient, value=1 - SQUARES)
        rate = settings.learning_rate * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        size = second.sqrt().mul_((1 - SQUARES ** (step + 1)) ** -0.5).add_(TINY)
        stack.flat.addcdiv_(first, size, value=-rate / (1 - MOMENTUM ** (step + 1)))


def _batches(rows: int, count: int, settings: StackedTraining, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the rows of a batch for every network, (K, B), for every step; an incomplete batch is left out."""
    size = min(settings.batch_size, rows)
    passed = 0
    while passed < settings.steps:
        order = torch.stack([torch.randperm(rows, generator=generator) for _ in range(count)])
        for start in range(0, rows - size + 1, size):
            if passed == settings.steps:
                return
            yield order[:, start : start + size]
            passed += 1


def _mask(
    shape: tuple[int, int, int], dropping: int, settings: StackedTraining, generator: torch.Generator
) -> Tensor | None:
    """Return ones, with zeros and larger numbers for the last networks, which drop units; None if none does."""
    if not dropping:
        return None
    mask, keep = torch.ones(shape), 1 - settings.dropout
    mask[-dropping:] = (torch.rand(dropping, *shape[1:], generator=generator) < keep) / keep
    return mask
