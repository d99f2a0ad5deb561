"""Arrays in npz files, against NumPy's own reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lapwing.cli.data import NpzFile
from lapwing.errors import DataError, FileError

ARRAYS = {
    "x": np.arange(70, dtype=np.float32).reshape(7, 2, 5),
    "columns": np.asfortranarray(np.arange(21, dtype=np.float64).reshape(7, 3)),
    "big": np.arange(7, dtype=">f8"),
    "y": np.arange(7, dtype=np.uint16),
    "pixels": np.arange(7, dtype=np.uint8),
    "flags": np.arange(7) % 2 == 0,
    "long": np.arange(7, dtype=np.longdouble),
    "half": np.arange(7, dtype=np.float16),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_blocks_are_the_rows_that_numpy_reads(save: object, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    save(path, **ARRAYS, kind=np.array(list("aabbcab")))
    assert set(NpzFile.names_in(path)) == {*ARRAYS, "kind"}
    file = NpzFile(path, (*ARRAYS, "kind"))
    assert file.rows == 7
    for _ in range(2):
        blocks = list(file.blocks(3))
        assert [len(block["x"]) for block in blocks] == [3, 3, 1]
        assert [kind for block in blocks for kind in block["kind"]] == list("aabbcab")
        for name, values in ARRAYS.items():
            joined = torch.cat([block[name] for block in blocks])
            assert joined.shape == values.shape
            np.testing.assert_array_equal(joined.numpy(), values)
    assert blocks[0]["y"].dtype == torch.int64
    assert blocks[0]["long"].dtype == torch.float64


def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    """Of rows that are read one by one, the archive is read no further than the rows."""
    import zipfile

    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((4000, 50)))
    read = []
    whole = zipfile.ZipExtFile.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zipfile.ZipExtFile, "read", lambda self, n=-1: read.append(n) or whole(self, n))
        next(NpzFile(path, ("x",)).blocks(10))
    assert max(read) == 10 * 50 * 8
    assert min(read) > 0


def test_python_objects_are_refused_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.array([{"a": 1}, None], dtype=object))
    with pytest.raises(DataError, match=r"the array 'x' of .* holds object; expected numbers"):
        _ = NpzFile(path, ("x",)).headers


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, "different numbers of rows: 3 in 'x', 4 in 'y'"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "have no rows"),
        ({"x": np.zeros((3, 2)), "y": np.array(1.0)}, "'y' of .* is a single number"),
        ({"x": np.zeros(3, dtype="datetime64[s]"), "y": np.zeros(3)}, "'x' of .* holds datetime64"),
    ],
)
def test_arrays_that_are_no_data_are_refused(arrays: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=message):
        _ = NpzFile(path, ("x", "y")).headers


def test_other_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.arange(4000.0))
    content = path.read_bytes()
    for bad in (b"", b"no archive", content[:200], content[:-40]):
        path.write_bytes(bad)
        with pytest.raises(FileError, match=r"numpy.savez"):
            NpzFile.names_in(path)
    path.write_bytes(content[:2000] + bytes(500) + content[2500:])  # the checksum of the archive no longer holds
    with pytest.raises(FileError, match=r"data.npz is no npz file, or damaged: Bad CRC-32 for file 'x.npy'"):
        list(NpzFile(path, ("x",)).blocks(5000))
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(FileError, match=r"holds no arrays"):
        NpzFile.names_in(path)
