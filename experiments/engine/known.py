"""The experiments that the engine runs."""

from __future__ import annotations

from importlib import import_module

from experiments.engine.contract import Experiment
from lapwing.errors import LapwingError

EXPERIMENTS: dict[str, str] = {  # name -> the module and class
    "cnn": "experiments.vision.cnn:Convolutional",
    "shift": "experiments.vision.shift:Shift",
    "evidence": "experiments.vision.evidence:Evidence",
    "regularised": "experiments.vision.regularised:Regularised",
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
