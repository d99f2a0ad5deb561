"""Files that are written whole or not at all, and the file of a saved value.

A ``State`` in a file: the safetensors format, with JSON of limited size and a checksum of every byte.

The file begins with the length of a JSON header. The header lists the tensors, whose bytes follow it, and has two texts
as metadata: ``lapwing``, the state without its tensors as JSON, and ``sha256``, the checksum of the file with the 64
digits of the checksum replaced by zeros. The format is written and read here, and other programs that know safetensors
can read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lapwing.errors import FileError, UnsupportedError
from lapwing.runtime.states import State

# Why a file could not be written, in words; every other error keeps the words of the system.
REASONS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the quota of the disk is used up; free some space",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "the folder or the file may not be written to; change its permissions or choose another folder",
    errno.EPERM: "the folder or the file may not be written to; change its permissions or choose another folder",
    errno.ENOTDIR: "a part of the path is not a folder; choose another path",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ELOOP: "its symbolic links point at each other; choose another path",
}
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF)  # file systems without it


def write_atomically(path: str | Path, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write a file such that at every moment the path has the old contents or the new ones, each whole.

    The contents go to a temporary file in the same folder. It is flushed and synchronised with the disk, then renamed
    to the target, and the folder is synchronised. A link stays a link, and the new file has the permissions of the old
    one. After an error or an interrupt the old file is whole and there is no temporary file.

    Raises:
        FileError: If the file cannot be written, with the reason.
    """
    temporary: Path | None = None
    try:
        target = Path(os.path.realpath(path))
        refuse_no_folder(target)
        mode = _mode(target)
        temporary = target.parent / f".lapwing-{secrets.token_hex(8)}.part"
        with open(temporary, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, target)
        _synchronise(target.parent)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        if isinstance(error, OSError):
            reason = REASONS.get(error.errno or 0, f"{error}; choose another path or disk")
            raise FileError(f"{path} cannot be written: {reason}. An existing file is unchanged.") from error
        raise


def refuse_no_folder(target: Path) -> None:
    """Raise ``FileError`` unless the target is in a folder that exists."""
    if not target.parent.exists():
        raise FileError(f"the folder {target.parent} does not exist; create it first.")
    if not target.parent.is_dir():
        raise FileError(f"{target.parent} is not a folder; choose another path.")


