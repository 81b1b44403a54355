"""The conversation in a body of Anthropic's API, `system` and `messages`, as messages of the OpenAI API.

Neighbouring messages of one role are one turn. What a user says in a turn with results is a part of a result, in
`<user>` tags, since the loop of calls goes on: agents put reminders there. A user's message would end the loop, and
many chat templates leave out the thoughts of loops that have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import inside
from cortexmlx.protocols.history import (
    checked_name,
    known_fields,
    leave_out_thoughts,
    message_fields,
    orphan,
    read_arguments,
    read_part,
    read_text,
)
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.seal import Seal
from cortexmlx.types.messages import tagged
from cortexmlx.types.request import Message

BILLING = "x-anthropic-billing-header:"
"""How a block of `system` begins that is for accounting. It differs in every conversation, so a prompt that begins with
it would share nothing with others in the prefix cache.
"""

_ANSWERED = "the last message is an assistant's, but an answer cannot be continued: end with a user's message"


def read_conversation(said: Mapping[str, Any], seal: Seal | None) -> list[Message]:
    """Return the messages of a body. `seal` proves that thoughts are the model's own; None: they are not checked.
    Raises InvalidRequest with the path of an invalid or unserved block.
    """
    with inside("system"):
        system = [text for text in _texts(said.get("system", [])) if not text.startswith(BILLING)]
    messages = said.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("`messages` must be a list of objects with `role` and `content`", field="messages")
    turns = _Turns(seal)
    last_user = max((n for n, each in enumerate(messages) if _role(each) == "user"), default=-1)
    for place, message in enumerate(messages):
        with inside(f"messages[{place}]"):
            role, content = _parts(message)
            with inside("content"):
                if role == "assistant":
                    turns.assistant(place, content)
                elif role == "user":
                    turns.user(place, content)
                elif message.get("clear_at") == "next_user_message" and place < last_user:
                    continue
                elif turns.begun:
                    turns.system(place, _texts(content))
                else:
                    system += _texts(content)
    first = [{"role": "system", "content": _lines(system)}] if any(system) else []
    turns.end(len(messages) - 1)
    return read_messages(first + turns.messages, ["system"] * len(first) + turns.paths)


@dataclass
class _Turn:
    """A message of a user or an assistant, or the result of a call, while it grows."""

    role: str
    place: int
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    """What the user says beside a result."""
    more: dict[str, str] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """Return it as a message of the OpenAI API. An assistant's texts have no line breaks between them."""
        message: dict[str, Any] = {"role": self.role, **self.more}
        said = [tagged("user", _lines(self.beside))] if any(self.beside) else []
        message["content"] = "".join(self.texts) if self.role == "assistant" else _lines([*self.texts, *said])
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class _Turns:
    """The turns of a conversation."""

    def __init__(self, seal: Seal | None) -> None:
        self._turns: list[_Turn] = []
        self._seal = seal
        self._called: dict[str, str] = {}

    @property
    def begun(self) -> bool:
        """Whether there is a turn."""
        return bool(self._turns)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns as messages of the OpenAI API."""
        return [turn.message() for turn in self._turns]

    @property
    def paths(self) -> list[str]:
        """The places of the turns in the body."""
        return [f"messages[{turn.place}]" for turn in self._turns]

    def system(self, place: int, texts: list[str]) -> None:
        """Add texts of a system message. How templates want to read them is not known here."""
        self._turn("system", place).texts += texts

    def user(self, place: int, content: object) -> None:
        """Add what a user says, and the results of calls. Raises InvalidRequest."""
        since: list[_Turn] = []
        while self._turns and self._turns[-1].role != "assistant":
            since.insert(0, self._turns.pop())
        results = [turn for turn in since if turn.role == "tool"]
        before = [] if results else [text for turn in since if turn.role == "user" for text in turn.texts]
        began, orphans, texts = len(results), list[str](), list[str]()
        for path, block, kind in _blocks(content):
            with inside(path):
                if kind == "tool_result":
                    result = self._result(place, block)
                    if result.role == "tool":
                        results.append(result)
                    else:
                        orphans += result.texts
                elif (text := read_part(block)) or kind == "text":
                    (results[-1].beside if results else texts).append(text)
        texts = [*orphans, *texts]
        if not results:
            self._turns += since
            self._turn("user", place).texts += texts
            return
        if began:
            results[-1].beside += texts
        else:
            results[0].beside[:0] = [*before, *texts]
        self._turns += results
        for turn in since:
            if turn.role == "system":
                self.system(turn.place, turn.texts)

    def assistant(self, place: int, content: object) -> None:
        """Add what an assistant says, thinks and calls. Raises InvalidRequest."""
        turn = self._turn("assistant", place)
        for path, block, kind in _blocks(content):
            with inside(path):
                if kind == "tool_use":
                    turn.calls.append(self._call(block))
                elif kind in ("thinking", "redacted_thinking"):
                    turn.thoughts.append(self._thought(block))
                else:
                    turn.texts.append(read_part(block))

    def end(self, place: int) -> None:
        """Check that an answer may follow. Raises InvalidRequest."""
        if not self.begun:
            raise InvalidRequest("`messages` has no user's message", field="messages")
        if self._turns[-1].role == "assistant":
            raise InvalidRequest(_ANSWERED, field=f"messages[{place}]")

    def _turn(self, role: str, place: int) -> _Turn:
        """Return the last turn if it has this role, or else a new one."""
        if not self.begun or self._turns[-1].role != role:
            self._turns.append(_Turn(role, place))
        return self._turns[-1]

    def _result(self, place: int, block: Mapping[str, Any]) -> _Turn:
        """Return the result of a call."""
        block = known_fields(block, ("tool_use_id", "content", "is_error"), "a result")
        id, content = checked_name("tool_use_id", block.get("tool_use_id")), block.get("content")
        with inside("content"):
            parts = [[part] for part in content] if isinstance(content, list) else [content]
            texts = [read_text(part, loose=True) for part in parts]
        if block.get("is_error") not in (None, False, 0, "false"):
            said = _lines(texts)
            texts = [said if said.lower().startswith("error") else f"Error: {said}"]
        if id not in self._called:
            return _Turn("user", place, [orphan(_lines(texts))["content"]])
        return _Turn("tool", place, texts, more={"tool_call_id": id, "name": self._called[id]})

    def _call(self, block: Mapping[str, Any]) -> dict[str, Any]:
        id, name = (checked_name(part, block.get(part)) for part in ("id", "name"))
        self._called[id] = name
        return {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": read_arguments(block.get("input"))},
        }

    def _thought(self, block: Mapping[str, Any]) -> str:
        """Return thoughts that this server wrote for this client; others are left out."""
        text, signature = block.get("thinking"), block.get("signature")
        if isinstance(text, str):
            if self._seal is None or (text and isinstance(signature, str) and self._seal.holds(text, signature)):
                return text
            if not text and isinstance(signature, str) and (known := self._seal.unwrap(signature)) is not None:
                return known
        leave_out_thoughts()
        return ""


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def _parts(message: object) -> tuple[str, object]:
    """Return the role and the content of a message. Raises InvalidRequest."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"it is {message!r:.80}, but must be an object with `role` and `content`")
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"role is {role!r:.80}, but must be user, assistant or system", field="role")
    message = message_fields(message, ("role", "content", "clear_at"), "a message")
    if role == "system" and message.get("clear_at") not in (None, "never", "next_user_message"):
        shown = f"{message['clear_at']!r:.80}"
        raise InvalidRequest(f"clear_at is {shown}, but must be never or next_user_message", field="clear_at")
    return role, message.get("content")


def _blocks(content: object) -> list[tuple[str, Mapping[str, Any], str]]:
    """Return the blocks of a content, each with its path in it and its type. Raises InvalidRequest."""
    if isinstance(content, str):
        return [("", {"type": "text", "text": content}, "text")]
    if content is not None and not isinstance(content, list):
        raise InvalidRequest(f"it is {content!r:.80}, but must be a text or a list of blocks")
    blocks = []
    for place, block in enumerate(content or ()):
        if block is None:
            continue
        block = {"type": "text", "text": block} if isinstance(block, str) else block
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str):
            why = f"a block is {block!r:.80}, but must be an object with a `type`"
            raise InvalidRequest(why, field=f"[{place}]")
        blocks.append((f"[{place}]", block, kind))
    return blocks


def _texts(content: object) -> list[str]:
    """Return the texts of a content that has nothing else. Raises InvalidRequest."""
    texts = []
    for path, block, _ in _blocks(content):
        with inside(path):
            texts.append(read_part(block))
    return texts


def _lines(texts: list[str]) -> str:
    """Return texts, each in lines of its own."""
    return "\n".join(texts)
