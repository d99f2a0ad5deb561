"""Held-out data that are training data too: which rows of them a posterior knows, and what to say about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lapwing.core.callers import warn_caller
from lapwing.core.data import Data
from lapwing.core.known_rows import KnownRows
from lapwing.core.processes import Processes
from lapwing.core.trace import Trace
from lapwing.networks.network import Network
from lapwing.tuners.protocol import HoldsOut, Tuner

REMEDY = "The network knows their targets, and error bars come out too narrow. Hold data out of training."


@dataclass(frozen=True)
class Reused:
    """The rows that a posterior knows, with those of its held-out data, and findings about rows that are both."""

    rows: KnownRows
    findings: tuple[str, ...] = ()


def validated(rows: KnownRows, validation: Data) -> Reused:
    """Return the known rows with those of the validation data; warn if some of these are training data.

    Raises:
        DataError: If all of them are.
    """
    return _noted(rows, validation, "validation data", refuses=True)


def tuned_on(rows: KnownRows, tuner: Tuner | None, network: Network, processes: Processes) -> Reused:
    """Return the known rows with the held-out data of a tuner, if it has some; warn if these are training data."""
    if not isinstance(tuner, HoldsOut) or not tuner.holds_out:
        return Reused(rows)
    data = network.reading(tuner.data, "held-out data", processes=processes)
    return _noted(rows, data, "held-out data of the tuner", refuses=False)


def _noted(rows: KnownRows, data: Data, name: str, refuses: bool) -> Reused:
    sketch = data.sketch()
    remarks = tuple(rows.remarks(sketch, name, REMEDY))
    for remark in remarks:
        if refuses and remark.whole:
            raise remark.refused()
        warn_caller(remark.text)
    return Reused(rows.with_validation(sketch), tuple(remark.text for remark in remarks))


def with_findings(posterior: Any, findings: tuple[str, ...]) -> Any:
    """Return the posterior with these findings after those of its trace."""
    if not findings:
        return posterior
    trace = Trace("") if posterior.trace is None else posterior.trace
    return posterior.with_trace(replace(trace, findings=(*trace.findings, *findings)))
