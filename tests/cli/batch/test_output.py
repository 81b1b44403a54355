"""Writing a batch: each record in the shape of its question, and on disk before the next."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from cortexmlx.cli.batch.input import BadLine, BatchRequest, Style
from cortexmlx.cli.batch.output import BatchWriter, answer_record, error_record
from cortexmlx.cli.batch.resume import RunIdentity, start
from cortexmlx.errors import CortexError
from cortexmlx.logprobs import PromptLogprobs, TokenLogprob
from cortexmlx.request import Completion, FinishReason, SamplingParams, Timings, Usage


def answer(text: str, tokens: int, logprobs: tuple[TokenLogprob, ...] | None = None) -> Completion:
    usage = Usage(prompt_tokens=5, completion_tokens=tokens, cached_tokens=2)
    return Completion(text, tuple(range(tokens)), FinishReason.STOP, usage, Timings(0, 0, 0, 0, 0), logprobs)


def request(style: Style) -> BatchRequest:
    return BatchRequest(7, "q", style, "hi", SamplingParams())


LOGPROBS = (TokenLogprob(3, -0.5, ((3, -0.5), (9, -1.5))), TokenLogprob(4, -2.0))


def test_the_prompt_of_several_answers_is_counted_once() -> None:
    body = answer_record(request(Style.CHAT), [answer("a", 3), answer("b", 4)], "m")["response"]["body"]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "a"), (1, "b")]
    simple = answer_record(request(Style.SIMPLE), [answer("a", 3), answer("b", 4)], "m")
    assert (simple["id"], simple["text"], [other["text"] for other in simple["others"]]) == ("q", "a", ["b"])
    assert "others" not in answer_record(request(Style.SIMPLE), [answer("a", 3)], "m")


def test_log_probabilities_have_the_shape_of_each_endpoint() -> None:
    def choice(style: Style) -> object:
        [one] = answer_record(request(style), [answer("ab", 2, LOGPROBS)], "m")["response"]["body"]["choices"]
        return one["logprobs"]

    assert choice(Style.CHAT) == {
        "content": [
            {
                "token": "token_id:3",
                "logprob": -0.5,
                "top_logprobs": [
                    {"token": "token_id:3", "logprob": -0.5},
                    {"token": "token_id:9", "logprob": -1.5},
                ],
            },
            {"token": "token_id:4", "logprob": -2.0, "top_logprobs": []},
        ]
    }
    assert choice(Style.COMPLETIONS) == {
        "tokens": ["token_id:3", "token_id:4"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"token_id:3": -0.5, "token_id:9": -1.5}, {}],
    }
    simple = answer_record(request(Style.SIMPLE), [answer("ab", 2, LOGPROBS)], "m")
    assert [(token["token_id"], token["logprob"]) for token in simple["logprobs"]] == [(3, -0.5), (4, -2.0)]
    assert "logprobs" not in answer_record(request(Style.SIMPLE), [answer("ab", 2)], "m")


def test_those_of_a_prompt_stand_beside_the_first_answer_or_with_an_echo_before_it() -> None:
    ids, own = np.array([[0, 0], [8, 1], [5, 2]], np.int32), np.array([np.nan, -1.5, -0.25], np.float32)
    top = np.array([[0, 0], [-1.5, -2.0], [-0.25, -4.0]], np.float32)
    told = PromptLogprobs((6, 8, 5), own, ids, top)
    answers = [replace(answer("ab", 2, LOGPROBS), index=i, prompt_logprobs=told) for i in range(2)]
    asked = request(Style.COMPLETIONS)
    listed = [
        None,
        asdict(TokenLogprob(8, -1.5, ((8, -1.5), (1, -2.0)))),
        asdict(TokenLogprob(5, -0.25, ((5, -0.25), (2, -4.0)))),
    ]
    first, second = answer_record(asked, answers, "m")["response"]["body"]["choices"]
    assert first["prompt_logprobs"] == listed and "prompt_logprobs" not in second and first["text"] == "ab"
    simple = answer_record(request(Style.SIMPLE), answers, "m")
    assert simple["prompt_logprobs"] == listed and "prompt_logprobs" not in simple["others"][0]
    for choice in answer_record(replace(asked, echo=True), answers, "m")["response"]["body"]["choices"]:
        assert choice["text"] == "hiab" and "prompt_logprobs" not in choice
        assert choice["logprobs"] == {
            "tokens": ["token_id:6", "token_id:8", "token_id:5", "token_id:3", "token_id:4"],
            "token_logprobs": [None, -1.5, -0.25, -0.5, -2.0],
            "top_logprobs": [
                None,
                {"token_id:8": -1.5, "token_id:1": -2.0},
                {"token_id:5": -0.25, "token_id:2": -4.0},
                {"token_id:3": -0.5, "token_id:9": -1.5},
                {},
            ],
        }


def test_an_error_stands_in_the_place_of_an_answer_with_its_line() -> None:
    error = {"code": "invalid_request", "message": "bad", "line": 7}
    assert error_record(BadLine(7, "q", Style.SIMPLE, "bad"), "bad") == {"id": "q", "error": error}
    assert error_record(request(Style.CHAT), "gone", code="cancelled") == {
        "id": "batch_req_7",
        "custom_id": "q",
        "response": None,
        "error": {"code": "cancelled", "message": "gone", "line": 7},
    }


def test_a_record_is_on_disk_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    synced: list[int] = []
    monkeypatch.setattr("cortexmlx.cli.batch.output.os.fsync", lambda file: synced.append(os.fstat(file).st_size))
    writer = BatchWriter(path)
    for count, record in enumerate([{"id": 1, "text": "né"}, {"id": 2, "error": {"code": "x"}}, {"id": 3}], 1):
        writer.write(record)
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) == count and json.loads(lines[-1]) == record
        assert len(synced) == count and synced[-1] == path.stat().st_size
    assert (writer.written, writer.failed) == (3, 1) and "né" in path.read_text(encoding="utf-8")
    writer.close()
    again = BatchWriter(path, append=True)
    again.write({"id": 4})
    again.close()
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    BatchWriter(path).close()
    assert path.read_text() == ""


def test_stdout_stays_open(capsys: pytest.CaptureFixture[str]) -> None:
    writer = BatchWriter(None)
    writer.write({"id": 1})
    writer.close()
    print("more")
    assert capsys.readouterr().out == '{"id": 1}\nmore\n'


def test_a_full_disk_is_said_with_the_files_name_and_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/dev/full")
    writer = BatchWriter(tmp_path / "out")
    with pytest.raises(CortexError, match=r"out cannot be written: No space left on device; .* --resume the rest"):
        writer.write({"id": 1})
    writer.close()
    (tmp_path / "new.run").symlink_to("/dev/full")
    with pytest.raises(CortexError, match=r"new\.run cannot be written: No space left on device"):
        start(tmp_path / "new", RunIdentity("fake", "-", None, False, SamplingParams()))
