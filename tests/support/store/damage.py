"""Damages to the folder of a store, chosen by a seed: what disks, other programs, and people do to files."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[random.Random, Path], None]


def _some_file(chance: random.Random, folder: Path) -> Path | None:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size)
    return chance.choice(files) if files else None


def flip_bits(chance: random.Random, folder: Path) -> None:
    if path := _some_file(chance, folder):
        data = bytearray(path.read_bytes())
        for _ in range(chance.choice((1, 1, 3, 50))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)


def cut_short(chance: random.Random, folder: Path) -> None:
    if path := _some_file(chance, folder):
        os.truncate(path, chance.randrange(path.stat().st_size))


def fill_with_zeros(chance: random.Random, folder: Path) -> None:
    """What a crash of the system leaves of a file that was not synced."""
    if path := _some_file(chance, folder):
        data = path.read_bytes()
        begin = chance.randrange(len(data))
        path.write_bytes(data[:begin] + bytes(len(data) - begin))


def append(chance: random.Random, folder: Path) -> None:
    if path := _some_file(chance, folder):
        with path.open("ab") as file:
            file.write(chance.randbytes(chance.randrange(1, 5000)))


def remove(chance: random.Random, folder: Path) -> None:
    if path := _some_file(chance, folder):
        path.unlink()


def replace(chance: random.Random, folder: Path) -> None:
    if path := _some_file(chance, folder):
        path.write_bytes(chance.randbytes(chance.randrange(20_000)))


def swap(chance: random.Random, folder: Path) -> None:
    """Two files have each other's names: most are segments."""
    one, other = _some_file(chance, folder), _some_file(chance, folder)
    if one and other and one != other:
        shutil.move(one, folder / "aside")
        shutil.move(other, one)
        shutil.move(folder / "aside", other)


def copy(chance: random.Random, folder: Path) -> None:
    """A segment is there twice."""
    if path := _some_file(chance, folder):
        shutil.copy(path, folder / f"{chance.randbytes(16).hex()}.safetensors")


def transplant(chance: random.Random, folder: Path) -> None:
    """A piece of one file in the place of another's."""
    one, other = _some_file(chance, folder), _some_file(chance, folder)
    if one and other:
        piece, data = one.read_bytes(), bytearray(other.read_bytes())
        begin, size = chance.randrange(len(piece)), chance.randrange(1, 4096)
        at = chance.randrange(len(data))
        data[at : at + size] = piece[begin : begin + size]
        other.write_bytes(data)


def lose_the_index(chance: random.Random, folder: Path) -> None:
    (folder / "index.sqlite").unlink(missing_ok=True)


def lose_the_secret(chance: random.Random, folder: Path) -> None:
    (folder / "secret").unlink(missing_ok=True)


def leave_rubbish(chance: random.Random, folder: Path) -> None:
    for ending in ("unfinished", "safetensors"):
        (folder / f"{chance.randbytes(16).hex()}.{ending}").write_bytes(chance.randbytes(chance.randrange(300)))
    (folder / "index.sqlite-journal").write_bytes(chance.randbytes(chance.randrange(3000)))


def back_in_time(chance: random.Random, folder: Path) -> None:
    """Every file looks older, or comes from the future."""
    for path in folder.iterdir():
        os.utime(path, (chance.randrange(1 << 32),) * 2)


DAMAGES: tuple[Damage, ...] = (
    *(flip_bits,) * 4,
    *(cut_short,) * 2,
    *(swap,) * 2,
    *(transplant,) * 2,
    fill_with_zeros,
    append,
    remove,
    replace,
    copy,
    lose_the_index,
    lose_the_secret,
    leave_rubbish,
    back_in_time,
)
