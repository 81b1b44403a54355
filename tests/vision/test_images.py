"""Images of requests: hostile files, the documented treatment of rare ones, and patches as transformers makes them."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cortexmlx.errors import CortexError, InvalidRequest, ModelCorrupt, ModelUnsupported
from cortexmlx.vision import images
from cortexmlx.vision.images import Image, ImageProcessor, open_image, read_size

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, of damaged files
PICTURE = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (23, 37, 4), np.uint8))
QWEN = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2}
QWEN |= {"merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
SIZES = [(640, 480), (37, 23), (1, 1), (1, 200), (1999, 10), (900, 1700)]


def encode(kind: str, mode: str = "RGB", picture: PIL.Image.Image = PICTURE, **options: Any) -> bytes:
    if mode == "I;16":
        picture = PIL.Image.fromarray(np.asarray(picture.convert("L"), np.uint16) * 257)
    picture.convert(mode).save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


@cache
def files() -> dict[str, bytes]:
    """A valid file of every format and mode."""
    modes = {
        "PNG": "1 L LA P RGB RGBA I;16",
        "JPEG": "L RGB CMYK",
        "WEBP": "RGB RGBA",
        "GIF": "L P",
        "BMP": "1 L P RGB",
    }
    modes["TIFF"] = "1 L P RGB RGBA CMYK I;16"
    made = {f"{kind} {mode}": encode(kind, mode) for kind, names in modes.items() for mode in names.split()}
    frames = {"save_all": True, "append_images": [PIL.Image.new("RGB", PICTURE.size, (9 * n, 0, 0)) for n in range(3)]}
    made |= {f"{kind} frames": encode(kind, **frames) for kind in ("PNG", "WEBP", "GIF", "TIFF")}
    made |= {f"TIFF {name}": encode("TIFF", compression=name) for name in ("tiff_lzw", "tiff_deflate", "jpeg")}
    return made | {"JPEG progressive": encode("JPEG", progressive=True), "WEBP lossless": encode("WEBP", lossless=True)}


def opened(data: Any) -> Image | None:
    """What a hostile file becomes: an image that is whole, or None for an error that is short and ours."""
    try:
        image = open_image(data)
    except InvalidRequest as error:
        assert 15 < len(str(error)) < 600 and "\n" not in str(error)
        return None
    assert image.pixels.shape == (image.height, image.width, 3) and image.pixels.dtype == np.uint8
    assert read_size(data) == (image.width, image.height) and not image.pixels.flags.writeable
    return image


def test_files_cut_short_are_refused_or_whole() -> None:
    cut = {
        (name, tenth): opened(data[: len(data) * tenth // 10]) for name, data in files().items() for tenth in range(10)
    }
    assert len(cut) > 250 and not any(cut[name, 5] for name in files() if "frames" not in name)
    assert all(opened(data) for data in files().values())


@given(st.sampled_from(sorted(files())), st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=4))))
def test_damaged_bytes_make_an_image_or_the_one_error(name: str, changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(files()[name])
    for at, new in changes:
        at %= min(len(data), 400 if at % 2 else len(data))
        data[at : at + len(new)] = new
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "MAX_PIXELS", 1_000_000)
        opened(bytes(data))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def tiff(*entries: tuple[int, ...], tail: bytes = b"") -> bytes:
    return (
        b"II*\0\x08\0\0\0"
        + struct.pack("<H", len(entries))
        + b"".join(struct.pack("<HHII", *e) for e in entries)
        + tail
    )


def bombs() -> dict[str, bytes]:
    """Small files that ask for gigabytes or minutes."""
    png, jpeg, gif, webp = encode("PNG"), encode("JPEG", progressive=True), encode("GIF"), encode("WEBP", "RGBA")
    scan, size = jpeg.rindex(b"\xff\xda"), jpeg.index(b"\xff\xc2") + 5
    tile = zeros = zlib.compress(bytes(60_000 * 5_000))
    tags = [(256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1)]
    tags += [(322, 4, 1, 60_000), (323, 4, 1, 60_000), (324, 4, 1, 134), (325, 4, 1, len(tile))]
    large = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    bmp = (
        b"BM"
        + struct.pack("<IHHIIiiHHIIiiII", 1100, 0, 0, 1078, 40, 65_000, 900, 1, 8, 1, 0, 0, 0, 256, 0)
        + bytes(1024)
    )
    return {
        "png size": png[:8] + chunk(b"IHDR", large) + png[33:],
        "png text": png[:33] + chunk(b"zTXt", b"a\0\0" + zeros) + png[33:],
        "png texts": png[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1_000_000))) * 2000 + png[33:],
        "png chunks": png[:33] + chunk(b"tEXt", b"a\0b") * 30_000 + png[33:],
        "jpeg size": jpeg[:size] + b"\xff\xff\xff\xff" + jpeg[size + 4 :],
        "jpeg scans": jpeg[:-2] + jpeg[scan:-2] * 100 + jpeg[-2:],
        "jpeg segments": jpeg[:2] + b"\xff\xe5\0\2" * 30_000 + jpeg[2:],
        "jpeg filled": jpeg[:2] + b"\xff" * 30_000 + jpeg[2:],
        "gif screen": gif[:6] + b"\xff\xff\xff\xff" + gif[10:],
        "webp canvas": webp[:24] + b"\xff\xff\0\xff\xff\0" + webp[30:],
        "tiff tile": tiff(*tags, tail=bytes(4) + tile),
        "bmp runs": bmp + b"\1a\0\0" * 900,
        "large file": jpeg + bytes(images.MAX_FILE_BYTES),
        "png side": encode("PNG", picture=PIL.Image.new("L", (70_000, 1))),
    }


def test_bombs_are_refused_with_little_memory(tmp_path: Path) -> None:
    for name, data in (made := bombs()).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "frames.gif").write_bytes(
        encode("GIF", save_all=True, append_images=[PICTURE.rotate(n) for n in range(359)])
    )
    exif = tiff(*((2000 + n, 7, 4_000_000, 0) for n in range(5000))).ljust(4_000_000, b"\0")
    (tmp_path / "exif.png").write_bytes(encode("PNG")[:33] + chunk(b"eXIf", exif) + encode("PNG")[33:])
    code = """if True:
        import pathlib, resource, sys, warnings, PIL.Image
        from cortexmlx.vision.images import InvalidRequest, open_image
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        warnings.simplefilter("ignore")
        before = peak()
        for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
            try:
                print(path.name, "|", open_image(path).notes)
            except InvalidRequest as error:
                print(path.name, "| refused", error)
        print("MB |", (peak() - before) >> 20)"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    said = dict(line.split(" | ", 1) for line in done.stdout.splitlines())
    assert said.pop("frames.gif") == "('the first frame of an animation',)" and said.pop("exif.png") == "()"
    assert int(said.pop("MB")) < 250
    assert "in tiles of 3,600,000,000" in said["tiff tile"]
    assert set(said) == set(made) and all(each.startswith("refused") for each in said.values()), said


