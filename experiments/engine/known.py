"""The experiments that the engine runs."""

from __future__ import annotations

from importlib import import_module

from experiments.engine.contract import Experiment
from lapwing.errors import LapwingError

EXPERIMENTS: dict[str, str] = {  # name -> the module and class
    "active": "experiments.active:Active",
    "calibration": "experiments.calibration_jobs:Calibration",
    "cifar": "experiments.cifar:Cifar",
    "cnn": "experiments.vision.cnn:Convolutional",
    "crossfit": "experiments.crossfit:Crossfitting",
    "costs": "experiments.costs:Costs",
    "decisions": "experiments.decisions:Decisions",
    "drift": "experiments.vision.drift:Drift",
    "estimators": "experiments.estimators:Estimators",
    "evidence": "experiments.vision.evidence:Evidence",
    "fashion": "experiments.fashion:Fashion",
    "flights": "experiments.flights:Flights",
    "images": "experiments.images:ImageTable",
    "inducing": "experiments.inducing:Inducing",
    "inducing_targets": "experiments.inducing_targets:Targets",
    "language": "experiments.language_task:Language",
    "normalised": "experiments.normalised:Normalised",
    "norms": "experiments.norms:Norms",
    "pushed": "experiments.pushed:PushedImages",
    "regularised": "experiments.vision.regularised:Regularised",
    "response": "experiments.response_task:ResponseTask",
    "resnet50": "experiments.vision.fifty:Fifty",
    "sampling": "experiments.sampling:Sampling",
    "tomography": "experiments.tomography.experiment:Tomography",
    "uci": "experiments.tables:Tables",
    "budget": "experiments.budget:Budget",
    "between": "experiments.maps_regression:Between",
    "maps": "experiments.maps_classification:Classes",
    "em": "experiments.em:SampleScales",
    "objectives": "experiments.objectives:Objectives",
    "push_sizes": "experiments.push_sizes:PushSizes",
    "shift": "experiments.vision.shift:Shift",
}


def experiment_class(name: str) -> type[Experiment]:
    """Import the class of an experiment. Only this module is imported.

    Raises:
        LapwingError: If there is no such experiment.
    """
    if name not in EXPERIMENTS:
        raise LapwingError(f"there is no experiment {name!r}; expected one of {', '.join(EXPERIMENTS)}.")
    module, _, cls = EXPERIMENTS[name].partition(":")
    known: type[Experiment] = getattr(import_module(module), cls)
    return known
