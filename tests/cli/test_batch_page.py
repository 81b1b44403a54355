"""docs/batch.md: what it shows is what the reader accepts and what the writer writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.cli.batch.input import BatchReader
from cortexmlx.cli.start import run
from cortexmlx.protocols import batch, responses, simple
from cortexmlx.protocols.batch import ENDPOINTS, ENVELOPE, BatchRequest, LineStyle
from cortexmlx.protocols.openai import chat_completions, completions
from cortexmlx.protocols.openai.parameters import ALIASES, SAMPLING_FIELDS
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import Fakes

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "batch.md").read_text(encoding="utf-8")
INPUT, OUTPUT = PAGE.partition("\n## Output\n")[::2]


def examples(text: str, kind: str) -> list[str]:
    blocks = re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def shape(value: Any) -> Any:
    """The names of a JSON value and the kinds of what they hold."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


def test_every_example_of_a_request_is_accepted_whole() -> None:
    lines = examples(INPUT, "jsonl")
    reader = BatchReader([line.encode() for line in lines], SamplingParams(), jsonl=None, raw=False)
    read = list(reader)
    assert len(read) == len(lines) == 8 and all(isinstance(item, BatchRequest) for item in read)
    assert {item.style for item in read} == set(LineStyle)
    plain = [line.encode() for line in examples(INPUT, "text")]
    asked = BatchReader(plain, SamplingParams(), jsonl=None, raw=False)
    assert [item.request.prompts for item in asked if isinstance(item, BatchRequest)] == [
        (line.decode(),) for line in plain
    ]


def test_every_field_that_the_reader_knows_is_on_the_page_and_no_other() -> None:
    kinds = [protocol.FIELDS for protocol in (chat_completions, completions, responses, simple)]
    unserved = batch.UNSERVED.keys() | {name for kind in kinds for name in kind.unserved}
    served = frozenset[str]().union(*(kind.served for kind in kinds), ENVELOPE) - batch.UNSERVED.keys()
    first_cells = re.findall(r"^\| (`.*?) \|", INPUT, re.MULTILINE)
    in_tables = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    of_messages = {"reasoning_details", "thinking_blocks"}
    assert in_tables - of_messages == (served | {"effort"}) - {"top_logprobs", "max_output_tokens"}
    others = INPUT.partition("**Everything else")[2].partition("**Ids.**")[0]
    listed = {name for item in others.split("\n- ")[1:3] for name in re.findall(r"`(\w+)`", item)}
    assert listed == frozenset[str]().union(*(kind.no_effect for kind in kinds)) | unserved
    assert all(f"`{name}`" in INPUT for name in ("top_logprobs", "max_output_tokens", *ENDPOINTS))


@pytest.mark.parametrize("name", sorted((SAMPLING_FIELDS | ALIASES.keys()) - {"min_new_tokens"}))
def test_every_parameter_reaches_the_request(name: str) -> None:
    values: dict[str, Any] = {
        "stop": "x",
        "stop_token_ids": [5],
        "logit_bias": {"5": 1},
        "ignore_eos": True,
        "top_p": 0.5,
    }
    line = json.dumps({"prompt": "a", "n": 1, name: values.get(name, 0.5 if name in ("min_p",) else 2)})
    (item,) = BatchReader([line.encode()], SamplingParams(), jsonl=True, raw=False)
    assert isinstance(item, BatchRequest) and item.request.params != SamplingParams()


def test_the_records_on_the_page_have_the_shape_of_those_that_are_written(fakes: Fakes, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    asked = [
        {"id": "q2", "prompt": "hi"},
        {"custom_id": "a", "url": LineStyle.CHAT.value, "body": chat},
        {"id": "q9", "prompt": ""},
        {"custom_id": "q8", "url": LineStyle.CHAT.value, "body": {}},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, asked)))
    assert run(["batch", "fake", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]) == 1
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    shown = [json.loads(line) for line in examples(OUTPUT, "jsonl")]
    assert [shape(record) for record in shown] == [shape(record) for record in written]
