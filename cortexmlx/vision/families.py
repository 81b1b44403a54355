"""The families of models that see images: whose tower they have, and how their texts show an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cortexmlx.errors import ModelUnsupported
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.vision import pixtral, qwen
from cortexmlx.vision.images import ImageProcessor
from cortexmlx.vision.reader import MAX_TOKENS, ImageReader
from cortexmlx.vision.towers import Tower


@dataclass(frozen=True)
class Family:
    """How models see."""

    read_tower: Callable[..., Tower | None]
    """Reads the tower of a model's folder: see `qwen.read_tower`."""
    marks: tuple[str, str] = ("", "")
    """What the chat template writes before and after an image."""
    row_ends: tuple[str, str] | None = None
    """The tokens that end a row of an image's tokens, and the last row."""
    shows_image_first: bool = False
    """Whether the chat template writes one image and one text in this order, however they came."""

    def make_reader(self, loaded: Any, tower: Tower) -> ImageReader:
        """Return what reads images for a loaded model with this tower. Raises ModelUnsupported, and what
        `ImageProcessor` raises.
        """
        placeholder = loaded.config.get("image_token_id", loaded.config.get("image_token_index"))
        if not isinstance(placeholder, int):
            raise ModelUnsupported(f"config.json says {placeholder!r} for image_token_id, the token of images")
        ends, tokenizer = list[int](), SharedTokenizer(loaded.tokenizer)
        for text in self.row_ends or ():
            tokens = tokenizer.encode(text, False)
            if len(tokens) != 1:
                raise ModelUnsupported(f"its tokenizer has no token {text}, which ends a row of an image")
            ends += tokens
        return ImageReader(
            ImageProcessor(loaded.path, MAX_TOKENS),
            placeholder,
            *self.marks,
            row_ends=(ends[0], ends[1]) if ends else None,
            has_axes=tower.turns_by_axes,
            shows_image_first=self.shows_image_first,
        )


FAMILIES = {
    **dict.fromkeys(qwen.TOWER_MODELS, Family(qwen.read_tower, ("<|vision_start|>", "<|vision_end|>"))),
    **dict.fromkeys(
        pixtral.TOWER_MODELS,
        Family(pixtral.read_tower, row_ends=("[IMG_BREAK]", "[IMG_END]"), shows_image_first=True),
    ),
}
"""By the `model_type` of config.json."""
