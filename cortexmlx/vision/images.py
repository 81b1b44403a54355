"""Images of requests, from a file to the patches that a model's vision tower reads.

`open_image` decodes a file of one of six formats, however hostile. `ImageProcessor` makes patches of it by the settings
in a model's folder. Both need Pillow, which the extra `vision` installs. Nothing here uses the network.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import io
import json
import math
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cortexmlx.errors import CortexError, InvalidRequest, ModelCorrupt, ModelUnsupported
from cortexmlx.mlx_lm.package import import_mlx_lm_utils
from cortexmlx.models.folder_config import read_json_object
from cortexmlx.models.messages import one_line

if TYPE_CHECKING:
    import PIL.Image

MAX_FILE_BYTES = 20 * 2**20
"""Bytes of a file: a photo of 48 megapixels has 5 to 15 MB. OpenAI's API takes as many for an image."""

VISION_INSTALL = "pip install 'pillow>=13,<14'"
"""Installs what images need, wherever this package is: see `SERVER_INSTALL`."""

MAX_PIXELS = 64_000_000
"""Pixels of an image, checked before it is decoded, which takes 7 to 16 bytes of memory a pixel (WEBP takes the most).
Telephones make photos of 48 to 50 million. Models see 16 million at most.
"""

MAX_SIDE = 65_535
"""Pixels of a side: no JPEG, GIF or WEBP has more. Some decoders take memory or time for every row."""

_MAX_SCANS = 30
"""Scans of a JPEG. Progressive files have about 10, and each is a pass over all pixels: 0.2 s at `MAX_PIXELS`, for a
scan of 100 bytes.
"""

_MAX_PARTS = 20_000
"""Segments of a JPEG and chunks of a PNG, which Pillow reads in Python, 6 microseconds each. A PNG of 20 MiB has 2,560
chunks as libpng writes them.
"""

_BAND_PIXELS = 2**20
"""Pixels that are converted to RGB at once, so that no second copy of a large image is made."""

_FORMATS = {
    "PNG": ("Png", rb"\x89PNG\r\n\x1a\n"),
    "JPEG": ("Jpeg", rb"\xff\xd8\xff"),
    "WEBP": ("WebP", rb"RIFF.{4}WEBP"),
    "GIF": ("Gif", rb"GIF8[79]a"),
    "BMP": ("Bmp", rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0"),
    "TIFF": ("Tiff", rb"II\*\0|MM\0\*"),
}
"""The formats that are decoded: the name of Pillow's class, and how files begin. Pillow's 40 other parsers are never
given a file.
"""

_OTHER_FORMATS = {
    "a HEIC photo": rb".{4}ftyp(?:hei|hev|mif1|msf1)",
    "an AVIF image": rb".{4}ftypavi",
    "a video": rb".{4}ftyp|\x1aE\xdf\xa3",
    "a JPEG XL image": rb"\xff\x0a|\0\0\0\x0cJXL ",
    "a JPEG 2000 image": rb"\0\0\0\x0cjP",
    "a PDF document": rb"\s*%PDF-",
    "an SVG drawing": rb"(?:\xef\xbb\xbf)?\s*<(?:svg|(?:\?xml|!--|!DOCTYPE svg).{0,1000}<svg)",
    "an HTML page": rb"(?i)\s*<(?:!doctype )?html",
    "a ZIP archive or an Office document": rb"PK\x03\x04",
    "base64 text, which must be decoded first": rb"data:image/|iVBORw0KGgo|/9j/|R0lGOD|UklGR",
}
"""What people take for an image that can be read, and how it begins."""

_JPEG_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")
"""A marker that has a length, or the end: not a byte 0xff of a scan, nor a marker inside or in front of one."""

_TURNS: dict[int, Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels),
}
"""What turns an image upright, for each value of EXIF's Orientation that asks for it. From 5 on sides are swapped."""

ImageSource: TypeAlias = "bytes | bytearray | memoryview | str | os.PathLike[str] | PIL.Image.Image"
"""An encoded file, the path of one, or a PIL image."""


