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
from cortexmlx.models.safetensors_check import read_header

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapters.safetensors"

_SETTLED = 0.05
"""Seconds after a change of a file in which a further change may not show in its time."""

_TRIES = 20


class AdapterKind(str, Enum):
    """What was trained: two thin matrices beside a layer (LORA), these and the layer's magnitudes (DORA), or whole
    layers (FULL).
    """

    LORA = "lora"
    DORA = "dora"
    FULL = "full"


@dataclass(frozen=True)
class Adapter:
    """An adapter that can be applied to the model that it was made for."""

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
    transposed: bool = False
    """Whether the file stores all matrices transposed."""
    base: str | None = None
    """The model that it was trained on; None if its folder does not say."""
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict, repr=False)
    """Those of its files before they were read."""

    def check_unchanged(self) -> None:
        """Raise ModelCorrupt if its files have changed since `read_adapter` began: what was read may be half old and
        half new.
        """
        for file, stamp in self.stamps.items():
            if _stamp(file) != stamp:
                raise changed(file)

    @property
    def added_bytes(self) -> int:
        """Bytes that the model takes more with the adapter. Whole layers replace the model's, so they add none."""
        return 0 if self.kind is AdapterKind.FULL else self.size


def read_adapter(path: str | Path) -> Adapter:
    """Return the adapter in the folder `path`, or in the folder of the file `path`. A symbolic link to the folder is
    followed once, so all of the adapter comes from one folder.

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
    given, folder = folder, Path(os.path.realpath(folder))
    files = [folder / name for name in (CONFIG_FILE, WEIGHTS_FILE, MODEL_FILE)]
    stamps = {file: stamp for file in files if (stamp := _settled(file)) is not None}
    config = read_json_object(folder / CONFIG_FILE)
    adapter = _of_peft(folder, config) if is_peft(config) else _of_mlx_lm(folder, config)
    read = (folder / CONFIG_FILE, adapter.weights)
    adapter = replace(adapter, path=given, stamps={file: stamps[file] for file in read if file in stamps})
    rank = adapter.settings.get("rank")
    for name, shape in adapter.shapes.items():
        if rank is not None and name.endswith((".lora_a", ".lora_b")) and rank not in shape:
            raise ModelCorrupt(f"{folder / CONFIG_FILE} says rank {rank}, but {name} is {shape}: not of one adapter.")
    return adapter


def adapter_beside(folder: Path) -> str | None:
    """Return the file name of an adapter's weights in a model's folder. They are not the model's, and have no effect
    there.
    """
    return next((name for name in (WEIGHTS_FILE, MODEL_FILE) if (folder / name).is_file()), None)


def changed(file: Path) -> ModelCorrupt:
    """Return the error for a file that was not the same all the time."""
    return ModelCorrupt(f"{file} has changed while it was read. Load it again.")


def _settled(file: Path) -> FileStamp | None:
    """Return the stamp of a file; None if there is none. If it has just been changed, wait until a further change would
    show. Raises ModelCorrupt if it is changed all the time.
    """
    for _ in range(_TRIES):
        stamp = _stamp(file)
        if stamp is None or not 0 <= time.time() - stamp.modified_ns / 1e9 < _SETTLED:
            return stamp
        time.sleep(_SETTLED)
    raise changed(file)


def _stamp(file: Path) -> FileStamp | None:
    try:
        return stamp_of(file)
    except OSError:
        return None


def _of_mlx_lm(folder: Path, config: dict[str, Any]) -> Adapter:
    where = folder / CONFIG_FILE
    named = config.get("fine_tune_type", "lora")
    if named not in [kind.value for kind in AdapterKind]:
        raise ModelUnsupported(f"{where} says fine_tune_type {named!r}; lora, dora and full are known.")
    kind = AdapterKind(named)
    weights, shapes, size = _tensors(folder, WEIGHTS_FILE)
    base = _text(config.get("model"))
    if kind is AdapterKind.FULL:
        return Adapter(folder, kind, weights, shapes, size, base=base)
    layers, settings = config.get("num_layers"), config.get("lora_parameters")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise ModelCorrupt(f"{where} has num_layers {layers!r}, which must be a number of layers.")
    if not isinstance(settings, dict):
        raise ModelCorrupt(f"{where} has no lora_parameters. Was it written by `mlx_lm.lora`?")
    return Adapter(folder, kind, weights, shapes, size, layers, _checked(where, settings), base=base)


def _checked(where: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that have an effect, after a check of their types."""
    rank, scale, keys = settings.get("rank"), settings.get("scale"), settings.get("keys")
    if not is_rank(rank):
        raise ModelCorrupt(
            f"{where} has rank {rank!r:.40}, which must be at least 1, and no more than a layer has rows."
        )
    if not is_number(scale):
        hint = " (mlx-lm wants scale, not alpha)" if scale is None and "alpha" in settings else ""
        raise ModelCorrupt(f"{where} has scale {scale!r:.40}, which must be a number{hint}.")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise ModelCorrupt(f"{where} has keys {keys!r}, which must be names of modules.")
    return {"rank": rank, "scale": float(scale), "dropout": 0.0, "keys": keys}


