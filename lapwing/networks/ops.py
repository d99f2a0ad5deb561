"""The facts about autograd operations: one entry for each that Lapwing knows.

Everything that walks a graph asks ``operation(node)``. An operation without an entry is not an error: its gradient is
left to autograd, a probe decides which rows belong to which sample, and parameters that it uses go to the fallback.
``rules.py`` has the functions that say how parameters are used, ``pull.py`` those that pull gradients back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lapwing.networks import pull, rules
from lapwing.networks.pull import Expanded, Gradient, JointPull, New, Slope, View
from lapwing.networks.rules import LEAF, Node, NormStatistics, Shape, UseRule, as_signed, output_shape

__all__ = ["Expanded", "New", "Operation", "Slope", "View", "along", "entries", "operation", "register", "row_wise"]


Keeps = Callable[[int, Node, int], bool]  # (operand, its node, which output of that node) -> rows are in the same order
Rows = Callable[[Node, Shape], Keeps | None]  # (node, output shape) -> which operands keep the order of the rows


@dataclass(frozen=True)
class Operation:
    """The facts about one autograd operation. Every field but the name is optional.

    Args:
        name: the name of its node, such as ``"TanhBackward0"``.
        reshapes: it keeps all entries in their order; only the shape or the dtype changes.
        moves: it only moves entries, so a parameter that passes through it is still that parameter.
        transposes: it swaps the two dimensions of a matrix.
        casts: it changes the dtype alone.
        adds: it adds its two operands.
        expands: it repeats its operand along further dimensions, without a copy.
        looks_up: it picks rows of a table.
        data_operand: the only operand whose rows belong to samples (the input of a product with a weight).
        rows: which operands have their rows in the order of the output's rows, such as ``row_wise``.
        gradient: how the gradients of K seeds are pulled back: ``Slope``, ``New``, ``View`` or ``Expanded``.
        joint_gradient: the same for an operation with several outputs, or whose operands share work.
        uses: how it uses the parameters among its operands.
        norm: the statistics of a normalisation.
        seed_by_seed: whether autograd must take one seed at a time here, given the node and whether it is on a CPU.
        not_derivative: why its gradient is not its derivative, or "".
        forward_differs: whether forward mode disagrees with the gradient.
    """

    name: str
    reshapes: bool = False
    moves: bool = False
    transposes: bool = False
    casts: bool = False
    adds: bool = False
    expands: bool = False
    looks_up: bool = False
    data_operand: int | None = None
    rows: Rows | None = None
    gradient: Gradient | None = None
    joint_gradient: JointPull | None = None
    uses: UseRule | None = None
    norm: Callable[[Node], NormStatistics | None] = lambda node: None
    seed_by_seed: Callable[[Node, bool], bool] = lambda node, on_cpu: False
    not_derivative: Callable[[Node], str] = lambda node: ""
    forward_differs: Callable[[Node], bool] = lambda node: False

    @cached_property
    def carries_parameter(self) -> bool:
        """Whether a parameter may pass through it and still be that parameter."""
        return self.reshapes or self.moves

    @cached_property
    def has_gradient(self) -> bool:
        """Whether the gradients of several seeds can be pulled back through it together."""
        return self.gradient is not None or self.joint_gradient is not None

    @cached_property
    def follows_shapes(self) -> bool:
        """Whether shapes alone decide where rows go, so that one probe for each shape is enough."""
        return self.reshapes or self.data_operand is not None or self.rows is not None

    def keeps(self, node: Node, shape: Shape, batch: int) -> Keeps | None:
        """Return which operands are batch-major if the output, of ``shape``, is; None if none is known to be."""
        if self.reshapes:
            return lambda operand, child, number: True
        if not shape or shape[0] % batch:
            return None
        if self.data_operand is not None:
            return lambda operand, child, number: operand == self.data_operand and n_rows(child, number) == shape[0]
        return None if self.rows is None else self.rows(node, shape)


def n_rows(node: Node, number: int) -> int:
    """Return the first dimension of a node's output, or -1 for a parameter or a single number."""
    if node.name() == LEAF:
        return -1
    shape = output_shape(node, number)
    return shape[0] if shape else -1


_UNKNOWN = Operation("unknown")
_TABLE: dict[str, Operation] = {}


def operation(node: Node) -> Operation:
    """Return the facts about a node's operation; without an entry, an operation about which nothing is known."""
    return _TABLE.get(node.name(), _UNKNOWN)


def register(*operations: Operation) -> None:
    """Add operations to the table; an entry of the same name is replaced.

    Args:
        operations: the facts about each operation.

    Names are those of nodes in the graph, ``output.grad_fn.name()``. Without an entry a network gives the same numbers,
    only slower. An entry is not checked: compare it with autograd.

    >>> import torch
    >>> from lapwing.networks.ops import Operation, Slope, operation, register, row_wise
    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> torch.sinh(x).grad_fn.name()
    'SinhBackward0'
    >>> register(Operation("SinhBackward0", rows=row_wise, gradient=Slope(lambda node: node._saved_self.cosh())))
    >>> operation(torch.sinh(x).grad_fn).rows is row_wise
    True
    """
    _TABLE.update({entry.name: entry for entry in operations})


