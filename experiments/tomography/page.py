"""The page of the case study: pictures and tables in one file that opens without a network."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.tomography import pictures
from lapwing.demo.result import Picture, Result, table

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; background: white; } pre { overflow-x: auto; font-size: 13px; }
"""
PARTS: tuple[tuple[str, str, Picture], ...] = (
    (
        "The reconstruction and its error bars",
        "A network was trained on the measurements of this one image. Its tangent model gives every pixel a standard "
        "deviation. Where the error is large, the standard deviation should be large too; points of the Q-Q plot "
        "should lie on the diagonal, and lie flatter where the error bars are too wide.",
        pictures.reconstruction,
    ),
    (
        "Images that the priors expect",
        "Samples of the prior over images around the reconstruction: with independent weights, with a Gaussian process "
        "over the taps of each filter, and with TV-PredCP, which prefers images with little total variation.",
        pictures.prior_samples,
    ),
    (
        "The next angles",
        "After a few angles the belief chooses the next ones: those that it expects to learn most from.",
        pictures.design,
    ),
)


def write(results: Sequence[Result], path: Path) -> None:
    """Write the page: a section with picture and table for each of the first results, and the last as a table."""
    sections = []
    with TemporaryDirectory() as folder:
        for (title, text, draw), result in zip(PARTS, results, strict=False):
            picture = Path(folder, "picture.png")
            draw(result, picture)
            data = base64.b64encode(picture.read_bytes()).decode()
            image = f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'
            sections.append(f"<h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{image}{_table(result)}")
    sections += [f"<h2>What was learned, and what it cost</h2>{_table(result)}" for result in results[len(PARTS) :]]
    first = results[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    foot = f"<p>python -m experiments tomography --seed {first.seed}; {html.escape(versions)}</p>"
    head = f"<title>Tomography with error bars</title><style>{STYLE}</style>"
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    body = f"<h1>Tomography with error bars</h1>{''.join(sections)}{foot}"
    path.write_text(
        f'<!doctype html><html lang="en"><head>{meta}{head}</head><body>{body}</body></html>\n', encoding="utf-8"
    )


def _table(result: Result) -> str:
    return f"<pre>{html.escape(table(result))}</pre>"
