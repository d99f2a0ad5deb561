"""The forms in which a network uses a parameter, and the Jacobian that follows from each.

A form turns a graph node and the gradient at its output into the Jacobian of the parameter, sample by sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.networks.blocks import BlockJacobian
from lapwing.networks.dense_jacobian import DenseJacobian
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.lookup_jacobian import LookupJacobian

Node = Any  # torch.autograd.graph.Node
Shape = tuple[int, ...]
Pattern = tuple[int, int, int]  # rows run over (outer, sample, inner)
Part = tuple[int, int, int]  # first and last row of the parameter that is used, and how many rows it has
Factor = Callable[[Node], Tensor]


def output_shape(node: Node, number: int = 0) -> Shape:
    """Return the shape of one of a node's outputs."""
    return tuple(node._input_metadata[number].shape)


def saved(node: Node, name: str) -> Tensor:
    """Return a tensor that a node saved: part of the graph where gradients are recorded, otherwise detached."""
    tensor: Tensor = getattr(node, name)
    return tensor if torch.is_grad_enabled() else tensor.detach()


class Form(Protocol):
    """One way to use a parameter."""

    @property
    def kind(self) -> str:
        """The kind of block that it asks for: "rows", "columns", or "dense" where Jacobians are kept whole."""
        ...

    @property
    def takes_bias(self) -> bool:
        """Whether a bias that is added right after it may join its block."""
        ...

    def n_rows(self, shape: Shape) -> int:
        """Return how many rows a node with outputs of this shape has."""
        ...

    def patch_size(self, shape: Shape, weight: Shape, groups: int) -> int:
        """Return the size of the unfolded input for outputs and a weight of these shapes; 0 if nothing is unfolded."""
        ...

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian:
        """Return the Jacobian for gradients g (K, *output) at the node; ``bias`` adds the column of a bias."""
        ...


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a parameter: the node where it happens and the form it takes."""

    node: Node
    name: str
    form: Form
    bias: str | None = None  # the parameter that is added at this very node, to the same rows
    groups: int = 1

    @property
    def n_rows(self) -> int:
        """The number of rows at the node."""
        return self.form.n_rows(output_shape(self.node))


def per_sample(t: Tensor, dim: int, pattern: Pattern) -> Tensor:
    """Split a dimension of rows into (sample, position) under the pattern."""
    outer, _, inner = pattern
    if outer == 1:
        return t.unflatten(dim, (pattern[1], inner))
    return t.unflatten(dim, pattern).movedim(dim + 1, dim).flatten(dim + 1, dim + 2)


@dataclass(frozen=True)
class Matmul:
    """The product rows @ W.T (kind "rows") or rows @ W (kind "columns"); ``part`` where only some outputs are used."""

    kind: str
    saved: str  # where the node saved the rows
    part: Part | None = None

    @property
    def takes_bias(self) -> bool:
        return self.part is None

    def n_rows(self, shape: Shape) -> int:
        return shape[0]

    def patch_size(self, shape: Shape, weight: Shape, groups: int) -> int:
        return 0

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian:
        a = per_sample(saved(node, self.saved), 0, pattern)
        g = per_sample(g, 1, pattern)
        if self.part is not None:
            first, last, total = self.part
            g = torch.nn.functional.pad(g, (first, total - last))
        return LinearJacobian(with_ones(a, bias)[None], g[None])


@dataclass(frozen=True)
class Convolution:
    """A convolution: positions are output pixels, inputs are the patches below them."""

    kind: str = "rows"
    takes_bias: bool = False

    def n_rows(self, shape: Shape) -> int:
        return shape[0]

    def patch_size(self, shape: Shape, weight: Shape, groups: int) -> int:
        return math.prod(shape) // shape[1] * math.prod(weight[1:]) * groups

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian:
        x, weight, groups = saved(node, "_saved_input"), node._saved_weight.detach(), node._saved_groups
        patches = windows(x, weight.shape[2:], node._saved_stride, node._saved_padding, node._saved_dilation)
        images, spatial = x.shape[0], g.shape[3:]
        count, dims = math.prod(spatial), len(spatial)
        # Inputs lie in memory as (G, Cin/G * k, N, T): one copy along rows of pixels, the bias's ones included, and
        # a Gram matrix over all positions needs no further one.
        kernel = tuple(weight.shape[2:])
        width = weight[0].numel()
        a = x.new_empty(groups, width + bias, images, count)
        patches = patches.unflatten(1, (groups, -1)).permute(
            1, 2, *range(3 + dims, 3 + 2 * dims), 0, *range(3, 3 + dims)
        )
        a[:, :width].view(groups, weight.shape[1], *kernel, images, *spatial).copy_(patches)
        if bias:
            a[:, width] = 1
        g = g.reshape(g.shape[0], images, groups, -1, count).permute(2, 0, 1, 4, 3)
        return LinearJacobian(_merge(a.permute(0, 2, 3, 1), 1, pattern), _merge(g, 2, pattern))


@dataclass(frozen=True)
class TransposedConvolution:
    """A transposed convolution: positions are input pixels, outputs are the patches above them."""

    kind: str = "columns"
    takes_bias: bool = False

    def n_rows(self, shape: Shape) -> int:
        return shape[0]

    def patch_size(self, shape: Shape, weight: Shape, groups: int) -> int:
        return 0

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian:
        x, weight, groups = saved(node, "_saved_input"), node._saved_weight.detach(), node._saved_groups
        images, spatial = x.shape[0], x.shape[2:]
        count, dims = math.prod(spatial), len(spatial)
        seeds = g.shape[0]
        above = windows(
            g.flatten(0, 1), weight.shape[2:], node._saved_stride, node._saved_padding, node._saved_dilation
        )
        for dim, extent in enumerate(spatial):  # output_padding may add windows beyond the input
            above = above.narrow(2 + dim, 0, extent)
        above = above.unflatten(0, (seeds, images)).unflatten(2, (groups, -1))
        above = above.permute(2, 0, 1, *range(4, 4 + dims), 3, *range(4 + dims, 4 + 2 * dims))
        a = x.reshape(images, groups, -1, count).permute(1, 0, 3, 2)
        return LinearJacobian(
            _merge(a, 1, pattern), _merge(above.reshape(groups, seeds, images, count, -1), 2, pattern)
        )


@dataclass(frozen=True)
class Lookup:
    """An embedding: positions pick rows of a table."""

    table: int
    kind: str = "columns"
    takes_bias: bool = False

    def n_rows(self, shape: Shape) -> int:
        return math.prod(shape[:-1])

    def patch_size(self, shape: Shape, weight: Shape, groups: int) -> int:
        return 0

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian:
        indices = node._saved_indices.reshape(-1)
        g = per_sample(g.reshape(g.shape[0], len(indices), -1), 1, pattern)
        rows = per_sample(indices, 0, pattern)
        real = rows != node._saved_padding_idx  # autograd gives the padding row no gradient
        return LookupJacobian.build(rows, g, real, self.table)


@dataclass(frozen=True, eq=False)
class Elementwise:
    """A parameter added to every row or multiplied with every row: biases and scales of norms.

    ``factor`` reads from the node what the parameter is multiplied with; None for a sum. ``channel`` says that the
    parameter lies along dimension 1 and not along the trailing dimensions.
    """

    shape: tuple[int, ...]
    channel: bool = False
    factor: Factor | None = None
    part: Part | None = None
    kind: str = "dense"
    takes_bias: bool = False

    def n_rows(self, shape: Shape) -> int:
        return shape[0] if self.channel else math.prod(shape[: len(shape) - len(self.shape)])

    def patch_size(self, shape: Shape, weight: Shape, groups: int) -> int:
        return 0

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian:
        if self.factor is not None:
            factor = self.factor(node)
            g = g * (factor if torch.is_grad_enabled() else factor.detach())
        if self.channel:
            g = g.flatten(3).sum(-1) if g.ndim > 3 else g
            extents: tuple[int, ...] = (self.shape[0],)
        else:
            extents = tuple(g.shape[g.ndim - len(self.shape) :])
        total = per_sample(g.reshape(g.shape[0], -1, *extents), 1, pattern).sum(2)  # (K, B, *extents)
        broadcast = [i + 2 for i, (have, want) in enumerate(zip(extents, self.shape, strict=True)) if have != want]
        if broadcast and not self.part:
            total = total.sum(broadcast)
        flat = total.flatten(2) if total.ndim > 2 else total.unsqueeze(-1)
        if self.part is not None:
            first, last, size = self.part
            flat = torch.nn.functional.pad(flat, (first, size - last))
        return DenseJacobian(flat.transpose(0, 1))


def windows(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """Return sliding windows (N, C, *out, *kernel) of x (N, C, *spatial), as a view of the padded input."""
    if any(padding):
        x = torch.nn.functional.pad(x, [p for extent in reversed(padding) for p in (extent, extent)])
    elif not x.is_contiguous():
        x = x.contiguous()
    spatial, steps = x.shape[2:], x.stride()[2:]
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(spatial, kernel, stride, dilation, strict=True)]
    return x.as_strided(
        (*x.shape[:2], *out, *kernel),
        (
            *x.stride()[:2],
            *(step * s for step, s in zip(steps, stride, strict=True)),
            *(step * d for step, d in zip(steps, dilation, strict=True)),
        ),
        x.storage_offset(),
    )


def with_ones(a: Tensor, bias: bool) -> Tensor:
    """Return the input with the column of ones that carries a bias, if there is one."""
    return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1) if bias else a


def _merge(t: Tensor, dim: int, pattern: Pattern) -> Tensor:
    """Reshape (..., images, positions, d) to (..., sample, images of the sample x positions, d)."""
    if pattern[0] == pattern[2] == 1:
        return t
    return per_sample(t, dim, pattern).flatten(dim + 1, dim + 2)
