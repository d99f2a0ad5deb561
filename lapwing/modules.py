"""A fitted posterior as an ``nn.Module``, for evaluation loops and for export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.data.inputs import Inputs, call_model, wants_slopes
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.labels import Bernoulli, Categorical
from lapwing.likelihoods.numbers import Gaussian
from lapwing.linalg.dense import eigh
from lapwing.networks.forward import pick_output, refuse_training_mode
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network
from lapwing.networks.tangent import LayerJacobians
from lapwing.posteriors.base import Posterior
from lapwing.posteriors.mixture import Cell, CellLogits, MixturePosterior
from lapwing.posteriors.weight_space import Linearised, SharedAxes
from lapwing.predictives.labels import FEW_PAIRS, bridge, pairwise_logits, probit_logits
from lapwing.runtime.memory import refuse_large_result
from lapwing.runtime.settings import one_of
from lapwing.values.gaussian import FunctionGaussian, isolate, normal_rule

if TYPE_CHECKING:
    from lapwing.fitted import Fitted

SAME = 1e-9  # change of a parameter, relative to its norm, that counts as rounding


class PosteriorModule(nn.Module):
    """A module of a fitted posterior, around the model of its user.

    It is always in evaluation mode, and leaves the mode of the model to its user.

    Args:
        fitted: The fitted posterior.
        returns: "logits", "probs" or "moments".
    """

    def __init__(self, fitted: Fitted, returns: str) -> None:
        super().__init__()
        self.model, self.returns = fitted.network.model, returns
        self.output, self.fingerprint = fitted.network.output, fitted.fingerprint
        self.first = (next(p for p in self.model.parameters() if p.is_floating_point()),)  # in a tuple: not registered
        self.fitted_dtype = self.first[0].dtype
        self.training = False

    def train(self, mode: bool = True) -> PosteriorModule:
        """Stay in evaluation mode, whatever ``mode`` is: a posterior belongs to the trained network."""
        return self

    def refuse_changed(self) -> None:
        """Raise if the model is in training mode, or has other weights than at the fit.

        A module that was cast to another dtype may differ by its rounding.
        """
        dtype = self.first[0].dtype
        self.fingerprint.refuse_other(
            self.model, SAME if dtype == self.fitted_dtype else max(SAME, torch.finfo(dtype).eps)
        )

    def fitted_device(self) -> torch.device:
        """Return the device of the model."""
        return next(self.model.parameters()).device


def is_recording() -> bool:
    """Return whether operations are recorded, by ``torch.export``, ONNX, ``torch.compile`` or a trace, and not run."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


SAME_COVARIANCE = 3e-6  # error, relative to the largest entry, up to which a covariance of weights has the shorter form
COPIES = 4  # float64 copies of the covariance of weights that the search for the shorter form takes


# Forms return the covariances of the outputs (L, ..., C, C) under L beliefs, given the features of the last layer.


class DenseForm(nn.Module):
    """aᵀ S_cd a for features a (..., D) and every pair of outputs c, d; with a bias, a one follows the features."""

    covariance: Tensor

    def __init__(self, covariance: Tensor, with_bias: bool = False) -> None:
        super().__init__()
        self.sizes, self.with_bias = covariance.shape[1:], with_bias
        self.register_buffer("covariance", covariance.flatten(1))  # S as (D, C C D)

    def forward(self, a: Tensor) -> Tensor:
        if self.with_bias:
            a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
        rows = (a @ self.covariance).unflatten(-1, self.sizes)  # (..., C, C, D)
        return (rows * a.unsqueeze(-2).unsqueeze(-2)).sum(-1).unsqueeze(0)


class NoForm(nn.Module):
    """The covariance of outputs without spread, zero, given their mean in place of features."""

    def forward(self, mean: Tensor) -> Tensor:
        return torch.zeros_like(mean.unsqueeze(-1) * mean.unsqueeze(-2)).unsqueeze(0)


def quadratic_form(posterior: Linearised, network: Network) -> nn.Module:
    """Return the covariance of the outputs as a module of the features, for a posterior over one linear map."""
    (block,) = network.layout
    axes = SharedAxes.of([posterior])
    if axes is not None:
        return axes
    d_out, d_in = block.d_out, block.d_in
    what = f"the covariance of {block.size} weights"
    refuse_large_result(COPIES * 8 * block.size**2, network.device, what, "Export a posterior over fewer weights")
    options: Any = {"dtype": network.dtype, "device": network.device}
    a = torch.eye(d_in, **options)[None, :, None]  # one sample for each feature
    g = torch.eye(d_out, **options)[None, :, None, None].expand(1, d_out, d_in, 1, d_out)
    jacobian = LayerJacobians(
        (partial(LinearJacobian, a, g),), network.layout, network.selection, d_in, d_out, network.dtype
    )
    with torch.no_grad():
        covariance = posterior.cross(jacobian).double().reshape(d_in, d_out, d_in, d_out).permute(0, 1, 3, 2)
        with_bias = block.bias is not None
        dense = _shared_axes(covariance, with_bias) or DenseForm(covariance.contiguous(), with_bias)
        return dense.to(network.dtype)


