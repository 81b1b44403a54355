"""Pins with a name and a lifetime, and files that carry them into another engine's folder: read, not computed, with the
same tokens, and refused for another model, adapter or precision.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.cli.start import run
from cortexmlx.errors import EngineClosed, InvalidRequest, PrefixRefused
from cortexmlx.sessions import pin as carried
from support.models.adapters import write_adapter
from support.models.calling import write_calling
from support.models.quantized_models import wide
from support.models.tiny import tokens_of
from support.store.stored import reading_pays

PREFIX = tokens_of(90, seed=7)
PROMPT = [*PREFIX, *tokens_of(9, seed=8)]
ANSWER = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    reading_pays(monkeypatch)


def opened(model: Path, folder: Path, **options: Any) -> Engine:
    return Engine(model, **{"kv_memory": "1MB", "block_size": 8, "max_rows": 2, "kv_store": folder, **options})


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
def test_another_engine_reads_it_and_writes_the_same_tokens(name: str, tiny: Any, theirs: Any, tmp_path: Path) -> None:
    file = tmp_path / "rules.kv"
    with opened(tiny(name), tmp_path / "one") as engine:
        pin = engine.pin(PREFIX, name="rules")
        assert pin.export(file) == file.stat().st_size and (pin.name, pin.tokens) == ("rules", 88)
    with opened(tiny(name), tmp_path / "two") as engine:
        pin = engine.import_pin(str(file))
        assert (pin.name, pin.tokens, engine.stats().pins) == ("rules", 88, 1)
        assert engine.stats().prefilled_tokens == 1  # all others were read
        answer = engine.generate(PROMPT, ANSWER)
        assert answer.usage.cached_tokens == 88 and list(answer.token_ids) == theirs(name, tuple(PROMPT), 10)
        assert engine.submit(PROMPT, ANSWER, client="else").result().usage.cached_tokens == 0
        engine.check_invariants()
    with opened(tiny(name), tmp_path / "two") as engine:  # without another import
        assert engine.generate(PROMPT, ANSWER).usage.cached_tokens >= 88


def test_a_file_of_another_model_adapter_or_precision_is_refused_in_words(tiny: Any, tmp_path: Path) -> None:
    model, file, plain = tiny("llama"), tmp_path / "file", tmp_path / "plain"
    style = write_adapter(tmp_path / "style", model, keys=("self_attn.q_proj",), num_layers=2, seed=1)
    with opened(model, tmp_path / "one", adapters={"style": style}) as engine:
        engine.pin(PREFIX, name="styled", adapter="style").export(file)
        engine.pin(PREFIX, name="plain").export(plain)
        assert engine.stats().pins == 2
    for what, options, words in (
        (tiny("qwen3"), {}, "weights or configuration"),
        (model, {"adapter": style}, "weights or configuration"),
        (model, {"block_size": 16}, r"engine: other block size \(8, here 16\)\. Its .*: use block_size 8 \(--block"),
        (model, {"reproducible": True}, r"engine: other attention \(\w+, here \w+, reproducible\)\. Its keys"),
    ):
        with opened(what, tmp_path / "two", **options) as engine, pytest.raises(PrefixRefused, match=words):
            engine.import_pin(plain)
        assert not list((tmp_path / "two").glob("*.prefix"))
    with opened(model, tmp_path / "two") as engine:
        with pytest.raises(PrefixRefused, match="an adapter that is not loaded"):
            engine.import_pin(file)
        engine.load_adapter("mine", style)
        assert engine.import_pin(file, name="renamed", client="you").name == "renamed"
        told = {
            (client, adapter): engine.submit(PROMPT, ANSWER, client=client, adapter=adapter).result()
            for client in (None, "you")
            for adapter in (None, "mine")
        }
        assert [asked for asked, answer in told.items() if answer.usage.cached_tokens == 88] == [("you", "mine")]
    with opened(model, tmp_path / "one", adapters={"style": style}) as engine:
        right = engine.generate(PROMPT, ANSWER, cache=False, adapter="style").token_ids
    assert told["you", "mine"].token_ids == right


def test_a_file_of_another_precision_is_refused_in_words(tmp_path: Path) -> None:
    model, files = wide(tmp_path / "models", "llama"), {bits: tmp_path / str(bits) for bits in (None, 8)}
    for bits, file in files.items():
        with opened(model, tmp_path / "one", kv_bits=bits) as engine:
            engine.pin(PREFIX, name="rules").export(file)
    for bits, other, words, advice in (
        (None, 8, "8 bits, here float", "kv_bits 8 "),
        (8, None, ", here 8 bits", "no kv_bits "),
    ):
        with opened(model, tmp_path / "two", kv_bits=bits) as engine:
            with pytest.raises(PrefixRefused, match=rf"other keys and values \(.*{words}.*\)\. Its .*: use {advice}"):
                engine.import_pin(files[other])
            assert engine.import_pin(files[bits]).tokens == 88


def test_what_cannot_be_exported_says_why(tiny: Any, tmp_path: Path) -> None:
    with Engine(tiny("llama"), kv_memory="256KB", block_size=8) as engine:
        for name in (None, "rules"):
            with engine.pin(PREFIX, name=name) as pin, pytest.raises(PrefixRefused, match="a name in an engine with"):
                pin.export(tmp_path / "file")
    with opened(tiny("llama"), tmp_path / "kv") as engine:
        pin = engine.pin(PREFIX, name="rules")
        pin.export(tmp_path / "file")
        removed = engine.inspect(lambda core: core.disk.store.segments.clear())  # type: ignore[union-attr]
        assert removed > 0
        pin.export(tmp_path / "again")  # written once more
        assert (tmp_path / "again").stat().st_size == (tmp_path / "file").stat().st_size
    with Engine(tiny("llama"), kv_memory="256KB") as engine, pytest.raises(PrefixRefused, match="kv_store"):
        engine.import_pin(tmp_path / "file")


def test_a_folder_that_is_gone_keeps_no_name_and_the_pin_stays(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tiny("llama"), tmp_path / "one") as engine:
        engine.pin(PREFIX, name="first")
        shutil.rmtree(tmp_path / "one")
        pin = engine.pin(PREFIX, name="second")
        assert (pin.name, pin.tokens, engine.stats().pins) == ("second", 88, 2) and "cannot be written" in caplog.text
        with pytest.raises(PrefixRefused, match="pieces of 'second' are not on disk"):
            pin.export(tmp_path / "file")


def test_an_engine_that_closes_meanwhile_says_so(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closes_first(function: Any) -> Any:
        def call(*values: Any) -> Any:
            engine.close()
            return function(*values)

        return call

    with opened(tiny("llama"), tmp_path / "one") as engine:
        engine.pin(PREFIX, name="rules").export(tmp_path / "file")
    for name in ("export_prefix", "import_prefix"):
        monkeypatch.setattr(carried, name, closes_first(getattr(carried, name)))
    with opened(tiny("llama"), tmp_path / "one") as engine, pytest.raises(EngineClosed):
        engine.pin(PREFIX, name="rules").export(tmp_path / "other")
    with opened(tiny("llama"), tmp_path / "two") as engine, pytest.raises(EngineClosed):
        engine.import_pin(tmp_path / "file")


def test_a_name_has_one_pin_and_a_lifetime_ends_it(engine: Engine) -> None:
    first, second = engine.pin(tokens_of(20), name="rules"), engine.pin(tokens_of(30, seed=2), name="rules")
    assert engine.stats().pins == 1 and repr(second) == "<Pin 'rules': 24 tokens>"
    first.unpin()
    assert engine.stats().pins == 1
    short = engine.pin(tokens_of(20), lifetime=0.2)
    assert engine.stats().pins == 2
    time.sleep(0.25)
    assert (engine.stats().pins, engine.stats().pinned_blocks) == (1, 3)
    short.unpin()
    for lifetime in (0, -1, float("nan"), True):
        with pytest.raises(InvalidRequest, match="lifetime is"):
            engine.pin(tokens_of(20), lifetime=lifetime)
    with pytest.raises(InvalidRequest, match="is ''"):
        engine.pin(tokens_of(20), name="")


def test_the_commands_carry_messages_and_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file, body = write_calling(tmp_path / "tiny", "hermes"), tmp_path / "file", tmp_path / "body.json"
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
    messages = [{"role": "system", "content": "You look before you answer. " * 3}]
    body.write_text(json.dumps({"messages": messages, "tools": [tool]}))
    small = ["--kv-memory", "4MB"]
    one, two = (["--kv-store", str(tmp_path / folder)] for folder in ("one", "two"))
    assert run(["cache", "export", "look", str(file), *one]) == 1
    assert "has no prefix 'look': it has none" in capsys.readouterr().err
    export = ["cache", "export", "look", str(file), "-m", str(model), "--messages", str(body), *one, *small]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "pin", lambda *prompt, **options: signal.raise_signal(signal.SIGINT))
        assert run(export) == 130
    assert f"stopped: {file} was not written. The same command begins again" in capsys.readouterr().err
    assert run(export) == 0
    assert capsys.readouterr().out.startswith("look: 2")
    assert run(["cache", "import", str(file), *two]) == 0
    assert "tokens of " in capsys.readouterr().out
    assert run(["cache", *two]) == 0
    assert "  prefix look: " in capsys.readouterr().out
    assert run(["cache", "export", "look", str(tmp_path / "again"), *two]) == 0  # it can go on from there
    missing = tmp_path / "missing" / "file"
    for other, reason in ((body, f"{body} cannot be written: it is another"), (missing, f"no folder {missing.parent}")):
        assert run(["cache", "export", "look", str(other), *two]) == 1
        assert reason in capsys.readouterr().err
    assert run(["cache", "import", str(tmp_path / "again"), "--name", "b", "-m", str(model), *one, *small]) == 0
    assert run(["cache", "import", str(file), "-m", str(model), *one, *small, "--block-size", "16"]) == 1
    assert "other block size (32, here 16)" in capsys.readouterr().err
    for rest in (["export", "look", str(file), "--messages", str(body)], ["import", str(file)]):
        assert (
            run(["cache", *rest, "-m", "no/model", "--no-kv-store"]) == 2
        )  # before it is loaded and computes anything
        assert "--no-kv-store" in capsys.readouterr().err
    with Engine(str(model), kv_memory="4MB", kv_store=tmp_path / "two") as engine:
        params = SamplingParams(max_tokens=2, tools=(tool,))
        answer = engine.generate([*messages, {"role": "user", "content": "What is there?"}], params)
        assert answer.usage.cached_tokens > 200
    assert run(["cache", "--remove", "look", *two]) == 0
    assert capsys.readouterr().out == "prefix look: removed. Its keys and values go as the folder fills\n"
    assert run(["cache", "--remove", "look", *two]) == 1
    assert "has no prefix 'look': it has none" in capsys.readouterr().err
    assert run(["cache", "--remove", "look", "--clear", *two]) == 2
    assert run(["cache", "import", str(file), *two]) == run(["cache", "--clear", *two]) == 0
    assert not list((tmp_path / "two").glob("*.prefix"))
