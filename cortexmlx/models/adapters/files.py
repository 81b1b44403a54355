"""Read an adapter's folder before a model is loaded: the adapter's kind, and the shapes of its numbers. No mlx.

mlx-lm writes `adapter_config.json` and `adapters.safetensors`. A folder of the PEFT library has a configuration of the
same name with other settings (see `peft`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeGuard

from cortexmlx.disk.hashes import FileStamp, stamp_of
from cortexmlx.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.models.folder_config import read_json_object
from cortexmlx.models.safetensors_check import read_safetensors_header

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapters.safetensors"

_SETTLE_SECONDS = 0.05
"""Seconds after a change of a file in which a further change may not show in its time."""

_TRIES = 20


class AdapterKind(str, Enum):
    """What an adapter has for a layer: low-rank matrices (LORA), magnitudes too (DORA), or the whole layer (FULL)."""

    LORA = "lora"
    DORA = "dora"
    FULL = "full"


@dataclass(frozen=True)
class Adapter:
    """An adapter as its folder describes it: kind, settings, tensor names and shapes. The weights are not read yet."""

    path: Path
    kind: AdapterKind
    weights: Path
    """The file of its numbers."""
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    """The shape of each tensor, under the name that the model gives to it."""
    size: int
    """Bytes of the weights file."""
    num_layers: int = -1
    """How many layers have an adapter, counted from the last layer. Unused for FULL."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """mlx-lm's `lora_parameters`: rank, scale, dropout, and keys (which modules of a layer; None for all). Empty for
    FULL.
    """
    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The name in the file of each tensor whose name in the model differs."""
    is_transposed: bool = False
    """Whether the file stores all matrices transposed."""
    base: str | None = None
    """The model that it was trained on; None if its folder does not say."""
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict, repr=False)
    """Those of its files before they were read."""

    def check_unchanged(self) -> None:
        """Raise ModelCorrupt if a file changed since `read_adapter` began: what was read may be half old, half new."""
        for file, stamp in self.stamps.items():
            if _read_stamp(file) != stamp:
                raise file_changed_error(file)

    @property
    def added_bytes(self) -> int:
        """The bytes that the adapter adds to the model's memory; 0 for whole layers, which replace the model's own."""
        return 0 if self.kind is AdapterKind.FULL else self.size


def read_adapter(path: str | Path) -> Adapter:
    """Read the adapter in the folder `path`, or in the folder of the file `path`. A symbolic link is followed once, so
    all files come from one folder.

    Raises ModelNotFound if there is no adapter, and ModelCorrupt for damaged files. Raises ModelUnsupported with the
    kind of an adapter that cannot be applied.
    """
    folder = Path(os.path.expanduser(path))
    try:
        if folder.is_file() and folder.suffix == ".safetensors":
            folder = folder.parent
        if not folder.is_dir():
            raise ModelNotFound(f"no adapter {str(path)!r}: give the folder with {CONFIG_FILE} and {WEIGHTS_FILE}.")
        if not (folder / CONFIG_FILE).is_file():
            raise ModelNotFound(f"{folder} holds no adapter: there is no {CONFIG_FILE} in it.")
    except OSError as error:
        raise ModelNotFound(f"cannot look at {str(path)!r:.200}: {error.strerror}.") from error
    given_folder, folder = folder, Path(os.path.realpath(folder))
    files = [folder / name for name in (CONFIG_FILE, WEIGHTS_FILE, PEFT_WEIGHTS_FILE)]
    stamps = {file: stamp for file in files if (stamp := _wait_for_stamp(file)) is not None}
    config = read_json_object(folder / CONFIG_FILE)
    adapter = _parse_peft_adapter(folder, config) if is_peft(config) else _parse_mlx_lm_adapter(folder, config)
    files_read = (folder / CONFIG_FILE, adapter.weights)
    adapter = replace(adapter, path=given_folder, stamps={file: stamps[file] for file in files_read if file in stamps})
    rank = adapter.settings.get("rank")
    for name, shape in adapter.shapes.items():
        if rank is not None and name.endswith((".lora_a", ".lora_b")) and rank not in shape:
            raise ModelCorrupt(f"{folder / CONFIG_FILE} says rank {rank}, but {name} is {shape}: not of one adapter.")
    return adapter


def find_adapter_file(folder: Path) -> str | None:
    """Return the name of an adapter's weights file that lies in a model's folder; None if there is none."""
    return next((name for name in (WEIGHTS_FILE, PEFT_WEIGHTS_FILE) if (folder / name).is_file()), None)


