"""Conversation: the turns of a chat with a model. The next turn computes only what is new."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import NO_VARIABLES, TemplateVars, checked_vars
from cortexmlx.progress import OnProgress
from cortexmlx.request import Completion, FinishReason, Message
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.serving.app.interruptible import read_with_timeout
from cortexmlx.serving.prompt import ChatTokens, Reader, render, thoughts_after
from cortexmlx.serving.streams import Listener
from cortexmlx.sessions.markdown import as_markdown
from cortexmlx.sessions.reply import AsyncReply, Reply, StartedTurn
from cortexmlx.sessions.saved import SavedConversation, SavedModel, listed, messages_in, text_of
from cortexmlx.sessions.settings import moved, of_file
from cortexmlx.sessions.transcript import Transcript
from cortexmlx.sessions.turn import (
    FinishedTurn,
    Turn,
    place_that_leaves,
    said_by_model,
    thoughts_in,
    with_so_far,
    without_answer,
)

if TYPE_CHECKING:
    from cortexmlx.serving.handle import RequestHandle
    from cortexmlx.stats import ModelInfo

log = logging.getLogger("cortexmlx")

Question = str | Message | Sequence[Message]
"""What is said to the model: a user's text, or messages, such as the outputs of tools."""


class ConversationEngine(Protocol):
    """What a conversation needs of an engine."""

    info: ModelInfo

    @property
    def longest_request(self) -> int:
        """Tokens that a prompt and its answer may have."""

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        listener: Listener | None = None,
        client: str | None = None,
        timeout: float | None = None,
    ) -> RequestHandle:
        """See `Engine.submit`."""

    def conversation(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        params: SamplingParams | None = None,
        template_vars: TemplateVars = NO_VARIABLES,
        client: str | None = None,
    ) -> Conversation:
        """See `Engine.conversation`."""