def test_what_is_no_image_is_named_with_the_next_step(tmp_path: Path) -> None:
    cases = {b"": "is empty", b"%PDF-1.7": "a PDF document", b"<?xml version='1.0'?>\n<svg>": "an SVG drawing"}
    cases |= {b"BMW makes cars": "text, beginning with 'BMW", b"\x89\0\1": "not an image", b"/9j/4AAQ": "base64 text"}
    cases |= {
        b"\0\0\0\x18ftypheic": "a HEIC photo.*`sips -s format jpeg .*png' --out .*jpg'`",
        b"PK\3\4": "ZIP",
    }
    (path := tmp_path / "a b.png").touch()
    for data, message in cases.items():
        path.write_bytes(data)
        with pytest.raises(InvalidRequest, match=message):
            open_image(path)
    others = {
        tmp_path: "a folder",
        tmp_path / "no": "there is no file",
        "/dev/zero": "a device",
        "a\0b": "cannot be read",
    }
    for source, message in (others | {"https://a.b/c.png": "not fetched", 7: "is int"}).items():
        with pytest.raises(InvalidRequest, match=message):
            open_image(source)  # type: ignore[arg-type]


def test_rare_kinds_look_as_they_should(tmp_path: Path) -> None:
    for name, data in files().items():
        with PIL.Image.open(io.BytesIO(data)) as picture:
            if "I;16" not in name:  # Pillow's own conversion is white wherever a sample is above 255
                np.testing.assert_array_equal(open_image(data).pixels, convert_to_rgb(picture, return_numpy=True), name)
            assert open_image(picture) == open_image(data)
    gray = np.asarray(PICTURE.convert("L"))[..., None].repeat(3, 2)
    for data in (files()["PNG I;16"], files()["TIFF I;16"]):
        np.testing.assert_array_equal(open_image(data).pixels, gray)
        assert open_image(data).notes == ("16 bits reduced to 8",)
    (tmp_path / "wrong.gif").write_bytes(files()["PNG RGB"])
    assert (
        open_image(tmp_path / "wrong.gif")
        == open_image(files()["BMP RGB"])
        == open_image(bytearray(files()["TIFF RGB"]))
    )
    wide = encode("PNG", picture=PIL.Image.new("RGB", (20_000, 10)))
    assert read_size(wide) == (20_000, 10) and open_image(wide).width == 20_000
    assert open_image(encode("PNG", picture=PICTURE.resize((1, 1)))).pixels.shape == (1, 1, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_turns_the_image_as_pillow_does(kind: str) -> None:
    for orientation in range(10):
        exif = PIL.Image.Exif()
        exif[0x0112] = orientation
        data = encode(kind, exif=exif)
        image = opened(data)
        assert image is not None
        np.testing.assert_array_equal(
            image.pixels, np.asarray(ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))))
        )


