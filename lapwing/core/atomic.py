"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from lapwing.errors import FileError

# Why a file could not be written, in words; every other error keeps the words of the system.
REASONS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the quota of the disk is used up; free some space",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "the folder or the file may not be written to; change its permissions or choose another folder",
    errno.EPERM: "the folder or the file may not be written to; change its permissions or choose another folder",
    errno.ENOTDIR: "a part of the path is no folder; choose another path",
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
        raise FileError(f"{target.parent} is no folder; choose another path.")


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
