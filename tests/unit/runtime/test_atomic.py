"""A file is written whole or not at all, whatever fails."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lapwing.errors import FileError
from lapwing.runtime.files import write_atomically

OLD, NEW = b"the old contents", [b"the new ", b"contents"]


def failing(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def assert_old(path: Path) -> None:
    assert path.read_bytes() == OLD
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "net").write_bytes(OLD)
    return tmp_path / "net"


def test_the_new_contents_replace_the_old(path: Path) -> None:
    write_atomically(path, NEW)
    assert path.read_bytes() == b"".join(NEW)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only"), (errno.EIO, "choose")],
)
@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_a_failure_leaves_the_old_file(
    call: str, number: int, word: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, failing(number))
    with pytest.raises(FileError, match=rf"{word}.*unchanged"):
        write_atomically(path, NEW)
    assert_old(path)


def test_a_disk_that_fills_up_while_writing(path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * 2**20
        failing(errno.ENOSPC)()

    with pytest.raises(FileError, match="the disk is full; free some space"):
        write_atomically(path, chunks())
    assert_old(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_the_error_of_the_system_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes go to a device that answers as a full disk does."""
    real = open

    def onto_full(name: Any, mode: str) -> Any:
        real(name, mode).close()
        return real("/dev/full", "wb")

    monkeypatch.setattr("builtins.open", onto_full)
    with pytest.raises(FileError, match="the disk is full"):
        write_atomically(path, NEW)
    monkeypatch.undo()
    assert_old(path)


def test_an_interrupt_leaves_no_litter(path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, chunks())
    assert_old(path)


def test_the_order_of_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contents are on the disk before the rename, and the folder after it."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synchronised(number: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file")
        fsync(number)

    def renamed(one: Any, two: Any) -> None:
        steps.append("rename")
        replace(one, two)

    monkeypatch.setattr(os, "fsync", synchronised)
    monkeypatch.setattr(os, "replace", renamed)
    write_atomically(path, NEW)
    assert steps == ["file", "rename", "folder"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_the_permissions_stay(mode: int, path: Path) -> None:
    path.chmod(mode)
    write_atomically(path, NEW)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(OLD)
    write_atomically(tmp_path / "net", NEW)
    assert (tmp_path / "net").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "folder" / "link"
    link.symlink_to("../net")
    write_atomically(link, NEW)
    assert link.is_symlink()
    assert path.read_bytes() == b"".join(NEW)
    assert list((tmp_path / "folder").iterdir()) == [link]


def test_places_that_cannot_be_written(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"nowhere does not exist; create it first"):
        write_atomically(tmp_path / "nowhere" / "net", NEW)
    with pytest.raises(FileError, match="is no folder"):
        write_atomically(path / "net", NEW)
    with pytest.raises(FileError, match="is a folder or a device"):
        write_atomically(tmp_path, NEW)
    with pytest.raises(FileError, match="is a folder or a device"):
        write_atomically("/dev/null", NEW)
    with pytest.raises(FileError, match="the name is too long"):
        write_atomically(tmp_path / ("n" * 300), NEW)
    assert_old(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write everywhere")
def test_a_read_only_folder_or_file(path: Path) -> None:
    path.chmod(0o444)
    with pytest.raises(FileError, match="may not be written to"):
        write_atomically(path, NEW)
    path.parent.chmod(0o555)
    with pytest.raises(FileError, match="may not be written to"):
        write_atomically(path.parent / "other", NEW)
    path.parent.chmod(0o755)
    assert_old(path)


def test_a_folder_that_refuses_the_temporary_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.open", failing(errno.EACCES))
    with pytest.raises(FileError, match="may not be written to; change its permissions"):
        write_atomically(path, NEW)
    monkeypatch.undo()
    assert_old(path)
