"""Damaged files for the command line: it reads them, or says in one line what is wrong with them.

``python -m tests.attack command_line --count 1000 --seed 1``
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from torch import nn

from lapwing.cli import main as lapwing
from tests.attack.files import command

NETS = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))\n"
FILES = ("w.pt", "w.safetensors", "d.npz", "c.npz", "d.csv", "d.parquet", "p.lapwing")
COMMANDS = {
    "check": "", "evaluate": "--posterior {p}", "predict": "--posterior {p} --out out.csv --overwrite",
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Write a network, its weights, data and posterior."""
    (folder / "attacked_nets.py").write_text(NETS)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    torch.save(net.state_dict(), folder / "w.pt")
    save_file(net.state_dict(), folder / "w.safetensors")
    x = torch.randn(20, 3)
    y = (x[:, 0] > 0).long()
    np.savez(folder / "d.npz", x=x.numpy(), y=y.numpy())
    np.savez_compressed(folder / "c.npz", x=x.numpy(), y=y.numpy())
    rows = (",".join(map(str, [*row, label])) for row, label in zip(x.tolist(), y.tolist(), strict=True))
    (folder / "d.csv").write_text("\n".join(["a,b,c,y", *rows]))
    columns = {name: x[:, at].numpy() for at, name in enumerate("abc")}
    pq.write_table(pa.table({**columns, "y": ["yes" if label else "no" for label in y]}), folder / "d.parquet")
    fit = "fit attacked_nets:net --weights w.pt --data d.npz --likelihood classification --prior 1 --out p.lapwing"
    if run(fit)[0] != 0:
        raise RuntimeError("the files of the attack cannot be made")


def run(words: str) -> tuple[int, str]:
    """Return the exit code of a command and what it writes to stderr."""
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        code = lapwing(words.split())
    return code, error.getvalue()


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one kind of damage: cut off, changed, shortened, lengthened, copied within."""
    at, length = rng.randrange(len(content)), rng.randrange(1, 40)
    noise, other = rng.randbytes(length), rng.randrange(len(content))
    return rng.choice([
        content[:at],
        content[:at] + noise + content[at + length :],
        content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
        content[:at] + content[at + length :],
        content[:at] + noise + content[at:],
        content[:at] + content[other : other + length] + content[at + length :],
    ])  # fmt: skip


def attacked(count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Damage one file at random and run a command that reads it, as often as asked."""
    rng, totals, wrong = random.Random(seed), Counter[str](), list[str]()
    before = os.getcwd()
    os.chdir(folder)
    try:
        prepare(folder)
        for number in range(count):
            name, chosen = rng.choice(FILES), rng.choice(list(COMMANDS))
            bad = f"bad{Path(name).suffix}"
            (folder / bad).write_bytes(damaged((folder / name).read_bytes(), rng))
            files = {"w": "w.pt", "d": "d.npz", "p": "p.lapwing", name[0].replace("c", "d"): bad}
            words = f"{chosen} attacked_nets:net --weights {{w}} --data {{d}} {COMMANDS[chosen]}".format(**files)
            code, error = run(words)
            expected = code == 1 and error.count("\n") == 1 and "not expected" not in error
            verdict = "accepted" if code == 0 else "refused" if expected else "wrong"
            totals[verdict] += 1
            if verdict == "wrong":
                wrong.append(f"{number} {name}: {words}: {code}: {error}")
    finally:
        os.chdir(before)
    return totals, wrong


def main(argv: list[str]) -> int:
    return command(attacked, argv, 1000, "files of commands")