def entries() -> Mapping[str, Operation]:
    """Return all entries by name."""
    return dict(_TABLE)


# How the rows of samples pass through an operation. A node's output is batch-major where sample b owns the b-th
# contiguous share of its rows. Each rule takes a node with a batch-major output and says which of its operands are
# batch-major too; None means that none is known to be, and that a probe must decide. A rule that says less than is true
# costs a probe and never gives a wrong number.


def row_wise(node: Node, shape: Shape) -> Keeps | None:
    """Keep operands with as many rows and dimensions: each entry, or each row, is handled without the others.

    An operand with fewer dimensions was broadcast over the batch.
    """
    return lambda operand, child, number: (
        n_rows(child, number) == shape[0] and len(output_shape(child, number)) == len(shape)
    )


def along(*fields: str) -> Rows:
    """Return the rule of an operation that works along the dimensions that a node saved in these fields."""

    def rule(node: Node, shape: Shape) -> Keeps | None:
        if 0 in _dimensions(node, fields, len(shape)):
            return None
        return lambda operand, child, number: n_rows(child, number) == shape[0]

    return rule


def along_permutation(node: Node, shape: Shape) -> Keeps | None:
    """Keep the operand if the first dimension stays the first."""
    return (lambda operand, child, number: True) if as_signed(node._saved_dims[0]) in (0, -len(shape)) else None


def along_layer_norm(node: Node, shape: Shape) -> Keeps | None:
    """Keep the data of a LayerNorm that does not normalise over the first dimension."""
    data_alone = len(node._saved_normalized_shape) < len(shape)
    return (lambda operand, child, number: operand == 0) if data_alone else None


def by_shapes(node: Node, shape: Shape) -> Keeps | None:
    """Keep nothing: rows are moved, but in a way that depends on shapes and not on numbers."""
    return None


def _dimensions(node: Node, fields: tuple[str, ...], ndim: int) -> set[int]:
    dimensions: set[int] = set()
    for field in fields:
        value = getattr(node, "_saved_" + field)
        for unsigned in value if isinstance(value, tuple | list) else (value,):
            dim = as_signed(unsigned)
            # A dimension that the node removes counts from the larger shape, so a negative one is read against both.
            dimensions |= {dim} if dim >= 0 else {dim + ndim, dim + ndim + 1}
    return dimensions


def _alike(names: str, ending: str = "Backward0", **facts: Any) -> Iterator[Operation]:
    """Yield an entry with the same facts for each of the names, without their common ending."""
    return (Operation(name + ending, **facts) for name in names.split())


