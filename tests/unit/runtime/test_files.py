"""The file itself: atomic writes, its container, and checkpoints."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as source
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import FileError, UnsupportedError
from lapwing.runtime.files import DTYPES, parse_json, read, write, write_atomically
from lapwing.runtime.states import State
from lapwing.runtime.threads import without_checkpoints
from tests.attack.damage import Contents
from tests.tolerances import assert_close

# A file is written whole or not at all, whatever fails.

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
    with pytest.raises(FileError, match="is not a folder"):
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


# States in files: every byte counts, and odd JSON is refused before it is read.

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
        parse_json(text)


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


# Models with gradient checkpointing have the posterior of the same models without.

D = torch.float64


class Net(nn.Module):
    """Three layers, the middle one in a checkpoint: none, "reentrant", "other" or "sequential"."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.form = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3), form

    def _middle(self, h: Tensor) -> Tensor:
        return torch.tanh(self.middle(torch.tanh(h)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.form == "none":
            h = self._middle(h)
        elif self.form == "sequential":
            parts = nn.Sequential(nn.Tanh(), self.middle, nn.Tanh())
            h = source.checkpoint_sequential(parts, 2, h, use_reentrant=False)
        elif self.form == "applied":
            h = source.CheckpointFunction.apply(self._middle, True, h)
        else:
            h = source.checkpoint(self._middle, h, use_reentrant=self.form == "reentrant")
        return self.last(h)


def fitted(form: str, method: Any) -> tuple[lw.Fitted, Tensor]:
    torch.manual_seed(0)
    model, x = Net(form).double(), torch.randn(9, 4, dtype=D)
    return lw.fit(model, [(x, torch.arange(9) % 3)], "classification", method=method, prior=1.0), x


@pytest.mark.parametrize("method", [lw.Kron(), lw.Diagonal()])
@pytest.mark.parametrize("form", ["reentrant", "other", "sequential", "applied"])
def test_a_checkpoint_changes_nothing(form: str, method: Any) -> None:
    before = (source.CheckpointFunction, source._checkpoint_without_reentrant_generator)
    (posterior, x), (plain, _) = fitted(form, method), fitted("none", method)
    assert [block.kind for block in posterior.network.layout] == ["rows"] * 3
    assert_close(posterior.functions(x).cov, plain.functions(x).cov)
    draws = [p.function_samples(x, 5, torch.Generator().manual_seed(1)) for p in (posterior, plain)]
    assert_close(*draws)
    assert (source.CheckpointFunction, source._checkpoint_without_reentrant_generator) == before


def test_other_threads_keep_their_checkpoints() -> None:
    """Training in another thread meanwhile: its graph has the node of the checkpoint, and its gradient is right."""
    x = torch.randn(3, 4, dtype=D, requires_grad=True)
    names: dict[str, str] = {}

    def train() -> None:
        out = source.checkpoint(torch.sin, x, use_reentrant=True)
        names["thread"] = out.grad_fn.name()
        out.sum().backward()
        other = source.checkpoint(lambda h: h.exp().sin(), x, use_reentrant=False)
        (grad,) = torch.autograd.grad(other.sum(), x)
        assert_close(grad, (x.exp().cos() * x.exp()).detach())

    with without_checkpoints:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        names["here"] = source.checkpoint(torch.sin, x, use_reentrant=True).grad_fn.name()
    assert names == {"thread": "CheckpointFunctionBackward", "here": "SinBackward0"}
    assert_close(x.grad, x.detach().cos())
    assert source.checkpoint(torch.sin, x, use_reentrant=True).grad_fn.name() == "CheckpointFunctionBackward"


def test_an_error_in_a_checkpoint_is_that_of_the_model() -> None:
    def fail(h: Tensor) -> Tensor:
        raise ZeroDivisionError("by the model")

    for reentrant in (True, False):
        with without_checkpoints, pytest.raises(ZeroDivisionError, match="by the model"):
            source.checkpoint(fail, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
        with pytest.raises(ZeroDivisionError):
            source.checkpoint(fail, torch.ones(2, requires_grad=True), use_reentrant=reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of PyTorch, where nothing is recorded
def test_a_checkpoint_of_another_make_is_refused() -> None:
    """A class that was imported beforehand by its name is not found: its node hides what is inside."""
    function = source.CheckpointFunction

    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(function.apply(self._middle, True, self.first(x)))

    with pytest.raises(lw.errors.ModelError, match=r"reentrant gradient checkpointing, which hides.*Switch it off"):
        lw.fit(Other("none").double(), [(torch.randn(6, 4, dtype=D), torch.arange(6) % 3)], "classification", prior=1.0)
