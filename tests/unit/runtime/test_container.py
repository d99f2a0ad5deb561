"""States in files: every byte counts, and odd JSON is refused before it is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lapwing.errors import FileError, UnsupportedError
from lapwing.runtime.files import DTYPES, parsed, read, write
from lapwing.runtime.state import State
from tests.attack.damage import Contents

STATE = State(
    "example-1", {"a": 1, "b": [0.1, None, "text"]},
    {name: torch.ones(2, 3).to(dtype) for name, dtype in DTYPES.items()},
    {"part": State("Part", tensors={"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)})},
)  # fmt: skip


def test_a_state_comes_back(tmp_path: Path) -> None:
    write(tmp_path / "file", STATE)
    again = read(tmp_path / "file", "example-1", "example")
    assert (again.name, again.settings) == (STATE.name, STATE.settings)
    for one, two in ((again, STATE), (again.parts["part"], STATE.parts["part"])):
        assert list(one.tensors) == list(two.tensors)
        for name, tensor in two.tensors.items():
            assert one.tensors[name].dtype == tensor.dtype
            assert torch.equal(one.tensors[name], tensor)


def test_other_programs_can_read_the_file(tmp_path: Path) -> None:
    known = {name: STATE.tensors[name] for name in ("F64", "F32", "BF16", "I64", "BOOL", "U8")}
    write(tmp_path / "file", State("example-1", {}, known, STATE.parts))
    tensors = load_file(tmp_path / "file")
    assert set(tensors) == {*known, "part.empty", "part.scalar"}
    assert torch.equal(tensors["BF16"], STATE.tensors["BF16"])


def test_every_bit_counts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, State("example-1", {"a": 1}, {"x": torch.tensor([1.0, 2.0])}))
    content = path.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(FileError):
            read(path, "example-1", "example")


def test_spaces_count_too(tmp_path: Path) -> None:
    """The checksum is one of the bytes, not of their meaning."""
    path = tmp_path / "file"
    write(path, STATE)
    file = Contents.of(path.read_bytes())
    path.write_bytes(file.packed())
    assert read(path, "example-1", "example").settings == STATE.settings
    path.write_bytes(file.packed(right=False))
    with pytest.raises(FileError, match="do not match their checksum"):
        read(path, "example-1", "example")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested more than"), ('{"a":' * 60 + "1" + "}" * 60, "nested more than"),
        ('{"a": 1, "a": 2}', "twice"), ("1" * 5000, "digits"), ("[1, 2", "delimiter"), ("", "value"),
        ('["[[[[", "\\ud800"]', "surrogates"),
    ],
)  # fmt: skip
def test_odd_json(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parsed(text)


def test_brackets_in_texts_are_not_nesting() -> None:
    assert parsed('["' + "[" * 1000 + '\\"{"]') == ["[" * 1000 + '"{']


def test_what_a_file_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="which a file cannot hold"):
        write(tmp_path / "file", State("example-1", {}, {"x": torch.eye(2).to_sparse()}))
    twice = State("example-1", {}, {"a.b": torch.ones(1)}, {"a": State("Part", {}, {"b": torch.ones(1)})})
    with pytest.raises(UnsupportedError, match="two tensors"):
        write(tmp_path / "file", twice)
    assert not list(tmp_path.iterdir())


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="a folder or a device"):
        read(tmp_path / "pipe", "example-1", "example")
