"""A fitted posterior of any method as a module that calls ``predict``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.core.inputs import call
from lapwing.core.settings import one_of
from lapwing.errors import UnsupportedError
from lapwing.modules.closed_form import ClosedForm, Component, head_of, obstacles
from lapwing.modules.quadratic import NoForm, quadratic_form
from lapwing.modules.shared import PosteriorModule, captured

RETURNS = ("logits", "probs", "moments")


class Predicting(PosteriorModule):
    """A module that returns what the model returned, with the uncertainty of a posterior inside.

    Args:
        fitted: The fitted posterior.
        returns: "logits", "probs" or "moments".
        why: Why it cannot be exported.
    """

    def __init__(self, fitted: Any, returns: str, why: str) -> None:
        super().__init__(fitted, returns)
        self.fitted, self.why = fitted, why

    def extra_repr(self) -> str:
        return f"cannot be exported: {self.why}"

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if captured():
            raise UnsupportedError(
                f"{self.why}; an exported program needs a closed form, and this posterior has none. Fit with "
                "weights=lw.last_layer, a model that ends in nn.Linear, and Categorical (links pairwise, probit, "
                "bridge), Bernoulli or Gaussian."
            )
        device = next(self.model.parameters()).device
        if device != self.fitted.base.theta.device:  # the module was moved
            self.fitted = self.fitted.to(device)
        x = named if named else inputs[0] if len(inputs) == 1 else inputs
        predictive = self.fitted.predict(x)
        with torch.no_grad():
            raw = self.raw(call(self.model, x))
        shaped = lambda values: values.reshape(raw.shape) if values.numel() == raw.numel() else values
        if self.returns == "moments":
            return tuple(map(shaped, _moments(self.fitted, predictive, x)))
        return shaped(_logits(predictive) if self.returns == "logits" else predictive.probs)


def _moments(fitted: Any, predictive: Any, x: Any) -> tuple[Tensor, Tensor]:
    if hasattr(predictive, "probs"):
        return predictive.probs, fitted.functions(x).variance
    return predictive.mean, predictive.variance


def _logits(predictive: Any) -> Tensor:
    if hasattr(predictive, "log_probs"):
        return predictive.log_probs  # type: ignore[no-any-return]
    if hasattr(predictive, "probs"):
        return predictive.probs.logit()  # type: ignore[no-any-return]
    return predictive.mean  # type: ignore[no-any-return]


ModuleOf = ClosedForm | Predicting


def module_of(fitted: Any, returns: str) -> ModuleOf:
    """Return a fitted posterior as a module: in closed form where it has one."""
    one_of(RETURNS).check("returns", returns)
    posterior, network = fitted.posterior, fitted.network
    if returns == "probs" and not fitted.likelihood.has_logits:
        kind = "a regression" if fitted.likelihood.noise_variance is not None else type(fitted.likelihood).__name__
        raise UnsupportedError(f"returns is 'probs', and {kind} has none; expected 'logits' or 'moments'.")
    components, members = _components(posterior)
    why = obstacles(network, components)
    if why:
        return Predicting(fitted, returns, "; ".join(why))
    if not any(component.scale for component in components):
        return ClosedForm(fitted, None, [NoForm() for _ in members], components, None, returns)
    forms = [quadratic_form(each, network) if each.linearised else NoForm() for each in members]
    shift = None if network.shift is None else network.layout[0].arrange(network.selection.split(network.shift))[0]
    return ClosedForm(fitted, head_of(network), forms, components, shift, returns)


def _components(posterior: Any) -> tuple[list[Component], list[Any]]:
    """Return what the predictive is averaged from, and the posterior of each belief."""
    if posterior is posterior.base:
        return [Component(0, float(posterior.has_spread), posterior.problem.likelihood, 1.0)], [posterior]
    pairs = zip(posterior.cells, posterior.weights.tolist(), strict=True)
    return [Component(c.belief, c.scale, c.likelihood, w) for c, w in pairs], list(posterior.members)