@dataclass(frozen=True)
class Image:
    """A decoded image, upright, with white in place of transparency."""

    pixels: npt.NDArray[np.uint8] = field(repr=False, compare=False)
    """`[height, width, 3]`, RGB, read-only."""

    digest: bytes
    """SHA-256 of the size and the pixels: the same for a PNG and a BMP of one picture, whatever they are called."""

    notes: tuple[str, ...] = field(default=(), compare=False)
    """What was done to the file's image that its sender may not expect, such as taking the first frame."""

    @property
    def width(self) -> int:
        """The width in pixels."""
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        """The height in pixels."""
        return int(self.pixels.shape[0])


def open_image(source: ImageSource) -> Image:
    """Decode an image: its first frame or page, turned upright by its EXIF data, with white in place of transparency
    and 8 bits a channel. Colour profiles are not applied, as when models are trained.

    Raises InvalidRequest for anything that is not a whole PNG, JPEG, WEBP, GIF, BMP or TIFF within the limits above,
    and CortexError without Pillow. Large images take seconds: call it on no thread that others wait for.
    """
    name, picture = _open_picture(source)
    with _translate_decoder_errors(name, picture.format):
        notes = []
        if getattr(picture, "is_animated", False):
            notes.append(
                "the first of several pages" if picture.format == "TIFF" else "the first frame of an animation"
            )
        picture.load()
        if picture.mode.startswith("I;16"):
            notes.append("16 bits reduced to 8")
        orientation = _orientation(picture)
        pixels = _rgb_pixels(picture)
    del picture  # before the turned copy is made
    if orientation in _TURNS:
        notes.append("turned upright as its EXIF data say")
        pixels = np.ascontiguousarray(_TURNS[orientation](pixels))
    pixels.flags.writeable = False
    digest = hashlib.sha256(b"%d x %d RGB\n" % (pixels.shape[1], pixels.shape[0]))
    digest.update(pixels.data)
    return Image(pixels, digest.digest(), tuple(notes))


def read_size(source: ImageSource) -> tuple[int, int]:
    """Return the width and height that `open_image` would give, from the header alone: no pixel is decoded. Raises what
    `open_image` raises for a bad header.
    """
    name, picture = _open_picture(source)
    with _translate_decoder_errors(name, picture.format):
        width, height = picture.size
        return (height, width) if _orientation(picture) >= 5 else (width, height)


def _open_picture(source: ImageSource) -> tuple[str, Any]:
    """Return a name for error messages, and a PIL image within the limits, whose pixels are not decoded yet."""
    if isinstance(source, _import_pillow().Image):
        name, picture = "the PIL image", source
    else:
        name, data = read_file(source)
        kind = _detect_format(name, data)
        module = importlib.import_module(f"PIL.{_FORMATS[kind][0]}ImagePlugin")
        with _translate_decoder_errors(name, kind):
            _check_part_count(name, kind, data)
            picture = getattr(module, f"{_FORMATS[kind][0]}ImageFile")(io.BytesIO(data))
    with _translate_decoder_errors(name, picture.format):
        width, height = picture.size
        if any(tile[0] == "bmp_rle" for tile in getattr(picture, "tile", ())):
            # Pillow decodes these in Python, pixel by pixel: 24 s for a file of 5 KB.
            raise InvalidRequest(f"{name} is a compressed BMP, which is rare and slow: save it as PNG or JPEG.")
        # A tile is decoded whole, and can be larger than its image.
        tags = getattr(picture, "tag_v2", {})
        decoded = max(width * height, int(tags.get(322, 0)) * int(tags.get(323, 0)))
        if decoded > MAX_PIXELS or max(width, height) > MAX_SIDE:
            raise InvalidRequest(
                f"{name} has {width:,} x {height:,} pixels"
                f"{f', in tiles of {decoded:,}' * (decoded > width * height)}; the limit is {MAX_PIXELS:,} pixels, and "
                f"{MAX_SIDE:,} a side. Make it smaller: models see far fewer."
            )
        if not (width and height):
            raise InvalidRequest(f"{name} has no pixels: {width} x {height}.")
    return name, picture


