"""Conversation: the turns of a chat with a model. The next turn computes only what is new."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack
from weakref import ref

from cortexmlx.core.arguments import KeywordsBesideTools, SamplingKeywords, checked_params, with_keywords
from cortexmlx.core.blocking_calls import tokenize_with_timeout
from cortexmlx.core.prompt import forget_images_after, make_allowed_calls
from cortexmlx.core.streams import Listener
from cortexmlx.errors import ConversationFileError, InvalidRequest, PromptTooLong
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.models.tokenizers.templates import accept_variables
from cortexmlx.sessions.reply import AsyncReply, Reply, StartedTurn
from cortexmlx.sessions.saved import (
    SavedConversation,
    SavedModel,
    conversation_markdown,
    copy_messages,
    parse_foreign_messages,
    read_text,
    with_image_bytes,
)
from cortexmlx.sessions.tool_rounds import MAX_ROUNDS, Approve, AsyncApprove, OnToolEvent, ToolRounds
from cortexmlx.sessions.turn import (
    FinishedTurn,
    Transcript,
    Turn,
    answer_message,
    answer_tokens,
    begin_turn,
    drop_last_answer,
    first_message_that_fits,
    last_question,
    thoughts_in,
    with_partial_answer,
)
from cortexmlx.stats import ModelInfo
from cortexmlx.structured.tools import Tool
from cortexmlx.types.messages import NO_VARIABLES, TemplateVars, checked_vars
from cortexmlx.types.progress import OnProgress
from cortexmlx.types.request import Completion, FinishReason, Message
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.core.handle import RequestHandle

log = logging.getLogger("cortexmlx")

Params = SamplingParams | None
Question = str | Message | Sequence[Message]
"""What is said to the model: a user's text, or messages, such as the outputs of tools."""


class ConversationEngine(Protocol):
    """What a conversation needs of its engine; see the members of `Engine`, which stands above."""

    info: ModelInfo

    @property
    def longest_request(self) -> int: ...
    @property
    def submit(self) -> Callable[..., RequestHandle]: ...
    @property
    def conversation(self) -> Callable[..., Any]: ...