def _mode(target: Path) -> int | None:
    """Return the permissions of an existing file, or None; raise if the target may not be replaced."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise FileError(f"{target} is a folder or a device; expected the path of a file. Choose another path.")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "not writable", str(target))
    return stat.S_IMODE(mode)


def _synchronise(folder: Path) -> None:
    """Write the entries of a folder to the disk, where the system can."""
    if os.name == "nt":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(number)


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "C128": torch.complex128,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_BYTES = 64 * 2**20  # the largest header
TENSORS = 100_000  # the most tensors
DEPTH = 48  # the deepest nesting of JSON
DIGITS = 20  # the longest integer
BLANK = "0" * 64  # in place of the checksum, while it is computed
MARKS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)


def write(path: str | Path, state: State) -> None:
    """Write a state to a file, whole or not at all; ``state.name`` is the name of the format.

    Raises:
        UnsupportedError: If a file cannot hold a value.
        FileError: If the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_flatten(state, "", tensors))
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries, end = {}, 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps({"__metadata__": {"sha256": BLANK, "lapwing": text}, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > HEADER_BYTES or len(tensors) > TENSORS:
        raise UnsupportedError(
            f"{len(tensors)} tensors with a header of {len(header)} bytes; a file takes {TENSORS} and {HEADER_BYTES}."
        )
    digest = hashlib.sha256(len(header).to_bytes(8, "little") + header)
    for name in order:
        digest.update(_bytes(tensors[name]))
    signed = header.replace(BLANK.encode(), digest.hexdigest().encode(), 1)
    write_atomically(path, chain([len(header).to_bytes(8, "little"), signed], (_bytes(tensors[n]) for n in order)))


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, without a copy."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b"")


def _flatten(state: State, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the state without its tensors, which are added to ``tensors`` under dotted names."""
    for key, tensor in state.tensors.items():
        name = f"{prefix}{key}"
        if name in tensors:
            raise UnsupportedError(f"two tensors of this state have the name {name!r}; rename one of them.")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in NAMES:
            raise UnsupportedError(f"the tensor {name!r} is {tensor.dtype}, {tensor.layout}, which a file cannot hold.")
        tensors[name] = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    parts = {key: _flatten(part, f"{prefix}{key}.", tensors) for key, part in state.parts.items()}
    return {"name": state.name, "settings": dict(state.settings), "tensors": list(state.tensors), "parts": parts}


def read(path: str | Path, name: str, what: str) -> State:
    """Return the state in a file. Its shape as plain data is checked; the values are checked by ``State.read``.

    Args:
        path: The file.
        name: The name of the format.
        what: What the file should hold, in words, for errors.

    Raises:
        FileNotFoundError: If there is no such file.
        FileError: If the file is of another format or damaged.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would make the program wait
            raise FileError(f"{path} cannot be read: it is a folder or a device. Expected a file with {what}.")
        with open(path, "rb") as file:
            return _read(file, name)
    except FileNotFoundError:
        raise
    except _ForeignError as error:
        raise FileError(f"{path} holds no Lapwing {what}: {error}.") from error
    except _DamagedError as error:
        raise FileError(f"{path} is damaged: {error}. Save the {what} again.") from error
    except (OSError, _UnreadableError, MemoryError) as error:
        raise FileError(f"{path} cannot be read: {error}. Expected a file with a Lapwing {what}.") from error


class _UnreadableError(Exception):
    """The file is not in the safetensors format, or not whole."""


class _ForeignError(Exception):
    """The file is of another kind, or of another version of the format."""


class _DamagedError(Exception):
    """The contents of the file are not those that were written."""


def _read(file: BinaryIO, name: str) -> State:
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, HEADER_BYTES):
        raise _UnreadableError("it is too short, or its beginning is not that of a safetensors file")
    header = file.read(length)
    try:
        entries = parse_json(header.decode())
    except ValueError as error:
        raise _UnreadableError(f"its header is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise _UnreadableError("its header is not a JSON object")
    metadata = entries.pop("__metadata__", None)
    places = _places(entries, size - 8 - length)
    if not isinstance(metadata, dict) or not isinstance(metadata.get("lapwing"), str):
        raise _ForeignError("it has no state of Lapwing in its metadata")
    try:
        root = parse_json(metadata["lapwing"])
    except ValueError as error:
        raise _ForeignError(f"its state is not JSON ({error})") from error
    seen = root.get("name") if isinstance(root, dict) else type(root).__name__
    if seen != name:
        raise _ForeignError(f"it has the format {seen!r:.80}; this version reads {name!r}")
    checksum = metadata.get("sha256")
    if set(metadata) != {"lapwing", "sha256"} or not isinstance(checksum, str) or len(checksum) != len(BLANK):
        raise _DamagedError("it has no checksum")
    digest = hashlib.sha256(start + header.replace(checksum.encode(), BLANK.encode()))
    tensors = {}
    for key, (dtype, shape, count) in places.items():
        content = bytearray(count)
        if file.readinto(content) != count:  # type: ignore[attr-defined]
            raise _UnreadableError("it is cut off")
        digest.update(content)
        tensors[key] = (torch.frombuffer(content, dtype=dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)
        if dtype is torch.bool and count and max(content) > 1:
            raise _DamagedError(f"{key!r} has values that are neither true nor false")
    if digest.hexdigest() != checksum:
        raise _DamagedError("its contents do not match their checksum")
    state = _unflatten(root, "", tensors)
    if tensors:
        raise _DamagedError(f"no part of it has the tensors {list(tensors)[:3]}")
    return state


def _places(entries: Mapping[str, Any], size: int) -> dict[str, tuple[torch.dtype, list[int], int]]:
    """Return dtype, shape and number of bytes of every tensor, in their order in the file; all bytes must be used."""
    if len(entries) > TENSORS:
        raise _UnreadableError(f"it lists {len(entries)} tensors; expected at most {TENSORS}")
    places, end = {}, 0
    try:
        for key, entry in sorted(entries.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
            dtype, shape, (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop)) and len(shape) <= 64
            count = math.prod(shape) * dtype.itemsize if whole else -1
            if set(entry) != {"dtype", "shape", "data_offsets"} or start != end or stop - start != count:
                raise ValueError(key)
            places[key], end = (dtype, shape, count), stop
    except (KeyError, TypeError, ValueError) as error:
        raise _UnreadableError(f"its list of tensors is wrong ({type(error).__name__}: {error!s:.80})") from error
    if end != size:
        raise _UnreadableError(f"it has {size} bytes of tensors; its header lists {end}")
    return places


def _unflatten(node: Any, prefix: str, tensors: dict[str, Tensor]) -> State:
    """Return the state of a node, with its tensors taken out of ``tensors``."""
    kinds = {"name": str, "settings": dict, "tensors": list, "parts": dict}
    if not isinstance(node, dict) or {key: type(value) for key, value in node.items()} != kinds:
        raise _DamagedError(f"{prefix or 'its state'} is not a state with name, settings, tensors and parts")
    taken = {}
    for key in node["tensors"]:
        if not isinstance(key, str) or f"{prefix}{key}" not in tensors:
            raise _DamagedError(f"the tensor {f'{prefix}{key}'!r:.80} is missing")
        taken[key] = tensors.pop(f"{prefix}{key}")
    parts = {key: _unflatten(part, f"{prefix}{key}.", tensors) for key, part in node["parts"].items()}
    return State(node["name"], node["settings"], taken, parts)


def parse_json(text: str) -> Any:
    """Return JSON as plain data; raise ``ValueError`` if it is wrong, nested too deeply, or has a key twice.

    >>> parse_json('{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    """
    depth = 0
    for mark in MARKS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
        if depth > DEPTH:
            raise ValueError(f"it is nested more than {DEPTH} deep")
    value = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    json.dumps(value, ensure_ascii=False).encode()  # halves of characters cannot be written again
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key is there twice")
    return result


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)
