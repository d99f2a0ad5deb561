"""The files that a finished command leaves: pictures, and one JSON file with all numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lapwing.demo.result import Result

Picture = Callable[[Result, Path], None]


@dataclass(frozen=True)
class Report:
    """Results, the JSON file for their numbers, and their pictures by file name: the first shows the first result."""

    path: Path
    results: tuple[Result, ...]
    pictures: Mapping[str, Picture] = field(default_factory=dict)

    def write(self) -> list[Path]:
        """Draw the pictures beside the JSON file, write that file, and return the paths of all of them."""
        drawn = [self.path.with_name(name) for name in self.pictures]
        for path, draw, result in zip(drawn, self.pictures.values(), self.results, strict=False):
            draw(result, path)
        documents = {result.experiment: json.loads(result.to_json()) for result in self.results}
        self.path.write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")
        return [*drawn, self.path]