def _import_pillow() -> Any:
    """Import and return PIL.Image. Raises CortexError without Pillow 13: with older ones, 300 EXIF tags in a PNG of
    10 MB took 3 GB of memory, and comments of 20 MB in a GIF took 22 seconds.
    """
    try:
        import PIL
        import PIL.Image
    except ModuleNotFoundError:
        raise CortexError(f"images need Pillow: `{VISION_INSTALL}`") from None
    if int(PIL.__version__.partition(".")[0]) < 13:
        raise CortexError(f"images need Pillow 13, not {PIL.__version__}: `{VISION_INSTALL}`")
    _silence_libtiff(Path(PIL.__file__).parent)
    return PIL.Image


@cache
def _silence_libtiff(folder: Path) -> None:
    """Stop the libtiff of Pillow in `folder` from printing about damaged files: errors are raised anyway."""
    for path in (*folder.parent.glob("pillow.libs/libtiff*"), *folder.glob(".dylibs/libtiff*")):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(str(path)).TIFFSetErrorHandler(None)


def read_file(source: ImageSource) -> tuple[str, bytes]:
    """Return a name of the image for error messages, and the bytes of its file. Raises InvalidRequest."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        name, size = "the image", memoryview(source).nbytes
        data = bytes(source) if size <= MAX_FILE_BYTES else b""
    elif isinstance(source, (str, os.PathLike)):
        name = os.fsdecode(source)
        if re.match(r"(?i)[a-z][a-z0-9+.-]*://|data:", name):
            raise InvalidRequest(
                f"{name[:80]!r} is a URL, and they are not fetched: give the path or the bytes of a file."
            )
        name = name if name.isprintable() else repr(name)
        try:
            with open(source, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                status = os.fstat(file.fileno())
                is_file = stat.S_ISREG(status.st_mode)
                data = file.read(MAX_FILE_BYTES + 1) if is_file else b""
            size = max(len(data), status.st_size)
        except FileNotFoundError:
            raise InvalidRequest(f"there is no file {name}") from None
        except IsADirectoryError:
            raise InvalidRequest(f"{name} is a folder, not an image.") from None
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{name} cannot be read: {one_line(error)}") from None
        if not is_file:
            raise InvalidRequest(f"{name} is a device or a pipe, not an image.")
    else:
        raise InvalidRequest(f"an image is {type(source).__name__}, but must be bytes, a path or a PIL image")
    if size > MAX_FILE_BYTES:
        raise InvalidRequest(
            f"{name} has {size:,} bytes; the limit is {MAX_FILE_BYTES:,}. Make it smaller, or save a JPEG."
        )
    if not data:
        raise InvalidRequest(f"{name} is empty.")
    return name, data


def _detect_format(name: str, data: bytes) -> str:
    """Return a file's format by its first bytes, such as "PNG". `name` is for errors. Raises InvalidRequest."""
    for kind, (_, beginning) in _FORMATS.items():
        if re.match(beginning, data, re.DOTALL):
            return kind
    advice = f"Give a {', '.join(list(_FORMATS)[:-1])} or TIFF file"
    for other, beginning in _OTHER_FORMATS.items():
        if re.match(beginning, data, re.DOTALL):
            if other in ("a HEIC photo", "an AVIF image"):
                path = name if os.path.splitext(name)[1] else f"photo.{other.split()[1].lower()}"
                target = os.path.splitext(path)[0] + ".jpg"
                command = f"sips -s format jpeg {shlex.quote(path)} --out {shlex.quote(target)}"
                advice = f"Convert it to JPEG, on a Mac with `{command}`"
            raise InvalidRequest(f"{name} is {other}. {advice}.")
    try:
        text = data[:40].decode("ascii")
        kind = f"text, beginning with {text!r}" if "\0" not in text else "not an image that this version knows"
    except UnicodeDecodeError:
        kind = "not an image that this version knows"
    raise InvalidRequest(f"{name} is {kind}. {advice}.")


