"""Sight: what a model that sees images has beside its text part. Only the engine's thread may use it.

A tower makes features of an image, one vector for each of its tokens. They take the place of the tokens' embeddings.
The tower runs piece by piece between the engine's steps, so that nobody who waits for tokens waits for a whole image.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from cortexmlx.types.arrays import IntArray
from cortexmlx.types.images import FeaturePiece, PreparedImage
from cortexmlx.vision.qwen import rotate
from cortexmlx.vision.towers import Pieces, Tower, run_pieces

FEATURE_BYTES = 64 << 20
"""Features of so many bytes are kept, the latest used ones. Others are computed again before they are needed."""


@dataclass(frozen=True)
class Features:
    """A vision tower's output for one image."""

    tokens: mx.array
    """`[tokens, h]`: they take the place of its tokens' embeddings."""
    deep: Sequence[mx.array]
    """`[tokens, h]` each: the i-th is added to what layer i of the text part makes of its tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes of all features."""
        return sum(array.nbytes for array in (self.tokens, *self.deep))


class Sight:
    """Runs the vision tower of a loaded model, and caches the features of the latest images."""

    def __init__(self, tower: Tower, model: nn.Module) -> None:
        self.tower = tower
        self._text = model.language_model.model
        self._features: OrderedDict[bytes, Features] = OrderedDict()
        self._waiting: deque[PreparedImage] = deque()
        self._pieces: Pieces | None = None
        self._needed = set[bytes]()
        self._model = model
        self._step = StepImages()
        norm = self._text.layers[0].input_layernorm.weight
        self._token_bytes = norm.nbytes * (1 + tower.deep_layers)

    def install(self, more_layers: Sequence[nn.Module] = ()) -> None:
        """Have the text part and `more_layers`, such as a draft head's, use this object in each step: see `StepImages`.
        Call it once, after all else that changes modules.
        """
        self._step.install(self._model, self.tower, more_layers)

    # -- features -----------------------------------------------------------------------------------------------------

    def request_features(self, images: Sequence[PreparedImage]) -> PreparedImage | None:
        """Have the next calls of `advance` compute the features of `images`, of as many as the cache can hold together.
        Return the last image to wait for; None if all are cached. Cached ones stay until the next call of `advance`.
        """
        wanted, size = dict[bytes, PreparedImage](), 0
        for image in images:
            size += len(image.tokens) * self._token_bytes if image.key not in wanted else 0
            if wanted and size > FEATURE_BYTES:
                break
            wanted[image.key] = image
        self._needed |= wanted.keys() & self._features.keys()
        for key in wanted.keys() & self._features.keys():
            self._features.move_to_end(key)
        known = {image.key for image in self._waiting} | self._features.keys()
        self._waiting += [image for key, image in wanted.items() if key not in known]
        return next((image for image in reversed(self._waiting) if image.key in wanted), None)

    @property
    def current_image(self) -> PreparedImage | None:
        """The image that `advance` continues with; None if no image waits."""
        return self._waiting[0] if self._waiting else None

    def advance(self, seconds: float | None) -> None:
        """Run the tower on the image that waits longest: at least one piece, and more until `seconds` are over; all
        pieces if None. An image is not begun if its features would evict some that were requested since the last call.
        If MLX lacks memory, its error is raised, and the image waits no more.
        """
        image, until = self.current_image, None if seconds is None else time.perf_counter() + seconds
        needed, self._needed = self._needed, set()
        if image is None:
            return
        if self._pieces is None:
            size = len(image.tokens) * self._token_bytes
            kept = sum(each.nbytes for key, each in self._features.items() if key in needed)
            if kept and size + kept > FEATURE_BYTES:
                return
        try:
            self._pieces = self._pieces or self.tower.see(mx.array(image.patches), image.grid)
            features = run_pieces(self._pieces, until)
            if features is None:
                return
            self._cache_features(image, Features(*features))
        except BaseException:
            self._drop_current()
            raise
        self._drop_current()

    def _drop_current(self) -> None:
        """Remove the current image from the waiting ones, so that the next one is current."""
        self._pieces = None
        self._waiting.popleft()

    def forget(self) -> None:
        """Forget the waiting images: their requests have ended, or the engine starts over after an error."""
        self._waiting.clear()
        self._pieces = None

    def _cache_features(self, image: PreparedImage, features: Features) -> None:
        """Cache an image's features, and evict the least recently used ones."""
        self._features[image.key] = features
        while len(self._features) > 1 and self.nbytes > FEATURE_BYTES:
            self._features.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the features that are kept."""
        return sum(each.nbytes for each in self._features.values())

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, positions: mx.array, axes: IntArray | None) -> None:
        """Begin a step whose tokens are rotated by `positions` `[T]`, or by `axes` `[3, T]`."""
        self._step.begin(positions, axes)

    def embed(self, tokens: mx.array, pieces: Sequence[FeaturePiece]) -> mx.array:
        """Return the embeddings `[T, 1, h]` of a step's tokens `[T]`; those of image tokens are their features."""
        embeddings = self._text.embed_tokens(mx.maximum(tokens, 0))
        layers: list[mx.array] = []
        for piece in pieces:
            features, span = self._features[piece.image.key], slice(piece.first, piece.first + piece.end - piece.begin)
            seen = features.tokens[span].astype(embeddings.dtype)
            is_image = tokens[piece.begin : piece.end, None] < 0  # the ends of rows are tokens of the vocabulary
            embeddings[piece.begin : piece.end] = mx.where(is_image, seen, embeddings[piece.begin : piece.end])
            for index, deep in enumerate(features.deep):
                if index == len(layers):
                    layers.append(mx.zeros_like(embeddings))
                layers[index][piece.begin : piece.end] = deep[span].astype(embeddings.dtype)
        self._step.deep = [layer[:, None] for layer in layers]
        flat: mx.array = embeddings[:, None]
        return flat