class Conversation:
    """A chat with the model of an engine: its messages, and the tokens they became. Made by `Engine.conversation`.

    `system`, `params` (sampling parameters) and `template_vars` (of the chat template) may be changed between turns.
    Each turn renders all messages through the chat template. Where the texts agree, its tokens are those computed
    before: the model's own tokens, not those of its text. So the prefix cache has them, after an `undo`, a `regenerate`
    or an `edit`, in a `fork`, and in another process if they are on disk.

    Only one thread may use it at a time, and one turn runs at a time; use `fork` for more. A turn that fails, or is
    cancelled before its first word, leaves no trace. `notes` tell about the file that was loaded. The oldest `unsent`
    messages are no longer sent to the model (`make_room`).
    """

    def __init__(
        self,
        engine: ConversationEngine,
        reader: SharedTokenizer,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        params: SamplingParams | None = None,
        template_vars: TemplateVars = NO_VARIABLES,
        client: str | None = None,
        adapter: str | None = None,
    ) -> None:
        self.system = system
        self.params = params or SamplingParams()
        self.template_vars = checked_vars(template_vars)
        self.notes: tuple[str, ...] = ()
        self._engine = engine
        self._reader = reader
        self._client = client
        self.adapter = adapter
        """The adapter of its next turns; None: the model as it is."""
        self.unsent = 0
        self._messages = copy_messages(messages)
        self._transcript = Transcript()
        self._open: ref[Reply | AsyncReply] | None = None
        self._runs_functions = False
        self._finished_turn: FinishedTurn | None = None

    @property
    def thinking(self) -> str:
        """The model's thoughts before its last answer; empty if it had none, or has not answered yet."""
        last_answer = next((m for m in reversed(self._messages) if m["role"] == "assistant"), None)
        return "" if last_answer is None else thoughts_in(last_answer, self._reader.thoughts)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far, without the system prompt."""
        return tuple(dict(message) for message in self._messages)

    @property
    def tokens(self) -> int:
        """How many tokens all messages have as the next turn sends them; 0 if there are none."""
        messages = self._with_system(self._messages)
        return len(self._begin_turn(self._messages).prompt) if messages else 0

    @property
    def context_left(self) -> int:
        """How many tokens are left for further messages, within one request of this engine."""
        return max(0, self._engine.longest_request - self.tokens)

    def count(self, question: Question | None = None) -> int:
        """Return how many tokens the prompt for `question` has (None: for the last one). Raises InvalidRequest."""
        return len(self._begin_turn(self._with_question(question)).prompt)

    def make_room(self, answer: int, question: Question | None = None) -> int:
        """Stop sending the oldest turns, until the prompt for `question` (None: the last question) leaves room for an
        answer of `answer` tokens. If no earlier turn fits, send the question alone. Unsent turns stay in `messages`,
        and `unsent` counts their messages. Return how many messages this call leaves out, 0 if there is room. The
        system prompt is always sent. Raises PromptTooLong if the question alone is too long; then nothing changes.
        """
        previous_unsent = self.unsent
        self.unsent = self._first_message_that_fits(answer, self._with_question(question))
        return self.unsent - previous_unsent

    def _first_message_that_fits(self, answer: int, messages: tuple[Message, ...]) -> int:
        """Return how many messages `make_room` leaves unsent. Raises PromptTooLong."""

        def count_prompt_tokens(begin: int) -> int:
            return len(self._begin_turn(messages, begin).prompt)

        return first_message_that_fits(answer, self._engine.longest_request, messages, count_prompt_tokens, self.unsent)

    # -- turns --------------------------------------------------------------------------------------------------------

    def ask(
        self,
        question: Question,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool | Callable[..., object]] = (),
        approve: Approve | None = None,
        on_event: OnToolEvent | None = None,
        max_rounds: int = MAX_ROUNDS,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
        **sampling: Unpack[KeywordsBesideTools],
    ) -> Completion:
        """Return the whole answer. `params` and parameters given by name apply to this turn only. An interrupt cancels
        the turn. `on_progress` is called on this thread while the prompt takes several steps; if it raises, the turn is
        cancelled. See `Engine.submit`.

        The model may call `tools`, which are functions. They run on this thread, and the model reads their results and
        their errors, until it answers without a call, after at most `max_rounds` rounds of calls. `approve` returns
        whether a call may run; without it, every call runs. `on_event` is told of each call and each result. The turn's
        messages have all calls and results. If a round fails, none of the turn is kept, though functions have run.
        """
        _require_question(question)
        if not tools:
            return self.stream(question, params, timeout=timeout, **sampling).result(on_progress)
        turn_params = with_keywords(params or self.params, **sampling, tools=tools)
        rounds = ToolRounds(turn_params, max_rounds=max_rounds, timeout=timeout, on_event=on_event)
        with self._roll_back_on_error():
            while True:
                answer = self.stream(question, rounds.params, timeout=rounds.time_left).result(on_progress)
                if not answer.tool_calls:
                    return answer
                with self._running_functions():
                    question = rounds.run_calls(answer, approve)

    def stream(
        self,
        question: Question | None = None,
        params: Params = None,
        *,
        timeout: float | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Reply:
        """Return the answer as an iterator of events. Without a question, the last one is answered again, and the new
        answer replaces the old one. Raises what `submit` raises, and InvalidRequest if there is nothing to answer.
        """
        reply = Reply(self._bind_turn(question, params, timeout, sampling)()(None))
        self._open = ref(reply)
        return reply

    def astream(
        self,
        question: Question | None = None,
        params: Params = None,
        *,
        timeout: float | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsyncReply:
        """`stream` for asyncio. The first `anext` renders and submits the turn on a thread, and raises its errors."""
        reply = AsyncReply(self._bind_turn(question, params, timeout, sampling))
        self._open = ref(reply)
        return reply

    async def aask(
        self,
        question: Question,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool | Callable[..., object]] = (),
        approve: AsyncApprove | None = None,
        on_event: OnToolEvent | None = None,
        max_rounds: int = MAX_ROUNDS,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
        **sampling: Unpack[KeywordsBesideTools],
    ) -> Completion:
        """`ask` for asyncio. Coroutine functions, `approve` too, run in this event loop, others on a thread."""
        _require_question(question)
        if not tools:
            return await self.astream(question, params, timeout=timeout, **sampling).result(on_progress)
        turn_params = with_keywords(params or self.params, **sampling, tools=tools)
        rounds = ToolRounds(turn_params, max_rounds=max_rounds, timeout=timeout, on_event=on_event)
        with self._roll_back_on_error():
            while True:
                answer = await self.astream(question, rounds.params, timeout=rounds.time_left).result(on_progress)
                if not answer.tool_calls:
                    return answer
                with self._running_functions():
                    question = await rounds.arun_calls(answer, approve)

    def regenerate(self, params: SamplingParams | None = None, **sampling: Unpack[SamplingKeywords]) -> Completion:
        """Answer the last question again. Raises InvalidRequest if there is none."""
        return self.stream(None, params, **sampling).result()

    def choose(self, answer: Completion) -> None:
        """Continue with another answer of the last turn (`n` > 1). Raises InvalidRequest unless it is one of them."""
        self._check_not_answering()
        finished_turn = self._finished_turn
        if finished_turn is None or not any(answer is each for each in finished_turn.answers):
            raise InvalidRequest("that is no answer of the last turn: choose its completion, or one of its others")
        self._add_turn(finished_turn.turn, finished_turn.params, answer)

    # -- what was said ------------------------------------------------------------------------------------------------

    def undo(self) -> tuple[Message, ...]:
        """Remove the last turn (question, calls and answer, or an unanswered question). Return the question, if any."""
        self._check_not_answering()
        begin, question = last_question(self._messages)
        self._replace_messages(self._messages[:begin])
        return question

    def edit(self, index: int, text: str) -> None:
        """Change the text of one of `messages`; later ones stay. Raises InvalidRequest if there is no such message."""
        self._check_not_answering()
        count = len(self._messages)
        if not isinstance(index, Integral) or not -count <= index < count:
            raise InvalidRequest(f"there is no message {index}: the conversation has {count}")
        new_messages = list(self._messages)
        new_messages[index] = {**new_messages[index], "content": text}
        self._replace_messages(tuple(new_messages))

    def clear(self) -> None:
        """Forget all messages, but not the system prompt."""
        self._check_not_answering()
        self._replace_messages(())

    def fork(self, engine: ConversationEngine | None = None) -> Conversation:
        """Return another conversation that begins with this one. What both share is computed and kept once. With
        another `engine`, `notes` list the settings that do not apply to its model: token ids, and variables that its
        chat template does not read.
        """
        engine = self._engine if engine is None else engine
        settings = settings_for_model(self._engine.info.identity, engine.info, self.params, self.template_vars)
        conversation: Conversation = engine.conversation(
            system=self.system,
            messages=self._messages,
            params=settings.params,
            template_vars=settings.template_vars,
            client=self._client,
            adapter=self.adapter,
        )
        conversation.notes = settings.notes
        if engine.info.identity == self._engine.info.identity:
            conversation._transcript = self._transcript
        if engine is self._engine:
            conversation.unsent = self.unsent
        return conversation

    def so_far(self) -> Conversation:
        """Return a fork with what was read so far of an unfinished answer, to be saved before the program ends."""
        conversation, reply = self.fork(), None if self._open is None else self._open()
        if reply is not None and not reply.ended and (turn := reply._turn) is not None:
            conversation._messages, conversation._transcript = (
                with_partial_answer(turn, *reply._read_so_far, self._reader),
                turn.transcript,
            )
        return conversation

    # -- in a file ----------------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything but logits processors and tools, which are functions, to one JSON file, atomically,
        readable by this user only. A line stands for each image. Raises ConversationFileError.
        """
        info = self._engine.info
        model = SavedModel(info.name, str(Path(info.path).absolute()), info.identity)
        main_fields = model, self.system, self._messages, checked_params(self.params), self._transcript
        saved_conversation = SavedConversation(*main_fields, self.template_vars, self.unsent, self.adapter)
        saved_conversation.write(Path(path))

    def load(self, path: str | PathLike[str]) -> None:
        """Continue what `save` wrote, with its system prompt and sampling parameters. With another model, texts are
        computed again, and `notes` and the log list the settings that do not apply to it (see `fork`). If the file
        names an adapter, it answers the next turns, which raise UnknownAdapter if it is not loaded.

        The file may also have messages of the OpenAI API: a JSON list, an object with `messages`, or one message per
        line. Then the sampling parameters do not change. Raises ConversationFileError; then nothing has changed.
        """
        self._check_not_answering()
        path = Path(path)
        foreign_messages = parse_foreign_messages(path, read_text(path))
        if foreign_messages is not None:
            self.system, messages = foreign_messages
            self._replace_messages(messages, unsent=0)
            self._transcript, self.notes = Transcript(), ()
            return
        saved_conversation, info = SavedConversation.read(path), self._engine.info
        is_same_model = saved_conversation.model.identity == info.identity
        transcript = (is_same_model and saved_conversation.transcript) or Transcript()
        is_in_vocabulary = max(transcript.tokens, default=0) < info.vocab_size
        settings = settings_from_file(path, saved_conversation, info)
        self.system, self.params = saved_conversation.system, settings.params
        self.template_vars, self.notes = settings.template_vars, settings.notes
        self.adapter = self.adapter if saved_conversation.adapter is None else saved_conversation.adapter
        self._replace_messages(saved_conversation.messages, unsent=saved_conversation.unsent)
        self._transcript = transcript if is_in_vocabulary else Transcript()
        for note in self.notes:
            log.warning(note)

    def markdown(self) -> str:
        """Return all messages as Markdown: a heading for each, and its text unchanged."""
        return conversation_markdown(self._engine.info.name, self._with_system(self._messages))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_not_answering(self) -> None:
        """Raise InvalidRequest while an answer is still being read, or its functions run."""
        reply = None if self._open is None else self._open()
        if self._runs_functions or (reply is not None and not reply.ended):
            raise InvalidRequest(
                "the conversation is being answered: read the answer to its end, or close it; a fork can be asked "
                "something else meanwhile"
            )

    @contextmanager
    def _running_functions(self) -> Iterator[None]:
        """Context in which tools run, between two answers of a turn. `_check_not_answering` raises meanwhile."""
        self._runs_functions = True
        try:
            yield
        finally:
            self._runs_functions = False

    @contextmanager
    def _roll_back_on_error(self) -> Iterator[None]:
        """Context that undoes every change of the messages if an error is raised in it."""
        previous_state = self._messages, self._transcript, self._finished_turn, self.unsent
        try:
            yield
        except BaseException:
            self._messages, self._transcript, self._finished_turn, self.unsent = previous_state
            raise

    def _with_question(self, question: Question | None) -> tuple[Message, ...]:
        """Return all messages with the question last. Raises InvalidRequest if there is nothing to answer."""
        self._check_not_answering()
        if question is None:
            messages = drop_last_answer(self._messages)
        elif isinstance(question, str):
            messages = (*self._messages, {"role": "user", "content": question})
        else:
            messages = (*self._messages, *copy_messages([question] if isinstance(question, Mapping) else question))
        if not messages:
            raise InvalidRequest("nothing was asked yet, so there is nothing to answer")
        return messages

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the system prompt first, if there is one."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *messages]

    def _replace_messages(self, messages: tuple[Message, ...], unsent: int | None = None) -> None:
        """Replace the messages, and `unsent` unless it is None. Set `unsent` to 0 if it would cover all messages."""
        self._messages, self._finished_turn = messages, None
        self.unsent = self.unsent if unsent is None else unsent
        if self.unsent >= len(messages):
            self.unsent = 0

    def _begin_turn(self, messages: tuple[Message, ...], unsent: int | None = None, params: Params = None) -> Turn:
        """Render and tokenize a turn for `messages` without the first `unsent` of them (None: `self.unsent`)."""
        if not self._engine.info.chat_template:
            raise InvalidRequest(f"{self._engine.info.name} has no chat template, so it cannot hold a conversation")
        sent_messages = messages[self.unsent if unsent is None else unsent :]
        calls = make_allowed_calls(self._reader, params or self.params)
        shown_messages = self._with_system(sent_messages)
        with forget_images_after(self._reader):
            return begin_turn(self._reader, self._transcript, messages, shown_messages, self.template_vars, calls)

    def _bind_turn(
        self, question: Question | None, params: Params, timeout: float | None, sampling: SamplingKeywords
    ) -> Callable[[], Callable[[Listener | None], StartedTurn]]:
        """Return `_prepare_turn` with its arguments for a question. Raises InvalidRequest for what cannot be asked."""
        turn_params = with_keywords(params or self.params, **sampling)
        if question == "":
            raise InvalidRequest("the question is empty")
        return partial(self._prepare_turn, self._with_question(question), turn_params, timeout)

    def _prepare_turn(
        self, messages: tuple[Message, ...], params: SamplingParams, timeout: float | None
    ) -> Callable[[Listener | None], StartedTurn]:
        """Render and tokenize a turn. Return a function that submits its request and returns the started turn."""
        start_time = time.monotonic()
        turn = tokenize_with_timeout(timeout, partial(self._begin_turn, messages, params=params))
        turn = replace(turn, messages=tuple(map(with_image_bytes, turn.messages)))
        if timeout is not None:
            timeout = max(timeout - (time.monotonic() - start_time), 0.001)
        submit = partial(self._engine.submit, turn.prompt, params, timeout=timeout)

        def start_turn(listener: Listener | None) -> StartedTurn:
            try:
                handle = submit(listener=listener, client=self._client, adapter=self.adapter)
            except PromptTooLong as error:
                if self._first_message_that_fits(1, messages) == self.unsent:
                    raise
                message = f"{error}, or let make_room() leave out the oldest turns"
                raise PromptTooLong(message, tokens=error.tokens, limit=error.limit) from error
            return StartedTurn(handle, turn, partial(self._end_turn, turn, params))

        return start_turn

    def _end_turn(self, turn: Turn, params: SamplingParams, completion: Completion) -> None:
        """Add a turn that has ended to the conversation, with its first answer that has text or was not cancelled. Keep
        all answers for `choose`. Without such an answer, nothing changes.
        """
        answers = (completion, *completion.others)
        kept_answer = next((a for a in answers if a.raw_text or a.finish_reason is not FinishReason.CANCELLED), None)
        if kept_answer is not None:
            self._add_turn(turn, params, kept_answer)
            self._finished_turn = FinishedTurn(turn, params, answers)

    def _add_turn(self, turn: Turn, params: SamplingParams, answer: Completion) -> None:
        """Add a turn to the conversation, with this answer."""
        tokens, _ = answer_tokens(answer, params, self._reader.eos_token_ids)
        self._messages = (*turn.messages, answer_message(turn, answer, self._reader))
        self._transcript = turn.transcript if tokens is None else turn.transcript.with_answer(answer.raw_text, tokens)