def _shared_axes(covariance: Tensor, with_bias: bool = False) -> SharedAxes | None:
    """Return the covariance (D, C, C, D) in the shorter form; None if it has none."""
    _, outputs = eigh(_symmetric(torch.einsum("icdi->cd", covariance)))
    turned = torch.einsum("icdj,ck,dl->iklj", covariance, outputs, outputs)
    blocks = turned.diagonal(dim1=1, dim2=2).permute(2, 0, 1)  # (C, D, D)
    _, inputs = eigh(_symmetric(blocks.sum(0)))
    weights = torch.einsum("kij,ia,ja->ka", blocks, inputs, inputs)
    pairs = torch.einsum("ck,dk,ka->cda", outputs, outputs, weights)  # in two steps: one would form all six axes
    whole = torch.einsum("cda,ia,ja->icdj", pairs, inputs, inputs)
    gap = (whole - covariance).abs().max()
    is_same = bool(gap <= SAME_COVARIANCE * covariance.abs().max())
    return SharedAxes(outputs, inputs, weights.clamp_min(0).unsqueeze(0), with_bias) if is_same else None


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


MANY = 256  # classes above which predictions are drawn from functions


class ClosedForm(PosteriorModule):
    """The features of the model, quadratic forms in them, and the links of a likelihood.

    A call that runs, and is not exported, refuses a model that is in training mode or has other weights than at the
    fit. Its results are differentiable in the inputs alone: ``backward`` writes nothing to the weights.

    Args:
        fitted: The fitted posterior, whose model is shared and not copied.
        head: Its last linear layer; None if there is no spread, and no features are needed.
        forms: The covariances of the outputs under all beliefs, given the features.
        cells: What the predictive is averaged from.
        weights: The weight of each.
        shift: The steps of the last layer's weights (C, D) from the network's to those of the mean; None for none.
        returns: "logits", "probs" or "moments".
    """

    shift: Tensor | None
    weights: Tensor
    differences: Tensor | None

    def __init__(
        self, fitted: Fitted, head: nn.Module | None, forms: Sequence[nn.Module], cells: Sequence[Cell],
        weights: Tensor, shift: Tensor | None, returns: str,
    ) -> None:  # fmt: skip
        super().__init__(fitted, returns)
        self.head, self.forms = head, nn.ModuleList(forms).eval()
        self.cells: tuple[Any, ...] = tuple(cells)
        self.with_bias = head is not None and fitted.network.layout[0].bias is not None  # a fixed bias has no spread
        self.register_buffer("shift", shift)
        dtype = reduce(torch.promote_types, (p.dtype for p in self.model.parameters()), torch.float32)
        self.register_buffer("weights", weights.to(self.fitted_device(), dtype))
        pairwise = all(isinstance(c.likelihood, Categorical) and c.likelihood.link == "pairwise" for c in cells)
        self.logits = CellLogits(cells, dtype).to(self.fitted_device()) if pairwise else None
        matrix = None
        if self.logits is not None and isinstance(first := forms[0], SharedAxes) and len(forms) == 1:
            matrix = first.differences(self.logits.belief, self.logits.spread)
        self.register_buffer("differences", matrix)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        given = inputs, named
        if is_recording():
            refuse_training_mode(self.model)
            results = self._compute(given)
        else:
            self.refuse_changed()
            if wants_slopes(given):
                results = isolate(self._compute, given)
            else:
                with torch.no_grad():
                    results = self._compute(given)
        return results if self.returns == "moments" else results[0]

    def _compute(self, given: Inputs) -> tuple[Tensor, ...]:
        """Return one tensor, or mean and variance, in the shape that the model returns."""
        features: list[Tensor] = []
        thread = None if is_recording() else get_ident()  # another one may run the model meanwhile

        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            if thread is None or thread == get_ident():
                features.append(given[0])

        handle = None if self.head is None else self.head.register_forward_pre_hook(hook)
        try:
            out = self.model(*given[0], **given[1])
        finally:
            if handle is not None:
                handle.remove()
        raw = pick_output(out, self.output)
        mean = raw.unsqueeze(-1) if raw.ndim == 1 else raw
        a = features[-1] if features else mean
        if self.shift is not None:
            shift = self.shift
            mean = mean + (F.linear(a, shift[:, :-1], shift[:, -1]) if self.with_bias else F.linear(a, shift))
        results = KINDS[type(self.cells[0].likelihood)](self, mean, a)
        return tuple(each.reshape(raw.shape) for each in results)

    def _covariances(self, a: Tensor) -> Tensor:
        """Return the covariances of the outputs under all beliefs, (L, ..., C, C)."""
        each = [form(a) for form in self.forms]
        return each[0] if len(each) == 1 else torch.cat(each)

    def _average(self, values: Tensor) -> Tensor:
        """Return Σ w_k v_k of values (K, ...)."""
        return (self.weights.reshape(-1, *[1] * (values.ndim - 1)) * values).sum(0)

    def _variance(self, covs: Tensor) -> Tensor:
        """Return the variance of the outputs f under the mixture."""
        each = covs.diagonal(dim1=-2, dim2=-1)
        return self._average(torch.stack([c.spread * each[c.belief] for c in self.cells]))

    def _classes(self, mean: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        covs = None if self.differences is not None and self.returns != "moments" else self._covariances(a)
        if self.logits is None:
            assert covs is not None
            each = torch.stack([CLASS_LINKS[c.likelihood.link](*_belief_of(c, mean, covs)) for c in self.cells])
        else:
            means, spread = self.logits.means(mean), self._spread(mean, a, covs)
            few = not is_recording() and spread.numel() <= FEW_PAIRS
            each = pairwise_logits(means, spread, few).log_softmax(-1)
        if self.returns == "logits":
            return (torch.logsumexp(each + torch.log(self.weights).reshape(-1, *[1] * mean.ndim), 0),)
        probs = self._average(each.exp())
        if self.returns == "probs":
            return (probs,)
        assert covs is not None
        return probs, self._variance(covs)

    def _spread(self, mean: Tensor, a: Tensor, covs: Tensor | None) -> Tensor:
        """Return the variances of the differences of every two logits, (K, ..., C, C)."""
        if self.differences is not None:
            axes: Any = self.forms[0]
            sizes = len(self.cells), mean.shape[-1], mean.shape[-1]
            return F.linear(axes.squares(a), self.differences).unflatten(-1, sizes).movedim(-3, 0)
        assert self.logits is not None
        assert covs is not None
        return FunctionGaussian(self.logits.means(mean), self.logits.covariances(covs)).differences

    def _labels(self, mean: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        covs = self._covariances(a)
        each = [LABEL_LINKS[c.likelihood.link](*_belief_of(c, mean, covs)) for c in self.cells]
        probs = self._average(torch.stack(each))
        if self.returns == "logits":
            return (probs.log() - (1 - probs).log(),)
        return (probs,) if self.returns == "probs" else (probs, self._variance(covs))

    def _numbers(self, mean: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        if self.returns == "logits":
            return (mean,)
        noise = [c.likelihood.widening * c.likelihood.noise_variance.to(mean).expand(mean.shape) for c in self.cells]
        return mean, self._variance(self._covariances(a)) + self._average(torch.stack(noise))


def _belief_of(cell: Cell, mean: Tensor, covs: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the logits that a cell predicts from."""
    factor, cov = 1 / (cell.likelihood.link_temperature or 1.0), covs[cell.belief]
    offset = cell.likelihood.logit_offset
    mean = factor * mean if offset is None else factor * mean + offset.to(mean)
    if not cell.scale:  # without a graph: the slope of a standard deviation at zero is infinite
        return mean, torch.zeros_like(cov)
    return mean, (cell.scale * factor**2) * cov


def _quadrature(mean: Tensor, cov: Tensor) -> Tensor:
    nodes, weights = (t.to(mean) for t in normal_rule())
    std = cov.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    return ((mean.unsqueeze(-1) + std.unsqueeze(-1) * nodes).sigmoid() * weights).sum(-1)


CLASS_LINKS = {
    "pairwise": lambda mean, cov: pairwise_logits(mean, FunctionGaussian(mean, cov).differences).log_softmax(-1),
    "probit": lambda mean, cov: probit_logits(mean, cov.diagonal(dim1=-2, dim2=-1)).log_softmax(-1),
    "bridge": lambda mean, cov: bridge(FunctionGaussian(mean, cov)),
}
LABEL_LINKS = {
    "quadrature": _quadrature,
    "probit": lambda mean, cov: probit_logits(mean, cov.diagonal(dim1=-2, dim2=-1)).sigmoid(),
}
KINDS: dict[type, Callable[[ClosedForm, Tensor, Tensor], tuple[Tensor, ...]]] = {
    Categorical: ClosedForm._classes, Bernoulli: ClosedForm._labels, Gaussian: ClosedForm._numbers,
}  # fmt: skip


def obstacles(network: Network, cells: Sequence[Cell]) -> list[str]:
    """Return why a posterior has no closed form, in words; nothing if it has one."""
    likelihood, found = cells[0].likelihood, []
    if type(likelihood) not in KINDS:
        found.append(f"{type(likelihood).__name__} has no closed form")
    elif type(likelihood) is Categorical and likelihood.link not in CLASS_LINKS:
        found.append(f"the link {likelihood.link!r} has no closed form")
    if network.image:
        found.append("the outputs are images")
    if any(cell.scale for cell in cells):
        first = network.layout[0]
        if len(network.layout) > 1 or network.selection.index is not None:
            found.append(
                "the uncertain weights are not those of one layer, so that variances are made of gradients of the "
                "network at every input, which ONNX and torch.export do not record"
            )
        elif not network.head or network.head != first.weight:
            found.append("the uncertain layer is not known to make the outputs")
        elif type(head_of(network)) is not nn.Linear:
            found.append(f"the last layer is {type(head_of(network)).__name__}, not Linear")
        if network.output_shape[-1] > MANY and type(likelihood) is Categorical:
            found.append(f"more than {MANY} classes are predicted from drawn functions")
    return found


def head_of(network: Network) -> nn.Module:
    """Return the module that the first uncertain weight belongs to."""
    return network.model.get_submodule(network.layout[0].weight.rpartition(".")[0])


RETURNS = ("logits", "probs", "moments")


class Predicting(PosteriorModule):
    """A module that returns what the model returned, with the uncertainty of a posterior inside.

    Args:
        fitted: The fitted posterior.
        returns: "logits", "probs" or "moments".
        why: Why it cannot be exported.
    """

    def __init__(self, fitted: Fitted, returns: str, why: str) -> None:
        super().__init__(fitted, returns)
        self.fitted, self.why = fitted, why

    def extra_repr(self) -> str:
        return f"cannot be exported: {self.why}"

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if is_recording():
            raise UnsupportedError(
                f"{self.why}; an exported program needs a closed form, and this posterior has none. Fit with "
                "weights=lw.last_layer, a model that ends in nn.Linear, and Categorical (links pairwise, probit, "
                "bridge), Bernoulli or Gaussian."
            )
        device = self.fitted_device()
        if device != self.fitted.base.theta.device:  # the module was moved
            self.fitted = self.fitted.to(device)
        x = named if named else inputs[0] if len(inputs) == 1 else inputs
        predictive = self.fitted.predict(x)
        with torch.no_grad():
            raw = pick_output(call_model(self.model, x), self.output)
        shaped = lambda values: values.reshape(raw.shape) if values.numel() == raw.numel() else values
        likelihood = self.fitted.likelihood
        if self.returns == "moments":
            variance = self.fitted.functions(x).variance if likelihood.has_logits else predictive.variance
            return shaped(predictive.mean), shaped(variance)
        if self.returns == "probs" or not likelihood.has_logits:
            return shaped(predictive.mean)
        return shaped(predictive.log_probs if likelihood.ignores_common_shift else predictive.probs.logit())


ModuleOf = ClosedForm | Predicting


def module_of(fitted: Fitted, returns: str) -> ModuleOf:
    """Return a fitted posterior as a module: in closed form where it has one."""
    one_of(RETURNS).check("returns", returns)
    posterior, network = fitted.posterior, fitted.network
    if returns == "probs" and not fitted.likelihood.has_logits:
        kind = "a regression" if fitted.likelihood.noise_variance is not None else type(fitted.likelihood).__name__
        raise UnsupportedError(f"returns is 'probs', and {kind} has none; expected 'logits' or 'moments'.")
    cells, weights, members = _components(posterior)
    why = obstacles(network, cells)
    if why:
        return Predicting(fitted, returns, "; ".join(why))
    if not any(cell.scale for cell in cells):
        return ClosedForm(fitted, None, [NoForm() for _ in members], cells, weights, None, returns)
    try:
        axes = SharedAxes.of(members)
        each = (quadratic_form(each, network) if isinstance(each, Linearised) else NoForm() for each in members)
        forms = list(each) if axes is None else [axes]
    except UnsupportedError as error:  # too many weights for their covariance
        return Predicting(fitted, returns, str(error).rstrip("."))
    shift = None if network.shift is None else network.layout[0].arrange(network.selection.split(network.shift))[0]
    return ClosedForm(fitted, head_of(network), forms, cells, weights, shift, returns)


def _components(posterior: Posterior) -> tuple[tuple[Cell, ...], Tensor, tuple[Posterior, ...]]:
    """Return what the predictive is averaged from, their weights, and the posterior of each belief."""
    if not isinstance(posterior, MixturePosterior):
        cell = Cell(0, posterior.problem.likelihood, float(posterior.has_spread))
        return (cell,), torch.ones(1, dtype=torch.float64), (posterior,)
    return posterior.cells, posterior.weights, posterior.members
