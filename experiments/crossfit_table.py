"""The tables of the experiment ``crossfit``: every rule against the plain network, and the goals.

Run: ``python -m experiments.crossfit_table OUT/crossfit_full.json``. Runs are paired: a task and a seed. A set's mean
is over its tasks and seeds. Constants may only be chosen on the sets of half 0.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from experiments.crossfit_tasks import TASKS
from experiments.engine.store import load
from lapwing.decisions.evaluation import align_columns

APART = 0.005  # nats that count as a difference
LEVEL = 0.95
Rules = Mapping[str, Mapping[str, float]]  # rule -> score -> value
Runs = Mapping[str, Rules]  # of a task and seed
JUDGED = ("temperature=", "validation=", "ensemble, temperature=", "sibling", "sibling()", "crossfit", "mixture")


def main(argv: Sequence[str] | None = None) -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(prog="python -m experiments.crossfit_table", description="Tables of crossfit.")
    parser.add_argument("file", type=Path, help="crossfit_FORM.json, as the engine writes it")
    runs: dict[str, dict[str, dict[str, float]]] = {}
    stored = load(parser.parse_args(argv).file)
    for record in stored.records:
        scores = dict(record.scores) | {"seconds": record.seconds or 0.0}
        runs.setdefault(f"{record.group}/{record.repeat}", {})[record.method] = scores
    units = stored.units.values()
    machines = sorted({f"{unit.machine.hardware}, torch {unit.machine.versions['torch']}" for unit in units})
    seconds = sum(unit.seconds for unit in units)
    print(f"{len(runs)} runs, {seconds:.0f} s, one thread for each process beside other work; {'; '.join(machines)}\n")
    print("\n".join(lines(runs)))


def lines(runs: Runs) -> Iterator[str]:
    """Yield the lines of all tables."""
    kinds: dict[str, dict[str, Rules]] = {"classes": {}, "numbers": {}, "gaps": {}}
    for name, rules in runs.items():
        task = TASKS[name.rsplit("/", 1)[0]]
        kinds["gaps" if task.gap else "classes" if "ECE" in rules["plain"] else "numbers"][name] = rules
    if kinds["classes"] and kinds["numbers"]:
        yield "in short"
        yield from _short(kinds["classes"], kinds["numbers"])
        yield ""
    for kind, own in kinds.items():
        halves = {"": own} if kind == "gaps" else {
            "all": own, **{f"half {half}": {n: r for n, r in own.items() if _half(n) == half} for half in (0, 1)},
        }  # fmt: skip
        for title, some in halves.items():
            if some:
                named = ", ".join(part for part in (kind, title) if part)
                yield f"{named} ({len(some)} runs, {len(_sets(some))} sets)"
                yield from _table(some, CLASSES if kind == "classes" else NUMBERS)
                yield ""
    for kind in ("classes", "numbers"):
        yield f"NLL less that of the plain network, means of the seeds: {kind}"
        yield from _tasks(kinds[kind])
        yield ""
    yield "goals"
    yield from goals(kinds)


def _set(name: str) -> str:
    return TASKS[name.rsplit("/", 1)[0]].data


def _half(name: str) -> int:
    return TASKS[name.rsplit("/", 1)[0]].half


def _sets(runs: Runs) -> dict[str, list[str]]:
    sets: dict[str, list[str]] = {}
    for name in runs:
        sets.setdefault(_set(name), []).append(name)
    return sets


def gaps(runs: Runs, rule: str, score: str, base: str = "plain") -> dict[str, float]:
    """Return the differences from another rule, by run."""
    return {name: rules[rule][score] - rules[base][score] for name, rules in runs.items() if score in rules[rule]}


def of_sets(runs: Runs, values: Mapping[str, float]) -> dict[str, float]:
    """Return the means over the runs of each set."""
    return {name: statistics.mean(values[run] for run in own) for name, own in _sets(runs).items()}


def _mean(runs: Runs, rule: str, score: str) -> float:
    return statistics.mean(rules[rule][score] for rules in runs.values())


def _worse(runs: Runs, rule: str) -> str:
    values = gaps(runs, rule, "NLL")
    return f"{sum(v > APART for v in values.values())} ({max(values.values()):.3f})"


def _against(runs: Runs, rule: str) -> str:
    values = gaps(runs, rule, "NLL", "temperature=").values()
    return f"{sum(v < -APART for v in values)} / {sum(v > APART for v in values)}"


def _sets_worse(runs: Runs, rule: str) -> str:
    return str(sum(v > APART for v in of_sets(runs, gaps(runs, rule, "NLL")).values()))


def _coverage_error(runs: Runs, rule: str) -> float:
    return statistics.mean(abs(rules[rule]["coverage 95 %"] - LEVEL) for rules in runs.values())


def _coverage_error_of_sets(runs: Runs, rule: str) -> float:
    values = {name: rules[rule]["coverage 95 %"] - LEVEL for name, rules in runs.items()}
    return statistics.mean(abs(v) for v in of_sets(runs, values).values())


def _ratio(score: str, base: str) -> Callable[[Runs, str], float]:
    return lambda runs, rule: statistics.geometric_mean(
        rules[rule][score] / rules[base][score] for rules in runs.values()
    )


COMMON: dict[str, tuple[str, Callable[[Runs, str], float | str]]] = {  # column -> score that it needs, and the value
    "NLL": ("NLL", lambda runs, rule: statistics.mean(gaps(runs, rule, "NLL").values())),
    "worse (most)": ("NLL", _worse),
    "sets worse": ("NLL", _sets_worse),
    "vs temperature=": ("NLL", lambda runs, rule: statistics.mean(gaps(runs, rule, "NLL", "temperature=").values())),
    "better / worse": ("NLL", _against),
}
LAST: dict[str, tuple[str, Callable[[Runs, str], float | str]]] = {
    "AUROC": ("AUROC", lambda runs, rule: _mean(runs, rule, "AUROC")),
    "trainings": ("trainings", lambda runs, rule: f"{_mean(runs, rule, 'trainings'):.0f}"),
    "networks": ("networks", lambda runs, rule: f"{_mean(runs, rule, 'networks'):.0f}"),
    "seconds": ("seconds", lambda runs, rule: f"{_mean(runs, rule, 'seconds'):.1f}"),
}
CLASSES = {
    **COMMON,
    "ECE": ("ECE", lambda runs, rule: statistics.mean(gaps(runs, rule, "ECE").values())),
    "accuracy": ("accuracy", lambda runs, rule: _mean(runs, rule, "accuracy")),
    **LAST,
}
NUMBERS = {
    **COMMON,
    "coverage": ("coverage 95 %", lambda runs, rule: _mean(runs, rule, "coverage 95 %")),
    "error": ("coverage 95 %", _coverage_error),
    "of sets": ("coverage 95 %", _coverage_error_of_sets),
    "width": ("width", _ratio("width", "split conformal")),
    "RMSE": ("RMSE", _ratio("RMSE", "plain")),
    "CRPS": ("CRPS", _ratio("CRPS", "plain")),
    **LAST,
}


def _table(runs: Runs, columns: Mapping[str, tuple[str, Callable[[Runs, str], float | str]]]) -> list[str]:
    """Return a row for each rule. NLL and ECE are differences, width, RMSE and CRPS are ratios."""
    first = next(iter(runs.values()))
    rows = [["", *columns]]
    for rule in first:
        cells = (value(runs, rule) if score in first[rule] else "" for score, value in columns.values())
        rows.append([rule, *(f"{cell:.3f}" if isinstance(cell, float) else cell for cell in cells)])
    return align_columns(rows, 1)


def _short(classes: Runs, numbers: Runs) -> list[str]:
    """Return a row for each rule that classes and numbers share: scores as in the other tables, and shares of runs."""
    first, second = next(iter(classes.values())), next(iter(numbers.values()))
    rows = [["", "classes: NLL", "ECE", "worse", "numbers: CRPS", "coverage", "width", "RMSE", "worse", "trainings"]]
    for rule in (rule for rule in first if rule in second):
        own = [CLASSES["NLL"], CLASSES["ECE"], ("", _share), *(NUMBERS[key] for key in ("CRPS", "coverage", "width"))]
        scores = [value(numbers if k > 2 else classes, rule) for k, (_, value) in enumerate(own)]
        scores += [NUMBERS["RMSE"][1](numbers, rule), _share(numbers, rule)]
        cells = (f"{cell:.3f}" if isinstance(cell, float) else cell for cell in scores)
        rows.append([rule, *cells, f"{_mean(classes, rule, 'trainings'):.0f}"])
    return align_columns(rows, 1)


def _share(runs: Runs, rule: str) -> str:
    values = gaps(runs, rule, "NLL").values()
    return f"{sum(v > APART for v in values) / len(values):.0%}"


def _tasks(runs: Runs) -> list[str]:
    tasks: dict[str, dict[str, Rules]] = {}
    for name, rules in runs.items():
        tasks.setdefault(name.rsplit("/", 1)[0], {})[name] = rules
    rows = [["", *JUDGED]]
    for task, own in tasks.items():
        rows.append([task, *(f"{statistics.mean(gaps(own, rule, 'NLL').values()):+.3f}" for rule in JUDGED)])
    return align_columns(rows, 1)


def goals(kinds: Mapping[str, Runs]) -> Iterator[str]:
    """Yield a line for each goal: what was measured, and whether it is reached."""

    def line(text: str, value: float, is_reached: bool) -> str:
        return f"  {text}: {value:.3f}, {'reached' if is_reached else 'missed'}"

    for kind in ("classes", "numbers"):
        runs = kinds[kind]
        if not runs:
            continue
        for rule in ("crossfit", "sibling", "sibling()"):
            values = gaps(runs, rule, "NLL")
            share = sum(v > APART for v in values.values()) / len(values)
            yield line(f"{kind}, {rule}: share of runs worse than plain by {APART}, at most 0.02", share, share <= 0.02)
            worst = max(of_sets(runs, values).values())
            yield line(f"{kind}, {rule}: the worst mean of a set, at most {APART}", worst, worst <= APART)
            apart = [v for v in gaps(runs, rule, "NLL", "temperature=").values() if abs(v) > APART]
            share = sum(v < 0 for v in apart) / max(1, len(apart))
            yield line(f"{kind}, {rule}: share better than temperature= of {len(apart)} runs that differ by {APART}, "
                       "at least 0.75", share, share >= 0.75)  # fmt: skip
    if runs := kinds["numbers"]:
        error, by_set = _coverage_error(runs, "crossfit"), _coverage_error_of_sets(runs, "crossfit")
        yield line("numbers, crossfit: coverage error of a run, at most 0.02", error, error <= 0.02)
        yield line("numbers, crossfit: coverage error of a set, at most 0.02", by_set, by_set <= 0.02)
        ratio = _ratio("RMSE", "plain")(runs, "crossfit")
        yield line("numbers, crossfit: RMSE over that of the plain network, 1", ratio, abs(ratio - 1) < 1e-3)
        ratio = _ratio("width", "split conformal")(runs, "crossfit")
        yield line("numbers, crossfit: width over that of split conformal, at most 1", ratio, ratio <= 1)
    if runs := kinds["gaps"]:
        loss = statistics.mean(gaps(runs, "crossfit", "coverage 95 %", "default").values())
        yield line("gaps, crossfit: coverage less that of the default, at least -0.03", loss, loss >= -0.03)


if __name__ == "__main__":
    main()