def _require_question(question: object) -> None:
    """Raise InvalidRequest for None, for which `stream` would answer the last question again."""
    if question is None:
        raise InvalidRequest("ask needs a question; regenerate() answers the last one again")


# Which settings of a saved conversation apply to the model that continues it.


_OF_TOKENS = ("logit_bias", "stop_token_ids")
"""Sampling parameters that contain token ids, which are other tokens in another model."""


@dataclass(frozen=True)
class ConversationSettings:
    """The sampling parameters and template variables of a conversation that apply to a model. `notes` list the settings
    that were left out, because with them every turn would be refused, or would mean something else.
    """

    params: SamplingParams
    template_vars: dict[str, object]
    notes: tuple[str, ...]


def settings_from_file(path: Path, saved_conversation: SavedConversation, info: ModelInfo) -> ConversationSettings:
    """Return the settings of a saved conversation that apply to this model. Raises ConversationFileError if it has
    token ids that its own model does not have.
    """
    if saved_conversation.model.identity == info.identity:
        try:
            saved_conversation.params.validate(info.vocab_size)
        except InvalidRequest as error:
            raise ConversationFileError(f"{path} is not a conversation with {info.name}: its {error}") from error
        notes = []
    else:
        notes = [saved_conversation.model.model_change_note(info, path)]
    previous_identity, variables = saved_conversation.model.identity, saved_conversation.template_vars
    return settings_for_model(previous_identity, info, saved_conversation.params, variables, *notes)


def settings_for_model(
    previous_identity: str, info: ModelInfo, params: SamplingParams, variables: TemplateVars, *notes: str
) -> ConversationSettings:
    """Return the settings of a conversation with the model of `previous_identity` that still apply with `info`'s:
    without token ids of another model, and without variables that its chat template does not read. Notes on what was
    left out follow the given `notes`.
    """
    dropped_names = [name for name in _OF_TOKENS if getattr(params, name)]
    if dropped_names and previous_identity != info.identity:
        params = replace(params, **{name: getattr(SamplingParams(), name) for name in dropped_names})
        notes += (f"{' and '.join(dropped_names)} named tokens of another model than {info.name}: not set any more",)
    known_names, kept_variables = frozenset(info.template_vars), dict(variables)
    for name, value in variables.items():
        try:
            accept_variables({name: value}, known_names)
        except InvalidRequest:
            del kept_variables[name]
    if unread_names := [name for name in variables if name not in kept_variables]:
        notes += (f"the chat template of {info.name} does not read {', '.join(unread_names)}: not set any more",)
    return ConversationSettings(params, kept_variables, notes)
