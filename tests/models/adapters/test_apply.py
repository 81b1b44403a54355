"""Adapters in a model: the tokens are those of mlx-lm with the same adapter, and one that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.adapters.apply import apply_adapter
from cortexmlx.models.adapters.files import read_adapter
from support.engine.core_driver import Driver
from support.engine.judge import disagreement, greedy
from support.folders import write_folder
from support.models.adapters import write_adapter, write_peft_adapter
from support.models.tiny import tokens_of, write_tiny
from tests.architectures.weights import write_model

pytestmark = pytest.mark.usefixtures("a_linux_cpu")

PROMPTS = [tokens_of(n, seed=n) for n in (9, 40, 3)]


def logits(model: Any) -> np.ndarray:
    import mlx.core as mx

    return np.array(model(mx.array([PROMPTS[0]])).astype(mx.float32))[0]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("llama", "lora", {"num_layers": -1}),
        ("llama", "dora", {}),
        ("llama", "full", {}),
        ("qwen3", "lora", {"keys": None}),
        ("mixtral", "lora", {"keys": ("block_sparse_moe.switch_mlp.up_proj", "self_attn.v_proj")}),
        ("gemma3_text", "lora", {"keys": ("model.embed_tokens", "self_attn.o_proj")}),
    ],
)
def test_a_batch_gets_mlx_lms_tokens_with_the_same_adapter(
    tmp_path: Path, name: str, kind: str, options: dict[str, Any]
) -> None:
    from mlx_lm import load

    folder = write_tiny(tmp_path / "m", name)
    adapter = write_adapter(tmp_path / "a", folder, kind, **options)
    judge, tokenizer = load(str(folder), adapter_path=str(adapter))
    plain, _ = load(str(folder))
    driver = Driver(folder, adapter=adapter)
    for prompt, mine in zip(PROMPTS, driver.answers(PROMPTS, 12, ignore_eos=False), strict=True):
        assert disagreement(judge, prompt, mine, greedy(judge, tokenizer, prompt, 12)) is None
    assert np.abs(logits(plain) - logits(judge)).max() > 0.1, "or the adapter does nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "deepseek_v3", "llama4", "gemma4_text", "falcon_h1"])
def test_states_latents_and_chunks_go_with_an_adapter(tmp_path: Path, name: str) -> None:
    """On every layer that mlx-lm would train."""
    from mlx_lm import load

    folder = write_model(tmp_path / "m", name)
    adapter = write_adapter(tmp_path / "a", folder, num_layers=-1, keys=None)
    judge, tokenizer = load(str(folder), adapter_path=str(adapter))
    driver = Driver(folder, adapter=adapter)
    for prompt, mine in zip(PROMPTS, driver.answers(PROMPTS, 12, ignore_eos=False), strict=True):
        assert disagreement(judge, prompt, mine, greedy(judge, tokenizer, prompt, 12)) is None


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_packed_weights_stay_packed_below_an_adapter_or_become_float32(tmp_path: Path, kind: str) -> None:
    from mlx_lm import load

    folder = write_folder(tmp_path / "m", quantize=True)
    adapter = write_adapter(tmp_path / "a", folder, kind)
    wanted = logits(load(str(folder), adapter_path=str(adapter))[0])
    packed = load_model(folder, adapter=adapter, dequantize=False)
    assert np.array_equal(logits(packed.model), wanted)
    widened = load_model(folder, adapter=adapter).model
    assert not hasattr(widened.layers[-1].mlp.down_proj.linear, "scales")
    assert np.abs(logits(widened) - wanted).max() < 1e-4


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_an_adapter_of_peft_computes_what_its_formula_says(tmp_path: Path, settings: dict[str, Any]) -> None:
    from mlx_lm import load

    folder = write_tiny(tmp_path / "m")
    wanted, _ = load(str(folder))
    shapes = {"model.layers.0.self_attn.q_proj": (32, 32), "model.layers.1.mlp.up_proj": (48, 32)}
    pairs = write_peft_adapter(tmp_path / "a", shapes, **settings)
    scale = 6 / 4**0.5 if settings.get("use_rslora") else 6 / 4
    for name, module in wanted.named_modules():
        if name in pairs:
            a, b = (part.astype(np.float64) for part in pairs[name])
            weight = np.array(module.weight, np.float64) + scale * b @ a
            if settings.get("use_dora"):
                weight /= np.linalg.norm(weight, axis=1, keepdims=True)
            import mlx.core as mx

            module.weight = mx.array(weight.astype(np.float32))
    assert np.abs(logits(load_model(folder, adapter=tmp_path / "a").model) - logits(wanted)).max() < 1e-4


def change(adapter: Path, **changes: Any) -> None:
    """Tensors of an adapter renamed, dropped (None) or added."""
    import mlx.core as mx

    file = str(adapter / "adapters.safetensors")
    tensors: Any = dict(mx.load(file))
    for name, other in changes.items():
        if isinstance(other, str):
            tensors[other] = tensors.pop(name)
        elif other is None:
            del tensors[name]
        else:
            tensors[name] = mx.array(other)
    mx.eval(tensors)
    mx.save_safetensors(file, tensors)


A, B = (f"model.layers.1.self_attn.q_proj.lora_{part}" for part in "ab")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({A: None}, ("1 places get no tensor", A)),
        ({A: A.replace("layers.1", "layers.9")}, ("1 of its 4 tensors have no place", "layers.9", "org/base")),
        ({B: np.zeros((4, 33), np.float32)}, ("1 have another shape", "(4, 33)", "(4, 32)")),
        ({"model.norm.weight": np.ones(32, np.float32)}, ("no place", "model.norm.weight")),
        ({A: np.ones((32, 4), np.int32)}, ("int32", "float32")),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_what_does_not(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    folder = write_tiny(tmp_path / "m")
    adapter = write_adapter(tmp_path / "a", folder)
    change(adapter, **changes)
    with pytest.raises(ModelUnsupported) as caught:
        load_model(folder, adapter=adapter)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_an_adapter_whose_numbers_are_none_is_damaged(tmp_path: Path, number: float) -> None:
    folder = write_tiny(tmp_path / "m")
    adapter = write_adapter(tmp_path / "a", folder)
    broken = np.zeros((4, 32), np.float32)
    broken[2, 7] = number
    change(adapter, **{B: broken})
    with pytest.raises(ModelCorrupt, match=rf"1 of its 4 tensors hold what is no number.*{B}\. Copy it again"):
        load_model(folder, adapter=adapter)


def test_files_that_change_before_they_are_applied_are_no_adapter(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    read = read_adapter(write_adapter(tmp_path / "a", folder))
    write_adapter(tmp_path / "b", folder, seed=5)
    (tmp_path / "b" / "adapters.safetensors").replace(read.weights)
    with pytest.raises(ModelCorrupt, match=r"adapters\.safetensors has changed while it was read\. Load it again"):
        apply_adapter(load_model(folder).model, read)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", write_tiny(tmp_path / "m", hidden_size=64))
    with pytest.raises(ModelUnsupported, match=r"2 have another shape.*\(4, 64\), the model's \(4, 32\)"):
        load_model(write_tiny(tmp_path / "n"), adapter=adapter)
    with pytest.raises(ModelUnsupported, match="4 of its 4 tensors have no place"):
        load_model(write_tiny(tmp_path / "o", "gpt2"), adapter=adapter)


def test_experts_take_no_dora(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "mixtral")
    adapter = write_adapter(tmp_path / "a", folder, keys=("block_sparse_moe.switch_mlp.up_proj",))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"fine_tune_type": "dora"}))
    with pytest.raises(ModelUnsupported, match="SwitchLinear doesn't support DoRA"):
        load_model(folder, adapter=adapter)


def test_the_model_says_which_adapter_it_has_and_which_it_could_have(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    assert load_model(folder).notes == ()
    write_adapter(folder, folder)
    plain, tuned = load_model(folder), load_model(folder, adapter=folder)
    assert plain.notes == (f"adapters.safetensors lies beside the model and is not used: --adapter {folder} does",)
    assert tuned.notes == (f"adapter {folder}: lora of rank 4, scale 2, on 2 layers, made for org/base",)
    assert (plain.adapter, tuned.adapter) == (None, folder)
    assert plain.identity != tuned.identity, "or cached keys of one would be taken for the other's"
