"""`cortexmlx plan` against what the models' makers publish: parameters, KV bytes per token, what a window saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.cli import plan_figures
from cortexmlx.cli.plan_figures import Machine, make_plan
from cortexmlx.cli.plan_source import PlanSource, find
from cortexmlx.cli.skeleton import build
from cortexmlx.cli.start import run
from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.spec import KVSpec, LayerGroup
from support.tiny import write_tiny

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 32768,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
}
MAMBA = {
    "model_type": "mamba2",
    "num_heads": 80,
    "head_dim": 64,
    "vocab_size": 50288,
    "hidden_size": 2560,
    "intermediate_size": 5120,
    "state_size": 128,
    "num_hidden_layers": 64,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.0, 1e9],
    "time_step_rank": 160,
    "tie_word_embeddings": True,
}
SEVEN_B = "plan --layers 32 --kv-heads 32 --head-dim 128"
QWEN3 = "plan --layers 36 --kv-heads 8 --head-dim 128"
MAC = Machine(memory=48 * 2**30, working_set=36 * 2**30)


def plan_of(config: dict[str, Any], machine: Machine = MAC, **options: Any) -> plan_figures.Plan:
    return make_plan(PlanSource("it", config, None), build(config), machine, max_rows=16, **options)


def test_a_model_of_published_size_is_counted_exactly_and_nothing_is_allocated() -> None:
    mx.reset_peak_memory()
    before = mx.get_active_memory()  # what other tests left
    skeleton = build(QWEN3_8B)
    assert (skeleton.parameters, skeleton.weight_bytes) == (8_190_735_360, 2 * 8_190_735_360)
    assert skeleton.groups == (LayerGroup(KVSpec(8, 128, 128, "bfloat16"), tuple(range(36))),)
    assert build(GEMMA3_1B).parameters == 999_885_952
    assert build(DEEPSEEK_V3).parameters == 671_026_419_200
    assert mx.get_peak_memory() - before < 2**20


def test_latent_attention_keeps_one_latent_and_one_rope_key_per_layer() -> None:
    assert build(DEEPSEEK_V3).groups == (LayerGroup(KVSpec(1, 512, 64, "bfloat16"), tuple(range(61))),)
    assert plan_of(DEEPSEEK_V3).model.kv_bytes_per_token == 61 * 576 * 2


def test_windows_and_recurrent_state_are_told_apart() -> None:
    near, far = build(GEMMA3_1B).groups
    assert (near.spec, len(near.layers)) == (KVSpec(1, 256, 256, "bfloat16", window=512), 22)
    assert (far.spec, far.layers) == (KVSpec(1, 256, 256, "bfloat16"), (5, 11, 17, 23))
    mamba = plan_of(MAMBA)
    assert mamba.model.kv_bytes_per_token == 0 and mamba.here.fits is None
    assert mamba.model.state_bytes_per_sequence > 64 * 80 * 64 * 128 * 2


def test_quantized_weights_take_their_bits_and_scales() -> None:
    quantized = build({**QWEN3_8B, "quantization": {"group_size": 64, "bits": 4}})
    assert quantized.weight_bytes == pytest.approx(8_190_735_360 * 4.5 / 8, rel=0.001)
    assert quantized.parameters == 8_190_735_360


def test_what_fits_a_mac_is_what_its_memory_leaves() -> None:
    plan = plan_of(QWEN3_8B, lengths=(8192,))
    assert plan.model.kv_bytes_per_token == plan.here.kv_bytes_per_token == 147_456
    left = 36 * 2**30 - 2 * 8_190_735_360 - 2 * 16 * 16 * 147_456 - 16 * 151_936 * 4
    assert plan.here.free_bytes == left and plan.here.fits == left // 147_456
    assert plan.here.arena_bytes == left // 2
    assert plan.here.lengths[0].sequences == left // (8192 * 147_456)
    assert plan_of(QWEN3_8B, kv_memory=2**30).here.arena_tokens == 2**30 // 147_456
    assert plan_of(QWEN3_8B, itemsize=1).model.kv_bytes_per_token == 73_728


def test_on_a_cpu_everything_is_float32_where_that_pays() -> None:
    small = plan_of(GEMMA3_1B, Machine(32 * 2**30, 24 * 2**30, on_cpu=True)).here
    assert (small.weight_bytes, small.itemsize) == (4 * 999_885_952, 4)
    quantized = {**QWEN3_8B, "quantization": {"group_size": 64, "bits": 4}}
    large = plan_of(quantized, Machine(32 * 2**30, 24 * 2**30, on_cpu=True)).here
    assert large.weight_bytes == pytest.approx(8_190_735_360 * 5 / 8, rel=0.001)
    assert large.weights_as == "quantized as stored, the rest float32"


def test_a_model_too_large_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "v3.json").write_text(json.dumps(DEEPSEEK_V3))
    assert run(["plan", str(tmp_path / "v3.json")]) == 0
    assert "the weights alone are too large" in capsys.readouterr().out


def test_the_page_and_the_json_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    for target in (folder, folder / "config.json"):
        assert run(["plan", str(target), "--context", "1024", "--context", "2048"]) == 0
        assert capsys.readouterr().out.startswith(
            "Qwen3-8B: qwen3, 8.19 B parameters, context 40,960 tokens\n"
            "  weights         3 MiB       as stored\n"
            "  KV per token    144 KiB     36 layers x 8 heads x (128 + 128) x 2 bytes\n"
        )
    assert run(["plan", str(folder), "--context", "1024", "--context", "2048", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["model"]["kv_bytes_per_token"] == 147_456
    assert [entry["tokens"] for entry in figures["here"]["lengths"]] == [1024, 2048]
    shape = {"layers": 36, "kv_heads": 8, "k_dim": 128, "v_dim": 128, "window": None, "row_bytes": 0}
    assert figures["model"]["shapes"] == [shape]


def test_a_shape_by_hand_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SEVEN_B.split(), "--tokens", "8192", "--bytes", "2"]) == 0
    assert capsys.readouterr().out == (
        "  KV per token    512 KiB     32 layers x 32 heads x (128 + 128) x 2 bytes\n"
        "  8,192 tokens    4 GiB       4,294,967,296 bytes\n"
    )
    assert run([*QWEN3.split(), "--json", "--tokens", "100"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "kv_bytes_per_token": 147_456,
        "lengths": [{"tokens": 100, "bytes": 14_745_600}],
    }


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("plan {tmp}/none.json", 1, "there is no {tmp}/none.json"),
        ("plan {tmp}", 1, "there is no {tmp}/config.json"),
        ("plan {tmp}/broken.json", 1, "{tmp}/broken.json cannot be read"),
        ("plan {tmp}/list.json", 1, "{tmp}/list.json is not a JSON object"),
        ("plan {tmp}/strange.json", 1, "mlx-lm has no architecture 'strange': give its shape with --layers"),
        ("plan {tmp}/short.json", 1, "the configuration does not fit 'qwen3'"),
        ("plan {tmp}/empty.json", 1, "names no model_type"),
        ("plan --layers 3", 2, "a shape is --layers, --kv-heads and --head-dim together"),
        ("plan x --layers 3", 2, "give a MODEL or its shape, not both"),
        ("plan --layers 0 --kv-heads 1 --head-dim 1", 2, "--layers"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(
    line: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "broken": "{",
        "list": "[]",
        "strange": '{"model_type": "strange"}',
        "short": '{"model_type": "qwen3"}',
        "empty": "{}",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    assert run(line.format(tmp=tmp_path).split()) == code
    err = capsys.readouterr().err
    assert says.format(tmp=tmp_path) in " ".join(err.split()) and "Traceback" not in err
    assert code == 2 or err.count("\n") == 1


def test_of_a_hub_id_only_the_configuration_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from cortexmlx.models import hub

    def download(repo: str, files: list[str]) -> Path:
        assert (repo, files) == ("org/Qwen3-8B", ["config.json"])
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
        return tmp_path

    monkeypatch.setattr(hub, "cached_folder", lambda repo: None)
    monkeypatch.setattr(hub, "_download", download)
    assert run(["plan", "org/Qwen3-8B"]) == 0
    assert "  weights         15.3 GiB    as stored\n  KV per token    144 KiB " in capsys.readouterr().out


def test_an_unknown_architecture_is_not_guessed() -> None:
    with pytest.raises(ModelUnsupported, match="mlx-lm has no architecture"):
        build({"model_type": "no_such_thing"})


@pytest.mark.parametrize(
    ("name", "without", "stated", "context"),
    [
        ("llama", (), {}, 512),
        ("gpt2", (), {}, 512),
        ("llama", ("max_position_embeddings",), {}, 2048),
        ("llama", ("max_position_embeddings",), {"model_max_length": 700}, 700),
        ("llama", ("max_position_embeddings",), {"max_sequence_length": 800}, 800),
        ("llama", ("max_position_embeddings",), {"model_max_length": 0, "seq_length": 900}, 900),
        ("llama", ("max_position_embeddings",), {"model_max_length": True, "text_config": {"n_ctx": 300}}, 300),
        ("llama", ("max_position_embeddings",), {"text_config": {}, "max_seq_len": 400}, 400),
    ],
)
def test_the_plan_and_the_engine_know_one_context(
    name: str, without: tuple[str, ...], stated: dict[str, Any], context: int, tmp_path: Path
) -> None:
    from cortexmlx import Engine

    folder = write_tiny(tmp_path / "model", name)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in without} | stated
    (folder / "config.json").write_text(json.dumps(config))
    planned = build(find(str(folder)).config).context_length
    with Engine(folder, kv_memory="1MB", max_rows=1) as engine:
        assert (planned, engine.info.context_length) == (context, context)


@pytest.mark.model
def test_the_starter_model_takes_what_the_engine_says_it_takes() -> None:
    from cortexmlx import Engine

    source = find("smollm2")
    plan = make_plan(source, build(source.config), plan_figures.this_machine(), max_rows=4)
    with Engine("smollm2", max_rows=4) as engine:
        info, stats = engine.info, engine.stats()
    assert plan.model.parameters == info.parameters
    assert plan.here.kv_bytes_per_token == info.kv_bytes_per_token
    assert plan.here.weight_bytes == info.weight_bytes
    assert plan.here.arena_bytes == pytest.approx(stats.kv_bytes_limit, rel=0.01)
