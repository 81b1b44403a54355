"""The commands on a model that runs one request at a time."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cortexmlx import Engine, SamplingParams
from cortexmlx.cli.chat.command import print_banner
from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.view import PlainTextView
from cortexmlx.cli.start import run
from support.cli.chat_commands import run_command

pytestmark = pytest.mark.usefixtures("unpaged")
GREEDY = ["--raw", "--temp", "0", "--max-tokens", "9"]


def test_generate_and_batch_give_mlx_lms_answers(
    tiny: Any, theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"a text that has the number {i}" * (1 + i) for i in range(3)]
    with Engine(tiny("llama")) as engine:
        prompts = [engine.encode(text) for text in texts]
    wanted = [theirs("llama", prompt, 9) for prompt in prompts]
    assert run(["generate", str(tiny("llama")), "-p", texts[1], *GREEDY, "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["token_ids"] == wanted[1]
    lines = [json.dumps({"id": str(i), "prompt": text}) + "\n" for i, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    assert run(["batch", str(tiny("llama")), str(tmp_path / "in.jsonl"), *GREEDY]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["usage"]["completion_tokens"] for r in records] == [len(answer) for answer in wanted]
    assert records[1]["text"] == one["text"]


def test_a_chat_begins_with_the_reason_and_goes_on_where_its_last_turn_ended(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(tiny("llama"), kv_memory="512KB") as engine:
        screen = Console(file=io.StringIO(), width=200)
        print_banner(engine, screen, "")
        first_lines = screen.file.getvalue()  # type: ignore[attr-defined]
        assert "one request runs at a time, on mlx-lm's own caches. tiny: a test wants it so" in first_lines
        assert len(first_lines.splitlines()) <= 6
        talk = engine.conversation(params=SamplingParams(max_tokens=12, temperature=0.0))
        session = ChatSession(engine, lambda reply: PlainTextView(), talk)
        run_command("/show info", session, screen)
        assert "mlx-lm's own attention" in screen.file.getvalue()  # type: ignore[attr-defined]
        first, second = session.ask(Question("one")), session.ask(Question("two"))
        assert first.usage.cached_tokens == 0
        assert second.usage.cached_tokens >= first.usage.prompt_tokens


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("command", ["generate", "batch"])
def test_whoever_looks_is_told_why(
    tiny: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    looks: bool,
) -> None:
    from cortexmlx.cli.terminal import console

    monkeypatch.setattr(console, "is_terminal", lambda stream: looks)
    (tmp_path / "in.txt").write_text("hi\n")
    asked = ["-p", "hi"] if command == "generate" else [str(tmp_path / "in.txt")]
    assert run([command, str(tiny("llama")), *asked, *GREEDY]) == 0
    said = capsys.readouterr().err
    reason = "cortexmlx: one request runs at a time, on mlx-lm's own caches. tiny: a test wants it so\n"
    assert (reason in said) is looks