def file_changed_error(file: Path) -> ModelCorrupt:
    """Return the error for a file that changed while it was read."""
    return ModelCorrupt(f"{file} has changed while it was read. Load it again.")


def _wait_for_stamp(file: Path) -> FileStamp | None:
    """Return a file's stamp (None without a file), after waiting until any later change would alter the stamp. Raises
    ModelCorrupt if the file goes on changing.
    """
    for _ in range(_TRIES):
        stamp = _read_stamp(file)
        if stamp is None or not 0 <= time.time() - stamp.modified_ns / 1e9 < _SETTLE_SECONDS:
            return stamp
        time.sleep(_SETTLE_SECONDS)
    raise file_changed_error(file)


def _read_stamp(file: Path) -> FileStamp | None:
    """Return a file's stamp, which differs after a change; None if there is no such file."""
    try:
        return stamp_of(file)
    except OSError:
        return None


def _parse_mlx_lm_adapter(folder: Path, config: dict[str, Any]) -> Adapter:
    """Return the adapter that a folder of mlx-lm holds, from its adapter_config.json."""
    config_file = folder / CONFIG_FILE
    fine_tune_type = config.get("fine_tune_type", "lora")
    if fine_tune_type not in [kind.value for kind in AdapterKind]:
        raise ModelUnsupported(f"{config_file} says fine_tune_type {fine_tune_type!r}; lora, dora and full are known.")
    kind = AdapterKind(fine_tune_type)
    weights, shapes, size = _read_shapes(folder, WEIGHTS_FILE)
    base = _text_or_none(config.get("model"))
    if kind is AdapterKind.FULL:
        return Adapter(folder, kind, weights, shapes, size, base=base)
    layers, settings = config.get("num_layers"), config.get("lora_parameters")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise ModelCorrupt(f"{config_file} has num_layers {layers!r}, which must be a number of layers.")
    if not isinstance(settings, dict):
        raise ModelCorrupt(f"{config_file} has no lora_parameters. Was it written by `mlx_lm.lora`?")
    return Adapter(folder, kind, weights, shapes, size, layers, _check_lora_settings(config_file, settings), base=base)


def _check_lora_settings(config_file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Check mlx-lm's `lora_parameters`, and return those that have an effect."""
    rank, scale, keys = settings.get("rank"), settings.get("scale"), settings.get("keys")
    if not is_rank(rank):
        raise ModelCorrupt(
            f"{config_file} has rank {rank!r:.40}, which must be at least 1, and no more than a layer has rows."
        )
    if not is_number(scale):
        hint = " (mlx-lm wants scale, not alpha)" if scale is None and "alpha" in settings else ""
        raise ModelCorrupt(f"{config_file} has scale {scale!r:.40}, which must be a number{hint}.")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise ModelCorrupt(f"{config_file} has keys {keys!r}, which must be names of modules.")
    return {"rank": rank, "scale": float(scale), "dropout": 0.0, "keys": keys}


def _parse_peft_adapter(folder: Path, config: dict[str, Any]) -> Adapter:
    """Return the adapter that a folder of PEFT holds, with mlx-lm's names and settings."""
    scale = read_peft_scale(folder / CONFIG_FILE, config)
    if not (folder / PEFT_WEIGHTS_FILE).is_file() and (folder / "adapter_model.bin").is_file():
        raise ModelUnsupported(
            f"{folder} has adapter_model.bin, a pickle, which is not read: save it as {PEFT_WEIGHTS_FILE}."
        )
    weights, file_shapes, size = _read_shapes(folder, PEFT_WEIGHTS_FILE)
    names = map_peft_names(folder, file_shapes)
    shapes = {name: tuple(reversed(file_shapes[file])) for name, file in names.items()}
    modules = sorted({name.rpartition(".")[0] for name in names})
    settings = {"rank": config["r"], "scale": scale, "dropout": 0.0, "keys": modules}
    kind = AdapterKind.DORA if config.get("use_dora") else AdapterKind.LORA
    base = _text_or_none(config.get("base_model_name_or_path"))
    return Adapter(folder, kind, weights, shapes, size, -1, settings, names, is_transposed=True, base=base)


def _text_or_none(value: Any) -> str | None:
    """Return a JSON string without line breaks; None for an empty string or another value."""
    return " ".join(value.split()) or None if isinstance(value, str) else None


def _read_shapes(folder: Path, name: str) -> tuple[Path, dict[str, tuple[int, ...]], int]:
    """Return the path of the weights file `name`, the shape of each tensor in it, and the file's bytes."""
    file = folder / name
    if not file.is_file():
        raise ModelCorrupt(f"{folder} has an {CONFIG_FILE} but no {name}. Copy it again.")
    shapes = {tensor: tuple(entry["shape"]) for tensor, entry in read_safetensors_header(file).items()}
    if not shapes:
        raise ModelCorrupt(f"{file} holds no numbers at all. Was its training cut short?")
    return file, shapes, file.stat().st_size


# Adapters of Hugging Face's PEFT library, expressed in mlx-lm's terms where the mathematics is the same.
#
# PEFT adds `alpha / r * B A x` to a linear layer's result (`alpha / sqrt(r)` with `use_rslora`), with A `[r, in]` and B
# `[out, r]`. mlx-lm adds `scale * x lora_a lora_b` with both transposed. DoRA's magnitudes are the same in both. Any
# other setting may change the numbers. So a setting that is not known to be harmless is refused by name.


PEFT_WEIGHTS_FILE = "adapter_model.safetensors"
MERGE_ADVICE = "merge it into its model (PEFT's merge_and_unload) and convert that"
_PEFT_PREFIX = "base_model.model."
_PEFT_ENDINGS = {
    ".lora_A.weight": ".lora_a",
    ".lora_B.weight": ".lora_b",
    ".lora_magnitude_vector": ".m",
    ".lora_magnitude_vector.weight": ".m",
}

_HARMLESS_SETTINGS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
}
"""Settings that are honoured, or that have no effect here. These say only which modules are adapted, as the tensors'
names do too, or how the adapter was trained.
"""

