"""Reading: one prompt with what is remembered of earlier answers, and its own answers for the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cortexmlx.server.transcripts.answered import Answered
from cortexmlx.server.transcripts.table import Remembered, Table
from cortexmlx.sessions.transcript import Transcript
from cortexmlx.sessions.turn import Render, anchor_of, said_tokens, text_or_none
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.messages import PromptReader
from cortexmlx.types.request import Completion, Message
from cortexmlx.types.sampling_params import SamplingParams


class Reading:
    """One prompt of a client. It is the `memory` of a ChatPrompt."""

    def __init__(self, table: Table, client: str, messages: Sequence[Message], params: SamplingParams) -> None:
        self._table = table
        self._client = client
        self._params = params
        self._reader: PromptReader | None = None
        self._render: Render | None = None
        self._read = Transcript()
        self._continued: Remembered | None = None
        self._answers: tuple[Answered, ...] = ()
        self.messages = tuple(self._given_back(message) for message in messages)
        """The messages, with the calls as they were written."""

    def _given_back(self, message: Message) -> Message:
        """Return an answer with calls as it was given, if its calls are known by their ids."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls or not isinstance(calls[0], dict):
            return message
        for answer in self._table.answer_of(self._client, str(calls[0].get("id"))):
            if answer.is_said_by(message):
                self._answers = (*self._answers, answer)
                return answer.given_back(message)
        return message

    def tokens(
        self, reader: PromptReader, text: str, render: Callable[[Sequence[Message]], str | list[int]]
    ) -> list[int]:
        """Return the tokens of the rendered messages: those of what is remembered, as far as the texts agree."""
        encode = partial(reader.encode, add_special_tokens=False)
        rendered = self._render = text_or_none(render)
        self._reader = reader
        found = self._table.nearest(self._client, text, self.messages)
        if found is None:
            self._read = Transcript().read(text, encode)
        else:
            self._table.use(self._client, found)
            self._read = found.continued(text, self.messages, encode, rendered)
            self._continued = found if found.is_begin_of(self._read) else None
        return list(self._read.tokens)

    def anchor(self, thoughts: Thoughts | None) -> int:
        """See `PromptMemory`."""
        if self._reader is None or self._render is None:
            return 0
        encode = partial(self._reader.encode, add_special_tokens=False)
        return anchor_of(self._read, self.messages, thoughts, self._render, encode)

    def ended(self, completion: Completion) -> None:
        """Remember the answers to this prompt."""
        reader = self._reader
        if reader is None:  # the template makes tokens, so no text is known
            return
        instead = self._continued
        for answer in (completion, *completion.others):
            tokens, ended = said_tokens(answer, self._params, reader.eos_token_ids)
            if tokens is None:
                continue
            end = reader.token_bytes(answer.token_ids[-1]).decode("utf-8", "replace") if ended else ""
            answered = Answered.of(answer, tokens, end, self._params.offered)
            self._table.keep(self._client, Remembered(self._read, len(self.messages), answered, self._answers), instead)
            instead = None
