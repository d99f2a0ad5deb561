"""Draws from a posterior: functions of the tangent model, weights, and outputs of the network with drawn weights."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lapwing.core.inputs import Inputs, check_finite
from lapwing.core.settings import require_integer
from lapwing.core.slopes import isolated
from lapwing.networks.forward import outside_autocast
from lapwing.posteriors.protocols import HasFunctionSamples, HasWeightSamples, required
from lapwing.predicting import Predicts
from lapwing.predictives.images import Images


class Draws(Predicts, Protocol):
    """A posterior from which functions and weights are drawn. ``Fitted`` inherits from it."""

    @outside_autocast
    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n functions drawn from the posterior, evaluated at x: (n, B, C), or (n, B, C, H, W) of images.

        Each draw uses one set of weights for every input, and equal generators give the same functions at whatever
        inputs they are asked for.

        Args:
            x: A batch of inputs.
            n: The number of draws.
            generator: The source of randomness; the global generator if None.

        Raises:
            UnsupportedError: If the method has no function samples, or fewer than n.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> posterior.function_samples(x, 8, torch.Generator().manual_seed(0)).shape
        torch.Size([8, 40, 1])
        """
        require_integer("n", n)
        required(self.base, HasFunctionSamples, "function samples", self.method)
        x, images = self._checked(x, slopes=True), Images()
        images.add(self.network.image_form(x))
        (samples,) = isolated(lambda x: [self.posterior.function_samples(x, n, generator)], x)
        check_finite(samples[0], "outputs of the network")
        return images.outputs(samples)

    @outside_autocast
    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the weights, (n, P), around the trained ones.

        Args:
            n: The number of draws.
            generator: The source of randomness; the global generator if None, and for ``SWAG`` and ``IVON`` the seed of
                the method.

        Raises:
            UnsupportedError: If the method has no weight samples, or fewer than n.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> posterior.weight_samples(8, torch.Generator().manual_seed(0)).shape  # a slope and an offset each
        torch.Size([8, 2])
        """
        require_integer("n", n)
        self._unchanged()
        required(self.base, HasWeightSamples, "weight samples", self.method)
        return self.posterior.weight_samples(n, generator)

    @outside_autocast
    def network_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return outputs (n, B, C) of the real network, not the tangent model, with sampled weights.

        Those of images are (n, B, C, H, W).
        Usually worse than ``function_samples``: the posterior's spread belongs to the tangent model, and a network
        that far from its optimum underfits (Immer et al. 2021 report 84 % against 92 % accuracy on Fashion-MNIST).
        Here for comparison. Cost: n forward passes.

        Args:
            x: A batch of inputs.
            n: The number of draws.
            generator: The source of randomness; the global generator if None.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> posterior.network_samples(x, 8, torch.Generator().manual_seed(0)).shape
        torch.Size([8, 40, 1])
        """
        x, network, images = self._checked(x), self.network, Images()
        images.add(network.image_form(x))
        steps = self.weight_samples(n, generator) - network.theta()
        with torch.no_grad():
            samples = torch.stack([network.at(step, x) for step in steps]).to(network.dtype)
        check_finite(samples[0], "outputs of the network")
        return images.outputs(samples)
