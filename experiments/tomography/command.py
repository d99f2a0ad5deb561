"""The command ``python -m experiments tomography``: one phantom with its pictures, on a page."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from experiments.options import Progress, add_quick, positive
from experiments.tomography import page, pictures
from experiments.tomography.scanning import DesignSettings, designed, quick
from experiments.tomography.study import Study, StudySettings
from lapwing.demo.result import ExperimentReport

TINY: dict[str, Any] = {"steps": 20, "channels": 3, "size": 12}  # of the quick form


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_quick(parser, "tiny networks and few steps")
    parser.add_argument("--steps", type=positive, help="training steps of a network")
    parser.add_argument("--channels", type=positive, help="width of a network")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Reconstruct the phantom, and choose the next angles of one image."""
    changes = {**TINY} if arguments.quick else {}
    changes |= {name: getattr(arguments, name) for name in ("steps", "channels") if getattr(arguments, name)}
    settings, choice = replace(StudySettings(), **changes), replace(quick(DesignSettings()), **changes)
    if arguments.quick:
        settings = replace(settings, angles=5, samples=16, tuning=50)
        choice = replace(choice, counts=(2, 3), candidates=6)
    study = Study.of(settings, arguments.seed, progress)
    results = (
        study.scores(settings, arguments.seed),
        study.priors(settings, arguments.seed),
        designed(choice, arguments.seed, progress),
        study.hyperparameters(settings, arguments.seed),
    )
    drawn = {
        "tomography.png": pictures.reconstruction, "tomography_priors.png": pictures.prior_samples,
        "tomography_angles.png": pictures.design, "tomography.html": lambda _, path: page.write(results, path),
    }  # fmt: skip
    return ExperimentReport(arguments.out / "tomography.json", results, drawn)
