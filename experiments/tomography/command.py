"""The command ``python -m experiments tomography``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from experiments.options import Progress, add_data_dir, add_quick, positive
from experiments.tomography import page, pictures
from experiments.tomography.grid import GridSettings, table_of
from experiments.tomography.large import LargeSettings
from experiments.tomography.large import reconstructed as large_reconstruction
from experiments.tomography.phantoms import digits
from experiments.tomography.scanning import DesignSettings, designed, quick
from experiments.tomography.study import Study, StudySettings
from lapwing.demo.result import Report

TINY = {"steps": 20, "channels": 3}  # of quick forms
SMALL = {"size": 14}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    parser.add_argument(
        "--part", choices=("study", "table", "angles", "large"), default="study",
        help="study: one phantom, minutes; table: all settings over digits; angles: the choice of angles over images; "
        "large: 501 x 501 pixels on a GPU",
    )  # fmt: skip
    add_quick(parser, "tiny networks and few steps")
    add_data_dir(parser, "mnist.npz, for the table")
    parser.add_argument("--images", type=positive, help="number of images of the table (20) or of angles (6)")
    parser.add_argument("--angles", type=positive, nargs="*", help="numbers of angles of the table (5 10 20 30)")
    parser.add_argument("--steps", type=positive, help="training steps of a network")
    parser.add_argument("--channels", type=positive, help="width of a network")
    parser.add_argument("--size", type=positive, help="side of the large image in pixels (501)")
    parser.add_argument("--memory", help="byte budget for the large image, such as 2GB (142GB)")
    parser.add_argument("--samples", type=positive, help="images drawn from the posterior of the large image (256)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, for the table and the large image")


def command(arguments: argparse.Namespace, progress: Progress) -> Report:
    """Run the part that was asked for."""
    return {"study": _study, "table": _table, "angles": _angles, "large": _large}[arguments.part](arguments, progress)


def _changes(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in ("steps", "channels") if getattr(arguments, name)}
    return (TINY if arguments.quick else {}) | given


def _study(arguments: argparse.Namespace, progress: Progress) -> Report:
    changes = _changes(arguments)
    settings, choice = replace(StudySettings(), **changes), replace(quick(DesignSettings()), **changes)
    if arguments.quick:
        settings = replace(settings, angles=5, samples=16, **SMALL)
        choice = replace(choice, counts=(2, 3), candidates=6, **SMALL)
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
    return Report(arguments.out / "tomography.json", results, drawn)


def _table(arguments: argparse.Namespace, progress: Progress) -> Report:
    grid = GridSettings(device=arguments.device, images=arguments.images or (2 if arguments.quick else 20))
    grid = replace(grid, **_changes(arguments))
    if arguments.quick:
        grid = replace(grid, angles=(3, 5), noises=(0.05,), samples=16)
    if arguments.angles:
        grid = replace(grid, angles=tuple(arguments.angles))
    truths = digits(arguments.data_dir, grid.images)
    kept = arguments.out / "tomography_table.jsonl"
    result = table_of(truths, grid, arguments.seed, kept, progress)
    return Report(arguments.out / "tomography_table.json", (result,))


def _angles(arguments: argparse.Namespace, progress: Progress) -> Report:
    settings = replace(DesignSettings(), **_changes(arguments))
    if arguments.quick:
        settings = replace(settings, images=2, counts=(2, 3), candidates=6, **SMALL)
    if arguments.images:
        settings = replace(settings, images=arguments.images)
    torch.set_num_threads(1)
    result = designed(settings, arguments.seed, progress)
    return Report(arguments.out / "tomography_angles.json", (result,), {"tomography_angles.png": pictures.design})


def _large(arguments: argparse.Namespace, progress: Progress) -> Report:
    given = {name: getattr(arguments, name) for name in ("size", "memory", "samples") if getattr(arguments, name)}
    settings = replace(LargeSettings(device=arguments.device), **_changes(arguments), **given)
    if arguments.quick:
        settings = replace(settings, size=25, angles=4, bins=17, scales=3, samples=8, memory="1GB")
    result = large_reconstruction(settings, arguments.seed, progress)
    return Report(arguments.out / "tomography_large.json", (result,))
