"""The inverse problem: tangent model, operator, measurements and prior; the covariances that they imply."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from lapwing.data.inputs import Inputs, check_finite, map_tensors, move_inputs
from lapwing.errors import DataError, InputError, ModelError, UnsupportedError
from lapwing.inverse.priors import ClassCovariance, class_covariance, same_classes
from lapwing.linalg.operators import MatrixDesign, OperatorDesign, SparseOperator
from lapwing.linalg.ridge import WIDE, refuse_unpaired
from lapwing.networks.forward import (
    CALL_ERRORS,
    BatchCall,
    advice,
    device_of,
    refuse_distributed,
    refuse_training_mode,
    unwrap,
)
from lapwing.networks.selection import AllWeights, Named, Selection, Weights, float_parameters, make_selection
from lapwing.priors import Isotropic, Prior
from lapwing.runtime.memory import budget, chunks, concat_chunks
from lapwing.runtime.settings import POSITIVE, Rule, describe
from lapwing.runtime.threads import FORWARD_MODE, ProgressBar, is_showing, math_attention, quiet


@runtime_checkable
class LinearOperator(Protocol):
    """A matrix A (rows, size) known by its products. Vectors are rows.

    ``lw.linear.OperatorDesign`` is one. An operator that also has ``to(device=, dtype=)`` is moved to the device and
    dtype of the computation.

    >>> import lapwing as lw
    >>> matrix = torch.tensor([[1.0, 2.0, 3.0]])
    >>> one = lw.linear.OperatorDesign(1, 3, lambda v: v @ matrix.T, lambda u: u @ matrix, matrix[:0, 0])
    >>> one.forward(torch.ones(2, 3)).flatten().tolist()
    [6.0, 6.0]
    """

    @property
    def rows(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def like(self) -> Tensor:
        """An empty tensor of the dtype and device that products take."""
        ...

    def forward(self, v: Tensor) -> Tensor:
        """Return A v (n, rows) for v (n, size)."""
        ...

    def back(self, u: Tensor) -> Tensor:
        """Return Aᵀ u (n, size) for u (n, rows)."""
        ...


@runtime_checkable
class Movable(Protocol):
    """An operator that can be moved to another device and dtype."""

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> LinearOperator: ...


def copy_to(operator: Movable, device: torch.device, dtype: torch.dtype) -> LinearOperator:
    """Return the operator on a device and in a dtype; a module, which ``to`` would change in place, is copied."""
    operator = copy.deepcopy(operator) if isinstance(operator, nn.Module) else operator
    return operator.to(device=device, dtype=dtype)


@dataclass(frozen=True, eq=False)
class Observation:
    """The operator with products that take and return the dtype and device of their rows; None is the identity."""

    operator: LinearOperator | None
    rows: int
    size: int

    @classmethod
    def of(cls, operator: Tensor | LinearOperator | None, size: int, like: Tensor) -> Observation:
        """Check what a user gives as operator against ``size`` entries of the output.

        Raises:
            DataError: If it is not an operator, or its width is wrong.
            NumericalError: If ``back`` is not the transpose of ``forward``.
        """
        if operator is None:
            return cls(None, size, size)
        if isinstance(operator, Tensor):
            operator = _matrix_operator(operator, like)
        if isinstance(operator, type) or not isinstance(operator, LinearOperator):
            seen = f"a {type(operator).__name__}" if hasattr(operator, "__array__") else describe(operator)
            raise DataError(
                f"the operator is {seen}; expected a matrix (dy, {size}), an object with rows, size, "
                "like, forward and back, such as lw.linear.OperatorDesign, or None for the identity."
            )
        if operator.like.dtype not in WIDE:
            raise DataError(f"the operator takes {operator.like.dtype}; expected float32 or float64.")
        if operator.size != size:
            raise DataError(
                f"the operator takes {operator.size} numbers and the network returns {size}; expected as many."
            )
        if isinstance(operator, Movable):
            operator = copy_to(operator, like.device, like.dtype)
        design = OperatorDesign(operator.rows, size, operator.forward, operator.back, operator.like)
        refuse_unpaired(design)
        return cls(operator, operator.rows, size)

    def forward(self, v: Tensor) -> Tensor:
        """Return A v (K, dy) for rows v (K, dx)."""
        if self.operator is None:
            return v
        operator = self._in_dtype(v.dtype)
        return operator.forward(v.to(operator.like)).detach().to(v)

    def back(self, u: Tensor) -> Tensor:
        """Return Aᵀ u (K, dx) for rows u (K, dy)."""
        if self.operator is None:
            return u
        operator = self._in_dtype(u.dtype)
        return operator.back(u.to(operator.like)).detach().to(u)

    def _in_dtype(self, dtype: torch.dtype) -> LinearOperator:
        """Return the operator for vectors of this dtype: in float64 if it can be, since covariances need the digits."""
        assert self.operator is not None
        return self._double if dtype == torch.float64 else self.operator

    @cached_property
    def _double(self) -> LinearOperator:
        operator = self.operator
        assert operator is not None
        if operator.like.dtype == torch.float64 or not isinstance(operator, Movable):
            return operator
        return copy_to(operator, operator.like.device, torch.float64)

    def basis(self, part: slice, like: Tensor) -> Tensor:
        """Return some rows of A, (K, dx)."""
        rows = like.new_zeros(part.stop - part.start, self.rows)
        rows[:, part] = torch.eye(len(rows), dtype=like.dtype, device=like.device)
        return self.back(rows)

    def sandwich(self, matrix: Tensor) -> Tensor:
        """Return A M Aᵀ for a symmetric matrix M (dx, dx)."""
        if self.operator is None:
            return matrix
        outer = self.forward(self.forward(matrix).mT)
        return 0.5 * (outer + outer.mT)


@dataclass(frozen=True, eq=False)
class MatrixOperator(MatrixDesign):
    """A matrix in memory as an operator."""

    def forward(self, v: Tensor) -> Tensor:
        return v @ self.matrix.mT

    def back(self, u: Tensor) -> Tensor:
        return u @ self.matrix

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> MatrixOperator:
        return MatrixOperator(self.matrix.to(device=device, dtype=dtype))


def _matrix_operator(matrix: Tensor, like: Tensor) -> LinearOperator:
    """Return the operator of a dense or sparse matrix, on the device and in the dtype of ``like``."""
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise DataError(f"the operator is a tensor of shape {tuple(matrix.shape)}; expected a matrix (dy, dx).")
    if matrix.is_complex():
        raise DataError(f"the operator is {matrix.dtype}; expected real numbers.")
    if matrix.layout is not torch.strided:
        entries = matrix.detach().to_sparse_coo().coalesce()
        check_finite(entries.values(), "the operator")
        row, column = entries.indices()
        return SparseOperator.from_entries(row, column, entries.values().to(like), (matrix.shape[0], matrix.shape[1]))
    check_finite(matrix, "the operator")
    return MatrixOperator(matrix.detach().to(like, copy=True))  # later changes of the matrix do not matter


PIECE = 0.2  # share of the byte budget for the pass of one chunk of vectors
MOST = 512  # vectors in one chunk; more are no faster


@dataclass(frozen=True, eq=False)
class ImageTangent:
    """The model f(x) + J (θ - w̃) at one input x, where θ (P,) are the selected weights and f(x) is flat, (dx,).

    It has a copy of the model of its own, so that later changes of the model do not matter. Vectors are rows. Create
    one with ``ImageTangent.build``.
    """

    module: BatchCall
    x: Inputs
    selection: Selection
    output: Tensor  # as the model returns it

    @classmethod
    def build(cls, model: nn.Module, x: Inputs, weights: Weights | None) -> ImageTangent:
        """Look at the model with its input."""
        device = device_of(model)
        refuse_distributed(model)
        refuse_training_mode(model)
        inputs = move_inputs(x, lambda t: t.detach().to(device, copy=True))  # later changes of x do not matter
        check_finite(inputs, "inputs")
        selection = select_weights(unwrap(model), weights)
        module = BatchCall(_copy_without_gradients(unwrap(model)))
        output = _output(module, inputs)
        _refuse_random(output, _output(module, inputs))
        return cls(module, inputs, selection, output)

    def to(self, dtype: torch.dtype) -> ImageTangent:
        """Return the same model in another dtype; itself if it has that dtype."""
        if self.dtype == dtype:
            return self
        module = copy.deepcopy(self.module).to(dtype)
        inputs = map_tensors(self.x, lambda t: t.to(dtype) if t.is_floating_point() else t)
        return ImageTangent(module, inputs, self.selection, _output(module, inputs))

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

        def count_bytes(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count_bytes, lambda tensor: tensor):
            self._at({name: value.clone().requires_grad_() for name, value in self.parameters.items()})
        return total

    def _chunks(self, count: int, weights: int) -> Iterator[slice]:
        """Yield vectors in chunks whose passes fit the byte budget, where each has this many weights."""
        each = 2 * self._saved_bytes + (2 * weights + 4 * self.size) * self.output.element_size()
        return chunks(count, each, self.device, PIECE, MOST)

    def forward(self, v: Tensor) -> Tensor:
        """Return J v (K, dx) for rows v (K, P)."""

        def one(tangent: dict[str, Tensor]) -> Tensor:
            return jvp(self._at, (self.parameters,), (tangent,))[1]

        def push(chunk: Tensor) -> Tensor:
            try:
                with FORWARD_MODE, torch.no_grad(), quiet, math_attention:
                    return vmap(one)(self.selection.split(chunk)).detach()
            except NotImplementedError:  # an operation without a forward derivative, such as weight_norm
                return torch.stack([self._forward_by_back(row) for row in chunk])

        rows = v.to(self.output)
        parts = (push(rows[chunk]) for chunk in self._chunks(len(v), self.selection.size))
        return concat_chunks(parts, len(v)) if len(v) else rows.new_zeros(0, self.size)

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
        return concat_chunks(parts, len(u)) if len(u) else rows.new_zeros(0, self.selection.size)

    def pullback(self, names: tuple[str, ...]) -> Callable[[Tensor], dict[str, Tensor]]:
        """Return the function from rows u (K, dx) to Jᵀ u of these parameters by name, (K, *shape)."""
        with quiet, math_attention:
            pull = vjp(self._at, {name: self.parameters[name] for name in names})[1]

        def pull_rows(rows: Tensor) -> dict[str, Tensor]:
            with torch.no_grad(), quiet:
                return {name: grad.detach() for name, grad in vmap(pull)(rows)[0].items()}

        return pull_rows

    def chunks(self, count: int, names: tuple[str, ...]) -> Iterator[slice]:
        """Yield ``count`` vectors in chunks for ``pullback`` of these parameters."""
        return self._chunks(count, sum(self.parameters[name].numel() for name in names))


def select_weights(model: nn.Module, weights: Weights | None) -> Selection:
    """Return the selection; by default the weights of convolution layers, or all weights if there are none."""
    if weights is None:
        return make_selection(model, _kernels(model) or AllWeights().needs(model))
    if not isinstance(weights, AllWeights | Named):
        raise ModelError(
            f"weights is {weights!r:.80}; expected lw.all_weights, lw.named(pattern), or None for the weights of "
            "convolution layers."
        )
    return make_selection(model, weights.needs(model))


def _copy_without_gradients(model: nn.Module) -> nn.Module:
    """Return a copy of the model without gradients."""
    try:
        return copy.deepcopy(model).requires_grad_(False)
    except RuntimeError as error:  # of tensors that are not leaves, such as those of the old nn.utils.weight_norm
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


def _tensor(out: object) -> Tensor:
    if not isinstance(out, Tensor) or not out.is_floating_point() or out.ndim == 0 or out.numel() == 0:
        given = f"shape {tuple(out.shape)} and dtype {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise ModelError(f"the model returns {given}; expected a tensor (B, ...) of real numbers.")
    return out


def _output(module: BatchCall, inputs: Inputs) -> Tensor:
    """Return the output of the model; raise if it refuses the input or its numbers are not finite."""
    try:
        with torch.no_grad():
            out = _tensor(module(inputs))
    except (DataError, ModelError):
        raise
    except CALL_ERRORS as error:
        do = advice(module.inner, inputs, error)
        raise InputError(f"the model raises {type(error).__name__}: {error}. {do}") from error
    check_finite(out, "outputs of the network")
    return out


PIECES = 0.65  # share of the byte budget for rows of the Jacobian; the rest is for passes, and for products of the rows
PRIOR = Rule(
    "a precision, or an object such as lw.priors.filter_gp()",
    lambda v: not isinstance(v, type) and (isinstance(v, Prior) or POSITIVE.holds(v)),
)


@dataclass(frozen=True, eq=False)
class InverseProblem:
    """Measurements y = A (f + J (θ - w̃)) + noise with the prior θ ~ N(mean, Σ); everything but the noise."""

    network: ImageTangent
    observation: Observation
    prior: ClassCovariance
    residual: Tensor  # y - A f(x), (dy,), float64
    theta: Tensor  # the trained weights w̃ (P,), float64
    prior_residual: Tensor  # y - A h(mean) = residual + A J (w̃ - mean), (dy,), float64

    @classmethod
    def of(cls, network: ImageTangent, observation: Observation, prior: ClassCovariance, y: Tensor) -> InverseProblem:
        """Return the problem of measurements y (dy,) in float64."""
        residual = y - observation.forward(network.f.double()[None])[0]
        theta = network.theta().double()
        return cls(network, observation, prior, residual, theta, residual).with_prior_residual()

    def with_prior_residual(self) -> InverseProblem:
        """Return the problem with y - A h(mean) for the mean of its prior, at the cost of a product with J."""
        network = self.network
        change = network.forward((self.theta - self.prior.mean)[None]).double()
        return replace(self, prior_residual=self.residual + self.observation.forward(change)[0])

    @property
    def evidence_unit(self) -> int:
        """The number that tuners divide the log evidence by: weights or measurements, whichever are fewer."""
        return min(self.network.selection.size, self.observation.rows)

    def with_prior(self, given: ClassCovariance | Prior | float) -> InverseProblem:
        """Return the problem with another prior of the same structure, bound to the weights or as users give it."""
        prior = given if isinstance(given, ClassCovariance) else bound_prior(given, self.network)
        if not same_classes(prior, self.prior):
            raise UnsupportedError(
                "the prior has other blocks than that of the fit; expected the same blocks with other values. Fit "
                "again with lw.inverse.fit(prior=...)."
            )
        return replace(self, prior=prior).with_prior_residual()

    def with_precisions(self, values: Tensor) -> InverseProblem:
        """Return the problem with other hyperparameters of the same prior, in the shape of ``prior.values``."""
        return replace(self, prior=replace(self.prior, values=values))  # type: ignore[type-var]

    def image_kernel(self, v: Tensor) -> Tensor:
        """Return J Σ Jᵀ v (K, dx) for rows v (K, dx), in the dtype of the network."""
        network, size = self.network, self.network.selection.size
        rows = v.to(network.output)
        with torch.no_grad():
            parts = (
                network.forward(self.prior.multiply(network.back(rows[chunk])))
                for chunk in chunks(len(v), 3 * size * rows.element_size(), network.device)
            )
            return concat_chunks(parts, len(v)) if len(v) else rows

    def kernel(self, u: Tensor) -> Tensor:
        """Return A J Σ Jᵀ Aᵀ u (K, dy) for rows u (K, dy), in the dtype of the network."""
        return self.observation.forward(self.image_kernel(self.observation.back(u.to(self.network.output))))

    def back(self, u: Tensor) -> Tensor:
        """Return Jᵀ Aᵀ u (K, P) for rows u (K, dy), in the dtype of the network."""
        return self.network.back(self.observation.back(u.to(self.network.output)))

    def rows(self, observation: Observation, label: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the rows of A J (dy, m) piece by piece: names of parameters, each with some or all of its filters.

        Pieces are computed in groups that fit the byte budget, with one backward pass for each row and group. What
        was yielded is freed before the next piece comes.
        """
        network, n = self.network, observation.rows
        groups = list(self._groups(n))
        for number, group in enumerate(groups, 1):
            names = tuple(dict.fromkeys(name for name, _ in group))
            pull = network.pullback(names)
            filters = {name: _by_filter(network.parameters[name]) for name in names}
            pieces = [network.f.new_empty(n, filters[name][part].numel()) for name, part in group]
            chunks = list(network.chunks(n, names))
            of = f" {number}/{len(groups)}" if len(groups) > 1 else ""
            for chunk in ProgressBar(chunks, f"{label}{of}", is_showing()):
                grads = pull(observation.basis(chunk, network.f))
                for piece, (name, part) in zip(pieces, group, strict=True):
                    piece[chunk] = grads[name].reshape(-1, *filters[name].shape)[:, part].flatten(1)
                del grads
            del pull
            for name, _ in group:
                yield name, pieces.pop(0)

    def _groups(self, n: int) -> Iterator[list[tuple[str, slice]]]:
        """Yield groups of parameters, or of slices of them; n rows of a group fit the byte budget."""
        network = self.network
        room = int(PIECES * budget(network.device)) // (n * network.output.element_size())
        group: list[tuple[str, slice]] = []
        taken = 0
        for name, parameter in network.parameters.items():
            count, each = _by_filter(parameter).shape
            step = max(1, min(count, room // each))
            for start in range(0, count, step):
                part = slice(start, min(count, start + step))
                size = each * (part.stop - part.start)
                if group and taken + size > room:
                    yield group
                    group, taken = [], 0
                group.append((name, part))
                taken += size
        yield group


def _by_filter(parameter: Tensor) -> Tensor:
    """Return the entries of the slices along the first dimension, (F, entries)."""
    return parameter.reshape(parameter.shape[0] if parameter.ndim else 1, -1)


def bound_prior(given: Prior | float, tangent: ImageTangent) -> ClassCovariance:
    """Return the prior of the selected weights; raise unless its covariance has a few classes."""
    PRIOR.check("prior", given)
    given = given if isinstance(given, Prior) else Isotropic(given)
    if given.needs_groups or given.needs_curvature:
        raise UnsupportedError(
            f"the prior {type(given).__name__} takes groups or a scale from the data of lw.fit; expected filter_gp(), "
            "isotropic(), per_layer() or grouped()."
        )
    return class_covariance(given, tangent.selection, tangent.f)
