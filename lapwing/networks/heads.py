"""The choice of one tensor among those that a model returns: a head of a dictionary, a tuple, or a nesting of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lapwing.core.settings import Rule, is_integer, nearest
from lapwing.errors import ModelError
from lapwing.networks.selection import Selection

Path = tuple[str | int, ...]  # keys and positions, from the outside in

_is_key = lambda v: is_integer(v) or (isinstance(v, str) and bool(v))
OUTPUT = Rule(
    'the key of an output such as "logits", its position, or a tuple of these for outputs inside outputs, or None',
    lambda v: v is None or _is_key(v) or (isinstance(v, tuple) and len(v) > 0 and all(map(_is_key, v))),
)


def path_of(output: Any) -> Path:
    """Return the path that a user gave: a key, a position, a tuple of them, or None for the output as it is.

    >>> path_of("logits"), path_of(("heads", 1)), path_of(None)
    (('logits',), ('heads', 1), ())
    """
    OUTPUT.check("output", output)
    if output is None:
        return ()
    return output if isinstance(output, tuple) else (output,)


def picked(out: Any, path: Path) -> Any:
    """Return what lies at this path in the output of a model; raise ``ModelError`` with what there is, if nothing does.

    Without a path it is the output, or its ``logits`` if it has any and is no tensor.
    """
    for depth, key in enumerate(path):
        out = _part(out, key, path[:depth])
    if isinstance(out, Tensor) or path:
        return out
    return out["logits"] if isinstance(out, Mapping) and "logits" in out else getattr(out, "logits", out)


def reached(selection: Selection, raw: Tensor, tensors: Mapping[str, Tensor]) -> Selection:
    """Return the selection without the parameters that the output does not depend on, such as those of other heads."""
    chosen = [tensors[name] for name in selection.names]
    recorded = [p for p in chosen if p.requires_grad]
    slopes = torch.autograd.grad(raw.sum(), recorded, retain_graph=True, allow_unused=True)
    used = {id(p) for p, slope in zip(recorded, slopes, strict=True) if slope is not None}
    kept = [i for i, p in enumerate(chosen) if id(p) in used]
    if not kept:
        raise ModelError("the chosen output does not depend on any selected parameter; choose other weights.")
    return Selection(tuple(selection.names[i] for i in kept), tuple(selection.shapes[i] for i in kept))


def _part(out: Any, key: str | int, before: Path) -> Any:
    where = f"output{''.join(f'[{k!r}]' for k in before)}"
    if isinstance(out, Mapping) and key in out:
        return out[key]
    if isinstance(out, tuple | list) and isinstance(key, int) and -len(out) <= key < len(out):
        return out[key]
    if isinstance(key, str) and key in keys_of(out):
        return getattr(out, key)
    known = keys_of(out)
    expected = f"one of {', '.join(map(repr, known))}" if known else "no output=, which is for a dictionary or a tuple"
    raise ModelError(
        f"output has {key!r}, and the model returns a {type(out).__name__} as its {where}; expected {expected}."
        f"{nearest(key, [name for name in known if isinstance(name, str)])}"
    )


def keys_of(out: Any) -> list[Any]:
    """Return the keys, positions or fields of an output with several parts; none of a tensor."""
    if isinstance(out, Mapping):
        return list(out)
    if isinstance(out, tuple | list):
        return [*range(len(out)), *getattr(out, "_fields", ())]
    if isinstance(out, Tensor):
        return []
    return [name for name, value in getattr(out, "__dict__", {}).items() if isinstance(value, Tensor | tuple | list)]
