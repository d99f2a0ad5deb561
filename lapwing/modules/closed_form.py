"""A last-layer posterior as a module of plain tensor operations, which ``torch.export`` and ONNX accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.core.gaussian import FunctionGaussian, normal_rule
from lapwing.core.inputs import wants_slopes
from lapwing.core.slopes import isolated
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.modules.shared import PosteriorModule, captured
from lapwing.networks.forward import refuse_training_mode
from lapwing.networks.network import Network
from lapwing.predictives.links import bridge, paired, probit_of

MANY = 256  # classes above which predictions are drawn from functions


@dataclass(frozen=True, eq=False)
class Component:
    """One component of a predictive: a belief, the factor of its covariance, the likelihood, and its weight."""

    belief: int
    scale: float
    likelihood: Any
    weight: float


class ClosedForm(PosteriorModule):
    """The features of the model, quadratic forms in them, and the links of a likelihood.

    A call that runs, and is not exported, refuses a model that is in training mode or has other weights than at the
    fit. Its results are differentiable in the inputs alone: ``backward`` writes nothing to the weights.

    Args:
        fitted: The fitted posterior, whose model is shared and not copied.
        head: Its last linear layer; None if there is no spread, and no features are needed.
        forms: The covariance of the outputs under every belief, given the features.
        components: What the predictive is averaged from.
        shift: The steps of the last layer's weights (C, D) from the network's to those of the mean; None for none.
        returns: "logits", "probs" or "moments".
    """

    shift: Tensor | None
    weights: Tensor

    def __init__(
        self,
        fitted: Any,
        head: nn.Module | None,
        forms: Sequence[nn.Module],
        components: Sequence[Component],
        shift: Tensor | None,
        returns: str,
    ) -> None:
        super().__init__(fitted, returns)
        self.head, self.forms, self.components = head, nn.ModuleList(forms).eval(), tuple(components)
        self.register_buffer("shift", shift)
        dtype = reduce(torch.promote_types, (p.dtype for p in self.model.parameters()), torch.float32)
        weights = torch.tensor([each.weight for each in components], dtype=torch.float64)
        self.register_buffer("weights", weights.to(dtype))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if captured():
            refuse_training_mode(self.model)
            return self._computed(inputs, named)
        self.refuse_changed()
        given = inputs, named
        with nullcontext() if wants_slopes(given) else torch.no_grad():
            results = isolated(lambda given: _listed(self._computed(*given)), given)
        return results if self.returns == "moments" else results[0]

    def _computed(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return what was asked for, in the shape that the model returns."""
        features: list[Tensor] = []
        hook = lambda _, given: features.append(given[0])
        handle = None if self.head is None else self.head.register_forward_pre_hook(hook)
        try:
            out = self.model(*inputs, **named)
        finally:
            if handle is not None:
                handle.remove()
        raw = self.raw(out)
        mean = raw.unsqueeze(-1) if raw.ndim == 1 else raw
        a = features[-1] if features else mean
        if self.head is not None and self.head.bias is not None:
            a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
        if self.shift is not None:
            mean = mean + a @ self.shift.mT
        results = self._results(mean, [form(a) for form in self.forms])
        if isinstance(results, Tensor):
            return results.reshape(raw.shape)
        return tuple(each.reshape(raw.shape) for each in results)

    def _results(self, mean: Tensor, covs: list[Tensor]) -> Any:
        """Return what was asked for, in the shape (..., C)."""
        return KINDS[type(self.components[0].likelihood)](self, mean, covs)

    def _average(self, values: list[Tensor]) -> Tensor:
        """Return Σ w_k v_k."""
        stacked = torch.stack(values, -1)
        return (stacked * self.weights).sum(-1)

    def _variance(self, covs: list[Tensor]) -> Tensor:
        """Return the variance of the outputs f under the mixture."""
        each = [cov.diagonal(dim1=-2, dim2=-1) for cov in covs]
        return self._average([c.scale * c.likelihood.widening * each[c.belief] for c in self.components])

    def _classes(self, mean: Tensor, covs: list[Tensor]) -> Any:
        each = [CLASS_LINKS[c.likelihood.link](*_scaled(c, mean, covs)) for c in self.components]
        log_weights: Tensor = torch.log(self.weights)
        log_probs = torch.logsumexp(torch.stack(each, -1) + log_weights, -1)
        if self.returns == "logits":
            return log_probs
        return log_probs.exp() if self.returns == "probs" else (log_probs.exp(), self._variance(covs))

    def _labels(self, mean: Tensor, covs: list[Tensor]) -> Any:
        probs = self._average([LABEL_LINKS[c.likelihood.link](*_scaled(c, mean, covs)) for c in self.components])
        if self.returns == "logits":
            return probs.log() - (1 - probs).log()
        return probs if self.returns == "probs" else (probs, self._variance(covs))

    def _numbers(self, mean: Tensor, covs: list[Tensor]) -> Any:
        if self.returns == "logits":
            return mean
        noise = [
            c.likelihood.widening * c.likelihood.noise_variance.to(mean).expand(mean.shape) for c in self.components
        ]
        return mean, self._variance(covs) + self._average(noise)


def _scaled(component: Component, mean: Tensor, covs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the logits that a component predicts from."""
    factor, cov = 1 / component.likelihood.link_temperature, covs[component.belief]
    offset = component.likelihood.logit_offset
    mean = factor * mean if offset is None else factor * mean + offset.to(mean)
    if not component.scale:  # without a graph: the slope of a standard deviation at zero is infinite
        return mean, torch.zeros_like(cov)
    return mean, (component.scale * factor**2) * cov


def _listed(results: Any) -> Sequence[Tensor]:
    return [results] if isinstance(results, Tensor) else results  # type: ignore[no-any-return]


def _pairwise(mean: Tensor, cov: Tensor) -> Tensor:
    own = cov.diagonal(dim1=-2, dim2=-1)
    spread = (own.unsqueeze(-1) + own.unsqueeze(-2) - 2 * cov).clamp_min(0)
    return paired(mean, spread).log_softmax(-1)


def _probit(mean: Tensor, cov: Tensor) -> Tensor:
    return probit_of(mean, cov.diagonal(dim1=-2, dim2=-1)).log_softmax(-1)


def _quadrature(mean: Tensor, cov: Tensor) -> Tensor:
    nodes, weights = (t.to(mean) for t in normal_rule())
    std = cov.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    return ((mean.unsqueeze(-1) + std.unsqueeze(-1) * nodes).sigmoid() * weights).sum(-1)


CLASS_LINKS = {
    "pairwise": _pairwise, "probit": _probit, "bridge": lambda mean, cov: bridge(FunctionGaussian(mean, cov)),
}  # fmt: skip
LABEL_LINKS = {
    "quadrature": _quadrature,
    "probit": lambda mean, cov: probit_of(mean, cov.diagonal(dim1=-2, dim2=-1)).sigmoid(),
}
KINDS: dict[type, Any] = {
    Categorical: ClosedForm._classes, Bernoulli: ClosedForm._labels, Gaussian: ClosedForm._numbers,
}  # fmt: skip


def obstacles(network: Network, components: Sequence[Component]) -> list[str]:
    """Return why a posterior has no closed form, in words; nothing if it has one."""
    likelihood, found = components[0].likelihood, []
    if type(likelihood) not in KINDS:
        found.append(f"{type(likelihood).__name__} has no closed form")
    elif type(likelihood) is Categorical and likelihood.link not in CLASS_LINKS:
        found.append(f"the link {likelihood.link!r} has no closed form")
    if network.image:
        found.append("the outputs are images")
    if any(component.scale for component in components):
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