def folder_with(folder: Path, settings: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(settings))
    return folder


def test_patches_are_those_of_transformers(tmp_path: Path) -> None:
    qwen = folder_with(tmp_path, QWEN | {"image_processor_type": "Qwen2VLImageProcessorFast"})
    (tmp_path / "g").mkdir()
    gemma = {
        "image_processor": {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 16, "max_soft_tokens": 280}
    }
    gemma_folder = folder_with(tmp_path / "g", gemma, "processor_config.json")
    qwen_judge = Qwen2VLImageProcessorPil.from_pretrained(qwen)
    gemma_judge = Gemma4ImageProcessorPil.from_pretrained(gemma_folder)
    for width, height in SIZES:
        picture = PICTURE.convert("RGB").resize((width, height))
        image = open_image(picture)
        for limit, size in ((None, QWEN["size"]), (1000, {"longest_edge": 1000 * 1024, "shortest_edge": 65536})):
            judge = qwen_judge(picture, size=size)
            processor = ImageProcessor(qwen, limit)
            made = processor.make_patches(image)
            np.testing.assert_array_equal(made.patches, judge["pixel_values"])
            assert made.grid == tuple(judge["image_grid_thw"][0])
            assert made.tokens == processor.count_tokens(width, height) == len(made.patches) // 4 <= (limit or 16384)
        told = gemma_judge(picture)
        made = (processor := ImageProcessor(gemma_folder)).make_patches(image)
        np.testing.assert_array_equal(made.patches, told["pixel_values"][0][: len(made.patches)])
        assert made.tokens == processor.count_tokens(width, height) == told["num_soft_tokens_per_image"][0]
        assert (told["image_position_ids"][0] >= 0).all(axis=-1).sum() == made.grid[1] * made.grid[2]


def pixtral_folder(folder: Path) -> Path:
    """A Mistral 3 whose processor says nothing of its tower's patches, as makers' do."""
    folder_with(folder, {"model_type": "mistral3", "vision_config": {"patch_size": 14}}, "config.json")
    return folder_with(folder, {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 1540}})


