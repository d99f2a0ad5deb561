"""Reads an autograd graph: where each parameter is used, and which rows belong to which sample.

The network runs as it is. Afterwards the graph that autograd built is walked from the output: a product whose
weight edge leads to a parameter is one use of that parameter, and what the node saved is its input. Nothing is
hooked, patched or registered, so functional code, attention and tied weights are read like any layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Node = Any  # torch.autograd.graph.Node
Shape = tuple[int, ...]

# Keep the logical order of entries.
RESHAPES = frozenset(
    name + "Backward" + digit
    for name, digit in (
        ("View", "0"), ("UnsafeView", "0"), ("ReshapeAlias", "0"), ("Squeeze", "0"), ("Squeeze", "1"), ("Squeeze", "2"),
        ("Unsqueeze", "0"), ("Alias", "0"), ("Clone", "0"), ("ToCopy", "0"),
    )
)  # fmt: skip
# A parameter may pass through these on its way to the product: they only move entries about.
MOVES = RESHAPES | {
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "SplitBackward0", "SplitWithSizesBackward0",
    "UnsafeSplitBackward0", "SliceBackward0", "SelectBackward0", "UnbindBackward0",
}  # fmt: skip
# Act on every entry by itself, or on every row of the first dimension by itself.
ROWWISE = frozenset(
    name + "Backward0"
    for name in (
        "Relu", "Tanh", "Sigmoid", "Gelu", "Silu", "Elu", "Celu", "Selu", "LeakyRelu", "Hardtanh", "Softplus", "Exp",
        "Expm1", "Log", "Log1P", "Sqrt", "Rsqrt", "Neg", "Abs", "Sin", "Cos", "Erf", "Threshold", "Mish",
        "Hardswish", "Hardsigmoid", "Clamp", "ClampMin", "ClampMax", "Reciprocal", "LogSigmoid", "Pow", "Add", "Sub",
        "Mul", "Div", "NativeDropout", "Where", "MaskedFill", "Addmm", "Mm", "Linear", "Convolution",
        "MkldnnConvolution", "CudnnConvolution", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "AvgPool2D",
        "AvgPool3D", "AdaptiveAvgPool2D", "AdaptiveMaxPool2D", "MkldnnMaxPool2D", "NativeGroupNorm",
        "NativeBatchNorm", "CudnnBatchNorm", "ConstantPadNd", "ReflectionPad2D", "ReplicationPad2D",
        "UpsampleNearest2D", "UpsampleBilinear2D", "PixelShuffle", "Embedding", "Expand",
    )
) | {
    "AddBackward1", "MulBackward1", "SubBackward1", "DivBackward1", "PowBackward1", "RsubBackward1", "ClampBackward1",
}  # fmt: skip
# Of these only one operand carries the rows.
DATA_EDGE = {
    "MmBackward0": 0, "AddmmBackward0": 1, "LinearBackward0": 0, "ConvolutionBackward0": 0,
    "NativeGroupNormBackward0": 0, "NativeBatchNormBackward0": 0, "CudnnBatchNormBackward0": 0,
}  # fmt: skip
# Work along stated dimensions: row-wise unless the first is among them.
ALONG = {
    name + "Backward" + digit: field
    for name, digit, field in (
        ("Softmax", "0", "dim"), ("LogSoftmax", "0", "dim"), ("Mean", "1", "dim"), ("Sum", "1", "dim"),
        ("Amax", "0", "dim"), ("Max", "0", "dim"), ("Cumsum", "0", "dim"), ("Slice", "0", "dim"),
        ("Select", "0", "dim"), ("Cat", "0", "dim"), ("Stack", "0", "dim"), ("Glu", "0", "dim"),
        ("Transpose", "0", "dim0 dim1"), ("Transpose", "1", "dim0 dim1"), ("Flip", "0", "dims"),
        ("Split", "0", "dim"), ("SplitWithSizes", "0", "dim"), ("UnsafeSplit", "0", "dim"), ("Unbind", "0", "dim"),
    )
}  # fmt: skip
# Move rows about in a way that the shapes decide and the numbers do not: one look per shape is enough.
STATIC = frozenset(
    [
        "TBackward0",
        "PermuteBackward0",
        "BmmBackward0",
        "BaddbmmBackward0",
        "RepeatBackward0",
        "ScaledDotProductFlashAttentionForCpuBackward0",
        "ScaledDotProductFlashAttentionBackward0",
        "ScaledDotProductEfficientAttentionBackward0",
        "ScaledDotProductFusedAttentionOverrideableBackward0",
        "ScaledDotProductCudnnAttentionBackward0",
        "NativeLayerNormBackward0",
        "FusedRmsNormBackward0",
        "ThnnFusedLstmCellBackward0",
        "ThnnFusedGruCellBackward0",
    ]
)


@dataclass(frozen=True, eq=False)
class Graph:
    """The nodes above an output, consumers before producers, and what is known about each."""

    nodes: tuple[Node, ...]
    consumers: Mapping[Node, int]
    batch_major: Mapping[Node, bool]  # sample b owns the b-th contiguous share of the node's output
    static: bool  # the layout follows from the shapes alone
    signature: tuple[Any, ...]

    def source(self, edge: tuple[Node, int], parameters: Mapping[int, str]) -> tuple[str, tuple[Node, ...]] | None:
        """The parameter at the far end of an edge and the moves on the way, or None."""
        moves = []
        node = edge[0]
        while node is not None and node.name() in MOVES and len(node.next_functions) == 1:
            moves.append(node)
            node = node.next_functions[0][0]
        name = None if node is None else leaf_name(node, parameters)
        return None if name is None else (name, tuple(moves))


def leaf_name(node: Node, parameters: Mapping[int, str]) -> str | None:
    """The name of the parameter that this node accumulates into, if it does."""
    return parameters.get(id(node.variable)) if node.name() == "torch::autograd::AccumulateGrad" else None


def saved(node: Node, name: str) -> Tensor:
    """A tensor that a node kept: detached, or where gradients are recorded (in the inputs) as part of the graph."""
    found: Tensor = getattr(node, name)
    return found if torch.is_grad_enabled() else found.detach()


def output_shape(node: Node, nr: int = 0) -> Shape:
    """The shape of a node's output."""
    return tuple(node._input_metadata[nr].shape)


