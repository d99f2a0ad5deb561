"""Autograd operations: one entry for each that Lapwing knows.

``uses.py`` defines an entry: how rows of samples may pass through an operation and how gradients may be pulled back.
``rules.py`` and ``pull.py`` have the functions that the entries name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lapwing.networks import pull, rules
from lapwing.networks.uses import (
    Expanded,
    New,
    Operation,
    Slope,
    View,
    along,
    entries,
    normalised_rows,
    operation,
    permuted,
    register,
    reordered,
    row_wise,
)

__all__ = [
    "Expanded", "New", "Operation", "Slope", "View", "along", "entries", "operation", "register",
    "row_wise",
]  # fmt: skip


def _alike(names: str, ending: str = "Backward0", **facts: Any) -> Iterator[Operation]:
    """Yield an entry with the same facts for each of the names, without their common ending."""
    return (Operation(name + ending, **facts) for name in names.split())


register(
    # Operations that keep all entries in their order.
    *_alike("View UnsafeView ReshapeAlias", reshapes=True, gradient=View(rules.view)),
    *_alike("Alias Clone", reshapes=True, gradient=View(lambda node, grad, operand: grad)),
    Operation("SqueezeBackward0", reshapes=True),
    Operation("SqueezeBackward1", reshapes=True, gradient=View(rules.view)),
    Operation("SqueezeBackward2", reshapes=True),
    Operation("UnsqueezeBackward0", reshapes=True, gradient=View(rules.unsqueeze)),
    Operation("ToCopyBackward0", reshapes=True, casts=True),
    # Operations that move entries.
    Operation("TBackward0", moves=True, transposes=True, rows=reordered),
    Operation("TransposeBackward0", moves=True, rows=along("dim0", "dim1"), gradient=View(rules.transpose)),
    Operation("TransposeBackward1", rows=along("dim0", "dim1")),
    Operation("PermuteBackward0", moves=True, rows=permuted, gradient=View(rules.permute)),
    *_alike("Split SplitWithSizes UnsafeSplit", moves=True, rows=along("dim"), joint_gradient=pull.split),
    Operation("UnbindBackward0", moves=True, rows=along("dim"), joint_gradient=pull.unbind),
    Operation("SliceBackward0", moves=True, rows=along("dim"), gradient=View(pull.part)),
    Operation("SelectBackward0", moves=True, rows=along("dim"), gradient=New(pull.select)),
    Operation("CatBackward0", rows=along("dim"), gradient=View(pull.cat)),
    Operation("StackBackward0", rows=along("dim"), gradient=View(pull.stack)),
    Operation("FlipBackward0", rows=along("dims")),
    Operation("RepeatBackward0", rows=reordered),
    Operation("ExpandBackward0", expands=True, rows=row_wise, uses=rules.use_expand),
    *_alike("ConstantPadNd ReflectionPad2D ReplicationPad2D", rows=row_wise),
    Operation("UpsampleNearest2DBackward0", rows=row_wise, gradient=New(pull.upsample_nearest)),
    *_alike("PixelShuffle UpsampleBilinear2D", rows=row_wise),
    # Products with a weight.
    Operation("MmBackward0", data_operand=0, gradient=New(rules.pull_mm), uses=rules.use_mm),
    Operation("AddmmBackward0", data_operand=1, gradient=New(rules.pull_addmm), uses=rules.use_addmm),
    Operation("LinearBackward0", data_operand=0),
    Operation(
        "ConvolutionBackward0",
        data_operand=0,
        gradient=New(rules.pull_convolution),
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
    Operation("BmmBackward0", rows=reordered, joint_gradient=pull.batched_product),
    Operation("BaddbmmBackward0", rows=reordered),
    *_alike("ThnnFusedLstmCell ThnnFusedGruCell", rows=reordered, uses=rules.use_fused_cell),
    # Attention in one kernel, of which autograd takes one seed at a time.
    *_alike(
        "ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention "
        "ScaledDotProductFusedAttentionOverrideable ScaledDotProductCudnnAttention",
        rows=reordered,
        joint_gradient=pull.attention,
        seed_by_seed=lambda node, on_cpu: True,
    ),
    # Normalisations.
    *_alike(
        "NativeBatchNorm CudnnBatchNorm",
        data_operand=0,
        gradient=New(pull.pull_batch_norm),
        uses=pull.use_batch_norm,
        norm=pull.batch_norm_statistics,
    ),
    Operation(
        "NativeGroupNormBackward0",
        data_operand=0,
        uses=pull.scale_and_shift(pull.group_normalised),
        norm=pull.own_statistics,
    ),
    Operation(
        "NativeLayerNormBackward0",
        rows=normalised_rows,
        gradient=New(pull.pull_layer_norm),
        uses=pull.scale_and_shift(pull.layer_normalised, channel=False),
        norm=pull.own_statistics,
    ),
    Operation("FusedRmsNormBackward0", rows=reordered),
    # Activations with a slope.
    Operation("ReluBackward0", rows=row_wise, gradient=Slope(rules.relu)),
    Operation("TanhBackward0", rows=row_wise, gradient=Slope(rules.tanh)),
    Operation("SigmoidBackward0", rows=row_wise, gradient=Slope(rules.sigmoid)),
    Operation("GeluBackward0", rows=row_wise, gradient=Slope(rules.gelu)),
    Operation("SiluBackward0", rows=row_wise, gradient=Slope(rules.silu)),
    Operation("LeakyReluBackward0", rows=row_wise, gradient=Slope(rules.leaky_relu)),
    # Sums, products and other functions of each entry or of each row.
    Operation("AddBackward0", adds=True, rows=row_wise, gradient=View(rules.pull_add), uses=rules.use_add),
    Operation("MulBackward0", rows=row_wise, gradient=New(rules.pull_mul), uses=rules.use_mul),
    *_alike("Elu Celu Selu Hardtanh Softplus Exp Expm1 Log Log1P Sqrt Rsqrt Neg Abs Sin Cos Erf", rows=row_wise),
    *_alike("Threshold Mish Hardswish Hardsigmoid Clamp ClampMin ClampMax Reciprocal LogSigmoid", rows=row_wise),
    Operation("MaskedFillBackward0", rows=row_wise, gradient=New(pull.masked_fill)),
    Operation("MulBackward1", rows=row_wise, gradient=New(pull.pull_scaled)),
    *_alike("Pow Sub Div NativeDropout Where", rows=row_wise),
    *_alike("Add Sub Div Pow Rsub Clamp", "Backward1", rows=row_wise),
    # Pooling, sums and other reductions.
    Operation("MaxPool2DWithIndicesBackward0", rows=row_wise, gradient=New(rules.max_pool)),
    Operation("AdaptiveAvgPool2DBackward0", rows=row_wise, gradient=New(rules.adaptive_pool)),
    Operation("AvgPool2DBackward0", rows=row_wise, gradient=New(rules.average_pool)),
    *_alike("MaxPool3DWithIndices AvgPool3D AdaptiveMaxPool2D MkldnnMaxPool2D", rows=row_wise),
    Operation("MeanBackward1", rows=along("dim"), gradient=New(rules.mean)),
    Operation("SumBackward1", rows=along("dim"), gradient=Expanded(rules.total)),
    *_alike("Softmax SafeSoftmax", rows=along("dim"), gradient=New(pull.softmax)),
    *_alike("LogSoftmax Amax Max Cumsum Glu", rows=along("dim")),
)
