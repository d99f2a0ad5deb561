"""Pictures of predictions and results, each a function that returns a Matplotlib axis: ``lw.plots``.

Over inputs: ``band`` and ``confidence_map``, with ``grid`` to make inputs. Beside targets: ``reliability``,
``intervals``, ``risk_coverage``, ``ranking``. What was learned: ``effective_parameters``, ``evidence_curve``,
``trace``. All take ``ax``, an axis to draw on, and otherwise make a figure that pyplot does not know:
``ax.figure.savefig("picture.png")``.
They need ``pip install 'lapwing[plots]'``; Matplotlib is imported when a picture is drawn.
"""

from lapwing.plots.functions import band, confidence_map, grid
from lapwing.plots.hyperparameters import effective_parameters, evidence_curve, trace
from lapwing.plots.scores import intervals, ranking, reliability, risk_coverage

__all__ = [
    "band", "confidence_map", "grid", "reliability", "intervals", "risk_coverage", "ranking", "effective_parameters",
    "evidence_curve", "trace",
]  # fmt: skip
