"""The tangent model of a network at one input: products with the Jacobian of the flattened output, many at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from lapwing.core.inputs import Inputs, check_finite, map_tensors, moved
from lapwing.core.memory import gathered, runs
from lapwing.core.switches import FORWARD_MODE, math_attention, quiet
from lapwing.errors import DataError, InputError, ModelError
from lapwing.networks.forward import (
    REFUSED,
    BatchCall,
    advice,
    device_of,
    refuse_distributed,
    refuse_training_mode,
    unwrapped,
)
from lapwing.networks.selection import AllWeights, Named, Selection, Weights, float_parameters, selected

PIECE = 0.2  # share of the byte budget for the pass of one chunk of vectors
MOST = 512  # vectors in one chunk; more are no faster


@dataclass(frozen=True, eq=False)
class Tangent:
    """The model f(x) + J (θ - w̃) at one input x, where θ (P,) are the selected weights and f(x) is flat, (dx,).

    It has a copy of the model of its own, so that later changes of the model do not matter. Vectors are rows. Create
    one with ``Tangent.build``.
    """

    module: BatchCall
    x: Inputs
    selection: Selection
    output: Tensor  # as the model returns it

    @classmethod
    def build(cls, model: nn.Module, x: Inputs, weights: Weights | None) -> Tangent:
        """Look at the model with its input."""
        device = device_of(model)
        refuse_distributed(model)
        refuse_training_mode(model)
        inputs = moved(x, lambda t: t.detach().to(device, copy=True))  # later changes of x do not matter
        check_finite(inputs, "inputs")
        selection = chosen_weights(unwrapped(model), weights)
        module = BatchCall(_private(unwrapped(model)))
        output = _output(module, inputs)
        _refuse_random(output, _output(module, inputs))
        return cls(module, inputs, selection, output)

    def to(self, dtype: torch.dtype) -> Tangent:
        """Return the same model in another dtype; itself if it has that dtype."""
        if self.dtype == dtype:
            return self
        module = copy.deepcopy(self.module).to(dtype)
        inputs = map_tensors(self.x, lambda t: t.to(dtype) if t.is_floating_point() else t)
        return Tangent(module, inputs, self.selection, _output(module, inputs))

    @property
    def f(self) -> Tensor:
        """The flat output, (dx,)."""
        return self.output.reshape(-1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one output, or of all of them if there are several inputs."""
        return tuple(self.output.shape[1:] if self.output.shape[0] == 1 else self.output.shape)

    @property
    def size(self) -> int:
        """The number dx of entries of the output."""
        return self.output.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.output.dtype

    @property
    def device(self) -> torch.device:
        return self.output.device

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The selected parameters by name."""
        tensors = dict(self.module.inner.named_parameters())
        return {name: tensors[name].detach() for name in self.selection.names}

    def theta(self) -> Tensor:
        """Return the trained weights w̃ (P,)."""
        return torch.cat([parameter.reshape(-1) for parameter in self.parameters.values()])

    def _at(self, values: dict[str, Tensor]) -> Tensor:
        """Return the flat output with other values of some parameters."""
        renamed = {f"inner.{name}": value for name, value in values.items()}
        return _tensor(functional_call(self.module, renamed, (self.x,))).reshape(-1)

    @cached_property
    def _saved_bytes(self) -> int:
        """The bytes that autograd keeps for a backward pass: a measure of what one more vector takes."""
        total = 0

        def kept(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
            self._at({name: value.clone().requires_grad_() for name, value in self.parameters.items()})
        return total

    def _chunks(self, count: int, weights: int) -> Iterator[slice]:
        """Yield vectors in chunks whose passes fit the byte budget, where each has this many weights."""
        each = 2 * self._saved_bytes + (2 * weights + 4 * self.size) * self.output.element_size()
        return runs(count, each, self.device, PIECE, MOST)

    def forward(self, v: Tensor) -> Tensor:
        """Return J v (K, dx) for rows v (K, P)."""

        def one(tangent: dict[str, Tensor]) -> Tensor:
            return jvp(self._at, (self.parameters,), (tangent,))[1]

        def pushed(chunk: Tensor) -> Tensor:
            try:
                with FORWARD_MODE, torch.no_grad(), quiet, math_attention:
                    return vmap(one)(self.selection.split(chunk)).detach()
            except NotImplementedError:  # an operation without a forward derivative, such as weight_norm
                return torch.stack([self._forward_by_back(row) for row in chunk])

        rows = v.to(self.output)
        parts = (pushed(rows[chunk]) for chunk in self._chunks(len(v), self.selection.size))
        return gathered(parts, len(v)) if len(v) else rows.new_zeros(0, self.size)

    def _forward_by_back(self, v: Tensor) -> Tensor:
        """Return J v (dx,) for one v (P,), the derivative of vᵀ Jᵀ u in u, by backward passes alone."""
        with torch.enable_grad(), quiet, math_attention:
            values = {name: value.clone().requires_grad_() for name, value in self.parameters.items()}
            out = self._at(values)
            u = torch.zeros_like(out, requires_grad=True)
            grads = torch.autograd.grad(
                out, list(values.values()), u, create_graph=True, allow_unused=True, materialize_grads=True
            )
            total = torch.cat([grad.reshape(-1) for grad in grads]) @ v
            return torch.autograd.grad(total, u)[0].detach()

    def back(self, u: Tensor) -> Tensor:
        """Return Jᵀ u (K, P) for rows u (K, dx)."""
        rows = u.to(self.output)
        pull, names = self.pullback(self.selection.names), self.selection.names
        parts = (
            torch.cat([grads[name].flatten(1) for name in names], 1)
            for grads in (pull(rows[chunk]) for chunk in self._chunks(len(u), self.selection.size))
        )
        return gathered(parts, len(u)) if len(u) else rows.new_zeros(0, self.selection.size)

    def pullback(self, names: tuple[str, ...]) -> Callable[[Tensor], dict[str, Tensor]]:
        """Return the function from rows u (K, dx) to Jᵀ u of these parameters by name, (K, *shape)."""
        with quiet, math_attention:
            pull = vjp(self._at, {name: self.parameters[name] for name in names})[1]

        def pulled(rows: Tensor) -> dict[str, Tensor]:
            with torch.no_grad(), quiet:
                return {name: grad.detach() for name, grad in vmap(pull)(rows)[0].items()}

        return pulled

    def chunks(self, count: int, names: tuple[str, ...]) -> Iterator[slice]:
        """Yield so many vectors in chunks for ``pullback`` of these parameters."""
        return self._chunks(count, sum(self.parameters[name].numel() for name in names))


def chosen_weights(model: nn.Module, weights: Weights | None) -> Selection:
    """Return the selection; by default the weights of convolution layers, or all weights if there are none."""
    if weights is None:
        names = _kernels(model) or AllWeights().needs(model)
        return selected(model, names)
    if not isinstance(weights, AllWeights | Named):
        raise ModelError(
            f"weights is {weights!r:.80}; expected lw.all_weights, lw.named(pattern), or None for the weights of "
            "convolution layers."
        )
    return selected(model, weights.needs(model))


def _private(model: nn.Module) -> nn.Module:
    """Return a copy of the model without gradients."""
    try:
        return copy.deepcopy(model).requires_grad_(False)
    except RuntimeError as error:  # of tensors that are no leaves, such as those of the old nn.utils.weight_norm
        raise ModelError(
            f"the model cannot be copied: {error}. Remove hooks that compute weights, for example with "
            "nn.utils.remove_weight_norm, or use nn.utils.parametrizations."
        ) from error


def _refuse_random(output: Tensor, again: Tensor) -> None:
    """Raise if two runs differ by more than rounding: output and Jacobian would belong to different functions."""
    change, scale = float((output - again).abs().max()), float(output.abs().max())
    if change > torch.finfo(output.dtype).eps ** 0.5 * scale:
        raise ModelError(
            f"two runs of the model with the same input differ by {change:.3g}; expected the same output. Switch "
            "random operations off, such as noise or dropout with training=True."
        )


def _kernels(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of convolution layers that require a gradient.

    Raises:
        ModelError: A layer computes its kernel from other parameters, which then would be left out.
    """
    for name, module in model.named_modules():
        if _is_convolution(module) and "weight" not in dict(module.named_parameters(recurse=False)):
            raise ModelError(
                f"the kernel of {name or 'the model'} is computed from other parameters (weight_norm, spectral_norm or "
                "another parametrisation); expected a parameter. Give weights=lw.named(pattern) or lw.all_weights, or "
                "remove the parametrisation."
            )
    layers = {f"{name}.weight" if name else "weight" for name, m in model.named_modules() if _is_convolution(m)}
    return tuple(name for name, p in float_parameters(model).items() if name in layers and p.requires_grad)


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def _tensor(out: Any) -> Tensor:
    if not isinstance(out, Tensor) or not out.is_floating_point() or out.ndim == 0 or out.numel() == 0:
        seen = f"shape {tuple(out.shape)} and dtype {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise ModelError(f"the model returns {seen}; expected a tensor (B, ...) of real numbers.")
    return out


def _output(module: nn.Module, inputs: Inputs) -> Tensor:
    """Return the output of the model; raise if it refuses the input or its numbers are not finite."""
    try:
        with torch.no_grad():
            out = _tensor(module(inputs))
    except (DataError, ModelError):
        raise
    except REFUSED as error:
        do = advice(getattr(module, "inner", module), inputs, error)
        raise InputError(f"the model raises {type(error).__name__}: {error}. {do}") from error
    check_finite(out, "outputs of the network")
    return out
