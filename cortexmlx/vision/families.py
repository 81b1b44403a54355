"""The families of models that see images: whose tower they have, and how their texts show an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cortexmlx.errors import ModelUnsupported
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.types.images import BidirectionalLayers
from cortexmlx.vision import gemma, pixtral, qwen
from cortexmlx.vision.images import ImageProcessor
from cortexmlx.vision.reader import MAX_TOKENS, ImageReader
from cortexmlx.vision.towers import Tower


@dataclass(frozen=True)
class Family:
    """How a family of models takes images: how to read its tower, and how its prompts and layers treat images."""

    read_tower: Callable[..., Tower | None]
    """Reads the tower of a model's folder: see `qwen.read_tower`."""
    marks: tuple[str, str] = ("", "")
    """What the chat template writes before and after an image."""
    row_ends: tuple[str, str] | None = None
    """The tokens that end a row of an image's tokens, and the last row."""
    shows_image_first: bool = False
    """Whether the chat template writes one image and one text in this order, however they came."""
    trims_texts: bool = False
    """Whether the chat template trims each text beside an image."""
    bidirectional_layers: Callable[[Mapping[str, Any]], BidirectionalLayers] = lambda config: BidirectionalLayers.NONE
    """Returns in which layers a token of an image sees the image's later tokens, from config.json."""

    def make_reader(self, loaded: Any, tower: Tower, step_tokens: int) -> ImageReader:
        """Return the reader of images for a loaded model with this tower. A step holds `step_tokens` tokens of prompts.
        Raises ModelUnsupported, and what `ImageProcessor` raises.
        """
        bidirectional, max_tokens = self.bidirectional_layers(loaded.config), MAX_TOKENS
        if bidirectional is not BidirectionalLayers.NONE:  # an image's tokens are computed in one step
            max_tokens = min(max_tokens, step_tokens)
        placeholder = loaded.config.get("image_token_id", loaded.config.get("image_token_index"))
        if not isinstance(placeholder, int):
            raise ModelUnsupported(f"config.json says {placeholder!r} for image_token_id, the token of images")
        ends, tokenizer = list[int](), SharedTokenizer(loaded.tokenizer)
        for text in self.row_ends or ():
            tokens = tokenizer.encode(text, False)
            if len(tokens) != 1:
                raise ModelUnsupported(f"its tokenizer has no token {text}, which ends a row of an image")
            ends += tokens
        try:
            processor = ImageProcessor(loaded.path, max_tokens)
        except ModelUnsupported as error:
            if max_tokens == MAX_TOKENS:
                raise
            raise ModelUnsupported(f"{error} A step computes an image's tokens at once: raise prefill_budget") from None
        return ImageReader(
            processor,
            placeholder,
            *self.marks,
            row_ends=(ends[0], ends[1]) if ends else None,
            has_axes=tower.turns_by_axes,
            shows_image_first=self.shows_image_first,
            trims_texts=self.trims_texts,
            bidirectional=bidirectional,
        )


_GEMMA = Family(
    gemma.read_tower, ("<|image>", "<image|>"), trims_texts=True, bidirectional_layers=gemma.bidirectional_layers
)

FAMILIES = {
    "gemma4": _GEMMA,
    "gemma4_unified": _GEMMA,
    "gemma3": replace(_GEMMA, marks=("\n\n<start_of_image>", "<end_of_image>\n\n")),
    **dict.fromkeys(qwen.TOWER_MODELS, Family(qwen.read_tower, ("<|vision_start|>", "<|vision_end|>"))),
    **dict.fromkeys(
        pixtral.TOWER_MODELS,
        Family(pixtral.read_tower, row_ends=("[IMG_BREAK]", "[IMG_END]"), shows_image_first=True),
    ),
}
"""By the `model_type` of config.json."""
