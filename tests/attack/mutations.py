"""Random damage to a file of Lapwing: to its bytes, its tensors or its JSON."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import torch
from torch import Tensor

from tests.attack.damage import BLANK, Contents, joined, signed, states

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, -5, 10**9, 2**62, 10**18, 0.5, -0.5, 1e-320, 1e300, -1e300, 1e31, math.inf,
    -math.inf, math.nan, "", "word", "Gaussian", "FullCurvature", "rows", "columns", "dense", "opaque", "rbf",
    "features", "random", "mc", "é\u2028", [], [[]], {}, {"a": 1}, [1, 2, 3], [None],
)  # fmt: skip


def damaged(content: bytes, rng: random.Random) -> tuple[str, bytes, bool]:
    """Return what was done, the damaged file, and whether its checksum is right."""
    kind = rng.choice(("bytes", "tensor", "tensor", "tensor", "json", "json", "json", "text", "header"))
    if kind == "bytes":
        return _bytes(content, rng)
    file = Contents.of(content)
    right = kind in ("text", "header") or rng.random() < 0.8
    if kind == "tensor":
        what = _tensor(file, rng)
        return what, file.packed(right), right
    if kind == "json":
        what = _json(file, rng)
        return what, file.packed(right), right
    if kind == "text":
        what, text = _text(json.dumps(file.root), rng)
        return what, file.packed(text=text), True
    what, header, data = _header(file.packed(right=True), rng)
    return what, signed(header, data), True


def _bytes(content: bytes, rng: random.Random) -> tuple[str, bytes, bool]:
    """Flip bits, cut, lengthen, or overwrite; the checksum stays."""
    data, kind = (
        bytearray(content),
        rng.choice(("flip", "flip", "flip", "cut", "longer", "overwrite", "zeros", "shift")),
    )
    place = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 4096))
    if kind == "flip":
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            data[rng.randrange(len(data)) if rng.random() < 0.5 else place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    elif kind == "longer":
        data += bytes(rng.randrange(1, 64))
    elif kind == "overwrite":
        data[place : place + 8] = rng.randbytes(8)
    elif kind == "zeros":
        data[place : place + 64] = bytes(len(data[place : place + 64]))
    else:
        data.insert(place, rng.randrange(256))
    return f"bytes: {kind} at {place}", bytes(data), bytes(data) == content


def _tensor(file: Contents, rng: random.Random) -> str:
    name = rng.choice(sorted(file.tensors))
    tensor = file.tensors[name]
    kind = rng.choice(("value", "value", "value", "bit", "bit", "scale", "negate", "dtype", "shape", "swap", "lose",
                       "add", "random", "transpose"))  # fmt: skip
    flat = tensor.reshape(-1)
    if kind == "value" and flat.numel():
        choices = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, 1e-320, 1e31) if tensor.is_floating_point() else (
            -1, 2**40, 7)  # fmt: skip
        flat[rng.randrange(flat.numel())] = torch.tensor(rng.choice(choices)).to(torch.float64).to(flat.dtype)
    elif kind == "bit" and flat.numel():
        _flip(flat, rng)
    elif kind == "scale" and tensor.is_floating_point():
        flat.mul_(rng.choice((-1.0, 0.0, 1e20, 1e-20, 1e-200, 2.0)))
    elif kind == "negate" and flat.numel():
        place = rng.randrange(flat.numel())
        flat[place] = -flat[place]
    elif kind == "dtype":
        file.tensors[name] = tensor.to(rng.choice(DTYPES))
    elif kind == "shape":
        new = rng.choice((flat, tensor[None], flat[:-1], torch.cat([flat, flat]), flat[:0], torch.zeros(())))
        file.tensors[name] = new.to(tensor.dtype)
    elif kind == "swap":
        other = rng.choice(sorted(file.tensors))
        file.tensors[name], file.tensors[other] = file.tensors[other], tensor
    elif kind == "lose":
        del file.tensors[name]
    elif kind == "add":
        file.tensors[name + rng.choice(("", ".more", "2"))[:99]] = torch.ones(2)
    elif kind == "random" and tensor.is_floating_point():
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        flat.copy_(torch.randn(flat.shape, generator=generator, dtype=torch.float64))
    elif kind == "transpose" and tensor.ndim > 1:
        file.tensors[name] = tensor.mT.contiguous()
    return f"tensor {name}: {kind}"


def _flip(flat: Tensor, rng: random.Random) -> None:
    raw = flat.view(torch.uint8)
    place = rng.randrange(raw.numel())
    raw[place] = int(raw[place]) ^ (1 << rng.randrange(8))


def _json(file: Contents, rng: random.Random) -> str:
    """Change one value, key or state of the JSON."""
    kind = rng.choice(("value", "value", "value", "value", "key", "name", "state", "tensors", "count"))
    state = rng.choice(states(file.root))
    if kind == "name":
        state["name"] = rng.choice(
            [each["name"] for each in states(file.root)] + ["Gaussian", "Isotropic", "", "Network"]
        )
    elif kind == "state":
        other = rng.choice(states(file.root))
        keys = rng.sample(("name", "settings", "tensors", "parts"), rng.randrange(1, 5))
        state.update(json.loads(json.dumps({key: other[key] for key in keys})))
    elif kind == "tensors":
        names = state["tensors"]
        state["tensors"] = rng.choice(
            (names[1:], names + names[:1], names[::-1], [1, 2], names + ["more"], "word", None)
        )
    elif kind == "key":
        place = state[rng.choice(("settings", "parts"))]
        key = rng.choice([*place, "new"])
        place[rng.choice(("more", key + "1"))] = place.pop(key) if key in place else rng.choice(VALUES)
    else:
        _change(state["settings"] or state, rng)
    return f"json of {state['name']!r:.40}: {kind}"


def _change(node: Any, rng: random.Random) -> None:
    """Walk down at random and replace one value."""
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.7:
        _change(node[key], rng)
        return
    old = node[key]
    close = [old + 1, old - 1, -old, old * 2, old / 3, float(old)] if isinstance(old, int | float) else []
    node[key] = rng.choice([*VALUES, *close, [old], str(old)])


def _text(text: str, rng: random.Random) -> tuple[str, str]:
    """Write JSON that is odd or wrong as text."""
    kind = rng.choice(("deep list", "deep object", "long number", "twice", "cut", "char", "surrogate", "big"))
    if kind.startswith("deep"):
        depth = rng.choice((60, 1000, 100_000))
        deep = "[" * depth + "]" * depth if kind == "deep list" else '{"a":' * depth + "1" + "}" * depth
        return kind, rng.choice((deep, text[:-1] + f', "more": {deep}}}'))
    if kind == "long number":
        return kind, text.replace("1", "1" * rng.choice((25, 5000, 200_000)), 1)
    if kind == "twice":
        return kind, text.replace('{"name":', '{"name": "x", "name":', 1)
    if kind == "cut":
        return kind, text[: rng.randrange(len(text))]
    if kind == "surrogate":
        return kind, text.replace('"name": "', '"name": "\\ud800', 1)
    if kind == "big":
        return kind, text[:-1] + ', "more": [' + "0," * 200_000 + "0]}"
    place = rng.randrange(len(text))
    return kind, text[:place] + chr(rng.randrange(32, 0x250)) + text[place + 1 :]


def _header(content: bytes, rng: random.Random) -> tuple[str, bytes, bytes]:
    """Change the list of tensors: offsets, shapes, dtypes, metadata."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    entry = header[rng.choice(names)]
    kind = rng.choice(("offsets", "shape", "dtype", "huge", "negative", "keys", "metadata", "list", "overlap"))
    if kind == "offsets":
        entry["data_offsets"][rng.randrange(2)] += rng.choice((-8, -1, 1, 8, 2**40))
    elif kind == "shape":
        entry["shape"] = rng.choice(([*entry["shape"], 2], [0], "word", [1.5], [True], None, [1] * 70))
    elif kind == "dtype":
        entry["dtype"] = rng.choice(("F8", "F64", "I8", "", None, "BOOL", []))
    elif kind == "huge":
        entry["shape"] = [2**62, 2**62]
    elif kind == "negative":
        entry["shape"] = [-1, -1]
    elif kind == "keys":
        entry[rng.choice(("more", "dtype"))] = 1
    elif kind == "metadata":
        header["__metadata__"] = rng.choice(({}, None, {"sha256": BLANK}, {"lapwing": 3, "sha256": BLANK}, []))
    elif kind == "list":
        header = rng.choice(([], {}, {"__metadata__": header["__metadata__"]}, "word"))
    else:
        entry["data_offsets"] = list(header[rng.choice(names)]["data_offsets"])
    if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"].update({"sha256": BLANK} if "sha256" in header["__metadata__"] else {})
    return f"header: {kind}", json.dumps(header).encode(), data


__all__ = ["damaged", "joined"]
