"""The tangent model of a posterior: variances of functions of its weights, its Jacobian and its GGN as operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from lapwing.core.inputs import Inputs
from lapwing.core.progress import shows_progress
from lapwing.core.settings import FUNCTION, Rule
from lapwing.errors import UnsupportedError
from lapwing.networks.forward import outside_autocast
from lapwing.networks.functionals import Functional
from lapwing.posteriors.protocols import HasVarianceOf, required
from lapwing.predicting import Predicts
from lapwing.tangent.design import NetworkDesign, refuse_reordered, refuse_unsteady
from lapwing.tangent.operator import Operator


class Linearises(Predicts, Protocol):
    """A posterior whose tangent model is asked for variances and products. ``Fitted`` inherits from it."""

    @outside_autocast
    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Return the posterior variance of a scalar function of the weights, or of the outputs at ``x``.

        To first order in the function for methods with a belief about weights.

        Args:
            function: Takes all weights by name, or, if ``x`` is given, the outputs f (B, C) there, as the model
                returns them; returns a scalar.
            x: A batch of inputs, for a function of the outputs.

        >>> import torch
        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=1.0)
        >>> bool(posterior.variance_of(lambda w: w["weight"][0, 0]) > 0)
        True
        >>> slope = posterior.variance_of(lambda f: (f[-1] - f[0]) / 2, x)
        >>> torch.allclose(slope, posterior.variance_of(lambda w: w["weight"][0, 0]))
        True
        """
        Rule("a function of the weights by name, or of the outputs", FUNCTION.holds).check("function", function)
        if x is None:
            self._unchanged()
        else:
            x = self._checked(x)
            form = self.network.image_form(x)
            given = function
            function = given if form is None else lambda f: given(form.outputs(f))
        what = "variance of functions of the weights"
        return required(self.posterior, HasVarianceOf, what, self.method).variance_of(function, x)

    @outside_autocast
    def jacobian(self, data: Iterable[Any], *, progress: bool | None = None) -> Operator:
        """Return the Jacobian J of all outputs over these data as an operator (N C, P); no matrix is formed.

        ``J @ v`` and ``J.T @ u`` take many vectors at once. Rows of images are in the order (N, H, W, C).

        Args:
            data: Batches, as for ``fit``.
            progress: Whether to show a progress bar while data are read; None shows one on a terminal.

        >>> import torch
        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> (posterior.jacobian([(x, x)]) @ torch.ones(2)).shape  # of 40 outputs in the direction of both weights
        torch.Size([40])
        """
        design = self._design(data, "jacobian", progress)
        refuse_reordered(design)
        return Operator.jacobian(design, self._unchanged)

    @outside_autocast
    def ggn(self, data: Iterable[Any], *, progress: bool | None = None) -> Operator:
        """Return the GGN Σ Jᵀ R Rᵀ J at unit dispersion over these data as an operator (P, P); no matrix is formed.

        Args:
            data: Batches, as for ``fit``.
            progress: As for ``jacobian``.

        >>> import torch
        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> (posterior.ggn([(x, x)]) @ torch.ones(2)).shape
        torch.Size([2])
        """
        design = self._design(data, "ggn", progress)
        refuse_unsteady(design)
        return Operator.ggn(design, self._unchanged)

    def _design(self, data: Iterable[Any], curvature: str, progress: bool | None) -> NetworkDesign:
        """Return the rows of the Jacobian over these data, times the root of the likelihood's curvature for "ggn"."""
        self._unchanged()
        if not self.base.of_one_network:
            raise UnsupportedError(
                f"{self.method} has several networks, each with its own weights; expected a posterior of one network "
                f"for {curvature}(). Fit one to each: lw.fit(model, data, ...)."
            )
        network = self.network.shifted(None)
        batches = network.reading(data, progress=shows_progress(None))
        batches = batches if progress is None else replace(batches, progress=shows_progress(progress))
        return NetworkDesign.build(network, self.likelihood, batches, curvature=curvature)
