"""Conversations as others leave them: what a client cannot mend is no error, and an error names what it can mend."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx.protocols import responses, simple
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.openai import chat_completions
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.protocols.seal import Seal
from cortexmlx.types.sampling_params import SamplingParams

NOISE = ("", "", "", "\0", "\ud83d", "\udc00", "\x1b[31m", "\ufffe", "\u2028", "é😀", '"}', "<|im_end|>", "{{ x }}")
IMAGE = {
    "chat": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
    ],
    "responses": [
        {"type": "input_image", "image_url": "data:,", "detail": "auto"},
        {"type": "input_file", "file_id": "f"},
        {"type": "computer_screenshot", "image_url": "x"},
    ],
    "messages": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}},
        {"type": "container_upload", "file_id": "f"},
    ],
}
FOREIGN: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
    {"provider_specific_fields": {"a": [1]}, "ts": 1.5},
    {"id": "msg_0", "timestamp": None, "usage": {}},
    {"\ud800": 1, "x" * 3000: "y"},
)
IDS = ("call_1", "toolu_01A", "functions.f:0", "", "é-1", "a b", "9" * 70, "chatcmpl-tool-1", "x|y")


@dataclass
class History:
    """A body with a conversation."""

    body: dict[str, Any]
    said: list[str] = field(default_factory=list)
    """The words that the model must be told, each once."""
    fault: str | None = None
    """The path of what the client's program got wrong; None: nothing is wrong."""


