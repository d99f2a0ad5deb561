"""The README as PyPI shows it, where links and pictures cannot lead into the checkout: a metadata hook of hatchling.

Relative links and the picture become links below the public address of the checkout, ``Source`` of ``[project.urls]``
(such as https://HOST/OWNER/lapwing), at the tag of the version. Without that address links become their text, and the
picture and the paragraph about it are left out, so that no link leads nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)\n\n((?:.+\n)+\n)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)]+)\)")


def for_pypi(readme: str, source: str = "", tag: str = "") -> str:
    """Return a README whose links and pictures are absolute, or are left out where there is no address for them."""
    pictures, files = (f"{source.rstrip('/')}/{kind}/{tag}/" if source else "" for kind in ("raw", "blob"))
    readme = PICTURE.sub(lambda found: f"![{found[1]}]({pictures}{found[2]})\n\n{found[3]}" if source else "", readme)
    return LINK.sub(lambda found: f"[{found[1]}]({files}{found[2]})" if source else found[1], readme)


class ReadmeHook(MetadataHookInterface):
    """The metadata field ``readme``, made from README.md."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source", "")
        readme = for_pypi(text, source, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
