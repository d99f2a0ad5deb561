"""Run the three experiments of the demo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lapwing.demo import bands, diabetes, digits
from lapwing.demo.result import Report


def run(out: Path, seed: int = 0, quick: bool = False) -> Report:
    """Run digits, diabetes and bands; ``quick`` trains for ten epochs only."""
    shorten = (lambda recipe: replace(recipe, epochs=10)) if quick else (lambda recipe: recipe)
    results = (
        digits.run(digits.Digits(recipe=shorten(digits.Digits.recipe), seed=seed)),
        diabetes.run(diabetes.Diabetes(recipe=shorten(diabetes.Diabetes.recipe), seed=seed)),
        bands.run(bands.Bands(recipe=shorten(bands.Bands.recipe), seed=seed)),
    )
    pictures = {"digits.png": digits.picture, "diabetes.png": diabetes.picture, "bands.png": bands.picture}
    return Report(out / "results.json", results, pictures)
