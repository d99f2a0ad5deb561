"""The command line of the engine: ``NAME --form quick``, ``--list``, ``--docs`` and ``--join``."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from experiments.data import data_folder
from experiments.engine.contract import Experiment
from experiments.engine.known import EXPERIMENTS, experiment_class
from experiments.engine.pages import refresh
from experiments.engine.running import Outcome, Plan, run
from experiments.engine.settings import code_version, digest, from_toml, overridden
from experiments.engine.store import Stored, join, load, result_path, save
from experiments.engine.tables import EXTRA, as_text, grid, summarised
from experiments.options import positive
from lapwing.errors import LapwingError

RESULTS = Path("docs/results")  # of the numbers in the docs
FORMS = ("quick", "full")
IN_FILES = Path(__file__).parents[1] / "forms"  # NAME/FORM.toml: further forms


def main(given: Sequence[str], others: Mapping[str, str]) -> int:
    """Run the command and return the exit status: 0, 1 after an error or a unit that failed, 130 after Ctrl-C.

    ``others`` are experiments that the engine does not run, with a line about each, for ``--list``.
    """
    if given[:1] == ["--list"]:
        return exit_status(lambda: _list(given, others))
    actions = {"--join": _join, "--docs": _docs}
    return exit_status(lambda: actions.get(given[0] if given else "", _run)(given))


def exit_status(work: Callable[[], int]) -> int:
    """Return the exit status of the work: its own, or 1 with a message on stderr after an expected error."""
    try:
        return work()
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith(("lapwing", "experiments")):
            raise
        return _complain(f"{missing.name} is not installed; use pip install 'lapwing[run]'.")
    except (LapwingError, OSError) as error:
        return _complain(str(error))


def _complain(message: str) -> int:
    print(f"experiments: {message}", file=sys.stderr)
    return 1


def run_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one experiment."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=experiment_class(name).title)
    parser.add_argument("name", choices=[name], help=argparse.SUPPRESS)
    parser.add_argument("--form", choices=FORMS, help="quick: minutes on two cores (default); full: as in the docs")
    parser.add_argument("--config", type=Path, help="TOML file of settings; its name is that of the form")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    parser.add_argument("--seed", type=int, help="the same as --set seed=N")
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--data-dir", type=Path, help="folder of the data; by default LAPWING_DATA")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of NAME_FORM.json (out)")
    parser.add_argument("--workers", type=positive, default=1, help="processes of one thread each (1: this process)")
    parser.add_argument("--time", type=float, metavar="SECONDS", help="start no unit after that many seconds")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="units to run, such as 'wine/*'")
    parser.add_argument("--replace", action="store_true", help="discard what is stored with other settings")
    return parser


def _run(given: Sequence[str]) -> int:
    arguments = run_parser(given[0]).parse_args(given)
    experiment = settings_of(arguments)
    form = arguments.config.stem if arguments.config else arguments.form or "quick"
    path = result_path(arguments.out, experiment.name, form)
    command = _command_text(given)
    plan = Plan(path, form, arguments.workers, arguments.time, arguments.only, command, arguments.replace)
    with _ending_like_ctrl_c():
        outcome = run(experiment, plan, _print_progress)
    if outcome.stored.records:
        print(table_text(experiment, outcome.stored), end="\n\n")
    _print_state(experiment, outcome, path)
    return 130 if outcome.interrupted else 1 if outcome.failed else 0


@contextmanager
def _ending_like_ctrl_c() -> Iterator[None]:
    """Let a request to end, such as that of ``timeout``, end a run as Ctrl-C does, its processes included."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def settings_of(arguments: argparse.Namespace) -> Experiment:
    """Return the experiment with the settings that the options give."""
    cls = experiment_class(arguments.name)
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    options = list(arguments.set)
    options += [] if arguments.seed is None else [f"seed={arguments.seed}"]
    options += [] if arguments.device is None else [f"device={arguments.device}"]
    if "data_dir" in names:
        try:
            options.append(f"data_dir={data_folder(arguments.data_dir)}")
        except LapwingError:
            if arguments.data_dir is not None:
                raise  # else there is no folder: a unit that needs data says so
    if arguments.config is not None:
        return from_toml(cls, arguments.config, options)
    return overridden(getattr(cls, arguments.form or "quick")(), options)


