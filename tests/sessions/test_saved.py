"""A conversation in a file: whole, private, and recognised when it is something else."""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import ConversationFileError, InvalidRequest
from cortexmlx.sessions import saved as files
from cortexmlx.sessions.saved import (
    SavedConversation,
    SavedModel,
    copy_messages,
    parse_foreign_messages,
    shows_images,
)
from cortexmlx.sessions.turn import Transcript
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import FakeEngine
from support.effort import THOROUGH

MODEL = SavedModel("tiny", "/models/tiny", "f00")
TALK = SavedConversation(
    MODEL,
    "Be brief.",
    ({"role": "user", "content": "né"}, {"role": "assistant", "content": "\ud800?"}),
    SamplingParams(temperature=0.5, stop=["\n"], logit_bias={3: -1.5}, seed=7),
    Transcript("né\ud800?", (1, 2, 3), ((0, 0), (2, 1), (4, 3))),
)


@settings(max_examples=25)
@given(st.none() | st.text(max_size=9), st.lists(st.tuples(st.text(max_size=9), st.text(max_size=20)), max_size=3))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, system: str | None, said: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "talk.json"
    messages = tuple({"role": role, "content": text, "tool_calls": [{"n": 1}]} for role, text in said)
    talk = replace(TALK, system=system, messages=messages, adapter=system)
    talk.write(path)
    assert SavedConversation.read(path) == talk