def test_patches_of_pixtral_are_those_of_transformers(tmp_path: Path) -> None:
    folder = pixtral_folder(tmp_path)
    judge = PixtralImageProcessorPil.from_pretrained(folder)
    for width, height in SIZES:
        picture = PICTURE.convert("RGB").resize((width, height))
        for limit, edge in ((None, 1540), (4160, 1540), (500, 21 * 28)):
            processor = ImageProcessor(folder, limit)
            if (width, height) == (1999, 10) and edge < 1540:
                continue  # it is refused below
            told = judge(picture, size={"longest_edge": edge}, patch_size={"height": 28, "width": 28})
            ((rows, columns),) = [(h // 14, w // 14) for h, w in told["image_sizes"]]
            made = processor.make_patches(open_image(picture))
            assert (made.grid, made.merge) == ((1, rows, columns), 2)
            assert made.tokens == processor.count_tokens(width, height) == rows // 2 * (columns // 2 + 1)
            for number in {0, 1, columns, len(made.patches) // 2, len(made.patches) - 1} & {*range(len(made.patches))}:
                y, x = number // columns * 14, number % columns * 14
                wanted = told["pixel_values"][0][:, y : y + 14, x : x + 14]
                np.testing.assert_array_equal(made.patches[number].reshape(3, 14, 14), wanted)
    for size in ((20_000, 10), (10, 20_000)):
        with pytest.raises(InvalidRequest, match=r"short side has no pixel left\. Crop it"):
            processor.count_tokens(*size)
    for edge in (1, 27, 28, 29, 1540, 3000):
        processor = ImageProcessor(folder, 600)
        assert processor.count_tokens(edge, 3 * edge) <= 600
    folder_with(folder, {"model_type": "mistral3", "vision_config": {"patch_size": 0}}, "config.json")
    with pytest.raises(ModelCorrupt, match=r"preprocessor_config\.json"):
        ImageProcessor(folder)


@given(st.integers(1, 30_000), st.integers(1, 30_000), st.integers(1, 20_000))
def test_no_image_has_more_tokens_than_the_limit(width: int, height: int, limit: int) -> None:
    processor = qwen_processor(limit)
    try:
        assert 1 <= processor.count_tokens(width, height) <= limit
    except InvalidRequest:
        assert max(width, height) / min(width, height) > min(200, limit / 2)


@cache
def qwen_processor(limit: int | None) -> ImageProcessor:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return ImageProcessor(
            folder_with(Path(folder), QWEN | {"image_processor_type": "Qwen2VLImageProcessor"}), limit
        )


def test_the_digest_is_of_pixels_size_settings_and_limit(tmp_path: Path) -> None:
    shapes = [PIL.Image.new("RGB", size, color) for size in ((4, 6), (6, 4), (4, 7)) for color in ("red", "blue")]
    changes: list[dict[str, Any]] = [{}, {"patch_size": 14}, {"image_mean": [0.4] * 3}, {"resample": 2}]
    processors = [
        ImageProcessor(folder_with(tmp_path, QWEN | {"image_processor_type": "Qwen2VLImageProcessor"} | each), limit)
        for each in changes
        for limit in (None, 500)
    ]
    digests = [processor.make_patches(open_image(shape)).digest for shape in shapes for processor in processors]
    assert len(set(digests)) == len(shapes) * len(processors)
    assert processors[0].make_patches(open_image(encode("BMP", picture=shapes[0]))).digest == digests[0]


def test_refusals_name_the_numbers_and_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelUnsupported, match=r"no preprocessor_config\.json"):
        ImageProcessor(tmp_path)
    for settings, error in (({"image_processor_type": "Other"}, ModelUnsupported), ({"patch_size": -4}, ModelCorrupt)):
        with pytest.raises(error, match=r"preprocessor_config\.json"):
            ImageProcessor(folder_with(tmp_path, {"image_processor_type": "Qwen2VLImageProcessor"} | settings))
    with pytest.raises(InvalidRequest, match=r"20,000 x 10 pixels.*200"):
        qwen_processor(None).count_tokens(20_000, 10)
    with pytest.raises(InvalidRequest, match=r"needs 15 tokens.*the limit is 4"):
        qwen_processor(4).count_tokens(2000, 10)
    monkeypatch.setattr(PIL, "__version__", "12.3.0")
    with pytest.raises(CortexError, match=r"Pillow 13, not 12\.3\.0: `pip install 'pillow>=13,<14'`"):
        open_image(b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    for call in (lambda: open_image(b""), lambda: ImageProcessor(tmp_path)):
        with pytest.raises(CortexError, match="need Pillow: `pip install 'pillow>=13,<14'`"):
            call()
