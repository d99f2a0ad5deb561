"""The covariance of outputs as a quadratic form in the features of a last layer, with constant matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.core.memory import refuse_beyond
from lapwing.core.spectra import eigh
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network

SAME = 3e-6  # error, relative to the largest entry, up to which a covariance of weights has the shorter form
COPIES = 4  # float64 copies of the covariance of weights that the search for the shorter form takes


class SharedAxes(nn.Module):
    """U diag(W (Vᵀa)²) Uᵀ for features a (..., D): the form of Kron, EKron and Diagonal."""

    outputs: Tensor
    inputs: Tensor
    weights: Tensor

    def __init__(self, outputs: Tensor, inputs: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("outputs", outputs)  # U, (C, C)
        self.register_buffer("inputs", inputs)  # V, (D, D)
        self.register_buffer("weights", weights)  # W, (C, D)

    def forward(self, a: Tensor) -> Tensor:
        scale = (a @ self.inputs).square() @ self.weights.mT
        return (self.outputs * scale.unsqueeze(-2)) @ self.outputs.mT


class DenseForm(nn.Module):
    """aᵀ S_cd a for features a (..., D) and every pair of outputs c, d."""

    covariance: Tensor

    def __init__(self, covariance: Tensor) -> None:
        super().__init__()
        self.sizes = covariance.shape[1:]
        self.register_buffer("covariance", covariance.flatten(1))  # S as (D, C C D)

    def forward(self, a: Tensor) -> Tensor:
        rows = (a @ self.covariance).unflatten(-1, self.sizes)  # (..., C, C, D)
        return (rows * a.unsqueeze(-2).unsqueeze(-2)).sum(-1)


class NoForm(nn.Module):
    """The covariance of outputs without spread, zero, given their mean in place of features."""

    def forward(self, mean: Tensor) -> Tensor:
        return torch.zeros_like(mean.unsqueeze(-1) * mean.unsqueeze(-2))


def quadratic_form(posterior: Any, network: Network) -> nn.Module:
    """Return the covariance of the outputs as a module of the features, for a posterior over one linear map."""
    (block,) = network.layout
    d_out, d_in = block.d_out, block.d_in
    what = f"the covariance of {block.size} weights"
    refuse_beyond(COPIES * 8 * block.size**2, network.device, what, "Export a posterior over fewer weights")
    options: Any = {"dtype": network.dtype, "device": network.device}
    a = torch.eye(d_in, **options)[None, :, None]  # one sample for each feature
    g = torch.eye(d_out, **options)[None, :, None, None].expand(1, d_out, d_in, 1, d_out)
    jacobian = LayerJacobians(
        (partial(LinearJacobian, a, g),), network.layout, network.selection, d_in, d_out, network.dtype
    )
    with torch.no_grad():
        covariance = posterior.cross(jacobian).double().reshape(d_in, d_out, d_in, d_out).permute(0, 1, 3, 2)
        return (_shared_axes(covariance) or DenseForm(covariance.contiguous())).to(network.dtype)


def _shared_axes(covariance: Tensor) -> SharedAxes | None:
    """Return the covariance (D, C, C, D) in the shorter form; None if it has none."""
    _, outputs = eigh(_symmetric(torch.einsum("icdi->cd", covariance)))
    turned = torch.einsum("icdj,ck,dl->iklj", covariance, outputs, outputs)
    blocks = turned.diagonal(dim1=1, dim2=2).permute(2, 0, 1)  # (C, D, D)
    _, inputs = eigh(_symmetric(blocks.sum(0)))
    weights = torch.einsum("kij,ia,ja->ka", blocks, inputs, inputs)
    whole = torch.einsum("ck,dk,ia,ja,ka->icdj", outputs, outputs, inputs, inputs, weights)
    gap = (whole - covariance).abs().max()
    return SharedAxes(outputs, inputs, weights.clamp_min(0)) if bool(gap <= SAME * covariance.abs().max()) else None


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
