"""The README as PyPI shows it, where links and pictures cannot lead into the checkout: a metadata hook of hatchling.

Relative links become links below ``base`` of ``[tool.hatch.metadata.hooks.custom]``, the public address of the
checkout's files (such as https://HOST/OWNER/lapwing/blob/v0.3.0/), and the picture one below ``pictures``. Without
them links become their text, and the picture and the paragraph about it are left out, so that no link leads nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)\n\n((?:.+\n)+\n)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)]+)\)")


def for_pypi(readme: str, base: str = "", pictures: str = "") -> str:
    """Return a README whose links and pictures are absolute, or are left out where there is no address for them."""
    readme = PICTURE.sub(lambda found: f"![{found[1]}]({pictures}{found[2]})\n\n{found[3]}" if pictures else "", readme)
    return LINK.sub(lambda found: f"[{found[1]}]({base}{found[2]})" if base else found[1], readme)


class ReadmeHook(MetadataHookInterface):
    """The metadata field ``readme``, made from README.md."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        addresses = {key: self.config[key] for key in ("base", "pictures") if key in self.config}
        metadata["readme"] = {"content-type": "text/markdown", "text": for_pypi(text, **addresses)}