@contextmanager
def _translate_decoder_errors(name: str, kind: str | None) -> Iterator[None]:
    """Context: turn any error of a decoder into InvalidRequest. Pillow has no list of what hostile files can raise."""
    try:
        yield
    except CortexError:
        raise
    except MemoryError:
        raise InvalidRequest(f"there is no memory to decode {name}: make it smaller.") from None
    except Exception as error:
        if isinstance(error, _import_pillow().DecompressionBombError):
            raise InvalidRequest(f"{name} has too many pixels: the limit is {MAX_PIXELS:,}. Make it smaller.") from None
        raise InvalidRequest(
            f"{name} cannot be decoded as {kind or 'an image'}: {one_line(error)}. It is cut short, damaged or "
            "of a rare kind: save it again as PNG or JPEG."
        ) from None


def _check_part_count(name: str, kind: str, data: bytes) -> None:
    """Raise InvalidRequest for a JPEG or PNG with so many parts or scans that even a small file takes minutes."""
    parts = scans = 0
    if kind == "JPEG":
        at = 2
        while (marker := _JPEG_MARKER.search(data, at)) and marker[1] != b"\xd9" and parts <= _MAX_PARTS:
            # What fills the space between segments is skipped byte by byte. After the first scan it is pixels.
            parts += 1 if scans else 1 + marker.start() - at
            scans += marker[1] == b"\xda"
            at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    elif kind == "PNG":
        at = 8
        while at < len(data) and parts <= _MAX_PARTS:
            parts, at = parts + 1, at + 12 + int.from_bytes(data[at : at + 4])
    if parts > _MAX_PARTS or scans > _MAX_SCANS:
        found = f"{scans:,} scans" if scans > _MAX_SCANS else f"more than {_MAX_PARTS:,} parts"
        limits = f"{_MAX_SCANS} scans and {_MAX_PARTS:,} parts"
        raise InvalidRequest(f"{name} is a {kind} of {found}; the limit is {limits}. Save it again.")


def _orientation(picture: Any) -> int:
    """Return EXIF's Orientation; 1 (upright) if there is none, or if it cannot be read, as in browsers."""
    try:
        # Pillow turns TIFF files itself. The method of the class, as that of PNG decodes all pixels first.
        value = 1 if picture.format == "TIFF" else _import_pillow().Image.getexif(picture).get(0x0112)
    except Exception:
        return 1
    return value if isinstance(value, int) and value in _TURNS else 1


def _rgb_pixels(picture: Any) -> npt.NDArray[np.uint8]:
    """Return the decoded pixels as `[height, width, 3]`."""
    width, height = picture.size
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        band = picture.crop((0, top, width, min(top + rows, height)))
        if band.mode in ("I", "F"):
            raise ValueError("its samples of 32 bits do not say what is white")
        if band.mode.startswith("I;16"):
            pixels[top : top + rows] = (np.asarray(band) >> 8)[..., None]
            continue
        if band.has_transparency_data:
            pillow = _import_pillow()
            band = pillow.alpha_composite(pillow.new("RGBA", band.size, "white"), band.convert("RGBA"))
        pixels[top : top + rows] = np.asarray(band.convert("RGB"))
    return pixels


@dataclass(frozen=True)
class ImagePatches:
    """The input of a vision tower for one image: patches, their grid, and the number of tokens."""

    patches: npt.NDArray[np.float32]
    """`[t * h * w, values of a patch]`, normalized, in the order of the family's tower."""

    grid: tuple[int, int, int]
    """Patches in time (1 for an image), rows and columns: t, h, w."""

    tokens: int
    """Tokens that stand for the merged patches in the text, with the ends of rows. Other tokens that begin and end an
    image are not counted.
    """

    merge: int
    """How many patches a token is wide and high."""

    digest: bytes
    """SHA-256 of the image with the processor's settings and version: the key of cached features and KV blocks."""


