"""The start of tuning: the default tuner of a posterior, and initial precisions near the optimum."""

from __future__ import annotations

from typing import Any

from lapwing.posteriors.protocols import Reweightable, SamplesGamma
from lapwing.priors.start import starting_precisions
from lapwing.tuners.maximise_evidence import MaximiseEvidence
from lapwing.tuners.protocol import Tuner
from lapwing.tuners.sample_em import SampleEM


def default_tuner(posterior: Any) -> Tuner:
    """Return the tuner that ``fit`` uses if none is given."""
    return SampleEM(mode="network") if isinstance(posterior, SamplesGamma) else MaximiseEvidence()


def start_near_optimum(posterior: Any) -> Any:
    """Return the posterior with precisions near the optimum of the evidence; unchanged if its prior is fixed."""
    problem, statistics = posterior.problem, posterior.statistics
    if not isinstance(posterior, Reweightable):
        return posterior
    values = starting_precisions(problem.prior, problem.network.theta(), statistics.data * statistics.outputs)
    return posterior.with_problem(problem.with_prior(problem.prior.with_precision(values)))