def read(output: Tensor, batch: int) -> Graph:
    """Walk the graph of ``output`` and follow the samples of its first dimension through it."""
    root: Node = output.grad_fn
    degree: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is None:
                continue
            if child not in degree:
                degree[child] = 0
                stack.append(child)
            degree[child] += 1
    consumers = dict(degree)
    major = dict.fromkeys(degree, True)
    nodes, names, queue = [], [], deque[Node]([root])
    static = True
    while queue:
        node = queue.popleft()
        nodes.append(node)
        name = node.name()
        if name != "torch::autograd::AccumulateGrad":
            shape = output_shape(node)
            names.append((name, shape))
            static = static and (name in RESHAPES or name in ROWWISE or name in ALONG or name in STATIC)
            keep = _row_rule(node, name, shape, batch) if major[node] else None
            for place, (child, nr) in enumerate(node.next_functions):
                if child is None:
                    continue
                if keep is None or not keep(place, child, nr):
                    major[child] = False
                degree[child] -= 1
                if degree[child] == 0:
                    queue.append(child)
    return Graph(tuple(nodes), consumers, major, static, tuple(names))


def _row_rule(node: Node, name: str, shape: Shape, batch: int) -> Callable[[int, Node, int], bool] | None:
    """Which producers of this node stay batch-major, or None when none is known to."""
    if name in RESHAPES:
        return lambda place, child, nr: True
    if not shape or shape[0] % batch:
        return None
    if name in DATA_EDGE:
        return lambda place, child, nr: place == DATA_EDGE[name] and _rows(child, nr) == shape[0]
    if name in ROWWISE:  # an operand with fewer dimensions was broadcast over the batch
        return lambda place, child, nr: _rows(child, nr) == shape[0] and _ndim(child, nr) == len(shape)
    if name in ALONG and 0 not in _dims(node, ALONG[name], len(shape)):
        return lambda place, child, nr: _rows(child, nr) == shape[0]
    if name == "PermuteBackward0" and signed(node._saved_dims[0]) in (0, -len(shape)):
        return lambda place, child, nr: True
    if name == "NativeLayerNormBackward0" and len(node._saved_normalized_shape) < len(shape):
        return lambda place, child, nr: place == 0
    return None


def _rows(child: Node, nr: int) -> int:
    if child.name() == "torch::autograd::AccumulateGrad":
        return -1
    below = output_shape(child, nr)
    return below[0] if below else -1


def _ndim(child: Node, nr: int) -> int:
    return len(output_shape(child, nr))


def _dims(node: Node, fields: str, ndim: int) -> set[int]:
    found: set[int] = set()
    for field in fields.split():
        value = getattr(node, "_saved_" + field)
        for dim in value if isinstance(value, tuple | list) else (value,):
            place = signed(dim)
            # A dimension removed by the node counts from the larger shape, so a negative one is read
            # against both; calling a row-wise node mixed costs a probe, never a wrong number.
            found |= {place} if place >= 0 else {place + ndim, place + ndim + 1}
    return found


def signed(value: int) -> int:
    """Autograd saves a negative dimension as an unsigned number."""
    return value - 2**64 if value >= 2**63 else value
