"""Convolutions: their gradient, and how they use a weight and a bias."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lapwing.networks.forms import Convolution, Elementwise, Form, TransposedConvolution, Use
from lapwing.networks.nodes import Node
from lapwing.networks.ops.entry import Sources
from lapwing.networks.ops.gradients import NoRuleError


def pull_convolution(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the images, all seeds folded into the batch."""
    if operand != 0:
        raise NoRuleError("ConvolutionBackward0")
    weight, x = node._saved_weight, node._saved_input
    folded = grad.flatten(0, 1)
    if folded.is_cpu and folded.dtype in (torch.bfloat16, torch.float16):  # 16-bit kernels crash some processes
        folded, weight = folded.float(), weight.float()
    blank = folded.new_empty(1).expand(folded.shape[0], *x.shape[1:])  # only its shape is read
    back = torch.ops.aten.convolution_backward(
        folded, blank, weight, None, node._saved_stride, node._saved_padding, node._saved_dilation,
        node._saved_transposed, node._saved_output_padding, node._saved_groups, (True, False, False),
    )[0]  # fmt: skip
    return back.to(grad.dtype).unflatten(0, grad.shape[:2])


def use_convolution(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    """Yield the uses of bias and weight in a convolution, transposed or not."""
    transposed = node._saved_transposed
    bias = None
    if 2 in sources and not sources[2][1]:
        bias = sources[2][0]
        yield 2, Use(node, bias, Elementwise(tuple(tensors[bias].shape), channel=True))
    if 1 in sources and not sources[1][1]:
        form: Form = TransposedConvolution() if transposed else Convolution()
        yield 1, Use(node, sources[1][0], form, None if transposed else bias, node._saved_groups)


def seed_by_seed(node: Node, on_cpu: bool) -> bool:
    """Return whether autograd is faster one seed at a time: batched convolutions are slow on a CPU."""
    return on_cpu