def test_no_field_is_forgotten(tmp_path: Path) -> None:
    """A new field of the record or of the sampling parameters needs a value here, and is in the file."""
    sampling: dict[str, Any] = {"max_tokens": 9, "max_thinking_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 7}
    sampling |= {"min_p": 0.1, "repetition_penalty": 1.1, "repetition_context": 7, "presence_penalty": 0.5, "n": 2}
    sampling |= {"frequency_penalty": 0.5, "logit_bias": {3: -1.5}, "stop": ("a",), "stop_token_ids": (3,), "seed": 7}
    sampling |= {"ignore_eos": True, "logprobs": 1, "prompt_logprobs": 1, "best_of": 3, "priority": 1}
    assert sampling.keys() | set(files._NOT_SAVED) == {each.name for each in fields(SamplingParams)}
    params = SamplingParams(**sampling, structured={"type": "array"})
    talk = replace(TALK, params=params, template_vars={"a": 1}, unsent=1, adapter="sql")
    talk.write(tmp_path / "talk.json")
    assert SavedConversation.read(tmp_path / "talk.json") == talk
    for each in (*fields(talk), *fields(params)):
        owner: Any = talk if each in fields(talk) else params
        known = MISSING if each.default_factory is MISSING else each.default_factory()
        usual = each.default if each.default is not MISSING else known
        assert each.name in files._NOT_SAVED or getattr(owner, each.name) != usual, each.name


def test_keys_that_become_texts_are_no_damage(tmp_path: Path) -> None:
    message = {"role": "user", "content": "a", "seen": {2: "b", 10: "c", True: "d"}}
    replace(TALK, messages=(message,)).write(tmp_path / "talk.json")
    read = SavedConversation.read(tmp_path / "talk.json")
    assert read.messages == ({**message, "seen": {"2": "b", "10": "c", "true": "d"}},)


def test_a_file_is_for_its_user_alone_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "talk.json"
    path.parent.mkdir()
    path.write_text("{}")
    path.chmod(0o644)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    TALK.write(link)
    assert path.stat().st_mode & 0o777 == 0o600 and link.is_symlink()
    assert SavedConversation.read(path) == TALK and os.listdir(path.parent) == ["talk.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "talk.json"
    TALK.write(path)

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConversationFileError, match=r"talk\.json cannot be written: No space left"):
        replace(TALK, system="other").write(path)
    assert SavedConversation.read(path) == TALK and os.listdir(tmp_path) == ["talk.json"]
    with pytest.raises(ConversationFileError, match="cannot be written as JSON: Object of type set"):
        replace(TALK, messages=({"role": "user", "content": {1}},)).write(path)
    for wrong in ({"system": 5}, {"adapter": 7}, {"unsent": 99}, {"template_vars": {"a": [{}, set()]}}):
        with pytest.raises(ConversationFileError, match="cannot be written as JSON: "):
            replace(TALK, **wrong).write(path)
    assert SavedConversation.read(path) == TALK, "what could not be read again is not written"
    with pytest.raises(ConversationFileError, match="cannot be written: File exists"):
        TALK.write(path / "inside.json")


def test_what_is_no_conversation_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "talk.json"
    TALK.write(path)
    whole = path.read_bytes()
    content = json.loads(whole.decode("utf-8", "surrogatepass"))
    monkeypatch.setattr(files, "LARGEST", 10_000)
    for data, says in {
        b"": "is not a saved conversation: it is empty",
        b"\xff\xfe": "is not a saved conversation: it is no JSON, or torn",
        whole[:-9]: "is not a saved conversation: it is no JSON, or torn",
        b"[" * 9000: "is not a saved conversation: it is no JSON, or torn",
        b'{"messages": []}': "is not a saved conversation: no JSON object with",
        b"[1]": "is not a saved conversation: no JSON object with",
        b'{"format": "cortexmlx conversation", "version": 1}': "is not a saved conversation: it has no 'system'",
        b" " * 10_001: "has 10,001 bytes, and a saved conversation has 10,000 at most",
        json.dumps(content | {"version": 2}).encode(): "version 2 of the format, and this program reads version 1",
        json.dumps(content | {"system": "Be long."}).encode(): "damaged, or was changed since it was saved",
    }.items():
        path.write_bytes(data)
        with pytest.raises(ConversationFileError, match=says):
            SavedConversation.read(path)
    for name, says in {"talk": "is not there", "": "is no file"}.items():
        with pytest.raises(ConversationFileError, match=says):
            SavedConversation.read(tmp_path / name)


def test_every_damage_of_a_byte_is_found(tmp_path: Path) -> None:
    """Or harmless: white space, and a name that nobody reads."""
    path = tmp_path / "talk.json"
    TALK.write(path)
    whole = bytearray(path.read_bytes())
    for place in range(0, len(whole), 1 if THOROUGH else 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            read = SavedConversation.read(path)
        except ConversationFileError:
            continue
        assert read == TALK or read == replace(TALK, transcript=None)


def test_who_edits_a_file_by_hand_takes_the_digest_out(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    TALK.write(path)
    content = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    del content["digest"]
    for change, says in {
        "system": None,
        "messages": "its messages are none",
        "sampling": "its temperature is -1",
        "model": "its model is not named",
        "adapter": "adapter is {",
    }.items():
        wrong = {"system": "Be long.", "messages": [1], "sampling": {**content["sampling"], "temperature": -1}}
        path.write_text(json.dumps({**content, change: wrong.get(change, {"name": 1})}))
        if says is None:
            assert SavedConversation.read(path) == replace(TALK, system="Be long.", transcript=None)
        else:
            with pytest.raises(ConversationFileError, match=says):
                SavedConversation.read(path)


INF = float("inf")


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("sampling", {"logit_bias": None}),
        ("sampling", {"logit_bias": [1]}),
        ("sampling", {"logits_processors": ["x"]}),
        ("transcript", {"cuts": [[0, 0], [INF, 1]]}),
        ("transcript", {"tokens": [-1, 2, 3]}),
        ("transcript", {"tokens": [True, 2, 3]}),
        ("transcript", {"tokens": {"a": 1}}),
    ],
)
def test_what_somebody_made_up_is_one_clear_error(tmp_path: Path, part: str, wrong: dict[str, Any]) -> None:
    """With a digest that fits: anybody can make one."""
    path = tmp_path / "talk.json"
    TALK.write(path)
    content = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    del content["digest"]
    content[part] |= wrong
    path.write_text(json.dumps({**content, "digest": files._digest(content)}))
    with pytest.raises(ConversationFileError, match="is not a saved conversation"):
        SavedConversation.read(path)


def test_what_is_no_file_is_not_written_over(tmp_path: Path) -> None:
    """Whoever may write everywhere would make a file of a device."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ConversationFileError, match="cannot be written: it is no file"):
            TALK.write(tmp_path / name)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize(
    ("name", "path", "found"),
    [
        ("smollm2", "/lib/SmolLM2-135M.gguf", "smollm2"),
        ("org/model", "/cache/models--org--model/snapshots/abc", "org/model"),
        ("../models/mine", "/home/me/models/mine", "/home/me/models/mine"),
        ("x.gguf", "/home/me/x.gguf", "/home/me/x.gguf"),
    ],
)
def test_a_model_is_found_again_from_any_folder(name: str, path: str, found: str) -> None:
    assert SavedModel(name, path, "f00").reopen_name == found


def test_messages_are_copied_and_checked() -> None:
    given = [{"role": "user", "content": "one"}]
    kept = copy_messages(given)
    given[0]["content"] = "two"
    assert kept == ({"role": "user", "content": "one"},)
    for wrong in ("text", {"content": "x"}, {"role": 1}):
        with pytest.raises(InvalidRequest, match="a message is a map"):
            copy_messages([wrong])  # type: ignore[list-item]


# -- Messages that others have written are read from a file, or refused by name ---------------------------------------


SAID: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "42", "tool_call_id": "1"},
]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(SAID),
        "\ufeff" + json.dumps([{**SAID[0], "role": "developer"}, *SAID[1:]]),
        json.dumps({"model": "gpt-4o", "temperature": 1, "messages": SAID}, indent=2),
        "\n".join(map(json.dumps, SAID)) + "\n\n",
        json.dumps({"messages": SAID}) + "\n",
        json.dumps({"messages": SAID, "format": "json"}),
        json.dumps([{"messages": SAID}]),
        "\n".join(map(json.dumps, [*SAID[:2]]))
        + "\n"
        + "\n".join(json.dumps({**m, "name": "a\u2028b"}, ensure_ascii=False) for m in SAID[2:]),
    ],
)
def test_messages_of_the_openai_api_are_loaded_in_every_form(text: str, tmp_path: Path) -> None:
    engine: Any = FakeEngine(EngineConfig("fake"))
    talk = engine.conversation(system="Old.", params=SamplingParams(top_k=3))
    talk.ask("old")
    (tmp_path / "talk.json").write_text(text)
    talk.load(tmp_path / "talk.json")
    assert talk.system == "Be brief." and talk.params.top_k == 3
    assert [(m["role"], m["content"]) for m in talk.messages] == [("user", "Hello"), ("assistant", ""), ("tool", "42")]
    assert talk.messages[1]["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": {}}}]
    assert talk.messages[2]["tool_call_id"] == "1"


def test_a_line_may_have_what_python_takes_for_the_end_of_one() -> None:
    said = [{"role": "user", "content": "one\u2028two\x85three"}, {"role": "assistant", "content": "four"}]
    lines = "\r\n".join(json.dumps(message, ensure_ascii=False) for message in said)
    assert parse_foreign_messages(Path("talk.jsonl"), lines) == (None, tuple(said))


def test_one_message_on_a_line_is_a_conversation_of_one() -> None:
    said = {"role": "user", "content": "Hello"}
    assert parse_foreign_messages(Path("talk.jsonl"), json.dumps(said) + "\n") == (None, (said,))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"content": "hi"}]', "talk.json: message 1: `role` is None, but must be a text"),
        ('[{"role": "user", "content": "hi"}, "hello"]', "message 2: it is 'hello', but must be an object with `role`"),
        ('[{"role": "user", "content": 7}]', "message 1: `content` is 7, but must be a text"),
        ('[{"role": "user", "at": 5}]', "message 1: unknown field of a message: 'at'"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n' * 2, "has 2 conversations: keep one of them in a file"),
        ('{"role": "user"', "is not a saved conversation: it is no JSON, or torn"),
        ("{}", "is not a saved conversation: no JSON object with"),
        ("[]", "is not a saved conversation: no JSON object with"),
        ("", "is not a saved conversation: it is empty"),
        ('[{"messages": []}]', "is not a saved conversation"),
        ('[{"messages": 5}]', "is not a saved conversation: it is no JSON|no JSON object with"),
        ("1\n2\n", "message 1: it is 1, but must be an object"),
    ],
)
def test_what_cannot_be_read_is_refused_and_changes_nothing(text: str, says: str, tmp_path: Path) -> None:
    engine: Any = FakeEngine(EngineConfig("fake"))
    talk = engine.conversation(system="Old.")
    talk.ask("old")
    before = talk.messages
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(ConversationFileError, match=says):
        talk.load(tmp_path / "talk.json")
    assert (talk.system, talk.messages) == ("Old.", before)


def test_a_saved_conversation_is_no_list_of_messages(tmp_path: Path) -> None:
    engine: Any = FakeEngine(EngineConfig("fake"))
    talk = engine.conversation()
    talk.ask("one")
    talk.save(tmp_path / "talk.json")
    assert parse_foreign_messages(tmp_path, (tmp_path / "talk.json").read_text()) is None


def test_a_text_is_not_searched_for_images_by_characters() -> None:
    """Each turn looked at each character of a conversation, and each save did twice."""

    class Text(str):
        def __iter__(self) -> Any:
            raise AssertionError

    assert not shows_images({"role": "user", "content": Text("a")})
