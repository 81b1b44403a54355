"""Engines whose quantized matmuls are our kernel's, in the simulator: the tokens of mlx-lm, and of MLX's products."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from cortexmlx.autotune.chooser import Autotuner
from cortexmlx.execution import execution_modes
from cortexmlx.execution.autotuning import TIMING_VARIABLE
from cortexmlx.matmul.autotuning import MLX, OURS, MatmulChoices
from cortexmlx.matmul.served import QuantizedMatmuls
from cortexmlx.metal.lab import sim
from cortexmlx.metal.matmul.shape import MatmulShape
from support.engine.core_driver import Driver
from support.engine.judge import assert_same, greedy
from support.models.tiny import quantize_in_place, tokens_of, write_tiny

PROMPTS = [tokens_of(count, seed=count) for count in (3, 7, 5)]
TOKENS = 5
FORMATS = {"4 bits": (32, 4, "affine"), "8 bits": (64, 8, "affine"), "mxfp4": (32, 4, "mxfp4")}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {}, "mixtral": {}, "gpt_oss": {}}


def quantized(folder: Path, name: str, form: str) -> Path:
    """A tiny model of quantized weights."""
    group, bits, kind = FORMATS[form]
    write_tiny(folder, name, hidden_size=64, intermediate_size=128, head_dim=16)
    return quantize_in_place(folder, group, bits, kind)


class FewRows:
    """`use`: 2 to 24 rows, or an expert's share of them. Counts what is asked and served."""

    def __init__(self) -> None:
        self.served: Counter[tuple[bool, int]] = Counter()

    def __call__(self, shape: MatmulShape, rows: int) -> bool:
        serves = 2 <= rows <= 48
        self.served[shape.experts is not None, rows] += serves
        return serves


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("llama", "4 bits"),
        ("mixtral", "mxfp4"),
        *(pytest.param(name, form, marks=pytest.mark.slow) for name in MODELS for form in FORMATS),
    ],
)
def test_the_tokens_are_those_of_mlx_lm(name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, use = quantized(tmp_path, name, form), FewRows()
    judge, tokenizer = mlx_lm.load(str(folder))[:2]
    with monkeypatch.context() as patched, sim.options(checked=False):
        served = QuantizedMatmuls(sim.metal_kernel, use)
        patched.setattr(execution_modes, "_make_matmuls", lambda backend: served)
        driver = Driver(folder, dequantize=False, attention="sim")
        mine = driver.answers(PROMPTS, TOKENS)
        assert served.notes() == ()
        driver.core.release()
    for prompt, answer in zip(PROMPTS, mine, strict=True):
        assert_same(judge, prompt, answer, greedy(judge, tokenizer, prompt, TOKENS))
    experts = name in ("mixtral", "gpt_oss")
    rows = {rows for of_experts, rows in +use.served if not of_experts}
    assert max(rows) <= 24 and 3 in rows, "decoding three rows"
    assert any(of_experts for of_experts, _ in +use.served) == experts


def test_a_failed_step_has_the_kernel_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And closing the runner leaves the model's modules as they were."""
    folder, checks = quantized(tmp_path, "llama", "4 bits"), []

    def noting(*, name: str, **options: Any) -> Any:
        kernel = sim.metal_kernel(name=name, **options)

        def call(*, init_value: float | None = None, **given: Any) -> list[mx.array]:
            checks.extend([name] if init_value is not None else [])
            return kernel(init_value=init_value, **given)

        return call

    with sim.options(checked=False):
        served = QuantizedMatmuls(noting, FewRows())
        monkeypatch.setattr(execution_modes, "_make_matmuls", lambda backend: served)
        driver = Driver(folder, dequantize=False)
        runner, model = driver.core.runner, driver.core.loaded.model
        driver.answers(PROMPTS[:2], 3)
        first = len(checks)
        runner.forget()
        driver.answers(PROMPTS[:2], 3)
        assert 0 < first < len(checks)
        linear = model.model.layers[0].mlp.gate_proj
        assert type(linear).__name__ == "_ServedLinear"
        driver.core.release()
        assert type(linear).__name__ == "QuantizedLinear"


@pytest.mark.parametrize("chosen", [OURS, MLX])
def test_what_is_fastest_multiplies(chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is scripted. Where it is never our kernel, the model's own modules are left alone."""
    folder, asked = quantized(tmp_path / "model", "llama", "4 bits"), Counter[str]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(TIMING_VARIABLE, "1")
    real = Autotuner.chosen_candidate

    def product_as_told(self: Autotuner, key: str) -> Any:
        return chosen if key.startswith("matmul") else real(self, key)

    monkeypatch.setattr(Autotuner, "chosen_candidate", product_as_told)
    monkeypatch.setattr("cortexmlx.autotune.chooser.time_candidates", lambda candidates, budget: None)

    def counting(*, name: str, **options: Any) -> Any:
        kernel = sim.metal_kernel(name=name, **options)

        def call(**given: Any) -> Any:
            asked[name] += 1
            return kernel(**given)

        return call

    judge, tokenizer = mlx_lm.load(str(folder))[:2]
    with sim.options(checked=False):
        products = QuantizedMatmuls(counting, MatmulChoices(), check=False)
        monkeypatch.setattr(execution_modes, "_make_matmuls", lambda backend: products)
        driver = Driver(folder, dequantize=False, attention="sim", max_rows=4)
        mine = driver.answers(PROMPTS, TOKENS)
        kind = type(driver.core.loaded.model.model.layers[0].self_attn.o_proj).__name__
        assert kind == ("_ServedLinear" if chosen == OURS else "QuantizedLinear")
        choices = driver.core.stats().choices
        rows = {choice.batch for choice in choices if choice.job.startswith("matmul")}
        assert choices[0].job.startswith("matmul"), "there is most to gain"
        driver.core.release()
    assert "5 to 8 rows" in rows and (asked["cortex_matmul_affine"] > 0) == (chosen == OURS)
    for prompt, answer in zip(PROMPTS, mine, strict=True):
        assert_same(judge, prompt, answer, greedy(judge, tokenizer, prompt, TOKENS))
