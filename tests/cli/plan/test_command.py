"""`cortexmlx plan` against what the models' makers publish: parameters, KV bytes per token, what a window saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.cli.plan.command import plan_text
from cortexmlx.cli.planning.figures import make_plan
from cortexmlx.cli.planning.machine import TargetMachine, this_machine
from cortexmlx.cli.planning.skeleton import build_skeleton
from cortexmlx.cli.planning.source import PlanSource, find_source
from cortexmlx.cli.start import run
from cortexmlx.engine import Engine
from cortexmlx.kv.sizing import ArenaDemand, format_bytes
from cortexmlx.system.machine import memory_bytes
from support.folders import CONFIG, write_zeros
from support.models.adapters import write_adapter
from support.models.published import DEEPSEEK_V3, GEMMA3_1B, LLAMA4_SCOUT, MAMBA, QWEN3_8B
from support.models.tiny import CONFIGS, write_tiny


def test_the_page_and_the_json_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    write_zeros(folder / "model.safetensors", 3 * 2**20)
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
    shape = {"layers": 36, "kv_heads": 8, "k_dim": 128, "v_dim": 128, "window": None, "chunked": False, "row_bytes": 0}
    assert figures["model"]["shapes"] == [shape]
    assert run(["plan", str(folder), "--kv-bits", "4"]) == 0
    quantized = "36 layers x 8 heads x (128 + 128) x (4 bits + 4 bytes for 64)"
    assert f"  KV per token    40.5 KiB    {quantized}\n" in capsys.readouterr().out


def test_the_page_says_what_a_row_has_that_keeps_a_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = str(write_tiny(tmp_path / "m"))
    assert run(["plan", model, "--keep-last", "200", "--keep-first", "96"]) == 0
    shown = capsys.readouterr().out
    assert "  of a row        496         tokens at most, whatever the length of its text\n" in shown
    assert "any length: what is kept does not grow with it\n" in shown
    assert run(["plan", model, "--keep-last", "300"]) == 1
    assert "the model's context has 512: make keep_last at most 254" in capsys.readouterr().err
    assert run(["plan", model, "--keep-first", "96"]) == 1
    assert "keep_first is 96, but must be None without keep_last (--keep-last)" in capsys.readouterr().err


def test_an_adapter_is_counted_with_the_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    adapter = write_adapter(tmp_path / "a", folder, num_layers=-1, keys=None)
    size = (adapter / "adapters.safetensors").stat().st_size
    figures = []
    for options in ([], ["--adapter", str(adapter)]):
        assert run(["plan", str(folder), "--json", *options]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert [plan["model"]["adapter_bytes"] for plan in figures] == [0, size]
    assert figures[1]["here"]["weight_bytes"] - figures[0]["here"]["weight_bytes"] == size
    assert run(["plan", str(folder), "--adapter", str(adapter)]) == 0
    assert f"\n  adapter         {format_bytes(size)}" in capsys.readouterr().out
    assert run(["plan", str(folder), "--adapter", str(folder)]) == 1
    assert "no adapter_config.json" in capsys.readouterr().err


def test_a_draft_model_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, states = write_tiny(tmp_path / "m"), write_tiny(tmp_path / "states", "qwen3_5")
    figures = []
    for line in ([folder], [folder, "--draft", folder], [states, "--draft", folder]):
        assert run(["plan", *map(str, line), "--kv-memory", "1MB", "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out)["here"])
    alone, drafted, of_states = figures
    assert (alone["draft_bytes"], alone["draft_kv_bytes"]) == (0, 0)
    assert of_states["draft_bytes"] == drafted["draft_bytes"] and of_states["draft_kv_bytes"] > 0
    assert drafted["draft_bytes"] >= alone["weight_bytes"] and drafted["draft_kv_bytes"] == 500_000
    assert drafted["free_bytes"] == alone["free_bytes"] - drafted["draft_bytes"]
    with Engine(folder, draft=folder, kv_memory="1MB") as engine:
        assert drafted["arena_tokens"] == engine.inspect(lambda core: core.cache.tables.capacity_tokens)
    assert run(["plan", str(folder), "--draft", str(folder), "--kv-memory", "1MB"]) == 0
    shown = capsys.readouterr().out
    assert f"\n  draft model     {format_bytes(drafted['draft_bytes'])} " in shown
    assert f"\n  draft's arena   {format_bytes(500_000)} " in shown
    assert run(["plan", str(folder), "--draft", str(states)]) == 1
    assert f"{states} cannot draft (--draft): its layers do not all keep keys and values" in capsys.readouterr().err


def test_a_small_kv_memory_says_what_it_holds_and_one_too_large_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = str(write_tiny(tmp_path / "m"))
    assert run(["plan", model, "--kv-memory", "100KB", "--json"]) == 0
    here = json.loads(capsys.readouterr().out)["here"]
    with Engine(model, kv_memory="100KB") as engine:
        assert here["arena_tokens"] == engine.stats().total_blocks * 32 < 512
        assert here["longest_text"] == engine.longest_request - 1, "the last token needs no room"
    assert here["total_bytes"] == sum(here[f"{part}_bytes"] for part in ("weight", "tail", "logits", "arena"))
    for options, text in (
        ("", "(--context 512 adds it: the model's context)"),
        ("--kv-memory 100KB", f"(--context {here['arena_tokens']} adds it: all that the arena holds)"),
        ("--keep-last 100", "(--context 204 adds it: all that a row keeps)"),
    ):
        assert run(["plan", model, *options.split()]) == 0
        page = capsys.readouterr().out
        assert "\n  total " in page and f"without what steps take\n{'':30}{text}\n" in page
    assert run(["plan", model, "--kv-memory", "100KB", "--context", "32", "--context", "512"]) == 0
    page = capsys.readouterr().out
    assert f"  {here['arena_tokens']:,} tokens\n" in page and "sequences that fit into the arena\n" in page
    assert f"  {here['arena_tokens'] // 32}\n" in page and "  0  needs a larger --kv-memory\n" in page
    assert "in one sequence" not in page
    refused = f"a KV memory of 838 GiB is more than this machine has: {format_bytes(memory_bytes())}, "
    for line in (["plan", model], ["generate", model, "-p", "hi"]):
        assert run([*line, "--kv-memory", "900GB"]) == 1
        assert capsys.readouterr().err.startswith(f"error: {refused}")


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("plan {tmp}/none.json", 1, "there is no {tmp}/none.json"),
        ("plan {tmp}", 1, "{tmp} holds no model: there is no config.json in it"),
        ("plan {tmp}/broken.json", 1, "{tmp}/broken.json cannot be read"),
        ("plan {tmp}/list.json", 1, "{tmp}/list.json is not a JSON object"),
        ("plan {tmp}/strange.json", 1, "mlx-lm has no architecture 'strange'"),
        ("plan {tmp}/short.json", 1, "the configuration does not say hidden_size, num_hidden_layers,"),
        ("plan {tmp}/odd.json", 1, "the configuration does not fit 'llama'"),
        ("plan {tmp}/llava.json", 1, "does not say hidden_size, num_hidden_layers, intermediate_size,"),
        ("plan {tmp}/empty.json", 1, "names no model_type"),
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
        "odd": json.dumps(CONFIG | {"num_hidden_layers": "two"}),
        "llava": '{"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}',
    }
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    assert run(line.format(tmp=tmp_path).split()) == code
    err = capsys.readouterr().err
    assert says.format(tmp=tmp_path) in " ".join(err.split()) and "Traceback" not in err
    assert code == 2 or err.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "mode", "group"),
    [
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.down"]}, "mxfp4", 32),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.down_proj"]}, "nvfp4", 16),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*down_proj$"]},
            "affine",
            32,
        ),
    ],
)
def test_what_others_packed_takes_what_mlx_lm_makes_of_it(settings: dict[str, Any], mode: str, group: int) -> None:
    import mlx.nn as nn
    from mlx_lm.models.llama import Model, ModelArgs

    from cortexmlx.models.weights import weight_bytes

    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "tie_word_embeddings": False}
    config = CONFIGS["llama"] | sizes | {"dtype": "float32"}
    model = Model(ModelArgs.from_dict(config))
    nn.quantize(model, group, 4, mode=mode, class_predicate=lambda path, _: "_proj" in path and "down" not in path)
    assert build_skeleton(config | {"quantization_config": settings}).weight_bytes == weight_bytes(model)


def test_floats_of_8_bits_are_bfloat16_in_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8"}}))
    write_zeros(tmp_path / "model.safetensors", 1108)
    data = (tmp_path / "model.safetensors").read_bytes()
    data = data.replace(b'"U8"', b'"F8_E4M3"').replace(b" " * 5, b"", 1)
    (tmp_path / "model.safetensors").write_bytes(data)
    source = find_source(str(tmp_path))
    assert (source.file_bytes, source.weight_bytes) == (1108, 2108)


@pytest.mark.parametrize(
    ("name", "without", "stated", "context"),
    [
        ("llama", (), {}, 512),
        ("gpt2", (), {}, 512),
        ("llama", ("max_position_embeddings",), {}, 2048),
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
    planned = build_skeleton(find_source(str(folder)).config).context_length
    with Engine(folder, kv_memory="1MB", max_rows=1) as engine:
        assert (planned, engine.info.context_length) == (context, context)


on_a_cpu = pytest.mark.skipif(not this_machine().on_cpu, reason="only a CPU wants all in float32")


@pytest.mark.model
def test_the_starter_model_takes_what_the_engine_says_it_takes() -> None:
    from cortexmlx import Engine

    source = find_source("smollm2")
    plan = make_plan(source, build_skeleton(source.config), this_machine(), load=ArenaDemand(4, 512))
    with Engine("smollm2", max_rows=4) as engine:
        info, stats = engine.info, engine.stats()
    assert plan.model.parameters == info.parameters
    assert plan.here.kv_bytes_per_token == info.kv_bytes_per_token
    assert plan.here.weight_bytes == info.weight_bytes
    assert plan.here.arena_bytes == pytest.approx(stats.kv_bytes_limit, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=on_a_cpu)])
@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_states_and_their_snapshots_take_what_the_engine_gives_them(name: str, dtype: str, tmp_path: Path) -> None:
    """With keys and values beside them, and without; also where all is widened on a CPU."""
    from cortexmlx import Engine, SamplingParams

    folder = write_tiny(tmp_path / "model", name, torch_dtype=dtype)
    source = find_source(str(folder))
    plan = make_plan(source, build_skeleton(source.config), this_machine(), load=ArenaDemand(3, 512), kv_memory=10**6)
    with Engine(folder, kv_memory="1MB", max_rows=3) as engine:
        engine.generate("the state", SamplingParams(max_tokens=3))
        stats, snapshots = engine.stats(), engine._worker.core.cache.states.snapshots
    assert plan.model.refusal is None and snapshots is not None
    assert plan.here.snapshots == snapshots.max_snapshots
    each = plan.here.snapshot_bytes // snapshots.max_snapshots
    assert plan.here.states_bytes == 2 * 3 * each
    assert stats.state_bytes == stats.state_snapshots * each > 0
    assert (each == plan.model.state_bytes_per_sequence) == (dtype == "float32")
    assert plan.here.arena_bytes == (10**6 - plan.here.snapshot_bytes if plan.here.kv_bytes_per_token else 0)
    text = plan_text(plan)
    assert f"{snapshots.max_snapshots} states of beginnings" in text and "of the rows, in recurrent layers" in text


def test_several_machines_are_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text(json.dumps(QWEN3_8B))
    assert run(["plan", str(tmp_path / "q.json"), "--hosts", "2", "--memory", "64GB"]) == 0
    told = capsys.readouterr().out.split("\n\n")[-1]
    assert told == (
        "On 2 machines of that size: each has a part of every layer (tensor parallel)\n"
        "  rank  layers     weights  KV per token  left for KV  one sequence\n"
        "     0      36    8.79 GiB        72 KiB     39.2 GiB  the whole context\n"
        "     1      36    8.79 GiB        72 KiB     39.2 GiB  the whole context\n"
        "  It can be cut for 2, 4 or 8 machines. Several processes on one machine share\n"
        "  its memory.\n"
    )
    (tmp_path / "short.json").write_text(json.dumps({**QWEN3_8B, "num_hidden_layers": 2}))
    assert run(["plan", str(tmp_path / "short.json"), "--hosts", "2", "--memory", "64GB", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["hosts"]["ranks"]
    assert [(part["layers"], part["kv_bytes_per_token"]) for part in ranks] == [(2, 2 * 4 * 128 * 2 * 2)] * 2
    assert run(["plan", str(tmp_path / "short.json"), "--hosts", "3"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "short cannot be cut for 3 hosts" in told and told.endswith("2, 4 or 8 hosts would do.")
    assert run(["plan", str(tmp_path / "q.json"), "--hosts", "nowhere.json"]) == 1
    assert "no such file. Give a number of processes" in capsys.readouterr().err
    assert run(["plan", str(tmp_path / "q.json"), "--hosts", "2", "--draft", "smollm2"]) == 2


# -- A plan as a page: every figure with where it comes from, on eighty columns ---------------------------------------


PLAMO3 = CONFIGS["llama"] | {"model_type": "plamo3", "sliding_window": 8, "sliding_window_pattern": 2}
MAC = TargetMachine(memory=48 * 2**30, working_set=36 * 2**30)


def page_of(config: dict[str, Any], machine: TargetMachine = MAC) -> list[str]:
    return plan_text(
        make_plan(PlanSource("it", config, None), build_skeleton(config), machine, load=ArenaDemand(16, 512))
    ).splitlines()


def test_the_page_of_a_model_whose_figures_are_known() -> None:
    lines = page_of(QWEN3_8B)
    assert lines[:4] == [
        "it: qwen3, 8.19 B parameters, context 40,960 tokens",
        "  weights         15.3 GiB    as stored",
        "  KV per token    144 KiB     36 layers x 8 heads x (128 + 128) x 2 bytes",
        "",
    ]
    assert lines[4] == "On this machine: 48 GiB, 36 GiB of it for models"
    table = lines[lines.index("     tokens   KV memory  sequences that fit into what is left for KV") + 1 :]
    assert [line.split()[0] for line in table] == ["4,096", "16,384", "40,960"]
    assert table[0].split()[1:3] == ["576", "MiB"]
    assert "  left for KV     20.7 GiB    40,960 tokens in one sequence, the model's context" in lines
    small = page_of(QWEN3_8B, TargetMachine(memory=20 * 2**30, working_set=20 * 2**30))
    assert "  left for KV     4.66 GiB    33,963 tokens in one sequence, of a context of 40,960" in small
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            GEMMA3_1B,
            (
                "  KV per token    26 KiB      22 layers x 1 head x (256 + 256) x 2 bytes, window 512",
                "                              4 layers x 1 head x (256 + 256) x 2 bytes",
            ),
        ),
        (
            LLAMA4_SCOUT,
            (
                "36 layers x 8 heads x (128 + 128) x 2 bytes, chunks of 8,192",
                "                              12 layers x 8 heads x (128 + 128) x 2 bytes",
            ),
        ),
        (
            MAMBA,
            (
                "  KV per token    0 B         no layer keeps keys and values",
                "2,048 tokens in one sequence, the model's context",
                "  arena           0 B         tokens take none",
                "the rows, in recurrent layers",
                "states of beginnings that can be used again",
            ),
        ),
        (
            DEEPSEEK_V3,
            (
                "the weights alone are too large",
                "  arena           0 B         nothing is left for it",
                "61 layers x 1 head x (512 + 64) x 2 bytes",
            ),
        ),
        (PLAMO3, ("  cortexmlx does not run it yet: plamo3",)),
    ],
)
def test_every_kind_of_layer_and_of_shortage_has_its_words(config: dict[str, Any], says: tuple[str, ...]) -> None:
    text = "\n".join(page_of(config))
    assert [words for words in says if words not in text] == []


def test_a_model_of_one_request_at_a_time_says_so_and_has_no_tails(unpaged: None) -> None:
    lines = page_of(QWEN3_8B)
    text = " ".join(line.strip() for line in lines)
    assert "one request runs at a time, on mlx-lm's own caches. tiny: a test wants it so" in text
    assert "does not run it" not in text and any(line.startswith("  tails           0 B ") for line in lines)
    assert max(map(len, lines)) <= 80