class Conversation:
    """A conversation with the model of an engine, made by `Engine.conversation`.

    `system`, `params`, the sampling parameters, and `template_vars`, the variables of the chat template, may be changed
    between turns, and hold for those to come. Each turn renders all messages through the model's chat template, and its
    tokens begin with those computed before as far as the texts agree: the model's own tokens, not those of its text. So
    the prefix cache has them, after an `undo`, a `regenerate`, an `edit` (up to it), in a `fork`, and in another
    process with what a disk kept.

    One thread at a time, one turn at a time; for more there is `fork`. A turn that fails, or is cancelled before its
    first word, leaves no trace. `notes` say what was remarkable about the file that was loaded.

    `unread` of the oldest messages are not sent to the model any more (`make_room`). It may be changed between turns.
    """

    def __init__(
        self,
        host: ConversationEngine,
        reader: Reader,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        params: SamplingParams | None = None,
        template_vars: TemplateVars = NO_VARIABLES,
        client: str | None = None,
    ) -> None:
        self.system = system
        self.params = params or SamplingParams()
        self.template_vars = checked_vars(template_vars)
        self.notes: tuple[str, ...] = ()
        self._host = host
        self._reader = reader
        self._client = client
        self.unread = 0
        self._messages = listed(messages)
        self._transcript = Transcript()
        self._open: ref[Reply | AsyncReply] | None = None
        self._offered: FinishedTurn | None = None

    @property
    def thinking(self) -> str:
        """What the model thought before its last answer; empty if it did not, or nothing was answered."""
        said = next((m for m in reversed(self._messages) if m["role"] == "assistant"), None)
        return "" if said is None else thoughts_in(said, self._reader.thoughts)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said so far, without the system prompt."""
        return tuple(dict(message) for message in self._messages)

    @property
    def tokens(self) -> int:
        """Tokens of what was said, as the next turn sends them; 0 if nothing was."""
        said = self._said(self._messages)
        return len(self._begin(self._messages).prompt) if said else 0

    @property
    def context_left(self) -> int:
        """Tokens that are left for what comes in one request of this engine, and with that in the model's context."""
        return max(0, self._host.longest_request - self.tokens)

    def count(self, question: Question | None = None) -> int:
        """Tokens that the model would read to answer `question` (None: the last one). Raises InvalidRequest."""
        return len(self._begin(self._asked(question)).prompt)

    def make_room(self, answer: int, question: Question | None = None) -> int:
        """Send the oldest turns no more, as few as leave room for `question` (None: the last one) and `answer` tokens:
        all of them if that is not enough, and none if the question has no room even so. They stay in `messages`.
        Returns how many messages that are, which `unread` counts. The system prompt is always sent.
        """
        messages, longest = self._asked(question), self._host.longest_request

        def tokens(begin: int) -> int:
            return len(self._begin(messages, begin).prompt)

        before = self.unread
        self.unread = place_that_leaves(answer, longest, messages, tokens, before)
        return self.unread - before

    # -- turns --------------------------------------------------------------------------------------------------------

    def ask(
        self,
        question: Question,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Completion:
        """The whole answer. `params` hold for this turn alone. An interrupt cancels it, and so does `on_progress` if it
        raises: it is told on this thread how far a prompt is that takes several steps. `timeout` and errors as for
        `Engine.submit`.
        """
        return self.stream(question, params, timeout=timeout).result(on_progress)

    def stream(
        self,
        question: Question | None = None,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> Reply:
        """The answer as it comes. Without a question the last one is answered again: its answer gives way when the new
        one is there. Raises what `submit` raises, and InvalidRequest if there is nothing to answer.
        """
        reply = Reply(self._submit(self._asked(question), params or self.params, timeout, None))
        self._open = ref(reply)
        return reply

    def astream(
        self,
        question: Question | None = None,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> AsyncReply:
        """`stream` for asyncio. The turn is rendered and submitted with the first `anext`, which raises what is wrong
        with it, on another thread: the event loop waits for nothing.
        """
        reply = AsyncReply(partial(self._submit, self._asked(question), params or self.params, timeout))
        self._open = ref(reply)
        return reply

    async def aask(
        self,
        question: Question,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Completion:
        """`ask` for asyncio."""
        return await self.astream(question, params, timeout=timeout).result(on_progress)

    def regenerate(self, params: SamplingParams | None = None) -> Completion:
        """Answer the last question again. Raises InvalidRequest if there is none."""
        return self.stream(None, params).result()

    def choose(self, answer: Completion) -> None:
        """Let the last turn have another of the answers that it got: its completion, or one of the `others` of that
        (`n` above 1). Raises InvalidRequest for anything else.
        """
        self._check_quiet()
        offered = self._offered
        if offered is None or not any(answer is each for each in offered.answers):
            raise InvalidRequest("that is no answer of the last turn: choose its completion, or one of its others")
        self._keep(offered.turn, offered.params, answer)

    # -- what was said ------------------------------------------------------------------------------------------------

    def undo(self) -> tuple[Message, ...]:
        """Take the last turn back: an answer and what it answered, or what nobody answered yet. Returns the latter; it
        is empty if nothing was said.
        """
        self._check_quiet()
        question = without_answer(self._messages)
        begin = next((i + 1 for i in range(len(question) - 1, -1, -1) if question[i]["role"] == "assistant"), 0)
        self._change(self._messages[:begin])
        return question[begin:]

    def edit(self, index: int, text: str) -> None:
        """Change the text of one of `messages`; those behind it stay. Raises InvalidRequest if there is none such."""
        self._check_quiet()
        count = len(self._messages)
        if not -count <= index < count:
            raise InvalidRequest(f"there is no message {index}: the conversation has {count}")
        changed = list(self._messages)
        changed[index] = {**changed[index], "content": text}
        self._change(tuple(changed))

    def clear(self) -> None:
        """Forget all messages, but not the system prompt."""
        self._check_quiet()
        self._change(())

    def fork(self, engine: ConversationEngine | None = None) -> Conversation:
        """Another conversation that begins with this one. What both share is computed and kept once. It may go on with
        another `engine`, and then reads all of it; if that has another model, everything is computed anew, and `notes`
        say what does not hold with that: what its chat template does not read, and ids of tokens.
        """
        host = self._host if engine is None else engine
        held = moved(self._host.info, host.info, self.params, self.template_vars)
        other = host.conversation(
            system=self.system,
            messages=self._messages,
            params=held.params,
            template_vars=held.template_vars,
            client=self._client,
        )
        other.notes = held.notes
        if host.info.identity == self._host.info.identity:
            other._transcript = self._transcript
        if host is self._host:
            other.unread = self.unread
        return other

    def so_far(self) -> Conversation:
        """A fork with the turn that is being answered, as far as the answer was read, for a program that must end."""
        other, reply = self.fork(), None if self._open is None else self._open()
        if reply is not None and not reply.ended and (turn := reply._turn) is not None:
            other._messages, other._transcript = with_so_far(turn, *reply._so_far, self._reader), turn.transcript
        return other

    # -- in a file ----------------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to one JSON file, in one go, readable for this user only; logits processors, which are
        functions, are left out. Raises ConversationFileError.
        """
        info = self._host.info
        model = SavedModel(info.name, str(Path(info.path).absolute()), info.identity)
        saved = SavedConversation(
            model, self.system, self._messages, self.params, self._transcript, self.template_vars, self.unread
        )
        saved.write(Path(path))

    def load(self, path: str | PathLike[str]) -> None:
        """Go on with what `save` wrote, system prompt and sampling parameters included. With another model the texts
        are the same and everything is computed anew, without the variables that its template does not read and without
        ids of tokens; `notes` and the log say so. Or with messages as the OpenAI API has them: a JSON list, an object
        with `messages`, or one message a line; the sampling parameters stay as they are. Raises ConversationFileError;
        then nothing changed.
        """
        self._check_quiet()
        path = Path(path)
        exchanged = messages_in(path, text_of(path))
        if exchanged is not None:
            self.system, messages = exchanged
            self._change(messages, unread=0)
            self._transcript, self.notes = Transcript(), ()
            return
        saved, info = SavedConversation.read(path), self._host.info
        same = saved.model.identity == info.identity
        top = max(saved.transcript.tokens, default=0) if saved.transcript is not None else 0
        held = of_file(path, saved, info)
        self.system, self.params = saved.system, held.params
        self.template_vars, self.notes = held.template_vars, held.notes
        self._change(saved.messages, unread=saved.unread)
        self._transcript = saved.transcript if same and saved.transcript and top < info.vocab_size else Transcript()
        for note in self.notes:
            log.warning(note)

    def markdown(self) -> str:
        """All that was said, to read: a heading for each message, their texts as they are."""
        return as_markdown(self._host.info.name, self._said(self._messages))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_quiet(self) -> None:
        reply = None if self._open is None else self._open()
        if reply is not None and not reply.ended:
            raise InvalidRequest(
                "the conversation is being answered: read the answer to its end, or close it; a fork can be asked "
                "something else meanwhile"
            )

    def _asked(self, question: Question | None) -> tuple[Message, ...]:
        """All messages, with the question last."""
        self._check_quiet()
        if question is None:
            messages = without_answer(self._messages)
        elif isinstance(question, str):
            messages = (*self._messages, {"role": "user", "content": question})
        else:
            messages = (*self._messages, *listed([question] if isinstance(question, Mapping) else question))
        if not messages:
            raise InvalidRequest("nothing was asked yet, so there is nothing to answer")
        return messages

    def _said(self, messages: Sequence[Message]) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *messages]

    def _change(self, messages: tuple[Message, ...], unread: int | None = None) -> None:
        """These are the messages now. What is not read any more of them would be all: then all is read."""
        self._messages, self._offered = messages, None
        self.unread = self.unread if unread is None else unread
        if self.unread >= len(messages):
            self.unread = 0

    def _begin(self, messages: tuple[Message, ...], unread: int | None = None) -> Turn:
        """What the model reads to answer these messages, but for the first `unread` (None: those of this one)."""
        if not self._host.info.chat_template:
            raise InvalidRequest(f"{self._host.info.name} has no chat template, so it cannot hold a conversation")
        sent = messages[self.unread if unread is None else unread :]
        rendered = render(self._reader, self._said(sent), self.template_vars)
        thoughts = thoughts_after(self._reader, rendered)
        if not isinstance(rendered, str):
            tag = thoughts.open if thoughts is not None and thoughts.begun else ""
            return Turn(messages, Transcript(), ChatTokens(rendered, thoughts), tag)
        read = self._transcript.read(rendered, partial(self._reader.encode, add_special_tokens=False))
        tag = rendered[rendered.rindex(thoughts.open) :] if thoughts is not None and thoughts.begun else ""
        return Turn(messages, read, ChatTokens(read.tokens, thoughts), tag)

    def _submit(
        self,
        messages: tuple[Message, ...],
        params: SamplingParams,
        timeout: float | None,
        listener: Listener | None,
    ) -> StartedTurn:
        turn = read_with_timeout(timeout, partial(self._begin, messages))
        handle = self._host.submit(turn.prompt, params, listener=listener, client=self._client, timeout=timeout)
        return StartedTurn(handle, turn, partial(self._end, turn, params))

    def _end(self, turn: Turn, params: SamplingParams, completion: Completion) -> None:
        """Keep a turn that has ended with the first of its answers, unless it was cancelled before there was any."""
        answers = (completion, *completion.others)
        kept = next((a for a in answers if a.raw_text or a.finish_reason is not FinishReason.CANCELLED), None)
        if kept is not None:
            self._keep(turn, params, kept)
            self._offered = FinishedTurn(turn, params, answers)

    def _keep(self, turn: Turn, params: SamplingParams, answer: Completion) -> None:
        """Keep a turn with this answer. The token that ended it is the template's to write."""
        tokens, text = answer.token_ids, answer.raw_text
        stopped = answer.finish_reason is FinishReason.STOP
        if stopped and tokens[-1] in {*self._reader.eos_token_ids, *params.stop_token_ids}:
            tokens, stopped = tokens[:-1], False
        self._messages = (*turn.messages, said_by_model(turn, answer, self._reader.reads_thoughts_field))
        # What a stop string cut away is not said: the tokens of the rest are those of its text.
        self._transcript = turn.transcript if stopped else turn.transcript.wrote(text, tokens)
