"""Models with Metal kernels of their own: refused by name where MLX cannot run them, and paged where it can, which the
simulator stands for. On a CPU BitNet's layers are float32 instead, and must give what its kernel gives.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.kernels
import numpy as np
import pytest

from cortexmlx.errors import ModelUnsupported
from cortexmlx.metal.lab.judge.mlx_lm_kernels import simulated
from cortexmlx.metal.lab.sim.kernel import MetalKernel
from support.engine.core_driver import Driver
from support.engine.logits import answers_with_logits, mlx_lms_logits
from support.models.tiny import CONFIGS, tokens_of, write_tiny

BITNET = {"model_type": "bitnet", "num_hidden_layers": 1}
MUSE_SPARK = {
    "model_type": "muse_spark",
    "audio_config": {"out_hidden_size": 32},
    "text_config": CONFIGS["llama"]
    | {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "layer_rope_theta": [10000.0, 0],
        "sliding_window": 9,
        "post_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0},
        "final_logit_softcapping": 9.0,
        "output_multiplier": 0.5,
        "qk_scale_factor": 2.0,
        "moe_hidden_size": 16,
        "moe_intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
    },
}


def simulate_all(patch: pytest.MonkeyPatch) -> None:
    """Give mlx-lm's modules the simulator's kernels for their own."""
    kernels = [f"mlx_lm.kernels.{found.name}" for found in pkgutil.iter_modules(mlx_lm.kernels.__path__)]
    for name in ("mlx_lm.models.bitlinear_layers", *kernels):
        for attribute, value in vars(simulated(name)).items():
            if isinstance(value, MetalKernel):
                patch.setattr(importlib.import_module(name), attribute, value)


both = pytest.mark.parametrize("config", [BITNET, MUSE_SPARK], ids=lambda config: config["model_type"])


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU runs them")
def test_without_a_gpu_they_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"^muse_spark: it has Metal kernels .* needs an Apple GPU$"):
        Driver(write_tiny(tmp_path / "model", "llama", **MUSE_SPARK))


@both
@pytest.mark.slow
def test_where_their_kernels_run_they_are_paged(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx_lm.utils

    folder = write_tiny(tmp_path / "model", "llama", **config)
    if mx.default_device() == mx.cpu:
        simulate_all(monkeypatch)
    model, _ = mlx_lm.utils.load_model(folder)
    prompts = [tokens_of(n, seed=n) for n in (3, 12)]
    for prompt, (answer, mine) in zip(prompts, answers_with_logits(Driver(folder), prompts, 6), strict=True):
        assert np.abs(mine - mlx_lms_logits(model, prompt, answer)).max() < 1e-4, len(prompt)
