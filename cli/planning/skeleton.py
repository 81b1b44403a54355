"""A model without weights, built from its configuration alone, to compute the memory that it takes.

mlx's arrays are lazy, so mlx-lm's own class can be built, quantized and even called without computing anything. The
shapes of its parameters and caches are exact for every architecture that mlx-lm knows.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.sizing import row_state_bytes
from cortexmlx.kv.spec import ITEMSIZE, KVSpec, LayerGroup, group_layers, kv_bits_error, quantize_groups
from cortexmlx.models.folder_config import (
    DEFAULT_CONTEXT,
    foreign_quantization,
    foreign_settings,
    language_configs,
    stated_context_length,
)
from cortexmlx.models.messages import one_line

if TYPE_CHECKING:
    from cortexmlx.cli.planning.source import PlanSource
    from cortexmlx.core.config import EngineConfig
    from cortexmlx.execution.execution_modes import ExecutionMode


@dataclass(frozen=True)
class Skeleton:
    """A model without weights: its sizes and KV layer groups, from its configuration."""

    architecture: str
    parameters: int
    weight_bytes: int
    """Bytes of the weights, as the configuration quantizes them."""
    widened_bytes: int
    """The same with every plain number as float32, and the quantized numbers still packed."""
    vocab_size: int
    context_length: int
    dtype: str
    """The type of the activations."""
    groups: tuple[LayerGroup, ...]
    """What the model's caches keep in `dtype`."""
    widened_groups: tuple[LayerGroup, ...]
    """What the model's caches keep if all plain numbers are float32."""
    model: Any = None
    """The outline itself, with all plain numbers as float32."""
    refusal: str | None = None
    """Why the engine does not run the model; None if it does."""
    most_rows: int | None = None
    """Requests that the model runs at once, at most. None for any number."""
    notes: tuple[str, ...] = ()
    """Why there is such a limit, a line each."""

    @property
    def can_rewind(self) -> bool:
        """Whether a row can drop its newest tokens, as `InProcessModel` says of a loaded model."""
        return self.most_rows is None and not row_state_bytes(self.groups)

    def with_draft_head(self) -> Skeleton:
        """Return the same model with one more full-attention layer, as a draft head adds."""

        def add_layer(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
            layer = sum(len(group.layers) for group in groups)
            index = next((i for i, g in enumerate(groups) if g.spec.kv_heads and g.spec.window is None), None)
            if index is None:
                return groups
            joined = replace(groups[index], layers=(*groups[index].layers, layer))
            return (*groups[:index], joined, *groups[index + 1 :])

        return replace(self, groups=add_layer(self.groups), widened_groups=add_layer(self.widened_groups))

    def with_quantized_kv(self, kv_bits: int | None, kv_group_size: int | None) -> Skeleton:
        """Return the same model with quantized keys and values. Raises ModelUnsupported if the engine does."""
        if kv_bits is not None and self.most_rows is not None:
            raise kv_bits_error(kv_bits, self.notes[0])
        groups, widened_groups = (
            quantize_groups(g, kv_bits, kv_group_size) for g in (self.groups, self.widened_groups)
        )
        return replace(self, groups=groups, widened_groups=widened_groups)


def build_skeleton(config: Mapping[str, Any]) -> Skeleton:
    """Build the skeleton of a model from `config`, the contents of config.json, without allocating its weights.

    Raises ModelUnsupported if mlx-lm does not know the architecture, if the configuration does not fit it, or if
    mlx-lm's code fails with it. Raises ModelCorrupt if it has more layers than any model.
    """
    from cortexmlx.cpu import blas

    blas.preload()
    import mlx.core as mx

    from cortexmlx.models.folder_config import check_layer_limit
    from cortexmlx.models.weights import dequantize_layers, find_unsupported_on_cpu, parameter_count, weight_bytes

    check_layer_limit(config)
    model = _build_lazy_model(dict(config))
    dtype = _config_dtype(config)
    model.set_dtype(getattr(mx, dtype))
    parameters = parameter_count(model)
    try:
        _quantize_model(model, config)
        stored_bytes, widened_bytes = weight_bytes(model), weight_bytes(model, as_float32=True)
        if mx.default_device() == mx.cpu and find_unsupported_on_cpu(model) is not None:
            dequantize_layers(model)  # as the engine does
        vocab_size, groups = probe_caches(model, dtype)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        kind = config["model_type"]
        raise ModelUnsupported(f"mlx-lm's code for {kind!r} fails with this configuration ({reason})") from error
    mode, refusal = _execution_mode(model)
    model.set_dtype(mx.float32)
    return Skeleton(
        architecture=str(config["model_type"]),
        parameters=parameters,
        weight_bytes=stored_bytes,
        widened_bytes=widened_bytes,
        vocab_size=vocab_size,
        context_length=stated_context_length(config) or DEFAULT_CONTEXT,
        dtype=dtype,
        groups=groups,
        widened_groups=probe_caches(model, "float32")[1],
        model=model,
        refusal=refusal,
        most_rows=mode.max_rows if mode is not None else None,
        notes=mode.notes if mode is not None else (),
    )


def add_drafts(skeleton: Skeleton, source: PlanSource, config: EngineConfig) -> tuple[Skeleton, Skeleton | None]:
    """Return the skeleton of the model in `source` with the layer of its draft head, if it has one, and the skeleton of
    what else drafts for it, or None. Raises what `find_source` and `build_skeleton` raise, and ModelUnsupported for a
    model that the engine does not accept as a draft.
    """
    from cortexmlx.cli.planning.source import find_source
    from cortexmlx.models.folder_config import ASSISTANT, is_same_model

    has_head = source.has_draft_head and config.speculate and not config.reproducible
    with_head = skeleton.with_draft_head() if has_head else skeleton
    if config.active_draft is None:
        return with_head, None
    drafting = find_source(str(config.active_draft)).config
    if drafting.get("model_type") == ASSISTANT:
        return skeleton, _build_head_skeleton(drafting)
    if is_same_model(drafting, source.config):
        return skeleton.with_draft_head(), _build_head_skeleton(drafting, skeleton.model)
    return with_head, _build_draft_skeleton(str(config.active_draft), drafting)


def _build_draft_skeleton(name: str, config: Mapping[str, Any]) -> Skeleton:
    """Build the skeleton of a draft model. Raises ModelUnsupported for one that the engine does not accept."""
    draft = build_skeleton(config)
    reason = draft.refusal
    if reason is None and not draft.can_rewind:
        reason = "its layers do not all keep keys and values, so no wrong token can be taken back"
    if reason is not None:
        raise ModelUnsupported(f"{name} cannot draft (--draft): {reason}")
    return draft


def _build_head_skeleton(config: Mapping[str, Any], model: Any = None) -> Skeleton:
    """Build the skeleton of `model`'s draft head or, without `model`, of an assistant. It has weights only, no KV."""
    from cortexmlx.cpu import blas

    blas.preload()
    import mlx.core as mx

    from cortexmlx.models.assistant import Assistant
    from cortexmlx.models.draft_head import make_draft_head
    from cortexmlx.models.weights import parameter_count, weight_bytes

    dtype = _config_dtype(config)
    head = Assistant(config) if model is None else make_draft_head(model)
    assert head is not None
    head.set_dtype(getattr(mx, dtype))
    parameters = parameter_count(head)
    _quantize_model(head, config)
    return Skeleton(
        architecture=str(config["model_type"]),
        parameters=parameters,
        weight_bytes=weight_bytes(head),
        widened_bytes=weight_bytes(head, as_float32=True),
        vocab_size=0,
        context_length=DEFAULT_CONTEXT,
        dtype=dtype,
        groups=(),
        widened_groups=(),
    )


def _build_lazy_model(config: dict[str, Any]) -> Any:
    """Build the mlx-lm model with lazy arrays, which allocate nothing."""
    from cortexmlx.mlx_lm.package import import_mlx_lm_utils, missing_package_message
    from cortexmlx.models.folder_config import describe_missing_settings, translate_settings

    if not isinstance(config.get("model_type"), str):
        raise ModelUnsupported("the configuration names no model_type: is it a model's config.json?")
    kind = config["model_type"]
    if message := missing_package_message(kind):
        raise ModelUnsupported(f"mlx-lm says of {kind!r}: {message}")
    try:
        model_class, args_class = import_mlx_lm_utils()._get_classes(config)
    except (ValueError, AttributeError):  # no module of that name, or not the module of a model
        raise ModelUnsupported(f"mlx-lm has no architecture {kind!r}") from None
    settings = config | translate_settings(config)
    try:
        model = model_class(args_class.from_dict(settings))
    except Exception as error:
        if fault := describe_missing_settings(error, kind):
            raise ModelUnsupported(f"the configuration {fault}") from error
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ModelUnsupported(f"the configuration does not fit {kind!r} ({reason})") from error
    if hasattr(model, "sanitize"):  # some drop their output projection here when the files hold none
        with contextlib.suppress(Exception):
            model.sanitize({})
    return model


def _config_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that the configuration names; bfloat16 if it names none that is known."""
    stated_dtypes = (source.get(key) for source in language_configs(config) for key in ("dtype", "torch_dtype"))
    dtype = next(filter(None, stated_dtypes), None)
    return dtype if isinstance(dtype, str) and dtype in ITEMSIZE else "bfloat16"


def _quantize_model(model: Any, config: Mapping[str, Any]) -> None:
    """Quantize the model as mlx-lm does on loading: each layer as the configuration sets it, and every other layer that
    can be. If another program packed the model and mlx-lm keeps that, embeddings and left out layers stay unpacked.
    """
    import mlx.nn as nn

    quantization, left_out = config.get("quantization"), None
    if (packing := (foreign_quantization(config) or "").rpartition(" ")[2]) in _KEPT_PACKINGS:
        quantization, left_out = _KEPT_PACKINGS[packing], _left_out_layers(foreign_settings(config) or {})
    if not isinstance(quantization, Mapping):
        return
    group = quantization.get("group_size", 64)

    def choose_quantization(path: str, module: Any) -> Any:
        if path in quantization:
            return quantization[path]
        if left_out and (isinstance(module, nn.Embedding) or left_out.search(path.replace("switch_mlp", "experts.0"))):
            return False
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0

    nn.quantize(
        model,
        group_size=group,
        bits=quantization.get("bits", 4),
        mode=quantization.get("mode", "affine"),
        class_predicate=choose_quantization,
    )


_KEPT_PACKINGS: dict[str, dict[str, Any]] = {
    **{key: {"group_size": 32, "bits": 4, "mode": "mxfp4"} for key in ("mxfp4", "mxfp4-pack-quantized")},
    **{key: {"group_size": 16, "bits": 4, "mode": "nvfp4"} for key in ("NVFP4", "nvfp4-pack-quantized")},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "pack-quantized": {"group_size": 32, "bits": 4},
    "awq": {"group_size": 128, "bits": 4},
}
"""How mlx-lm keeps what other programs packed, by the last word of `foreign_quantization`."""


def _left_out_layers(settings: Mapping[str, Any]) -> re.Pattern[str]:
    """Return a pattern for the layers that are not quantized, by the `settings` of the program that packed a model."""
    names = [str(name) for key in ("modules_to_not_convert", "ignore") for name in settings.get(key) or ()]
    patterns = (n[3:] if n.startswith("re:") else re.escape(n).replace(r"\*", ".*") for n in names)
    return re.compile("|".join(("lm_head", *patterns)))


def probe_caches(model: Any, dtype: str) -> tuple[int, tuple[LayerGroup, ...]]:
    """Run one token. Return the size of its logits, and the layer groups of what is then in mlx-lm's caches."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    logits = model(mx.zeros((1, 1), mx.int32), cache=caches)
    return int(logits.shape[-1]), group_layers([spec for cache in caches for spec in _cache_specs(cache, dtype)])


def _execution_mode(model: Any) -> tuple[ExecutionMode | None, str | None]:
    """Return how the engine runs the model, or why it does not."""
    from cortexmlx.execution.execution_modes import choose_execution_mode

    try:
        return choose_execution_mode(model), None
    except ModelUnsupported as error:
        return None, str(error)


def _cache_specs(cache: Any, dtype: str) -> Iterator[KVSpec]:
    """Yield what one cache object stores. An object that holds several caches counts as several layers."""
    inner_caches = getattr(cache, "caches", None)
    if inner_caches is not None:
        for each in inner_caches:
            yield from _cache_specs(each, dtype)
        return
    keys = getattr(cache, "keys", None)
    if keys is not None:
        window, chunk = getattr(cache, "max_size", None), getattr(cache, "chunk_size", None)
        is_chunked = chunk is not None
        yield KVSpec(keys.shape[1], keys.shape[-1], cache.values.shape[-1], dtype, window or chunk, chunked=is_chunked)
        return
    state = [array for array in getattr(cache, "cache", []) if array is not None]
    if state:
        yield KVSpec(0, 0, 0, dtype, row_bytes=sum(array.nbytes for array in state))


def model_as_loaded(skeleton: Skeleton, on_cpu: bool, is_expanded: bool) -> Any:
    """Return the skeleton's model in the form in which the engine loads it. On a CPU, plain weights are float32, and so
    are packed ones if `is_expanded`.
    """
    import mlx.core as mx

    from cortexmlx.models.weights import dequantize_layers

    if not on_cpu:
        skeleton.model.set_dtype(getattr(mx, skeleton.dtype))
    elif is_expanded:
        dequantize_layers(skeleton.model)
        skeleton.model.set_dtype(mx.float32)
    return skeleton.model
