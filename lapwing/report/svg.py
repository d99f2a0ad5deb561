"""Pictures as SVG inside a page: reproducible, with unique ids, in the colours of the page, with a description."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from html import escape
from typing import Any

from lapwing.plots.canvas import COLOURS, INK

# Colours that follow the page, which is light or dark; those of text and lines are the colour of its text.
VARIABLES = {colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)}
VARIABLES |= {INK: "currentColor", "#000000": "currentColor"}
_HEADER = re.compile(r"^.*?<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)
_STYLE = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>\s*", re.DOTALL)  # it would hold for the whole page
_ID = re.compile(r"(\bid=\"|url\(#|href=\"#)([^\")]+)")
_UNSIZED = re.compile(r"(-?\d+\.\d{2})\d+")


@dataclass(frozen=True)
class Picture:
    """An inline SVG with a heading, a caption, and a description for those who do not see it."""

    name: str  # unique in the page
    heading: str
    caption: str
    alt: str
    svg: str


def inline_svg(name: str, ax: Any, alt: str) -> str:
    """Return the figure of an axis as an SVG element for a page.

    Equal figures give equal text. All ids start with ``name``, so that several pictures fit in one page.
    """
    import matplotlib

    figure, written = ax.figure, io.StringIO()
    figure.patch.set_visible(False)
    for axis in figure.axes:
        axis.patch.set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    text = _STYLE.sub("", _COMMENT.sub("", _METADATA.sub("", written.getvalue())))
    box = _HEADER.match(text)
    assert box is not None
    text = _ID.sub(rf"\g<1>{name}-\g<2>", text[box.end() :])
    text = _UNSIZED.sub(r"\1", text)  # hundredths of a point are enough
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    label = escape(alt, quote=True)
    return (
        f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{name}-title" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{name}-title">{label}</title>{text}'
    )