class Maker:
    """Makes the histories of one protocol: `chat`, `simple`, `responses` or `messages`."""

    def __init__(self, protocol: str, seed: str) -> None:
        self._protocol = protocol
        self._draw = random.Random(f"{protocol} {seed}")
        self._words = 0
        self._said: list[str] = []

    def make(self) -> History:
        """Return the next history. One of six has a fault."""
        self._said = []
        write = {"responses": self._responses, "messages": self._messages}.get(self._protocol, self._chat)
        history = History(write())
        sent = json.dumps(history.body)
        history.said = [word for word in self._said if word in sent]
        if self._draw.random() < 1 / 6:
            history.fault = self._break(history.body)
        return history

    # -- parts --------------------------------------------------------------------------------------------------------

    def _pick(self, *options: Any) -> Any:
        return self._draw.choice(options)

    def _word(self, *, told: bool = True) -> str:
        self._words += 1
        word = f"w{self._words}w"
        if told:
            self._said.append(word)
        return word

    def _text(self, *, told: bool = True) -> str:
        return f"{self._pick(*NOISE)} {self._word(told=told)} {self._pick(*NOISE)}"

    def _content(self, kind: str = "text", *, tool: bool = False) -> Any:
        """A content in one of its shapes: null, a text, or parts."""
        match self._draw.randrange(6 if tool else 4):
            case 0:
                return None
            case 1:
                return self._text()
            case 4:
                return {"out": self._word(), "n": 1}
            case 5:
                return [self._draw.randrange(9), {"a": self._word()}, None]
        images = IMAGE["chat" if self._protocol == "simple" else self._protocol]
        parts: list[Any] = [{"type": kind, "text": self._text(), **self._pick(*FOREIGN)} for _ in range(2)]
        parts += [self._pick(*images, None, {"type": "zzz"}, {"type": kind, "text": None}, self._word())]
        if parts[-1] is not None and isinstance(parts[-1], str) and self._draw.random() < 0.5:
            parts.append({"type": "refusal", "refusal": self._word()})
        self._draw.shuffle(parts)
        return parts

    def _arguments(self) -> Any:
        """Arguments as models write them: also cut, wrong, or none."""
        match self._draw.randrange(6):
            case 0:
                return self._pick(None, "", " ", "{}", "null", {})
            case 1:
                return '{"city": "' + self._word()
            case 2:
                return json.dumps([self._word()])
            case 3:
                return {"a": self._text(), "b": [None, {"c": "\ud800"}]}
            case 4:
                return '{"a": "\\ud83d' + self._word() + '\\u0000"}'
        return json.dumps({"a": self._word(), "deep": json.loads("[" * 90 + "]" * 90)})

    def _turns(self) -> list[str]:
        return [self._pick("user", "assistant", "calls", "orphan", "system") for _ in range(self._draw.randrange(1, 6))]

    # -- protocols ----------------------------------------------------------------------------------------------------

    def _chat(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for turn in self._turns():
            foreign = self._pick(*FOREIGN)
            if turn in ("user", "system"):
                role = self._pick("system", "developer") if turn == "system" else "user"
                messages.append({"role": role, "content": self._content(), **foreign})
            elif turn == "orphan":
                message = {"role": self._pick("tool", "function"), "name": "f", "content": self._content(tool=True)}
                messages.append({**message, "tool_call_id": self._pick(*IDS), **foreign})
            else:
                messages.append({"role": "assistant", "content": self._content(), **self._thoughts(), **foreign})
            if turn == "calls":
                ids = self._draw.sample(IDS, 2)
                calls: list[Any] = [self._call(id) for id in ids]
                messages[-1]["tool_calls"] = [*self._pick([], [None]), *calls]
                for id in ids:
                    result = {"role": "tool", "tool_call_id": id, "content": self._content(tool=True)}
                    if self._draw.random() < 0.2 and result["content"] is None:
                        del result["content"]  # as JavaScript leaves out what is undefined
                    messages.append({**result, **self._pick(*FOREIGN)})
        messages.append({"role": "user", "content": self._text()})
        return {"messages": messages, "max_tokens": 1}

    def _call(self, id: str) -> dict[str, Any]:
        call = {"id": id, "type": "function", "function": {"name": "f", "arguments": self._arguments()}}
        return {**call, "index": 0, "extra_content": {"google": {"thought_signature": "A"}}}

    def _thoughts(self) -> dict[str, Any]:
        """Thoughts under the names that servers have for them, or nulls and empty ones."""
        match self._draw.randrange(5):
            case 0:
                return {self._pick("reasoning", "reasoning_content", "thinking"): self._text()}
            case 1:
                return {"reasoning_details": [{"type": "reasoning.text", "text": self._word(), "index": 0}, None]}
            case 2:
                return {"thinking_blocks": [{"type": "thinking", "thinking": self._word(), "signature": "A"}]}
            case 3:
                return {"reasoning_details": [{"type": "reasoning.encrypted", "data": "A"}], "reasoning": None}
        return {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": []}

    def _responses(self) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for turn in self._turns():
            foreign = {name: part for name, part in self._pick(*FOREIGN).items() if name != "id"}
            if turn in ("user", "system"):
                role = self._pick("system", "developer") if turn == "system" else "user"
                items.append({"role": role, "content": self._content("input_text"), **foreign})
            elif turn == "orphan":
                output = self._content("input_text", tool=True)
                items.append({"type": "function_call_output", "call_id": self._pick(*IDS), "output": output})
            else:
                sealed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
                items.append({**sealed, "encrypted_content": self._pick("gAAAAA==", None), **foreign})
                items.append({"type": self._pick("web_search_call", "compaction", "mcp_list_tools"), "id": "x"})
                items.append({"role": "assistant", "content": self._content("output_text"), "status": None})
            if turn == "calls":
                ids = self._draw.sample(IDS, 2)
                custom = {"type": "custom_tool_call", "call_id": ids[1], "name": "c", "input": self._content()}
                call = {"type": "function_call", "call_id": ids[0], "name": "f", "arguments": self._arguments()}
                items += [{**call, **foreign}, custom]
                for id, kind in zip(ids, ("function_call_output", "custom_tool_call_output"), strict=True):
                    items.append({"type": kind, "call_id": id, "output": self._content("input_text", tool=True)})
        items.append({"role": "user", "content": self._text()})
        return {"input": items, "instructions": self._text(), "max_output_tokens": 1}

    def _messages(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for turn in self._turns():
            foreign = self._pick(*FOREIGN)
            if turn == "user":
                messages.append({"role": "user", "content": self._content(), **foreign})
            elif turn == "system":
                messages.append({"role": self._pick("system", "developer"), "content": self._content(), **foreign})
            elif turn == "orphan":
                messages.append({"role": "user", "content": [self._result(self._pick(*IDS))], **foreign})
            else:
                thought = {"type": "thinking", "thinking": "of another server", "signature": self._pick("EqQB", None)}
                blocks = [self._pick(thought, {"type": "redacted_thinking", "data": "A"})]
                blocks.append({"type": "text", "text": self._text(), "citations": None, **foreign})
                blocks.append(self._pick(None, {"type": "server_tool_use", "id": "s", "name": "web_search"}))
                if turn == "calls":
                    ids = self._draw.sample(IDS, 2)
                    blocks += [{"type": "tool_use", "id": i, "name": "f", "input": self._arguments()} for i in ids]
                messages.append({"role": "assistant", "content": blocks})
                if turn == "calls":
                    messages.append({"role": "user", "content": [*map(self._result, ids), {"type": "text"}]})
        messages.append({"role": "user", "content": self._text()})
        system = self._pick(None, self._text(), [{"type": "text", "text": self._word(), "cache_control": None}])
        return {"messages": messages, "max_tokens": 1, "system": system}

    def _result(self, id: str) -> dict[str, Any]:
        content = self._content(tool=True)
        return {"type": "tool_result", "tool_use_id": id, "content": content, "is_error": self._pick(None, True, "no")}

    # -- faults -------------------------------------------------------------------------------------------------------

    def _break(self, body: dict[str, Any]) -> str:
        """Make the last message wrong, as a program may that never worked. Return the path that an error must name."""
        name = "input" if self._protocol == "responses" else "messages"
        place = len(body[name]) - 1
        path = f"{name}[{place}]"
        faults: list[tuple[dict[str, Any], str]] = [
            ({"role": "user", "content": 5}, ".content"),
            ({"role": None, "content": "x"}, ".role"),
            ({"role": "user", "contnt": "x"}, ".contnt"),
            ({"role": "user", "content": [{"text": "x"}]}, ".content[0]"),
        ]
        if self._protocol == "responses":
            call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
            faults += [({**call, "call_id": 5}, ".call_id"), ({**call, "name": None}, ".name")]
            faults += [({**call, "name": "f\0"}, ".name"), ({"type": "item_reference", "id": "none"}, ".id")]
        elif self._protocol == "messages":
            use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
            wrong = [({**use, "id": None}, ".id"), ({**use, "name": "\ud800"}, ".name")]
            faults += [({"role": "assistant", "content": [one]}, f".content[0]{end}") for one, end in wrong]
            result = {"type": "tool_result", "tool_use_id": 1}
            faults += [({"role": "user", "content": [result]}, ".content[0].tool_use_id")]
        else:
            call = self._call("1")
            wrong_calls = [({**call, "id": "\0"}, ".id"), ({**call, "function": {"name": 5}}, ".function")]
            faults += [({"role": "assistant", "tool_calls": [c]}, f".tool_calls[0]{end}") for c, end in wrong_calls]
            faults += [({"role": "tool", "tool_call_id": 5, "content": "x"}, ".tool_call_id")]
            faults += [({"role": "user", "content": "x", "name": 5}, ".name")]
        body[name][place], end = self._pick(*faults)
        return path + end


READERS: dict[str, Any] = {"chat": chat_completions, "responses": responses, "messages": messages, "simple": simple}
DEFAULTS = RequestDefaults(SamplingParams(), seal=Seal(b"s", ""), known_vars=frozenset())


def told(history: History, protocol: str) -> str:
    """All that the model is told of a conversation."""
    [prompt] = READERS[protocol].read(history.body, DEFAULTS).prompts
    return json.dumps(prompt, ensure_ascii=False)


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("protocol", READERS)
def test_no_history_is_an_error_that_a_client_cannot_mend(http: httpx.Client, protocol: str, count: int) -> None:
    """The slow ones are 1,200 histories. `simple` is the fourth: the lines of a batch file, without a server."""
    maker, refused = Maker(protocol, str(count)), Counter[str]()
    for _ in range(count):
        history = maker.make()
        if history.fault is None:
            said = told(history, protocol)
            assert [word for word in history.said if said.count(word) != 1] == [], (history.body, said)
        else:
            refused[history.fault.rpartition("].")[2]] += 1
            with pytest.raises(ValueError) as error:
                told(history, protocol)
            assert str(error.value.field).startswith(history.fault), (history, error.value)
        if protocol != "simple":
            path = READERS[protocol].URL
            reply = http.post(path, content=json.dumps(history.body).encode("utf-8", "surrogatepass"))
            assert reply.status_code == (200 if history.fault is None else 400), (history, reply.text)
            if history.fault is not None:
                assert history.fault in reply.text and len(reply.text) < 1000
    assert count < 100 or len(refused) > 4
    print(protocol, count, dict(refused))
