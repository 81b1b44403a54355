"""The events of a streamed message: its blocks one after the other, and at the end why it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.anthropic.errors import error_body
from cortexmlx.protocols.openai.choices import notes
from cortexmlx.protocols.openai.tools import whole
from cortexmlx.protocols.request import Body, ReplyInfo, Request
from cortexmlx.structured.tools import CallDelta
from cortexmlx.types.request import Completion, TokenEvent


@dataclass
class _Block:
    """The block that is open. `text` is what was said of thoughts so far."""

    kind: str
    call: int = 0
    text: str = ""


class Chunks:
    """The events of one streamed message, from the engine's events. Each is a body with a `type`."""

    def __init__(self, request: Request, info: ReplyInfo) -> None:
        self._request = request
        self._info = info
        self._begun = False
        self._open: _Block | None = None
        self._count = 0
        self._text = 0
        self._thinking = 0
        self._calls = 0

    def of(self, event: TokenEvent, prompt: int = 0) -> list[Body]:
        """Return the events of one event of the engine. The first of all says that the message begins."""
        if event.error is not None:
            return [error_body(event.error)]
        return [*self._begin(event), *self._of(event)]

    def _of(self, event: TokenEvent) -> Iterator[Body]:
        if event.completion is not None:
            yield from self._end(event.completion)
        else:
            yield from self._grow(event.thinking, event.text, event.tool_calls)

    def _begin(self, event: TokenEvent) -> Iterator[Body]:
        if not self._begun:
            self._begun = True
            usage = messages.usage_so_far(event.progress or self._info.progress())
            yield {"type": "message_start", "message": messages.begun(self._info, usage)}

    def _grow(self, thinking: str, text: str, calls: Sequence[CallDelta]) -> Iterator[Body]:
        self._thinking += len(thinking)
        self._text += len(text)
        if thinking:
            yield from self._switch("thinking", {"thinking": "", "signature": ""})
            assert self._open is not None
            self._open.text += thinking
            if not messages.omits(self._request):
                yield self._delta({"type": "thinking_delta", "thinking": thinking})
        if text:
            yield from self._switch("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for delta in calls:
            self._calls = max(self._calls, delta.index + 1)
            yield from self._switch("tool_use", {"id": delta.id, "name": delta.name, "input": {}}, delta.index)
            if delta.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})

    def _switch(self, kind: str, begun: Body, call: int = 0) -> Iterator[Body]:
        """Yield the end of the open block and the beginning of another, if what comes does not belong to the open
        one.
        """
        if self._open is not None and (self._open.kind, self._open.call) == (kind, call):
            return
        yield from self._close()
        self._open = _Block(kind, call)
        yield {"type": "content_block_start", "index": self._count, "content_block": {"type": kind, **begun}}

    def _close(self) -> Iterator[Body]:
        if self._open is None:
            return
        if self._open.kind == "thinking":
            signature = messages.thought(self._request, self._info, self._open.text)["signature"]
            yield self._delta({"type": "signature_delta", "signature": signature})
        yield {"type": "content_block_stop", "index": self._count}
        self._open = None
        self._count += 1

    def _end(self, completion: Completion) -> Iterator[Body]:
        """Yield what no event has said yet, and why the message ended."""
        calls = whole(completion.tool_calls, self._calls)
        yield from self._grow(completion.thinking[self._thinking :], completion.text[self._text :], calls)
        if not self._count and self._open is None:
            yield from self._switch("text", {"text": ""})
        yield from self._close()
        delta = messages.ended(self._request, completion)
        usage = messages.usage(completion, self._info)
        yield {"type": "message_delta", "delta": delta, "usage": usage, **notes(self._request, completion)}
        yield {"type": "message_stop"}

    def _delta(self, delta: Body) -> Body:
        return {"type": "content_block_delta", "index": self._count, "delta": delta}
