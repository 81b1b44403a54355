"""A chat, independent of its input and display: turns are answered, stopped or rolled back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from cortexmlx.cli.chat.sampling import carry_over_sampling
from cortexmlx.cli.chat.status import ArenaView
from cortexmlx.cli.chat.view import AnswerView, ThoughtDisplay
from cortexmlx.cli.chats.saved_chats import ChatSaver
from cortexmlx.cli.engine import why_no_images
from cortexmlx.cli.limits import drop_oldest_turns
from cortexmlx.cli.prompts import lost_calls_note
from cortexmlx.cli.terminal import console
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import CortexError, InvalidRequest, KVCacheFull
from cortexmlx.sessions.saved import shows_images, without_images
from cortexmlx.structured.tools import Tool
from cortexmlx.types.request import Completion, FinishReason, Message
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.cli.engine import ReplaceableEngine
    from cortexmlx.engine import Engine
    from cortexmlx.sessions.conversation import Conversation
    from cortexmlx.sessions.reply import Reply

NOT_BEGUN = "stopped before the first word"


class TurnStopped(CortexError):
    """The user stopped a turn before there was anything to keep."""


class FigureDisplay(Enum):
    """Which statistics are shown below an answer."""

    QUIET = "quiet"
    USUAL = "usual"
    VERBOSE = "verbose"


@dataclass(frozen=True)
class AttachedFile:
    """A text file that is sent with the next message."""

    path: Path
    text: str


@dataclass(frozen=True)
class AttachedImage:
    """An image that is sent with the next message."""

    path: Path
    data: bytes = field(repr=False)
    """The encoded file."""


Attachment = AttachedFile | AttachedImage


@dataclass(frozen=True)
class Question:
    """A user message to be answered, and how."""

    text: str
    replaces_last: bool = False
    """Replace the last turn as soon as there is an answer."""
    answers: int = 1
    """Answers side by side, of which the user chooses one."""
    typed_text: str = ""
    """What the user typed. If it is the text itself, the files that it names are still to be read."""
    attached_files: tuple[Attachment, ...] = ()
    """Files that were attached before. They wait again if the question is not answered."""
    images: tuple[AttachedImage, ...] = ()
    """Images that the model sees before the text."""

    @classmethod
    def from_content(cls, content: object) -> Question:
        """Rebuild a question from the content of a stored user message."""
        if not isinstance(content, list):
            return cls(str(content))
        images = [AttachedImage(Path(part["name"]), part["image"]) for part in content if part["type"] == "image"]
        return cls("".join(part["text"] for part in content if part["type"] == "text"), images=tuple(images))

    @property
    def turn_input(self) -> TurnInput:
        """The question as `Conversation` takes it: a text, or a message with images."""
        if not self.images:
            return self.text
        parts: list[dict[str, object]] = [
            {"type": "image", "image": image.data, "name": image.path.name} for image in self.images
        ]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}]


@dataclass(frozen=True)
class QuestionDraft:
    """A question for the user to edit in the input line."""

    text: str
    replaces_last: bool = True
    """Whether the draft is the last question. The changed question then replaces the last turn."""
    images: tuple[AttachedImage, ...] = ()
    """The images of the question."""


ViewFactory = Callable[["Reply"], AnswerView]
ReplyReader = Callable[["Reply"], Completion]
TurnInput = str | Sequence[Message]
"""A question, or the results of calls."""


@dataclass
class ChatSession:
    """One chat: its engine, conversation, display and settings; answers questions and stores turns."""

    engine: Engine
    show: ViewFactory
    """Opens the view of an answer."""
    conversation: Conversation
    stoppable: Callable[[Callable[[], None]], AbstractContextManager[object]] = nullcontext
    """Returns a context in which Ctrl-C calls the given function: an exception could lose a word on its way to the
    screen.
    """
    saver: ChatSaver | None = None
    """Saves the chat after each turn."""
    arena: ArenaView | None = None
    """The picture below answers; None without a terminal."""
    replaceable: ReplaceableEngine | None = None
    """Opens another engine."""
    note: Callable[[str], None] = console.print_note
    """Prints a note for the user."""
    figures: FigureDisplay = FigureDisplay.USUAL
    attached_files: list[Attachment] = field(default_factory=list)
    """Files that go with the next message."""
    typed_texts: dict[str, str] = field(default_factory=dict)
    """What the user typed, by the text of each message with files in it."""
    undone_question: object = None
    """The content of the question that `/undo` took last or that got no answer, until another is answered."""
    thought_display: ThoughtDisplay = field(default_factory=ThoughtDisplay)
    """Whether thoughts are folded."""
    ask_first: bool = True
    """Whether the user is asked before a call of the model runs."""
    allowed_functions: set[str] = field(default_factory=set)
    """Names of functions that run without a question."""
    _active_conversation: Conversation | None = field(default=None, init=False)

    @property
    def params(self) -> SamplingParams:
        """The conversation's sampling parameters."""
        return self.conversation.params

    @params.setter
    def params(self, params: SamplingParams) -> None:
        self.conversation.params = params

    def ask(self, question: Question, read_reply: ReplyReader | None = None) -> Completion:
        """Answer a question and store the turn, even if the answer was stopped. `read_reply` reads the answer to its
        end, in place of the usual view. Oldest turns that no longer fit are not sent.

        Raises CortexError if the turn failed, TurnStopped if it was stopped before the first word. The conversation is
        unchanged then.
        """
        if not self.has_model:
            raise InvalidRequest(self.no_model_advice)
        if not self.engine.info.chat_template:
            name = self.engine.info.name
            raise InvalidRequest(f"{name} has no chat template: try `cortexmlx generate {name} --raw -p ...`")
        conversation, unsent = self.conversation, self.conversation.unsent
        if question.typed_text:
            self.typed_texts[question.text] = question.typed_text
        if question.replaces_last:
            conversation = conversation.fork()
            conversation.undo()
        params = self.params
        if question.answers > 1:
            params = replace(params, n=question.answers, tools=(), tool_choice="auto")
            if self.params.tools:
                self.note("answers side by side call no functions")
        try:
            return self._answer(conversation, question.turn_input, params, read_reply or self._display_reply)
        except BaseException:
            self.conversation.unsent = unsent
            raise

    def answer_tool_results(self, results: Sequence[Message], params: SamplingParams) -> Completion:
        """Give the model the results of its tool calls, and return its next answer: see `ask`."""
        return self._answer(self.conversation, results, params, self._display_reply)

    def set_tools(self, tools: tuple[Tool, ...]) -> None:
        """Replace the tools that the model may call. Raises InvalidRequest if it cannot call any."""
        previous_params, self.params = self.params, replace(self.params, tools=tools)
        try:
            self.conversation.count("?")
        except InvalidRequest:
            self.params = previous_params
            raise
        self.allowed_functions.clear()

    def _answer(
        self, conversation: Conversation, turn_input: TurnInput, params: SamplingParams, read_reply: ReplyReader
    ) -> Completion:
        """Drop turns that do not fit, then stream the answer; retry with fewer turns if the KV cache is full."""
        self._drop_old_turns(conversation, turn_input)
        try:
            return self._stream_answer(conversation, turn_input, params, read_reply)
        except KVCacheFull:  # the system refused the cache more memory: less fits now
            if not self._drop_old_turns(conversation, turn_input):
                raise
            return self._stream_answer(conversation, turn_input, params, read_reply)

    def _drop_old_turns(self, conversation: Conversation, turn_input: TurnInput) -> bool:
        """Drop the oldest turns that do not fit, with a note. Return whether any were dropped."""
        drop_note = drop_oldest_turns(conversation, turn_input, self.engine)
        if drop_note:
            self.note(drop_note)
        return bool(drop_note)

    def _stream_answer(
        self, conversation: Conversation, turn_input: TurnInput, params: SamplingParams, read_reply: ReplyReader
    ) -> Completion:
        """Stream one answer, stoppable by Ctrl-C, and store the turn. Raises TurnStopped if nothing was written."""
        with conversation.stream(turn_input, params) as reply, self.stoppable(reply.cancel):
            self._active_conversation = conversation
            try:
                completion = read_reply(reply)
                answers = (completion, *completion.others)
                if completion.finish_reason is FinishReason.CANCELLED and not any(each.raw_text for each in answers):
                    raise TurnStopped(NOT_BEGUN)
                self.conversation, self.undone_question = conversation, None
                self.save()
            except OSError:  # the terminal has gone
                self.save_partial()
                raise
            finally:
                self._active_conversation = None
        return completion

    def switch_engine(self, config: EngineConfig) -> None:
        """Continue the conversation with other engine options or another model. Adapters that cannot be read any more
        are left out, with a note.

        Raises CortexError if that fails, or if the adapter that answers here cannot be read any more. Raises
        KeyboardInterrupt if the user gives up. The chat then continues unchanged, but for adapters that were left out.
        Raises EngineClosed if no engine could be opened: see `has_model`.
        """
        if self.replaceable is None:
            raise InvalidRequest("this chat cannot change its engine")
        left_out: dict[str, Exception] = {}
        try:
            left_out |= self.replaceable.check(config)
            self._check_adapter_survives(left_out)
            readable_adapters = {name: path for name, path in (config.adapters or {}).items() if name not in left_out}
            self.replaceable.replace_engine(replace(config, adapters=readable_adapters) if left_out else config)
        except KeyboardInterrupt:
            goes_on = f"{self.engine.info.name} goes on, and nothing has changed"
            self.note(f"given up: {goes_on if self.has_model else self.no_model_advice}")
            raise
        except (CortexError, OSError):
            raise
        except Exception as error:  # a library may raise anything on broken model files
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise CortexError(f"{config.model} cannot be loaded ({reason}); {self.engine.info.name} goes on") from error
        finally:
            if self.replaceable.engine is not self.engine:
                old_info, self.engine = self.engine.info, self.replaceable.engine
                self.conversation = self.conversation.fork(self.engine)
                self._replace_unseen_images()
                self.params = carry_over_sampling(self.params, old_info, self.engine.info)
                self._note_lost_adapters(left_out | self.replaceable.left_out)
                self.print_notes()

    def _replace_unseen_images(self) -> None:
        """Put a line in the place of each image if the model sees none."""
        messages = self.conversation.messages
        indices = [] if self.engine.sees_images else [n for n, each in enumerate(messages) if shows_images(each)]
        for index in indices:
            self.conversation.edit(index, str(without_images(messages[index])["content"]))
        if indices:
            self.note(f"{self.engine.info.name} sees no images: lines stand for those of the chat")

    @property
    def why_no_images(self) -> str:
        """Why the model sees no images, with what to do; empty if it sees them."""
        return why_no_images(self.engine)

    def _check_adapter_survives(self, unreadable: Mapping[str, Exception]) -> None:
        """Raise InvalidRequest if this chat's adapter exists only in the open engine, which must then not be closed."""
        name = self.conversation.adapter
        if name is not None and name in unreadable and self.has_model:
            reason = str(unreadable[name]).rstrip(".")
            raise InvalidRequest(
                f"{reason}. {name!r} answers here, and the model cannot be loaded again with it: nothing has changed. "
                f"/adapter none lets the model alone answer, /adapter {name}=FOLDER loads it from elsewhere"
            )

    def _note_lost_adapters(self, left_out: Mapping[str, Exception]) -> None:
        """Print which adapters the engine has lost. If this chat used one of them, the model answers alone."""
        if not left_out:
            return
        reasons = "; ".join(f"{name!r} ({str(error).rstrip('.')})" for name, error in left_out.items())
        self.note(f"adapters that cannot be loaded any more: {reasons}. /adapter NAME=FOLDER loads one from elsewhere")
        if self.conversation.adapter in left_out:
            self.note(f"{self.engine.info.name} answers alone now, without {self.conversation.adapter}")
            self.conversation.adapter = None

    @property
    def has_model(self) -> bool:
        """Whether an engine is open. Without one, the chat can still be saved, and `switch_engine` may open one."""
        return self.replaceable is None or self.replaceable.is_open

    @property
    def no_model_advice(self) -> str:
        """The message for a chat without an open engine: what to do, and where the chat is saved."""
        saved_path = self.saver.saved_path if self.saver is not None and self.conversation.messages else None
        save_advice = "/save FILE keeps the chat" if saved_path is None else f"the chat is saved in {saved_path}"
        return f"no model is open: /model NAME opens one, and the chat goes on. Until then, {save_advice}"

    def print_notes(self) -> None:
        """Print the notes on a conversation that was loaded or continues with another model."""
        for remark in conversation_notes(self.engine, self.conversation):
            self.note(remark)

    def save(self) -> None:
        """Save the chat, if chats are saved."""
        if self.saver is not None:
            self.saver.save(self.conversation, self.typed_texts)

    def save_partial(self) -> None:
        """Save the chat with its unfinished answer at exit. After /regen, the old answer stays until text comes."""
        if self.saver is None or self._active_conversation is None:
            return
        conversation = self._active_conversation.so_far()
        if conversation.messages[-1]["role"] == "assistant" or len(conversation.messages) > len(
            self.conversation.messages
        ):
            self.saver.save(conversation, self.typed_texts)

    def save_in_new_file(self) -> None:
        """Save what follows in a new file: `/clear` has emptied the conversation, or `/load` has filled it."""
        self.undone_question = None
        if self.saver is not None:
            self.saver.start_new_file()

    def _display_reply(self, reply: Reply) -> Completion:
        """Show a reply while it is written, and return it when complete."""
        with self.show(reply) as view:
            return self._feed_view(reply, view)

    @staticmethod
    def _feed_view(reply: Reply, view: AnswerView) -> Completion:
        """Feed a reply's events to a view, and return the completion."""
        shown_length = 0
        for event in reply:
            view.update_status(event)
            if event.thinking:
                view.feed(event.thinking, is_thought=True)
            view.feed(event.text)
            shown_length += len(event.text)
        completion = reply.result()
        view.feed(completion.text[shown_length:])
        return completion


def conversation_notes(engine: Engine, talk: Conversation) -> tuple[str, ...]:
    """Return the conversation's notes, a note on an adapter that is not loaded, and one on messages that the chat
    template leaves out.

    A conversation that the template refuses as a whole has no such note: the next question raises the error.
    """
    notes, name = talk.notes, talk.adapter
    if name is not None and name not in engine.adapters:
        notes += (f"{name!r} answered, an adapter that is not loaded: /adapter {name}=FOLDER, or /adapter none",)
    try:
        left_out = lost_calls_note(engine, talk.messages)
    except InvalidRequest:
        left_out = ""
    return (*notes, left_out) if left_out else notes
