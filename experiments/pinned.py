"""Settings under which the published tables were measured: one precision by the evidence, and the probit link.

``lw.fit`` itself returns a mixture over precisions, with the pairwise link; the experiment ``calibration`` is for that.
"""

from __future__ import annotations

from typing import Any

import lapwing as lw

EVIDENCE = lw.tuners.MaximiseEvidence()
PROBIT = lw.Categorical(link="probit")


def as_fitted(posterior: Any) -> Any:
    """Return the posterior as it is: a tuner for methods that learn their prior by themselves.

    ``posterior.tuned(as_fitted)`` is the posterior that a mixture varies.
    """
    return posterior
