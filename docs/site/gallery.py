"""Draw the pictures of the gallery: ``python docs/site/gallery.py [folder]``; needs ``lapwing[plots]``.

Runs the examples of docs/gallery.md one after another in docs/images/gallery, or in the folder; they take some seconds.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from lapwing.demo.result import reduce_colours

DOCS = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main(folder: Path) -> None:
    """Run the page in the folder."""
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    exec(compile("\n".join(BLOCK.findall(text)), "docs/gallery.md", "exec"), {"__name__": "__main__"})
    for path in Path().glob("*.png"):
        reduce_colours(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "images" / "gallery")
