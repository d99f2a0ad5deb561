"""Run the three experiments of the demo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from lapwing.demo import bands, diabetes, digits, overview
from lapwing.demo.result import ExperimentReport


def run(out: Path, seed: int = 0, quick: bool = False) -> ExperimentReport:
    """Run digits, diabetes and bands on one thread; ``quick`` trains each network once and for ten epochs only."""
    shorten = (lambda recipe: replace(recipe, epochs=10)) if quick else (lambda recipe: recipe)
    images, patients, curve = digits.Digits(seed=seed), diabetes.Diabetes(seed=seed), bands.Bands(seed=seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the networks are small: more threads only wait for each other
    try:
        of_digits = digits.run(replace(images, recipe=shorten(images.recipe), repeats=1 if quick else images.repeats))
        of_diabetes = diabetes.run(
            replace(patients, recipe=shorten(patients.recipe), repeats=1 if quick else patients.repeats)
        )
        of_bands = bands.run(replace(curve, recipe=shorten(curve.recipe)))
    finally:
        torch.set_num_threads(threads)
    pictures = {"overview.png": lambda result, path: overview.picture(result, of_bands, path)}
    return ExperimentReport(out / "results.json", (of_digits, of_diabetes, of_bands), pictures)
