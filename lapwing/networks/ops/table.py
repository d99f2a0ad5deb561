"""One entry for each autograd operation that Lapwing knows."""

from __future__ import annotations

from lapwing.networks.ops import elementwise, linear, norms, shapes
from lapwing.networks.ops.operation import (
    Expanded,
    New,
    Operation,
    Slope,
    View,
    along,
    normalised_rows,
    permuted,
    register,
    reordered,
    row_wise,
)

# Operations that keep all entries in their order.
register(
    Operation("ViewBackward0", reshapes=True, gradient=View(shapes.view)),
    Operation("UnsafeViewBackward0", reshapes=True, gradient=View(shapes.view)),
    Operation("ReshapeAliasBackward0", reshapes=True, gradient=View(shapes.view)),
    Operation("SqueezeBackward0", reshapes=True),
    Operation("SqueezeBackward1", reshapes=True, gradient=View(shapes.view)),
    Operation("SqueezeBackward2", reshapes=True),
    Operation("UnsqueezeBackward0", reshapes=True, gradient=View(shapes.unsqueeze)),
    Operation("AliasBackward0", reshapes=True, gradient=View(shapes.same)),
    Operation("CloneBackward0", reshapes=True, gradient=View(shapes.same)),
    Operation("ToCopyBackward0", reshapes=True, casts=True),
)

# Operations that move entries.
register(
    Operation("TBackward0", moves=True, transposes=True, rows=reordered),
    Operation("TransposeBackward0", moves=True, rows=along("dim0", "dim1"), gradient=View(shapes.transpose)),
    Operation("TransposeBackward1", rows=along("dim0", "dim1")),
    Operation("PermuteBackward0", moves=True, rows=permuted, gradient=View(shapes.permute)),
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
    Operation("MmBackward0", data_operand=0, gradient=New(linear.pull_mm), uses=linear.use_mm),
    Operation("AddmmBackward0", data_operand=1, gradient=New(linear.pull_addmm), uses=linear.use_addmm),
    Operation("LinearBackward0", data_operand=0),
    Operation(
        "ConvolutionBackward0",
        data_operand=0,
        gradient=New(linear.pull_convolution),
        uses=linear.use_convolution,
        seed_by_seed=linear.convolution_seed_by_seed,
    ),
    Operation("MkldnnConvolutionBackward0", rows=row_wise),
    Operation("CudnnConvolutionBackward0", rows=row_wise),
    Operation(
        "EmbeddingBackward0",
        rows=row_wise,
        uses=linear.use_embedding,
        seed_by_seed=linear.embedding_seed_by_seed,
        not_derivative=linear.embedding_not_derivative,
        forward_differs=linear.embedding_forward_differs,
    ),
    Operation("BmmBackward0", rows=reordered),
    Operation("BaddbmmBackward0", rows=reordered),
    Operation("ThnnFusedLstmCellBackward0", rows=reordered, uses=elementwise.use_fused_cell),
    Operation("ThnnFusedGruCellBackward0", rows=reordered, uses=elementwise.use_fused_cell),
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
            gradient=New(norms.pull_batch_norm),
            uses=norms.use_batch_norm,
            norm=norms.batch_norm_statistics,
        )
        for kernel in ("Native", "Cudnn")
    ),
    Operation("NativeGroupNormBackward0", data_operand=0, uses=norms.use_group_norm, norm=norms.own_statistics),
    Operation(
        "NativeLayerNormBackward0",
        rows=normalised_rows,
        gradient=New(norms.pull_layer_norm),
        uses=norms.use_layer_norm,
        norm=norms.own_statistics,
    ),
    Operation("FusedRmsNormBackward0", rows=reordered),
)

# Activations with a slope.
register(
    Operation("ReluBackward0", rows=row_wise, gradient=Slope(elementwise.relu)),
    Operation("TanhBackward0", rows=row_wise, gradient=Slope(elementwise.tanh)),
    Operation("SigmoidBackward0", rows=row_wise, gradient=Slope(elementwise.sigmoid)),
    Operation("GeluBackward0", rows=row_wise, gradient=Slope(elementwise.gelu)),
    Operation("SiluBackward0", rows=row_wise, gradient=Slope(elementwise.silu)),
    Operation("LeakyReluBackward0", rows=row_wise, gradient=Slope(elementwise.leaky_relu)),
)

# Sums, products and other functions of each entry or of each row.
register(
    Operation("AddBackward0", adds=True, rows=row_wise, gradient=View(elementwise.pull_add), uses=elementwise.use_add),
    Operation("MulBackward0", rows=row_wise, gradient=New(elementwise.pull_mul), uses=elementwise.use_mul),
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
    Operation("MaxPool2DWithIndicesBackward0", rows=row_wise, gradient=New(shapes.max_pool)),
    Operation("AdaptiveAvgPool2DBackward0", rows=row_wise, gradient=New(shapes.adaptive_pool)),
    Operation("AvgPool2DBackward0", rows=row_wise, gradient=New(shapes.average_pool)),
    Operation("MaxPool3DWithIndicesBackward0", rows=row_wise),
    Operation("AvgPool3DBackward0", rows=row_wise),
    Operation("AdaptiveMaxPool2DBackward0", rows=row_wise),
    Operation("MkldnnMaxPool2DBackward0", rows=row_wise),
    Operation("MeanBackward1", rows=along("dim"), gradient=New(shapes.mean)),
    Operation("SumBackward1", rows=along("dim"), gradient=Expanded(shapes.total)),
    *(
        Operation(f"{name}Backward0", rows=along("dim"))
        for name in ("Softmax", "LogSoftmax", "Amax", "Max", "Cumsum", "Glu")
    ),
)
