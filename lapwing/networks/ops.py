"""Autograd operations: one entry for each that Lapwing knows.

``operation.py`` defines an entry: how rows of samples may pass through an operation and how gradients may be pulled
back. ``rules.py`` and ``norm_rules.py`` have the functions that the entries name.
"""

from __future__ import annotations

from lapwing.networks import norm_rules, rules
from lapwing.networks.operation import (
    Expanded,
    New,
    Operation,
    Slope,
    View,
    along,
    entries,
    normalised_rows,
    operation,
    operation_named,
    permuted,
    register,
    reordered,
    row_wise,
)

__all__ = [
    "Expanded", "New", "Operation", "Slope", "View", "along", "entries", "operation", "operation_named", "register",
    "row_wise",
]  # fmt: skip

# Operations that keep all entries in their order.
register(
    Operation("ViewBackward0", reshapes=True, gradient=View(rules.view)),
    Operation("UnsafeViewBackward0", reshapes=True, gradient=View(rules.view)),
    Operation("ReshapeAliasBackward0", reshapes=True, gradient=View(rules.view)),
    Operation("SqueezeBackward0", reshapes=True),
    Operation("SqueezeBackward1", reshapes=True, gradient=View(rules.view)),
    Operation("SqueezeBackward2", reshapes=True),
    Operation("UnsqueezeBackward0", reshapes=True, gradient=View(rules.unsqueeze)),
    Operation("AliasBackward0", reshapes=True, gradient=View(rules.same)),
    Operation("CloneBackward0", reshapes=True, gradient=View(rules.same)),
    Operation("ToCopyBackward0", reshapes=True, casts=True),
)

# Operations that move entries.
register(
    Operation("TBackward0", moves=True, transposes=True, rows=reordered),
    Operation("TransposeBackward0", moves=True, rows=along("dim0", "dim1"), gradient=View(rules.transpose)),
    Operation("TransposeBackward1", rows=along("dim0", "dim1")),
    Operation("PermuteBackward0", moves=True, rows=permuted, gradient=View(rules.permute)),
    Operation("SplitBackward0", moves=True, rows=along("dim")),
    Operation("SplitWithSizesBackward0", moves=True, rows=along("dim")),
    Operation("UnsafeSplitBackward0", moves=True, rows=along("dim")),
    Operation("SliceBackward0", moves=True, rows=along("dim")),
    Operation("SelectBackward0", moves=True, rows=along("dim")),
    Operation("UnbindBackward0", moves=True, rows=along("dim")),
    Operation("CatBackward0", rows=along("dim")),
    Operation("StackBackward0", rows=along("dim")),
    Operation("FlipBackward0", rows=along("dims")),
    Operation("RepeatBackward0", rows=reordered),
    Operation("ExpandBackward0", rows=row_wise),
    Operation("ConstantPadNdBackward0", rows=row_wise),
    Operation("ReflectionPad2DBackward0", rows=row_wise),
    Operation("ReplicationPad2DBackward0", rows=row_wise),
    Operation("PixelShuffleBackward0", rows=row_wise),
    Operation("UpsampleNearest2DBackward0", rows=row_wise),
    Operation("UpsampleBilinear2DBackward0", rows=row_wise),
)

# Products with a weight.
register(
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
    Operation("MkldnnConvolutionBackward0", rows=row_wise),
    Operation("CudnnConvolutionBackward0", rows=row_wise),
    Operation(
        "EmbeddingBackward0",
        rows=row_wise,
        uses=rules.use_embedding,
        seed_by_seed=lambda node, on_cpu: bool(node._saved_sparse),  # autograd cannot batch a sparse gradient
        not_derivative=rules.embedding_not_derivative,
        forward_differs=rules.embedding_forward_differs,
    ),
    Operation("BmmBackward0", rows=reordered),
    Operation("BaddbmmBackward0", rows=reordered),
    Operation("ThnnFusedLstmCellBackward0", rows=reordered, uses=rules.use_fused_cell),
    Operation("ThnnFusedGruCellBackward0", rows=reordered, uses=rules.use_fused_cell),
)