class StepImages:
    """Changes layers of the language model for steps with image tokens: they rotate by three axes, and `deep` features
    of the tower's inner layers, `[T, 1, h]` each, are added to the first layers' outputs.
    """

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._axes: mx.array | None = None
        self.deep: list[mx.array] = []

    def begin(self, positions: mx.array, axes: IntArray | None) -> None:
        """Begin a step. Rotary modules use `axes` when they are called with this very array `positions` `[T]`."""
        self._positions = positions
        self._axes = None if axes is None else mx.array(np.ascontiguousarray(axes))
        self.deep = []

    def install(self, model: nn.Module, tower: Tower, more_layers: Sequence[nn.Module]) -> None:
        """Give the rotary modules and the first layers of a model subclasses that use this object."""
        if not tower.turns_by_axes:
            return
        args = model.language_model.args
        settings = {**(getattr(args, "rope_scaling", None) or {}), **(getattr(args, "rope_parameters", None) or {})}
        usual = (11, 11, 10) if args.model_type.startswith("qwen3_5") else (24, 20, 20)  # transformers' defaults
        sections = tuple(settings.get("mrope_section", usual))
        for layer in (*model.language_model.model.layers, *more_layers):
            rope = getattr(getattr(layer, "self_attn", None), "rope", None)
            if rope is not None:
                rope.__class__ = self._make_rope(type(rope), sections)
        for index, layer in enumerate(model.language_model.model.layers[: tower.deep_layers]):
            layer.__class__ = self._make_layer(type(layer), index)

    def _make_rope(self, kind: Any, sections: Any) -> Any:
        """Return a subclass of a rotary module class that rotates by three axes in a step that has them."""

        class RopeWithAxes(kind):  # type: ignore[misc]
            def __call__(module, x: mx.array, offset: Any = 0) -> mx.array:
                if self._axes is not None and offset is self._positions:
                    return rotate(x, self._axes, sections, module.dims, super().__call__)
                out: mx.array = super().__call__(x, offset=offset)
                return out

        return RopeWithAxes

    def _make_layer(self, kind: Any, index: int) -> Any:
        """Return a subclass of a layer class that adds the deep features `index` to its output."""

        class LayerWithDeep(kind):  # type: ignore[misc]
            def __call__(module, *inputs: Any, **options: Any) -> mx.array:
                out: mx.array = super().__call__(*inputs, **options)
                return out + self.deep[index] if index < len(self.deep) else out

        return LayerWithDeep
