"""The commands on real engines: three ways to ask the starter model one question, and what an engine refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.cli.start import run
from support.patience import PATIENCE

COMMAND = [sys.executable, "-c", "from cortexmlx.cli import main; main()"]
QUESTION = "What is the capital of France?"
GREEDY = ["--temp", "0", "--max-tokens", "24"]


def cortexmlx(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.model
def test_generate_batch_and_chat_give_the_same_answer(tmp_path: Path) -> None:
    done = cortexmlx("generate", "smollm2", "-p", QUESTION, *GREEDY, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert {"model", "text", "token_ids", "finish_reason", "usage", "timings"} <= answer.keys()
    assert "Paris" in answer["text"] and answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])

    chat = cortexmlx("chat", "smollm2", *GREEDY, "--top-p", "1", "--repetition-penalty", "1", stdin=QUESTION)
    assert (chat.returncode, chat.stdout, chat.stderr) == (0, answer["text"] + "\n", "")

    (tmp_path / "in.jsonl").write_text(json.dumps({"id": "q", "prompt": QUESTION}) + "\n{broken\n")
    batch = cortexmlx("batch", "smollm2", str(tmp_path / "in.jsonl"), *GREEDY)
    record, error = map(json.loads, batch.stdout.splitlines())
    assert batch.returncode == 1 and error["error"]["line"] == 2
    assert (record["id"], record["text"], record["finish_reason"]) == ("q", answer["text"], "stop")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-p", "word " * 900], "the model's context is 512"),
        (["-p", "word " * 90, "--kv-memory", "64KB"], "tokens"),
        (["-p", QUESTION, "--kv-memory", "1KB"], "holds no block of 32 tokens"),
        (["-p", QUESTION, "--block-size", "33"], "block_size is 33"),
        (["-p", QUESTION, "--attention", "magic"], "attention is 'magic'"),
    ],
)
def test_what_the_engine_refuses_is_one_line(
    tiny: Any, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(tiny("llama")), *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err