# Attention in one kernel, which autograd takes one seed at a time.
register(
    *(
        Operation(f"ScaledDotProduct{kernel}Backward0", rows=reordered, seed_by_seed=lambda node, on_cpu: True)
        for kernel in (
            "FlashAttentionForCpu",
            "FlashAttention",
            "EfficientAttention",
            "FusedAttentionOverrideable",
            "CudnnAttention",
        )
    )
)

# Normalisations.
register(
    *(
        Operation(
            f"{kernel}BatchNormBackward0",
            data_operand=0,
            gradient=New(norm_rules.pull_batch_norm),
            uses=norm_rules.use_batch_norm,
            norm=norm_rules.batch_norm_statistics,
        )
        for kernel in ("Native", "Cudnn")
    ),
    Operation(
        "NativeGroupNormBackward0",
        data_operand=0,
        uses=norm_rules.scale_and_shift(norm_rules.group_normalised),
        norm=norm_rules.own_statistics,
    ),
    Operation(
        "NativeLayerNormBackward0",
        rows=normalised_rows,
        gradient=New(norm_rules.pull_layer_norm),
        uses=norm_rules.scale_and_shift(norm_rules.layer_normalised, channel=False),
        norm=norm_rules.own_statistics,
    ),
    Operation("FusedRmsNormBackward0", rows=reordered),
)

# Activations with a slope.
register(
    Operation("ReluBackward0", rows=row_wise, gradient=Slope(rules.relu)),
    Operation("TanhBackward0", rows=row_wise, gradient=Slope(rules.tanh)),
    Operation("SigmoidBackward0", rows=row_wise, gradient=Slope(rules.sigmoid)),
    Operation("GeluBackward0", rows=row_wise, gradient=Slope(rules.gelu)),
    Operation("SiluBackward0", rows=row_wise, gradient=Slope(rules.silu)),
    Operation("LeakyReluBackward0", rows=row_wise, gradient=Slope(rules.leaky_relu)),
)

# Sums, products and other functions of each entry or of each row.
register(
    Operation("AddBackward0", adds=True, rows=row_wise, gradient=View(rules.pull_add), uses=rules.use_add),
    Operation("MulBackward0", rows=row_wise, gradient=New(rules.pull_mul), uses=rules.use_mul),
    *(
        Operation(f"{name}Backward{digit}", rows=row_wise)
        for digit, names in (
            ("0", "Elu Celu Selu Hardtanh Softplus Exp Expm1 Log Log1P Sqrt Rsqrt Neg Abs Sin Cos Erf Threshold Mish"),
            ("0", "Hardswish Hardsigmoid Clamp ClampMin ClampMax Reciprocal LogSigmoid Pow Sub Div NativeDropout"),
            ("0", "Where MaskedFill"),
            ("1", "Add Mul Sub Div Pow Rsub Clamp"),
        )
        for name in names.split()
    ),
)

# Pooling, sums and other reductions.
register(
    Operation("MaxPool2DWithIndicesBackward0", rows=row_wise, gradient=New(rules.max_pool)),
    Operation("AdaptiveAvgPool2DBackward0", rows=row_wise, gradient=New(rules.adaptive_pool)),
    Operation("AvgPool2DBackward0", rows=row_wise, gradient=New(rules.average_pool)),
    Operation("MaxPool3DWithIndicesBackward0", rows=row_wise),
    Operation("AvgPool3DBackward0", rows=row_wise),
    Operation("AdaptiveMaxPool2DBackward0", rows=row_wise),
    Operation("MkldnnMaxPool2DBackward0", rows=row_wise),
    Operation("MeanBackward1", rows=along("dim"), gradient=New(rules.mean)),
    Operation("SumBackward1", rows=along("dim"), gradient=Expanded(rules.total)),
    *(
        Operation(f"{name}Backward0", rows=along("dim"))
        for name in ("Softmax", "LogSoftmax", "Amax", "Max", "Cumsum", "Glu")
    ),
)
