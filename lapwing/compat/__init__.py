"""The interface of laplace-torch 0.3, computed by Lapwing: ``from lapwing.compat import Laplace``."""

from typing import Any

from lapwing.compat.laplace import Laplace
from lapwing.compat.settings import (
    FunctionalApproximation,
    HessianStructure,
    LikelihoodName,
    LinkApprox,
    PredType,
    PriorStructure,
    SubsetOfWeights,
    TuningMethod,
)

Likelihood = LikelihoodName

__all__ = [
    "Laplace", "FunctionalApproximation", "HessianStructure", "Likelihood", "LinkApprox", "PredType", "PriorStructure",
    "SubsetOfWeights", "TuningMethod",
]  # fmt: skip

_ELSEWHERE = {
    "marglik_training": "lw.train(model, loader, likelihood) trains with the evidence",
    "ELLA": 'use Laplace(..., "all", "gp", functional_approximation="nystrom", ...), or method=lw.ELLA() of lw.fit',
    "VaLLA": 'use Laplace(..., "all", "gp", functional_approximation="variational", ...), or method=lw.VaLLA()',
}


def __getattr__(name: str) -> Any:
    """Raise for other names of laplace-torch, with the way to do the same."""
    if name in _ELSEWHERE:
        raise ImportError(f"lapwing.compat has no {name}: {_ELSEWHERE[name]}.")
    if name.endswith("Laplace"):
        raise ImportError(
            f"lapwing.compat has no class {name}: there is one class, "
            "Laplace(model, likelihood, subset_of_weights, hessian_structure)."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