def _of_peft(folder: Path, config: dict[str, Any]) -> Adapter:
    scale = scale_of(folder / CONFIG_FILE, config)
    if not (folder / MODEL_FILE).is_file() and (folder / "adapter_model.bin").is_file():
        raise ModelUnsupported(f"{folder} has adapter_model.bin, a pickle, which is not read: save it as {MODEL_FILE}.")
    weights, stored, size = _tensors(folder, MODEL_FILE)
    names = renamed(folder, stored)
    shapes = {name: tuple(reversed(stored[file])) for name, file in names.items()}
    modules = sorted({name.rpartition(".")[0] for name in names})
    settings = {"rank": config["r"], "scale": scale, "dropout": 0.0, "keys": modules}
    kind = AdapterKind.DORA if config.get("use_dora") else AdapterKind.LORA
    base = _text(config.get("base_model_name_or_path"))
    return Adapter(folder, kind, weights, shapes, size, -1, settings, names, transposed=True, base=base)


def _text(value: Any) -> str | None:
    return " ".join(value.split()) or None if isinstance(value, str) else None


def _tensors(folder: Path, name: str) -> tuple[Path, dict[str, tuple[int, ...]], int]:
    """Return the file `name` in `folder`, the shapes of its tensors, and its bytes."""
    file = folder / name
    if not file.is_file():
        raise ModelCorrupt(f"{folder} has an {CONFIG_FILE} but no {name}. Copy it again.")
    shapes = {tensor: tuple(entry["shape"]) for tensor, entry in read_header(file).items()}
    if not shapes:
        raise ModelCorrupt(f"{file} holds no numbers at all. Was its training cut short?")
    return file, shapes, file.stat().st_size


# Adapters of Hugging Face's PEFT library, expressed in mlx-lm's terms where the mathematics is the same.
#
# PEFT adds `alpha / r * B A x` to a linear layer's result (`alpha / sqrt(r)` with `use_rslora`), with A `[r, in]` and B
# `[out, r]`. mlx-lm adds `scale * x lora_a lora_b` with both transposed. DoRA's magnitudes are the same in both. Any
# other setting may change the numbers. So a setting that is not known to be harmless is refused by name.


MODEL_FILE = "adapter_model.safetensors"
MERGE = "merge it into its model (PEFT's merge_and_unload) and convert that"
_PREFIX = "base_model.model."
_PARTS = {
    ".lora_A.weight": ".lora_a",
    ".lora_B.weight": ".lora_b",
    ".lora_magnitude_vector": ".m",
    ".lora_magnitude_vector.weight": ".m",
}

_HARMLESS = {
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

_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin training that leave the model's own weights unchanged."""


_LARGEST = 3.4e38
"""About the largest number of float32."""

_HIGHEST_RANK = 1 << 20
"""More than the number of rows of any layer."""


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a JSON value is a number that layers can multiply with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def is_rank(value: Any) -> TypeGuard[int]:
    """Return whether a JSON value is a rank that a layer can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _HIGHEST_RANK


def is_peft(config: dict[str, Any]) -> bool:
    """Return whether an adapter_config.json was written by PEFT."""
    return "peft_type" in config


def scale_of(where: Path, config: dict[str, Any]) -> float:
    """Return the factor of the adapter's result. Raises ModelUnsupported for anything but LoRA as described above, and
    ModelCorrupt if rank or alpha are not numbers.
    """
    if config["peft_type"] != "LORA":
        raise ModelUnsupported(f"{where} is of PEFT's type {config['peft_type']!r}; LORA alone is read: {MERGE}.")
    strange = [key for key, value in config.items() if key not in _HARMLESS and not _means_nothing(key, value)]
    if strange:
        named = ", ".join(f"{key}={config[key]!r}" for key in sorted(strange))
        raise ModelUnsupported(f"{where} has PEFT settings that are not known here ({named[:200]}): {MERGE}.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not is_rank(rank):
        raise ModelCorrupt(f"{where} has r {rank!r:.40}, which must be a rank of at least 1.")
    if not is_number(alpha):
        raise ModelCorrupt(f"{where} has lora_alpha {alpha!r:.40}, which must be a number.")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def renamed(folder: Path, tensors: Iterable[str]) -> dict[str, str]:
    """Return PEFT's name of each tensor by mlx-lm's name. Raises ModelUnsupported for a tensor that is not part of a
    LoRA layer.
    """
    names = {}
    for tensor in tensors:
        ending = next((part for part in _PARTS if tensor.endswith(part)), None)
        if ending is None or not tensor.startswith(_PREFIX):
            raise ModelUnsupported(f"{folder / MODEL_FILE} has {tensor}, which is no part of a LoRA layer: {MERGE}.")
        names[tensor.removeprefix(_PREFIX).removesuffix(ending) + _PARTS[ending]] = tensor
    return names


def _means_nothing(key: str, value: Any) -> bool:
    if key == "init_lora_weights":
        return value in _INITIAL
    return not value or (key == "bias" and value == "none")
