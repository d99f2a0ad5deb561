"""The corrected evidence of a network with many images: some of them stand for all."""

from __future__ import annotations

import time

from torch import Tensor, nn

import lapwing as lw
from experiments.options import Progress, silent
from lapwing.demo.training import batches

IMAGES = 2000  # that stand for all, unless a setting says otherwise


def corrected_evidence(
    model: nn.Module, data: tuple[Tensor, Tensor], of: int, size: int = 250, link: str = "pairwise",
    progress: Progress = silent,
) -> lw.Fitted:  # fmt: skip
    """Return the Kronecker posterior whose precision has the largest evidence at the optimum of the tangent model.

    That optimum takes hundreds of passes over the data, so few images stand for the ``of`` that the network was trained
    on: the temperature of the likelihood is their share.

    Args:
        model: The network.
        data: Images and classes.
        of: The number of images that the network was trained on.
        size: That of a batch.
        link: The link of the likelihood.
        progress: Is called with a line about the precision and the time.
    """
    start = time.perf_counter()
    likelihood = lw.Categorical(temperature=len(data[1]) / of, link=link)
    tuner = lw.tuners.LinearMode(solver_tolerance=1e-2, tolerance=1e-3)
    posterior = lw.fit(model, batches(*data, size), likelihood, tuner=tuner, progress=False)
    precision, seconds = posterior.prior.values.item(), time.perf_counter() - start
    progress(f"corrected evidence of {len(data[1])} images at the precision {precision:.3g}, {seconds:.0f} s")
    return posterior