def table_text(experiment: Experiment, stored: Stored) -> str:
    """Return the table of a result: mean and standard error of the scores that the experiment shows."""
    summary = summarised(stored.records)
    columns = getattr(experiment, "columns", ()) or [name for name in summary.columns if name not in EXTRA]
    shown = [name for name in (*columns, "seconds") if name in summary.columns]
    return f"{stored.experiment}/{stored.form}\n" + as_text(grid(summary.restricted(columns=shown)))


def _print_state(experiment: Experiment, outcome: Outcome, path: Path) -> None:
    drawing = getattr(experiment, "picture", None)
    if drawing is not None and not outcome.left and not outcome.failed:
        drawing(outcome.stored, path.with_suffix(".png"))
        print(path.with_suffix(".png"))
    if path.exists():  # not where no unit is done
        print(path)
    for key in outcome.failed:
        _complain(f"{key} failed: {outcome.stored.units[key].error}")
    if outcome.left:
        why = "interrupted" if outcome.interrupted else "the time is over"
        listed = ", ".join(outcome.left[:5]) + (", ..." if len(outcome.left) > 5 else "")
        _complain(f"{why}; {len(outcome.left)} units are left: {listed}. Run the same command to go on.")


def _command_text(given: Sequence[str]) -> str:
    """Return the command without the folders, which are different elsewhere."""
    words = list(given)
    for option, word in (("--data-dir", "DIR"), ("--out", "DIR"), ("--config", "FILE")):
        for i, text in enumerate(words):
            if text == option and i + 1 < len(words):
                words[i + 1] = word
            elif text.startswith(f"{option}="):
                words[i] = f"{option}={word}"
    return shlex.join(["python", "-m", "experiments", *words])


def _list(given: Sequence[str], others: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments", description="List the experiments.")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of stored results ({RESULTS})")
    parser.add_argument("--data-dir", type=Path, help="folder of the data; by default LAPWING_DATA")
    arguments = parser.parse_args(given)
    lines = []
    for name in EXPERIMENTS:
        cls = experiment_class(name)
        states = [_state(cls, form, arguments) for form in FORMS]
        lines.append([name, *states, cls.title])
    lines += [[name, "", "", text] for name, text in others.items() if name not in EXPERIMENTS]
    widths = [max(map(len, column)) for column in zip(["", *FORMS, ""], *lines)]
    for line in (["", *FORMS, ""], *lines):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    for path in sorted(IN_FILES.glob("*/*.toml")):
        if path.parent.name in EXPERIMENTS:
            state = _state(experiment_class(path.parent.name), path.stem, arguments, path)
            print(f"{path.relative_to(IN_FILES.parent.parent)}: {state}")
    return 0


def _state(cls: type[Experiment], form: str, arguments: argparse.Namespace, config: Path | None = None) -> str:
    """Return how many units a form has, and how many are stored, are of other code or settings, or failed."""
    try:
        options = argparse.Namespace(
            name=cls.name, form=form, config=config, set=[], seed=None, device=None, data_dir=arguments.data_dir
        )
        experiment = settings_of(options)
        keys = experiment.units()
    except (LapwingError, OSError):
        return "no data"
    path = result_path(arguments.out, cls.name, form)
    if not path.exists():
        return f"{len(keys)} units, none stored"
    stored = load(path)
    valid = stored.done(digest(experiment), code_version(experiment))
    done, other = valid & set(keys), len(valid - set(keys))
    failed = sum(bool(unit.error) for unit in stored.units.values())
    words = [f"{len(done)} of {len(keys)} stored"]
    words += [f"{failed} failed"] if failed else []
    words += [f"{other} more of other data or choices"] if other else []  # such as tables that are not in the folder
    old = len(stored.units) - len(valid) - failed
    return ", ".join(words + ([f"{old} out of date"] if old else []))


def _join(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Join the results of several machines.")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="files of stored results")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of NAME_FORM.json (out)")
    arguments = parser.parse_args(given)
    stored = join([load(path) for path in arguments.join])
    path = result_path(arguments.out, stored.experiment, stored.form)
    save(stored, path)
    print(f"{len(stored.units)} units", path, sep="\n")
    return 0


def _docs(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Write the numbers of the docs.")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page would change")
    check = parser.parse_args(given).check
    changed = refresh(Path(), check)
    if check and changed:
        listed = ", ".join(map(str, changed))
        return _complain(f"{listed} differ from the stored results; run python -m experiments --docs.")
    print("\n".join(map(str, changed)) or "all pages agree with the stored results")
    return 0


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
