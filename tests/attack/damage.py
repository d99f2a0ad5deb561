"""Files of Lapwing taken apart, changed and put together again, with the old checksum or with the right one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapwing.runtime.files import DTYPES, NAMES

BLANK = "0" * 64


@dataclass
class Contents:
    """A file as plain data; ``raw`` changes the header after it was put together."""

    tensors: dict[str, Tensor]
    root: Any
    checksum: str = BLANK
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes of the list of tensors

    @classmethod
    def of(cls, content: bytes) -> Contents:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        metadata = header.pop("__metadata__")
        tensors = {}
        for name, entry in header.items():
            start, stop = (8 + length + n for n in entry["data_offsets"])
            flat = torch.frombuffer(bytearray(content[start:stop]) or bytearray(8), dtype=DTYPES[entry["dtype"]])
            tensors[name] = flat[: (stop - start) // flat.element_size()].reshape(entry["shape"]).clone()
        return cls(tensors, json.loads(metadata["lapwing"]), metadata["sha256"])

    def packed(self, right: bool = True, text: str | None = None) -> bytes:
        """Return the file, with the right checksum or the old one; ``text`` replaces the JSON of the state."""
        data, entries = bytearray(), {}
        for name, tensor in self.tensors.items():
            start = len(data)
            data += bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
            entries[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, len(data)],
                **self.entries.get(name, {}),
            }
        text = json.dumps(self.root) if text is None else text
        metadata = {"lapwing": text, "sha256": BLANK if right else self.checksum}
        header = json.dumps({"__metadata__": metadata, **entries}).encode()
        return signed(header, bytes(data)) if right else joined(header, bytes(data))


def joined(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def signed(header: bytes, data: bytes) -> bytes:
    """Return a file whose header has zeros for the checksum, with the right one in their place."""
    digest = hashlib.sha256(joined(header, data)).hexdigest().encode()
    return joined(header.replace(BLANK.encode(), digest, 1), data)


def states(root: Any) -> list[dict[str, Any]]:
    """Return all states of a file, the root first."""
    return [root, *(each for part in root["parts"].values() for each in states(part))]
