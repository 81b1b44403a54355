"""The options that several commands share: where they go, and what is wrong usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from cortexmlx import SamplingParams
from cortexmlx.cli import options
from cortexmlx.cli.start import run
from cortexmlx.structured.output import StructuredOutput
from support.cli.cli_fakes import Fakes


def test_options_reach_the_engine_under_their_usual_names(fakes: Fakes) -> None:
    line = (
        "generate -m fake -p hi --max-tokens 7 --temp 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 3 --stop a --stop b"
    )
    more = "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --kv-memory 1GiB --block-size 16"
    more += " --kv-bits 8 --kv-group-size 32 --keep-first 9 --keep-last 500"
    assert run([*line.split(), *more.split(), "--attention", "reference"]) == 0
    (_, params), options = fakes.engine.seen[0], fakes.engine.options
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (7, 0.5, 0.9, 40, 0.1)
    assert (params.seed, params.stop, params.repetition_penalty) == (3, ("a", "b"), 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert (options.model, options.kv_memory, options.block_size, options.attention) == ("fake", 2**30, 16, "reference")
    assert (options.kv_bits, options.kv_group_size) == (8, 32)
    assert (options.keep_first, options.keep_last) == (9, 500)


CAT = {"type": "object", "properties": {"name": {"type": "string"}, "toys": {"items": {"properties": {"a": {}}}}}}


@pytest.mark.parametrize(
    ("options", "form"),
    [
        (["--schema", '{"type": "array"}'], StructuredOutput.json({"type": "array"}, compact=True)),
        (["--schema", "json"], StructuredOutput.json(compact=True)),
        (["--schema", json.dumps(CAT)], StructuredOutput.json(CAT, closed=True, compact=True)),
        (["--schema", json.dumps(CAT), "--open-schema"], StructuredOutput.json(CAT)),
        (["--regex", "a{3}"], StructuredOutput.regex("a{3}")),
        (["--choice", "yes, no"], StructuredOutput.choice(["yes", "no"])),
        (["--choice", "a, b", "--choice", "c"], StructuredOutput.choice(["a, b", "c"])),
        ([], None),
    ],
)
def test_the_form_of_answers(options: list[str], form: StructuredOutput | None, fakes: Fakes) -> None:
    """The rest of the sampling stays as it is without one."""
    assert run(["generate", "fake", "-p", "hi", *options]) == 0
    assert fakes.engine.seen[0][1] == SamplingParams(structured=form)


def test_a_schema_in_a_file(fakes: Fakes, tmp_path: Path) -> None:
    """With the byte order mark that some editors write."""
    (tmp_path / "s.json").write_bytes(b'\xef\xbb\xbf{"type": "array"}')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    assert run(["generate", "fake", "-p", "hi", "--schema", str(tmp_path / "s.json")]) == 0
    assert fakes.engine.seen[0][1].form == StructuredOutput.json({"type": "array"}, compact=True)
    assert run(["generate", "fake", "-p", "hi", "--schema", str(tmp_path / "bytes.json")]) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("generate fake", "no prompt"),
        ("generate fake -m other -p hi", "two models: 'fake' and --model 'other'"),
        ("generate fake -p hi --temp -1", "temperature is -1.0, but must be a number in [0, 100]"),
        ("generate fake -p hi --temp nan", "temperature is nan"),
        ("generate fake -p hi --top-p 0", "top_p is 0.0, but must be a number in (0, 1]"),
        ("generate fake -p hi --max-tokens 0", "max_tokens is 0"),
        ("generate fake -p hi --max-tokens many", "Invalid value for '--max-tokens'"),
        ("generate fake -p hi --kv-memory lots", "'lots' is not a size: write 4GB"),
        ("generate fake -p hi --raw --system x", "--system needs the chat template"),
        ("generate fake -p hi --no-such-option", "--no-such-option"),
        ("chat fake --adapter-memory lots", "'lots' is not a size: write 4GB"),
        ("generate fake -p hi --schema nowhere.json", "--schema: nowhere.json cannot be read: No such file"),
        ("generate fake -p hi --schema {", "--schema: the schema '{' is no JSON"),
        ("generate fake -p hi --schema .", "--schema: . cannot be read: Is a directory"),
        ("generate fake -p hi --schema=", "--schema: the schema '' is no JSON"),
        ("generate fake -p hi --regex=", "--regex: the pattern is '', but must be a text that is not empty"),
        ("generate fake -p hi --schema json --regex a", "--schema and --regex: an answer has one form"),
        ("generate fake -p hi --open-schema", "--open-schema: it says how --schema is read, and there is none"),
        ("generate fake -p hi --choice a,,b", "--choice: each choice is '', but must be a text that is not empty"),
        ("generat", "No such command 'generat'"),
    ],
)
def test_wrong_usage_exits_2_and_names_the_option(
    line: str, says: str, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in " ".join(err.split()) and "Traceback" not in err


def test_each_adapter_has_a_name_and_a_folder() -> None:
    assert options.parse_adapters(None) is None and options.parse_adapters([]) is None
    given = ["sql=a", "poems=b=c", "base:sql=a", "sql=a"]
    assert options.parse_adapters(given) == {"sql": "a", "poems": "b=c", "base:sql": "a"}


@pytest.mark.parametrize(
    ("given", "says"),
    [(["sql"], "'sql' is no NAME=FOLDER"), (["=a"], "no NAME"), (["sql="], "no NAME"), (["a=x", "a=y"], "is x and y")],
)
def test_wrong_use_is_told(given: list[str], says: str) -> None:
    with pytest.raises(typer.BadParameter, match=says):
        options.parse_adapters(given)


def test_there_is_room_for_all_adapters_that_are_named(fakes: Fakes) -> None:
    given = [f"--adapters=a{number}=folder" for number in range(20)]
    assert (
        run(["chat", "fake", "--once", "-p", "hi", *given, "--adapter-memory", "2GB", "--max-adapter-rank", "256"]) == 0
    )
    config = fakes.opened[0].options
    assert len(config.adapters or ()) == config.max_adapters == 20
    assert (config.adapter_memory, config.max_adapter_rank) == ("2GB", 256)


def test_an_adapter_with_a_name_is_told_its_option(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "fake", "--adapter", "sql=folder", "-p", "hi"]) == 2
    assert "--adapters takes NAME=FOLDER" in " ".join(capsys.readouterr().err.split()) and not fakes.opened