class _PatchMaker(Protocol):
    """Cuts images into patches for a family of models, with transformers' code, whose errors are ValueErrors."""

    merge: int
    """How many patches a token is wide and high."""

    def __init__(self, settings: Mapping[str, Any], max_tokens: int | None) -> None:
        """Set up with a folder's `settings`. Images get at most `max_tokens` tokens if the family resizes them."""

    def compute_grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Return the grid of patches (frames, rows, columns) for an image of this size in pixels."""

    def count_tokens(self, grid: tuple[int, int, int]) -> int:
        """Return the number of tokens of an image with this grid."""

    def make_patches(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Resize pixels `[height, width, 3]`, and return their patches `[count, numbers]`."""


class _Qwen2VL:
    """Patches for Qwen2-VL, Qwen3-VL, Qwen3.5 and later: images keep their size, rounded to whole tokens."""

    def __init__(self, settings: Mapping[str, Any], max_tokens: int | None) -> None:
        module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        self._processor, self._resize = module.Qwen2VLImageProcessorPil(**settings), module.smart_resize
        self._patch, self.merge = int(self._processor.patch_size), int(self._processor.merge_size)
        self._side = self._patch * self.merge
        self._least, self._most = (int(self._processor.size[name]) for name in ("shortest_edge", "longest_edge"))
        if max_tokens is not None:
            self._most = min(self._most, max_tokens * self._side**2)
            # Small images are enlarged to `least`, rounded up: by far less than to four times as many pixels.
            self._least = min(self._least, self._most // 4)

    def compute_grid(self, width: int, height: int) -> tuple[int, int, int]:
        height, width = self._resize(height, width, self._side, self._least, self._most)
        return 1, height // self._patch, width // self._patch

    def count_tokens(self, grid: tuple[int, int, int]) -> int:
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def make_patches(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        size = {"shortest_edge": self._least, "longest_edge": self._most}
        made = self._processor(pixels, size=size, input_data_format="channels_last")
        return np.asarray(made["pixel_values"], np.float32)


class _Gemma4:
    """Patches for Gemma 4: images are resized to fill a budget of tokens, keeping their aspect ratio."""

    def __init__(self, settings: Mapping[str, Any], max_tokens: int | None) -> None:
        self._module = importlib.import_module("transformers.models.gemma4.image_processing_pil_gemma4")
        self._processor = self._module.Gemma4ImageProcessorPil(**settings)
        self._patch, self.merge = int(self._processor.patch_size), int(self._processor.pooling_kernel_size)
        own = int(self._processor.max_soft_tokens)
        budgets = [each for each in (70, 140, 280, 560, 1120) if each <= min(own, max_tokens or own)]
        self._tokens = max(budgets, default=min(own, 70))

    def compute_grid(self, width: int, height: int) -> tuple[int, int, int]:
        patches = self._tokens * self.merge**2
        height, width = self._module.get_aspect_ratio_preserving_size(height, width, self._patch, patches, self.merge)
        return 1, height // self._patch, width // self._patch

    def count_tokens(self, grid: tuple[int, int, int]) -> int:
        return grid[1] * grid[2] // self.merge**2

    def make_patches(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        made = self._processor(pixels, max_soft_tokens=self._tokens, input_data_format="channels_last")
        used = int(made["num_soft_tokens_per_image"][0]) * self.merge**2
        return np.asarray(made["pixel_values"][0][:used], np.float32)


class _Gemma3:
    """Patches for Gemma 3: every image becomes a square of the same size, with the same number of tokens. No crops of
    wide images are made, as transformers does on demand.
    """

    merge = 1

    def __init__(self, settings: Mapping[str, Any], max_tokens: int | None) -> None:
        own = dict(settings)
        self._side = math.isqrt(int(own.pop("mm_tokens_per_image")))
        module = importlib.import_module("transformers.models.gemma3.image_processing_pil_gemma3")
        self._processor = module.Gemma3ImageProcessorPil(**(own | {"do_pan_and_scan": False}))

    def compute_grid(self, width: int, height: int) -> tuple[int, int, int]:
        return 1, self._side, self._side

    def count_tokens(self, grid: tuple[int, int, int]) -> int:
        return grid[1] * grid[2]

    def make_patches(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        made = self._processor(pixels, input_data_format="channels_last")
        image, side = np.asarray(made["pixel_values"][0], np.float32), self._side
        size = image.shape[1] // side
        return image.reshape(3, side, size, side, size).transpose(1, 3, 2, 4, 0).reshape(side * side, -1)


class _Pixtral:
    """Patches for Pixtral, Mistral 3: images keep their size in whole tokens, or shrink. One more token ends a row."""

    def __init__(self, settings: Mapping[str, Any], max_tokens: int | None) -> None:
        self._module = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
        own = dict(settings)
        self._patch, self.merge = int(own.pop("patch_size")), int(own.pop("spatial_merge_size"))
        self._side = self._patch * self.merge
        self._processor = self._module.PixtralImageProcessorPil(**own)
        size = self._processor.size
        self._size = {name: int(size["longest_edge"] or size[name]) for name in ("height", "width")}
        if max_tokens is not None:
            columns = max((math.isqrt(4 * max_tokens + 1) - 1) // 2, 1)  # and as many rows
            self._size = {name: min(limit, columns * self._side) for name, limit in self._size.items()}

    def compute_grid(self, width: int, height: int) -> tuple[int, int, int]:
        height, width = self._module.get_resize_output_image_size(
            np.broadcast_to(np.uint8(0), (height, width, 3)),
            (self._size["height"], self._size["width"]),
            self._side,
            "channels_last",
        )
        if not (width and height):
            raise ValueError("made small enough, its short side has no pixel left")
        return 1, height // self._patch, width // self._patch

    def count_tokens(self, grid: tuple[int, int, int]) -> int:
        rows, columns = grid[1] // self.merge, grid[2] // self.merge
        return rows * (columns + 1)

    def make_patches(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        side, patch = {"height": self._side, "width": self._side}, self._patch
        made = self._processor(pixels, size=self._size, patch_size=side, input_data_format="channels_last")
        image = np.asarray(made["pixel_values"][0], np.float32)
        channels, height, width = image.shape
        cut = image.reshape(channels, height // patch, patch, width // patch, patch).transpose(1, 3, 0, 2, 4)
        return cut.reshape(height * width // patch**2, -1)


_FAMILIES: dict[str, type[_PatchMaker]] = {
    "Qwen2VLImageProcessor": _Qwen2VL,
    "Gemma4ImageProcessor": _Gemma4,
    "Gemma4UnifiedImageProcessor": _Gemma4,
    "Gemma3ImageProcessor": _Gemma3,
    "PixtralImageProcessor": _Pixtral,
}
"""By the `image_processor_type` of a model's folder, without Fast or Pil at its end. Another family is a class more."""


class ImageProcessor:
    """Makes patches as a model's folder asks for, and counts the tokens of an image before it is decoded."""

    def __init__(self, folder: Path, max_tokens: int | None = None) -> None:
        """Read the settings in processor_config.json or preprocessor_config.json. Images are made smaller to have
        `max_tokens` tokens at most; None: the limit of the model, which is 16,384 for Qwen3-VL. Making patches takes
        60 KB of memory a token, or 7 bytes a pixel of the image if that is more.

        Raises ModelUnsupported if the folder does not say how or names a processor that this version lacks,
        ModelCorrupt for broken settings, InvalidRequest for `max_tokens` below 1, CortexError without Pillow.
        """
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {max_tokens}, but an image has at least 1 token", field="max_tokens")
        pillow = _import_pillow()
        path, settings = _read_settings(folder)
        name = str(settings.pop("image_processor_type", None))
        family = _FAMILIES.get(re.sub("(Fast|Pil)$", "", name))
        if family is None:
            known = ", ".join(_FAMILIES)
            raise ModelUnsupported(f"{path} asks for the image processor {name}; this version has {known}.")
        self.max_tokens = max_tokens
        if family is _Pixtral:  # the sizes that the tower has: transformers takes them from its text processor
            settings |= _tower_sizes(folder)
        elif family is _Gemma3:
            settings["mm_tokens_per_image"] = read_json_object(folder / "config.json").get("mm_tokens_per_image", 256)
        import_mlx_lm_utils()  # this imports transformers as a whole: two threads that import it can see half of it
        try:
            self._family = family(settings, max_tokens)
            self.count_tokens(640, 480)
            self._family.make_patches(np.zeros((64, 64, 3), np.uint8))
        except InvalidRequest as error:
            raise ModelUnsupported(f"its images do not become small enough: {error}") from None
        except Exception as error:
            raise ModelCorrupt(
                f"{path} has settings that cannot be used: {one_line(error)}. Download it again."
            ) from error
        transformers = importlib.import_module("transformers")
        self.version = f"cortexmlx 1, transformers {transformers.__version__}, Pillow {pillow.__version__}"
        """Changes where the same settings may give other patches."""
        stated = json.dumps([name, settings, max_tokens, self.version], sort_keys=True, default=str)
        self.digest = hashlib.sha256(stated.encode()).digest()
        """SHA-256 of the settings and the version."""

    def count_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size in pixels, as of `read_size`. Raises InvalidRequest for
        sides that the model does not take, such as 20,000 x 10 for Qwen, or that need more than `max_tokens`.
        """
        return self._family.count_tokens(self._compute_checked_grid(width, height))

    @property
    def largest_grid(self) -> tuple[int, int, int]:
        """The grid of the images with the most patches: large squares."""
        return self._family.compute_grid(math.isqrt(MAX_PIXELS), math.isqrt(MAX_PIXELS))

    def make_patches(self, image: Image) -> ImagePatches:
        """Return an image's patches, grid and tokens. Raises InvalidRequest as `count_tokens` does."""
        grid = self._compute_checked_grid(image.width, image.height)
        patches = self._family.make_patches(image.pixels)
        if len(patches) != grid[0] * grid[1] * grid[2]:
            raise ModelUnsupported(f"the image processor made {len(patches):,} patches for a grid of {grid}.")
        digest = hashlib.sha256(image.digest + self.digest).digest()
        return ImagePatches(patches, grid, self._family.count_tokens(grid), self._family.merge, digest)

    def _compute_checked_grid(self, width: int, height: int) -> tuple[int, int, int]:
        try:
            grid = self._family.compute_grid(width, height)
        except ValueError as error:
            raise InvalidRequest(
                f"this model does not take an image of {width:,} x {height:,} pixels: {one_line(error)}. Crop it."
            ) from None
        tokens = self._family.count_tokens(grid)
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise InvalidRequest(
                f"an image of {width:,} x {height:,} pixels needs {tokens:,} tokens at least; the limit is "
                f"{self.max_tokens:,}. Crop it, or raise the limit."
            )
        return grid


def _tower_sizes(folder: Path) -> dict[str, Any]:
    """Return Pixtral's `patch_size` (pixels a side) and `spatial_merge_size` (patches a side of a token)."""
    config = read_json_object(folder / "config.json")
    vision = config.get("vision_config")
    patch = vision.get("patch_size", 16) if isinstance(vision, dict) else 16
    return {
        "patch_size": patch,
        "spatial_merge_size": config.get("spatial_merge_size", 2) if config.get("model_type") == "mistral3" else 1,
    }


def _read_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path and the settings of the image processor's file: processor_config.json if it has them."""
    path = folder / "processor_config.json"
    if path.is_file() and isinstance(settings := read_json_object(path).get("image_processor"), dict):
        return path, settings
    path = folder / "preprocessor_config.json"
    if path.is_file():
        return path, read_json_object(path)
    raise ModelUnsupported(
        f"{folder} does not say how its model reads images: it has no preprocessor_config.json. Copy that file from "
        "the original model into the folder."
    )