_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin training that leave the model's own weights unchanged."""


_LARGEST_NUMBER = 3.4e38
"""About the largest number of float32."""

_HIGHEST_RANK = 1 << 20
"""More than the number of rows of any layer."""


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a JSON value is a number that fits float32."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER


def is_rank(value: Any) -> TypeGuard[int]:
    """Return whether a JSON value can be the rank of a LoRA layer."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _HIGHEST_RANK


def is_peft(config: dict[str, Any]) -> bool:
    """Return whether PEFT has written this adapter_config.json."""
    return "peft_type" in config


def read_peft_scale(config_file: Path, config: dict[str, Any]) -> float:
    """Return the factor by which a PEFT adapter's output is multiplied. Raises ModelUnsupported for a type other than
    LoRA and for unknown settings, and ModelCorrupt if rank or alpha are not numbers.
    """
    if config["peft_type"] != "LORA":
        raise ModelUnsupported(
            f"{config_file} is of PEFT's type {config['peft_type']!r}; LORA alone is read: {MERGE_ADVICE}."
        )
    unknown_keys = [
        key for key, value in config.items() if key not in _HARMLESS_SETTINGS and not _has_no_effect(key, value)
    ]
    if unknown_keys:
        settings_text = ", ".join(f"{key}={config[key]!r}" for key in sorted(unknown_keys))
        raise ModelUnsupported(
            f"{config_file} has PEFT settings that are not known here ({settings_text[:200]}): {MERGE_ADVICE}."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not is_rank(rank):
        raise ModelCorrupt(f"{config_file} has r {rank!r:.40}, which must be a rank of at least 1.")
    if not is_number(alpha):
        raise ModelCorrupt(f"{config_file} has lora_alpha {alpha!r:.40}, which must be a number.")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def map_peft_names(folder: Path, tensors: Iterable[str]) -> dict[str, str]:
    """Return PEFT's tensor names, by mlx-lm's names. Raises ModelUnsupported for a tensor of no LoRA layer."""
    names = {}
    for tensor in tensors:
        suffix = next((part for part in _PEFT_ENDINGS if tensor.endswith(part)), None)
        if suffix is None or not tensor.startswith(_PEFT_PREFIX):
            raise ModelUnsupported(
                f"{folder / PEFT_WEIGHTS_FILE} has {tensor}, which is no part of a LoRA layer: {MERGE_ADVICE}."
            )
        names[tensor.removeprefix(_PEFT_PREFIX).removesuffix(suffix) + _PEFT_ENDINGS[suffix]] = tensor
    return names


def _has_no_effect(key: str, value: Any) -> bool:
    """Return whether a PEFT setting, with this value, changes nothing."""
    if key == "init_lora_weights":
        return value in _HARMLESS_INITS
    return not value or (key == "bias" and value == "none")