register(
    # Operations that keep all entries in their order.
    *_alike("View UnsafeView ReshapeAlias", reshapes=True, gradient=View(pull.view)),
    *_alike("Alias Clone", reshapes=True, gradient=View(lambda node, grad, operand: grad)),
    Operation("SqueezeBackward0", reshapes=True),
    Operation("SqueezeBackward1", reshapes=True, gradient=View(pull.view)),
    Operation("SqueezeBackward2", reshapes=True),
    Operation("UnsqueezeBackward0", reshapes=True, gradient=View(pull.unsqueeze)),
    Operation("ToCopyBackward0", reshapes=True, casts=True),
    # Operations that move entries.
    Operation("TBackward0", moves=True, transposes=True, rows=by_shapes),
    Operation("TransposeBackward0", moves=True, rows=along("dim0", "dim1"), gradient=View(pull.transpose)),
    Operation("TransposeBackward1", rows=along("dim0", "dim1")),
    Operation("PermuteBackward0", moves=True, rows=along_permutation, gradient=View(pull.permute)),
    *_alike("Split SplitWithSizes UnsafeSplit", moves=True, rows=along("dim"), joint_gradient=pull.split),
    Operation("UnbindBackward0", moves=True, rows=along("dim"), joint_gradient=pull.unbind),
    Operation("SliceBackward0", moves=True, rows=along("dim"), gradient=View(pull.part)),
    Operation("SelectBackward0", moves=True, rows=along("dim"), gradient=New(pull.select)),
    Operation("CatBackward0", rows=along("dim"), gradient=View(pull.cat)),
    Operation("StackBackward0", rows=along("dim"), gradient=View(pull.stack)),
    Operation("FlipBackward0", rows=along("dims")),
    Operation("RepeatBackward0", rows=by_shapes),
    Operation("ExpandBackward0", expands=True, rows=row_wise, uses=rules.use_expand),
    *_alike("ConstantPadNd ReflectionPad2D ReplicationPad2D", rows=row_wise),
    Operation("UpsampleNearest2DBackward0", rows=row_wise, gradient=New(pull.upsample_nearest)),
    *_alike("PixelShuffle UpsampleBilinear2D", rows=row_wise),
    # Products with a weight.
    Operation("MmBackward0", data_operand=0, gradient=New(pull.pull_mm, 0), uses=rules.use_mm),
    Operation("AddmmBackward0", data_operand=1, gradient=New(pull.pull_addmm, 1), uses=rules.use_addmm),
    Operation("LinearBackward0", data_operand=0),
    Operation(
        "ConvolutionBackward0",
        data_operand=0,
        gradient=New(pull.pull_convolution, 0),
        uses=rules.use_convolution,
        seed_by_seed=lambda node, on_cpu: on_cpu,  # batched convolutions are slow on a CPU
    ),
    *_alike("MkldnnConvolution CudnnConvolution", rows=row_wise),
    Operation(
        "EmbeddingBackward0",
        looks_up=True,
        rows=row_wise,
        uses=rules.use_embedding,
        seed_by_seed=lambda node, on_cpu: bool(node._saved_sparse),  # autograd cannot batch a sparse gradient
        not_derivative=rules.embedding_not_derivative,
        forward_differs=rules.embedding_forward_differs,
    ),
    # Reentrant checkpointing that does not go through torch.utils.checkpoint.checkpoint.
    Operation("CheckpointFunctionBackward", not_derivative=rules.checkpoint_hides),
    Operation("BmmBackward0", rows=by_shapes, joint_gradient=pull.batched_product),
    Operation("BaddbmmBackward0", rows=by_shapes),
    *_alike("ThnnFusedLstmCell ThnnFusedGruCell", rows=by_shapes, uses=rules.use_fused_cell),
    # Attention in one kernel: autograd takes one seed at a time.
    *_alike(
        "ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention "
        "ScaledDotProductFusedAttentionOverrideable ScaledDotProductCudnnAttention",
        rows=by_shapes,
        joint_gradient=pull.attention,
        seed_by_seed=lambda node, on_cpu: True,
    ),
    # Normalisations.
    *_alike(
        "NativeBatchNorm CudnnBatchNorm",
        data_operand=0,
        gradient=New(pull.pull_batch_norm, 0),
        uses=rules.use_batch_norm,
        norm=rules.batch_norm_statistics,
    ),
    Operation(
        "NativeGroupNormBackward0",
        data_operand=0,
        uses=rules.scale_and_shift(rules.group_normalised),
        norm=rules.own_statistics,
    ),
    Operation(
        "NativeLayerNormBackward0",
        rows=along_layer_norm,
        gradient=New(pull.pull_layer_norm, 0),
        uses=rules.scale_and_shift(rules.layer_normalised, channel=False),
        norm=rules.own_statistics,
    ),
    Operation("FusedRmsNormBackward0", rows=by_shapes),
    # Activations with a slope.
    Operation("ReluBackward0", rows=row_wise, gradient=Slope(lambda node: node._saved_result > 0)),
    Operation("TanhBackward0", rows=row_wise, gradient=Slope(lambda node: 1 - node._saved_result.square())),
    Operation("SigmoidBackward0", rows=row_wise, gradient=Slope(pull.sigmoid)),
    Operation("GeluBackward0", rows=row_wise, gradient=Slope(pull.gelu)),
    Operation("SiluBackward0", rows=row_wise, gradient=Slope(pull.silu)),
    Operation("LeakyReluBackward0", rows=row_wise, gradient=Slope(pull.leaky_relu)),
    # Sums, products and other functions of each entry or of each row.
    Operation("AddBackward0", adds=True, rows=row_wise, gradient=View(pull.pull_add), uses=rules.use_add),
    Operation("MulBackward0", rows=row_wise, gradient=New(pull.pull_mul), uses=rules.use_mul),
    *_alike("Elu Celu Selu Hardtanh Softplus Exp Expm1 Log Log1P Sqrt Rsqrt Neg Abs Sin Cos Erf", rows=row_wise),
    *_alike("Threshold Mish Hardswish Hardsigmoid Clamp ClampMin ClampMax Reciprocal LogSigmoid", rows=row_wise),
    Operation("MaskedFillBackward0", rows=row_wise, gradient=New(pull.masked_fill, 0)),
    Operation("MulBackward1", rows=row_wise, gradient=New(pull.pull_mul, 0)),
    *_alike("Pow Sub Div NativeDropout Where", rows=row_wise),
    *_alike("Add Sub Div Pow Rsub Clamp", "Backward1", rows=row_wise),
    # Pooling, sums and other reductions.
    Operation("MaxPool2DWithIndicesBackward0", rows=row_wise, gradient=New(pull.max_pool)),
    Operation("AdaptiveAvgPool2DBackward0", rows=row_wise, gradient=New(pull.adaptive_pool)),
    Operation("AvgPool2DBackward0", rows=row_wise, gradient=New(pull.average_pool)),
    *_alike("MaxPool3DWithIndices AvgPool3D AdaptiveMaxPool2D MkldnnMaxPool2D", rows=row_wise),
    Operation("MeanBackward1", rows=along("dim"), gradient=New(pull.mean)),
    Operation("SumBackward1", rows=along("dim"), gradient=Expanded(pull.total)),
    *_alike("Softmax SafeSoftmax", rows=along("dim"), gradient=New(pull.softmax)),
    *_alike("LogSoftmax Amax Max Cumsum Glu", rows=along("dim")),
)
