"""`cortexmlx generate`, with an engine that needs no model: what it prints where, and how it ends."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cortexmlx.cli.start import run
from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import Fakes
from support.engine.judge import greedy
from support.models.adapters import write_adapter
from support.models.tiny import write_tiny
from support.patience import soon


def test_text_goes_to_stdout_and_nothing_to_stderr_in_a_pipe(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "fake", "-p", "hello there"]) == 0
    assert capsys.readouterr() == ("You said: hello there\n", "")


CUT = "before the form is whole"


def test_a_form_that_was_cut_is_told_and_fails(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    """The fake engine follows no form: it says what it is told to."""
    for said, options, whole in (
        ('!say {"a": 1}', ["--schema", "json"], True),
        ('!say {"a": 1, "b": 2}', ["--schema", "json", "-n", "2"], False),
        ('!say {"a": 1, "b": 2}', ["--schema", "json", "-n", "2", "--json"], False),
        ('!say {"a": 1, "b": 2}', ["-n", "2"], True),
        ("!say ab cd", ["--regex", "ab cd ef", "-n", "1"], False),
        ("!say yes", ["--choice", "yes,no", "-n", "1"], True),
        ("!say yes no", ["--choice", "yes no,no", "-n", "1"], False),
    ):
        assert run(["generate", "fake", "-p", said, *options]) == (0 if whole else 1), (said, options)
        out, err = capsys.readouterr()
        assert out and (CUT in err) is not whole
        assert ("stopped at the token limit of " in err) is ("-n" in options and said != "!say yes"), "whole"
    assert run(["generate", "fake", "-p", "!say { }", "--schema", "json", "-n", "1", "--n", "2"]) == 1
    assert f"2 of 2 answers end {CUT}: stopped at the token limit of 1. -n allows more" in capsys.readouterr().err


def test_json_is_one_object_with_the_promised_keys(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "fake", "-p", "hello there", "--max-tokens", "3", "--temp", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": "fake",
        "text": "You said: hello",
        "reasoning_content": None,
        "token_ids": list(map(ord, "You said: hello")),
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "cached_tokens": 2,
            "dropped_tokens": 0,
            "thinking_tokens": 0,
            "drafted_tokens": 0,
            "accepted_tokens": 0,
            "total_tokens": 8,
        },
        "timings": {
            "queued": 0.0,
            "ttft": 0.012,
            "total": 0.5,
            "prefill_tokens_per_second": 500.0,
            "decode_tokens_per_second": 40.0,
        },
    }


def test_prompt_goes_through_the_chat_template_unless_raw_or_there_is_none(fakes: Fakes) -> None:
    run(["generate", "fake", "-p", "hi", "--system", "Be brief."])
    assert fakes.engine.seen[0][0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    run(["generate", "fake", "-p", "hi", "--raw"])
    assert fakes.engine.seen[0][0] == "hi"
    fakes.info = replace(fakes.info, chat_template=False)
    run(["generate", "fake", "-p", "hi"])
    assert fakes.engine.seen[0][0] == "hi"


def test_a_system_prompt_for_a_model_without_template_is_refused(
    fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.info = replace(fakes.info, chat_template=False)
    assert run(["generate", "fake", "-p", "hi", "--system", "Be brief."]) == 1
    assert capsys.readouterr().err == (
        "error: fake has no chat template, so --system has no place: put it into the prompt\n"
    )


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (["--no-think"], {"enable_thinking": False}),
        (["--think"], {"enable_thinking": True}),
        (["--template-var", "reasoning_effort=low"], {"reasoning_effort": "low"}),
        (["--template-var", "enable_thinking=false", "--think"], {"enable_thinking": False}),
        (["--template-var", 'reasoning_effort={"a": [1]}'], {"reasoning_effort": {"a": [1]}}),
    ],
)
def test_the_chat_templates_variables_reach_it(fakes: Fakes, options: list[str], variables: dict[str, object]) -> None:
    assert run(["generate", "fake", "-p", "hi", *options]) == 0
    assert fakes.engine.seen[0][0] == ChatPrompt([{"role": "user", "content": "hi"}], variables)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--template-var", "x"], 2, "'x' is not NAME=VALUE"),
        (["--no-think", "--raw"], 2, "--raw leaves out"),
        (["--template-var", "colour=red"], 1, "does not read colour"),
    ],
)
def test_variables_that_change_nothing_are_refused(
    fakes: Fakes, capsys: pytest.CaptureFixture[str], options: list[str], code: int, said: str
) -> None:
    assert run(["generate", "fake", "-p", "hi", *options]) == code
    assert said in capsys.readouterr().err
    fakes.info = replace(fakes.info, chat_template=False)
    assert run(["generate", "fake", "-p", "hi", "--no-think"]) == 1
    assert "fake has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["fake", "why is it"], "why is it"),
        (["fake", "why", "is", "it"], "why is it"),
        (["-m", "fake", "why", "is it"], "why is it"),
        (["-m", "fake", "fake", "why"], "why"),
        (["fake", "why", "-p", "is it"], "why\n\nis it"),
    ],
)
def test_a_prompt_may_stand_behind_the_model(fakes: Fakes, arguments: list[str], asked: str) -> None:
    assert run(["generate", *arguments]) == 0
    assert fakes.engine.seen[0][0] == [{"role": "user", "content": asked}]
    assert fakes.engine.options.model == "fake"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (["generate", "fake"], "give one after MODEL or with -p"),
        (["generate", "why?  Say."], "'why? Say.' was taken as the model; the question goes after it or with -p"),
        (
            ["generate", "fake", "hi", "-n", "-1"],
            "for -n: -1 is not in 1 to 2,147,483,647. A number beyond the context",
        ),
        (["generate", "fake", "-f", "a.txt"], "No such option: -f. A file is piped in: < FILE"),
        (["generate", "fake", "-ngl", "99"], "No such option: -ngl. The whole model is on the GPU"),
        (["chat", "fake", "what is 2?"], "goes after -p, or type: cortexmlx generate fake 'what is 2?'"),
    ],
)
def test_a_line_that_cannot_run_says_what_to_type(
    line: list[str], advice: str, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line) in (1, 2)
    assert advice in " ".join(capsys.readouterr().err.split())


THOUGHT = "!say <think>let me see</think>It is."


@pytest.mark.parametrize(("options", "err"), [([], "let me see\n\n"), (["--hide-thinking"], "")])
def test_thoughts_go_to_stderr_and_can_be_hidden(
    fakes: Fakes, capsys: pytest.CaptureFixture[str], options: list[str], err: str
) -> None:
    assert run(["generate", "fake", THOUGHT, *options]) == 0
    assert capsys.readouterr() == ("It is.\n", err)
    assert run(["generate", "fake", THOUGHT, "--json", *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["text"], record["reasoning_content"]) == ("It is.", None if options else "let me see")
    assert record["usage"]["thinking_tokens"] == 3, "the words of the fake: <think>let, me, see</think>It"


def test_a_raw_prompt_is_answered_with_all_that_was_written(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "fake", THOUGHT, "--raw"]) == 0
    assert capsys.readouterr() == ("<think>let me see</think>It is.\n", "")


def test_several_answers_are_parted_by_a_line(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "fake", "hi", "--n", "3"]) == 0
    assert capsys.readouterr().out == "You said: hi\n---\nYou said: hi\n---\nYou said: hi\n"
    assert fakes.engine.seen[0][1].n == fakes.engine.options.max_rows == 3
    assert run(["generate", "fake", "hi", "--n", "3", "--json"]) == 0
    assert [other["text"] for other in json.loads(capsys.readouterr().out)["others"]] == ["You said: hi"] * 2
    assert run(["generate", "fake", "hi", "--n", "0"]) == 2
    assert "n is 0" in capsys.readouterr().err


def test_verbose_prints_the_figures_also_into_a_pipe(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "fake", "hello there", "--max-tokens", "3", "-v"]) == 0
    out, err = capsys.readouterr()
    assert out == "You said: hello\n"
    lines = [line.split(":", 1) for line in err.splitlines()]
    assert [name for name, _ in lines] == ["load", "prompt", "generation", "first token", "total", "peak memory"]
    assert lines[1][1].strip() == "5 tokens (2 cached), 500.0 tok/s"
    assert lines[2][1].strip() == "3 tokens, 40.0 tok/s, stopped at the token limit of 3"


def test_log_probabilities_have_the_tokens_texts(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from cortexmlx import Engine

    asked = ["generate", str(tiny("llama")), "the", "--max-tokens", "9", "--kv-memory", "1MB", "--logprobs", "2"]
    assert run([*asked, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    with Engine(tiny("llama"), kv_memory="1MB") as engine:
        texts = [engine.decode([token], special_tokens=True) for token in record["token_ids"]]
        judge = engine.generate([{"role": "user", "content": "the"}], SamplingParams(max_tokens=9, logprobs=2))
    assert [token["token"] for token in record["logprobs"]] == texts
    assert judge.logprobs is not None
    for token, wanted in zip(record["logprobs"], judge.logprobs, strict=True):
        assert (token["token_id"], token["logprob"]) == (wanted.token_id, pytest.approx(wanted.logprob, abs=1e-4))
        assert [each["token_id"] for each in token["top"]] == [each for each, _ in wanted.top]
    assert run(asked) == 0
    answer, _, shown = capsys.readouterr().out.partition("\n\ntoken ")
    assert answer == record["text"] and shown.splitlines()[0].split() == ["logprob", "prob", "likeliest"]
    assert [line.split("  ")[0].strip() for line in shown.splitlines()[1:]] == [
        json.dumps(t, ensure_ascii=False) for t in texts
    ]


def test_an_adapter_answers_as_mlx_lm_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlx_lm import load

    folder = write_tiny(tmp_path / "m")
    adapter = write_adapter(tmp_path / "a", folder, num_layers=-1, keys=None)
    model, tokenizer = load(str(folder), adapter_path=str(adapter))
    wanted = greedy(model, tokenizer, tokenizer.encode("Hello"), 8)
    command = ["generate", str(folder), "--raw", "-p", "Hello", "-n", "8", "--json", "--kv-memory", "256KB"]
    assert run([*command, "--adapter", str(adapter)]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == wanted
    assert run(command) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] != wanted


def test_ctrl_c_with_json_prints_the_partial_answer(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "begun"
    monkeypatch.setenv("FAKE_BEGUN", str(begun))

    def press() -> None:
        if soon(begun.exists):
            os.kill(os.getpid(), signal.SIGINT)

    keyboard = Thread(target=press)
    keyboard.start()
    assert run(["generate", "fake", "-p", "!slow", "--json"]) == 130
    keyboard.join()
    answer = json.loads(capsys.readouterr().out)
    assert answer["finish_reason"] == "cancelled" and answer["text"].startswith("word0 word1 word2 word3")
