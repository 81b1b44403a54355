"""`system` and `messages` of Anthropic's API as the messages that chat templates read."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.anthropic.conversation import BILLING, read_conversation
from cortexmlx.protocols.seal import Seal

SEAL = Seal(b"s", "ann")
HI = {"role": "user", "content": "hi"}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def use(id: str, name: str = "f", **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input, "caller": {"type": "direct"}}


def result(id: str, content: Any = "r", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def thought(said: str, signature: str | None = None) -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": SEAL.sign(said) if signature is None else signature}


def read(*messages: Any, seal: Seal | None = SEAL, **more: Any) -> list[Any]:
    return read_conversation({"messages": list(messages), **more}, seal)


def roles(*messages: Any, **more: Any) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in read(*messages, **more)]


def test_the_system_prompt_comes_first_without_the_line_for_billing() -> None:
    blocks = [
        text(f"{BILLING} cc_version=1; cch=7f3;"),
        text("You are.", cache_control={"type": "ephemeral"}),
        text("b"),
    ]
    assert roles(HI, system=blocks) == [("system", "You are.\nb"), ("user", "hi")]
    assert roles(HI, system="s") == [("system", "s"), ("user", "hi")]
    assert roles(HI, system=blocks[:1]) == roles(HI, system="") == [("user", "hi")]


def test_a_later_system_message_stands_where_it_was_said() -> None:
    system = {"role": "system", "content": [text("be brief", citations=None)]}
    said = [HI, system, HI, assistant(text("a")), system, system]
    assert [role for role, _ in roles(*said)] == ["user", "system", "user", "assistant", "system"]
    assert roles(*said)[-1] == ("system", "be brief\nbe brief")
    assert roles(system, HI, system="s") == [("system", "s\nbe brief"), ("user", "hi")]


def test_a_system_message_that_is_cleared_is_not_read() -> None:
    once = {"role": "system", "content": "now", "clear_at": "next_user_message"}
    assert roles(HI, once) == [("user", "hi"), ("system", "now")]
    assert roles(HI, once, assistant(text("a")), HI) == [("user", "hi"), ("assistant", "a"), ("user", "hi")]


def test_neighbours_of_one_role_are_one_message() -> None:
    turns = roles(
        user(text("a"), text("b")), user(text("c")), assistant(text("d"), text("e")), assistant(text("f")), HI
    )
    assert turns == [("user", "a\nb\nc"), ("assistant", "def"), ("user", "hi")]


def test_calls_and_results_are_those_that_templates_read() -> None:
    one, other = use("1", x=1), use("2", "g")
    said = read(
        HI, assistant(text("I look"), one, other), user(result("2"), result("1", [text("a"), text("b")]), text("go"))
    )
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    assert said[1] == {"role": "assistant", "content": "I look", "tool_calls": calls}
    assert said[2:] == [
        {"role": "tool", "tool_call_id": "2", "name": "g", "content": "r"},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "a\nb\n<user>\ngo\n</user>"},
    ]


def test_results_come_right_after_their_calls() -> None:
    system = {"role": "system", "content": "s"}
    for between, after in ((system, [("system", "s")]), (user(text("wait")), [])):
        said = roles(HI, assistant(use("1")), between, user(result("1"), text("go")))
        assert [role for role, _ in said[:3]] == ["user", "assistant", "tool"] and said[3:] == after
        assert said[2][1].startswith("r\n<user>\n") and said[2][1].endswith("\ngo\n</user>")
    said = roles(HI, assistant(use("1")), system, user(), system, user(result("1")), HI)
    assert said[2:] == [("tool", "r\n<user>\nhi\n</user>"), ("system", "s\ns")]


def test_the_model_is_told_of_a_tool_that_failed() -> None:
    for content, told in (("no file", "Error: no file"), ("Error: x", "Error: x"), ([], "Error: "), (None, "Error: ")):
        assert roles(HI, assistant(use("1")), user(result("1", content, is_error=True)))[2] == ("tool", told)
    assert roles(HI, assistant(use("1")), user(result("1", None, is_error=False)))[2] == ("tool", "")


def test_thoughts_are_read_if_this_server_wrote_them() -> None:
    said = read(HI, assistant(thought("a"), use("1")), user(result("1")), assistant(thought("b"), text("c")), HI)
    assert [each.get("reasoning_content") for each in said] == [None, "a", None, "b", None]
    assert read(HI, assistant(thought("", SEAL.wrap("x"))), HI)[1]["reasoning_content"] == "x"
    assert read(HI, assistant(thought("a", "zzz")), HI, seal=None)[1]["reasoning_content"] == "a"


@pytest.mark.parametrize(
    "block",
    [
        thought("a", ""),
        thought("a", SEAL.sign("b")),
        thought("a", Seal(b"s", "bob").sign("a")),
        thought("a", Seal(b"t", "ann").sign("a")),
        thought("a", SEAL.wrap("a")),
        thought("", Seal(b"s", "bob").wrap("a")),
        thought("", SEAL.sign("a")),
        thought("", "é"),
        thought("a", "\ud800"),
        {"type": "thinking", "thinking": "a"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "a", "signature": None},
    ],
)
def test_other_thoughts_are_left_out(block: dict[str, Any]) -> None:
    assert read(HI, assistant(text("t"), block), HI) == read(HI, assistant(text("t")), HI)


@pytest.mark.parametrize(
    ("messages", "field", "says"),
    [
        ([], "messages", "must be a list"),
        ([7], "messages[0]", "an object"),
        ([{"role": "tool", "content": "a"}], "messages[0].role", "user, assistant or system"),
        ([{"role": [], "content": "a"}], "messages[0].role", "user, assistant or system"),
        ([{"role": "user", "contnt": "a"}], "messages[0].contnt", "did you mean 'content'"),
        ([{"role": "user", "content": 5}], "messages[0].content", "a text or a list of blocks"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]", "an object with a `type`"),
        ([{"role": "system", "content": "a", "clear_at": 1}, HI], "messages[0].clear_at", "never"),
        ([user({"type": "text", "text": 5})], "messages[0].content[0].text", "no text"),
        ([user(result(1))], "messages[0].content[0].tool_use_id", "must be a text"),
        ([HI, assistant({**use("1"), "id": None}), HI], "messages[1].content[0].id", "a text"),
        ([HI, assistant(text("It is"))], "messages[1]", "cannot be continued"),
        ([{"role": "system", "content": "a"}], "messages", "no user's message"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(messages: list[Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        read(*messages)
    assert raised.value.field == field


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
LINE = "[An image was here, but only text can be read.]"


def test_what_is_not_read_becomes_a_line() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    assert roles(user(text("a"), IMAGE, document, text("\ud800", zzz=1)), system=[IMAGE]) == [
        ("system", LINE),
        ("user", f"a\n{LINE}\nd\n\ufffd"),
    ]
    said = read(HI, assistant({**use("1"), "input": "{}"}), user(result("1", [text("a"), IMAGE], is_error="true")))
    assert said[1]["tool_calls"][0]["function"]["arguments"] == {} and said[2]["content"] == f"Error: a\n{LINE}"
    search = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]}
    assert "web_search_tool_result" in roles(HI, assistant(search), HI)[1][1]


def test_a_result_without_its_call_is_what_the_user_says() -> None:
    told = "[The result of an earlier call:]\nr"
    assert roles(user(text("a"), result("9"))) == [("user", f"{told}\na")]
    beside = f"r\n<user>\n{told}\n</user>"  # the loop of calls goes on
    assert roles(HI, assistant(use("1")), user(result("9"), result("1")))[2:] == [("tool", beside)]


@pytest.mark.parametrize("system", [5, [5], {"type": "text", "text": "a"}])
def test_a_system_prompt_that_is_no_text_is_refused(system: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read(HI, system=system)
    assert raised.value.field is not None and raised.value.field.startswith("system")


BLOCK = st.sampled_from([text("a"), text("b"), use("1"), thought("t")])
MESSAGE = st.one_of(
    st.lists(BLOCK, max_size=3).map(lambda blocks: assistant(*blocks)),
    st.lists(st.sampled_from([text("a"), text("b"), result("1")]), max_size=3).map(lambda blocks: user(*blocks)),
    st.just({"role": "system", "content": "s"}),
)


@given(st.lists(MESSAGE, max_size=6))
def test_neighbours_are_one_and_results_follow_calls(messages: list[Any]) -> None:
    said = read(HI, assistant(use("1")), *messages, HI)
    kinds = [each["role"] for each in said]
    assert kinds[-1] != "assistant"
    for before, after in pairwise(kinds):
        assert before != after or before == "tool"
        assert (before, after) not in (("user", "tool"), ("system", "tool"), ("tool", "user"))
    told = "".join(each["content"] for each in said).replace("Error: ", "")
    told = re.sub("</?user>", "", told)
    sent = [block for each in messages if isinstance(each["content"], list) for block in each["content"]]
    for letter in "abr":
        own = sum((block.get("text") or block.get("content")) == letter for block in sent)
        assert told.count(letter) == own
