"""Files that somebody may send as images to do harm, or by mistake: the same ones each time."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")


def saved(image: Any, kind: str, **options: Any) -> bytes:
    """An image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def hostile_files(seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """More than 200 files, with a name for each."""
    from PIL import Image

    dice = random.Random(seed)
    noise = np.random.default_rng(seed).integers(0, 256, (48, 40, 4), np.uint8)
    rgba = Image.fromarray(noise)
    rgb = rgba.convert("RGB")
    whole = {kind: saved(rgb, kind, **({"compression": "tiff_lzw"} if kind == "TIFF" else {})) for kind in FORMATS}
    whole["old TIFF"] = saved(rgb, "TIFF", compression="jpeg")
    for kind, data in whole.items():
        for end in (4, 9, 20, 33, 60, *sorted(dice.sample(range(60, len(data)), 5)), len(data) - 20, len(data) - 1):
            yield f"{kind} of {end} bytes", data[:end]
        for number in range(9):
            damaged = bytearray(data)
            for _ in range(dice.choice([1, 3, 30])):
                damaged[dice.randrange(2, min(len(data), dice.choice([60, 10**6])))] = dice.randrange(256)
            yield f"{kind}, damaged {number}", bytes(damaged)
    yield from _huge(whole)
    frames = [Image.fromarray(np.roll(noise, n, 0)).convert("RGB") for n in range(3)]
    for kind in ("GIF", "PNG", "WEBP", "TIFF"):
        yield f"{kind} of frames", saved(frames[0], kind, save_all=True, append_images=frames[1:])
    for mode, kind in (("CMYK", "JPEG"), ("CMYK", "TIFF"), ("L", "JPEG"), ("1", "TIFF"), ("P", "GIF"), ("LA", "PNG")):
        yield f"{mode} {kind}", saved(rgb.convert(mode), kind)
    for kind in ("PNG", "WEBP", "TIFF"):
        yield f"{kind} with alpha", saved(rgba, kind)
    sixteen = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    yield from ((f"16 bits, {kind}", saved(sixteen, kind)) for kind in ("PNG", "TIFF"))
    yield "floats", saved(Image.fromarray(noise[..., 0].astype(np.float32)), "TIFF")
    for turn in (*range(10), 65535):
        exif = Image.Exif()
        exif[0x0112] = turn
        yield f"turned by {turn}", saved(rgb, "JPEG", exif=exif)
    yield "EXIF of noise", saved(rgb, "JPEG", exif=b"Exif\0\0II*\0" + dice.randbytes(500))
    for size in ((1, 1), (3, 3), (20_000, 10), (10, 20_000), (1, 65_535), (65_535, 1), (2000, 2000)):
        yield f"{size[0]} x {size[1]}", saved(Image.new("RGB", size, "red"), "PNG")
    png = whole["PNG"]
    yield "a PNG, and a ZIP", png + b"PK\x03\x04" + bytes(500)
    yield "a GIF, and a script", whole["GIF"].replace(b";", b"*/=1;alert(1);//", 1)
    yield "a JPEG, and a page", whole["JPEG"] + b"<html><script>alert(1)</script>"
    yield "a PDF, and a PNG", b"%PDF-1.4\n" + png
    yield "a PNG in a PNG", png[:33] + png + png[33:]
    for name, data in (
        ("svg", b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>'),
        ("xml", b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><svg>&b;</svg>'),
        ("heic", b"\0\0\0\x18ftypheic" + bytes(200)),
        ("avif", b"\0\0\0\x1cftypavif" + bytes(200)),
        ("video", b"\0\0\0\x18ftypmp42" + bytes(200)),
        ("page", b"<!doctype html><p>"),
        ("script", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage"),
        ("icon", b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0" + bytes(99)),
        ("zip", b"PK\x03\x04" + bytes(99)),
        ("base64", b"iVBORw0KGgoAAAANSUhEUgAA"),
        ("path", b"/etc/passwd"),
        ("nothing", b""),
        ("zeros", bytes(5000)),
        *((f"noise {n}", dice.randbytes(n)) for n in (1, 10, 1000, 100_000)),
    ):
        yield name, data


def _huge(whole: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Headers that claim many pixels, and files that become them."""

    def png(width: int, height: int, data: bytes = b"", color: int = 2) -> bytes:
        chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)), (b"IDAT", data), (b"IEND", b"")]
        written = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
        return b"\x89PNG\r\n\x1a\n" + b"".join(written)

    for width, height in ((2**31 - 1, 2**31 - 1), (65_535, 65_535), (10**6, 1), (0, 9), (8001, 8000)):
        yield f"a PNG says {width} x {height}", png(width, height)
    yield "a bomb", png(30_000, 30_000, zlib.compress(bytes(30_000_000), 9))
    yield "too many pixels for its size", png(10, 10, zlib.compress(bytes(50_000_000), 9))
    yield "a bomb of text", png(9, 9).replace(b"IEND", b"zTXt")
    for kind, at, size in (("GIF", 6, "<HH"), ("BMP", 18, "<ii")):
        for value in (32_767, -1 if kind == "BMP" else 65_535):
            packed = struct.pack(size, value, value)
            yield f"a {kind} says {value}", whole[kind][:at] + packed + whole[kind][at + len(packed) :]
    at = whole["JPEG"].index(b"\xff\xc0") + 5
    yield "a JPEG says 65,535", whole["JPEG"][:at] + b"\xff\xff\xff\xff" + whole["JPEG"][at + 4 :]
