"""Run the units of an experiment, in this process or in several, and store each as soon as it is done."""

from __future__ import annotations

import fnmatch
import hashlib
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.engine.contract import Experiment
from experiments.engine.machine import Machine
from experiments.engine.measuring import measured
from experiments.engine.settings import code_version, digest, what
from experiments.engine.store import Stored, Unit, checked, load, save
from experiments.options import Progress, silent
from lapwing.errors import FileError


@dataclass(frozen=True)
class Plan:
    """How to run: the file of results, processes, seconds after which no unit is started, pattern of units, command."""

    path: Path
    form: str
    workers: int = 1
    seconds: float | None = None
    only: str = "*"
    command: str = ""
    replace: bool = False  # stored units of other settings


@dataclass(frozen=True)
class Outcome:
    """What is stored after a run, and the keys of the units that failed, or were not started or not finished."""

    stored: Stored
    failed: tuple[str, ...]
    left: tuple[str, ...]
    interrupted: bool = False


def run(experiment: Experiment, plan: Plan, progress: Progress = silent) -> Outcome:
    """Run the units that are not stored yet and return what is stored then.

    A unit that raises is stored with its error, and the run goes on; the next run tries it again. On Ctrl-C the units
    that are done stay stored. The file is read again before a unit is added, so that runs of other units may share it.
    """
    start = time.monotonic()
    keys = selected(experiment, plan.only)
    stored = resumed(experiment, plan)
    done = stored.done(digest(experiment), code_version(experiment))
    todo = [key for key in keys if key not in done]
    if len(todo) < len(keys):
        progress(f"{experiment.name}/{plan.form}: {len(keys) - len(todo)} of {len(keys)} units are stored already")
    may_start = lambda: plan.seconds is None or time.monotonic() - start < plan.seconds
    ran: dict[str, Unit] = {}
    interrupted = False
    work = _serial if plan.workers == 1 else _parallel
    results = work(experiment, todo, plan, may_start, progress)
    try:
        for key, unit in results:
            ran[key] = unit
            stored = resumed(experiment, replace(plan, replace=plan.replace and len(ran) == 1)).with_unit(key, unit)
            stored = stored.ordered(experiment.units())
            save(stored, plan.path)
            state = f"failed, {unit.error.splitlines()[-1]}" if unit.error else "done"
            progress(f"{key}: {state} after {unit.seconds:.1f} s ({len(ran)} of {len(todo)})")
    except KeyboardInterrupt:
        interrupted = True
    failed = tuple(key for key, unit in ran.items() if unit.error)
    return Outcome(stored, failed, tuple(key for key in todo if key not in ran), interrupted)


def resumed(experiment: Experiment, plan: Plan) -> Stored:
    """Return what is stored of this experiment. Raise FileError if that was measured with other settings."""
    empty = Stored(experiment.name, plan.form, what(experiment), experiment.seed)
    if not plan.path.exists() or plan.replace:
        return empty
    stored = load(plan.path)
    choosing = getattr(experiment, "choosing", ())
    names = [name for name in {**stored.settings, **empty.settings} if name not in choosing]
    for name in names:
        old, new = stored.settings.get(name), empty.settings.get(name)
        if old != new:
            raise FileError(
                f"{plan.path} holds results with {name} = {old}, and {name} is {new} now; "
                "write to another folder with --out, or discard them with --replace."
            )
    return Stored(experiment.name, plan.form, empty.settings, experiment.seed, stored.units)


def selected(experiment: Experiment, pattern: str) -> tuple[str, ...]:
    """Return the keys of the units that a pattern of the shell selects. Raise if there are none."""
    keys = experiment.units()
    chosen = tuple(key for key in keys if fnmatch.fnmatchcase(key, pattern))
    if not chosen:
        listed = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
        raise FileError(f"--only is {pattern!r}, which selects no unit; expected a pattern of keys such as {listed}.")
    return chosen


def measured_unit(experiment: Experiment, key: str, command: str, progress: Progress) -> Unit:
    """Run one unit with a global random state that depends on its key and the seed alone; errors become text."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{experiment.seed}/{key}".encode()).digest()[:7], "big"))
    error, start = "", time.perf_counter()
    try:
        answer = measured(lambda: checked(experiment.measure(key, progress)))
        records, seconds, peak = answer.answer, answer.seconds, answer.peak
    except Exception as raised:
        records, seconds, peak = (), time.perf_counter() - start, None
        error = "".join(traceback.format_exception_only(type(raised), raised)).strip()
        progress(traceback.format_exc())
    machine = Machine.here(command)
    return Unit(records, round(seconds, 3), peak, machine, digest(experiment), code_version(experiment), error)


Results = Iterator[tuple[str, Unit]]


def _serial(experiment: Experiment, keys: Sequence[str], plan: Plan, may_start: Any, progress: Progress) -> Results:
    for key in keys:
        if not may_start():
            return
        yield key, measured_unit(experiment, key, plan.command, progress)


def _parallel(experiment: Experiment, keys: Sequence[str], plan: Plan, may_start: Any, progress: Progress) -> Results:
    """Run units in processes. If one dies, those that were running failed, and new processes take the rest."""
    waiting, others = list(keys), set(multiprocessing.active_children())
    while waiting and may_start():
        with ProcessPoolExecutor(
            plan.workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool:
            running: dict[Future[Unit], str] = {}
            try:
                while running or (waiting and may_start()):
                    while waiting and len(running) < plan.workers and may_start():
                        future = pool.submit(measured_unit, experiment, waiting[0], plan.command, _to_stderr)
                        running[future] = waiting.pop(0)
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield running[future], future.result()
                        del running[future]
            except BrokenProcessPool:
                for future, key in running.items():
                    survived = future.done() and future.exception() is None
                    yield key, future.result() if survived else _died(experiment, key, plan.command)
            except (KeyboardInterrupt, GeneratorExit):
                pool.shutdown(wait=False, cancel_futures=True)
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()
                raise


def _died(experiment: Experiment, key: str, command: str) -> Unit:
    error = "a process died, perhaps for want of memory; run again, with fewer workers"
    return Unit((), 0.0, None, Machine.here(command), digest(experiment), code_version(experiment), error)


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
