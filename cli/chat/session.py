"""A chat: turns that are answered, stopped or rolled back, whatever they are typed and shown on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cortexmlx.cli.chat.kept import Keeper
from cortexmlx.cli.chat.status import Arena
from cortexmlx.cli.chat.view import AnswerView
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.request import Completion, FinishReason, SamplingParams

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.sessions.conversation import Conversation
    from cortexmlx.sessions.reply import Reply


class Stopped(CortexError):
    """The user stopped a turn before there was anything to keep."""


@dataclass(frozen=True)
class Question:
    """A message to be answered. `again`: in the place of the last one, whose turn gives way when there is an answer."""

    text: str
    again: bool = False


ViewFactory = Callable[["Reply"], AnswerView]


@dataclass
class ChatSession:
    """The state of one chat.

    `show` opens a view for an answer. `stoppable(stop)` is a context in which the user may end the answer, by a call of
    `stop`: an exception could come between a word and its place on the screen. `keeper` keeps the chat after each turn.
    `arena` is shown below answers where it is wanted; None: there is no place for it.
    """

    engine: Engine
    show: ViewFactory
    conversation: Conversation
    stoppable: Callable[[Callable[[], None]], AbstractContextManager[object]] = nullcontext
    keeper: Keeper | None = None
    arena: Arena | None = None

    @property
    def params(self) -> SamplingParams:
        """How tokens are chosen."""
        return self.conversation.params

    @params.setter
    def params(self, params: SamplingParams) -> None:
        self.conversation.params = params

    def ask(self, question: Question) -> Completion:
        """Answer one question and remember both, also when the answer was stopped.

        Raises CortexError if the turn failed, Stopped if it was stopped before the first word: then the conversation
        is what it was.
        """
        if not self.engine.info.chat_template:
            name = self.engine.info.name
            raise InvalidRequest(f"{name} has no chat template: try `cortexmlx generate {name} --raw -p ...`")
        talk = self.conversation.fork() if question.again else self.conversation
        if question.again:
            talk.undo()
        with talk.stream(question.text) as reply, self.show(reply) as view, self.stoppable(reply.cancel):
            completion = self._follow(reply, view)
        if completion.finish_reason is FinishReason.CANCELLED and not completion.text:
            raise Stopped("stopped before the first word")
        self.conversation = talk
        self.keep()
        return completion

    def keep(self) -> None:
        """Save the chat, if chats are kept."""
        if self.keeper is not None:
            self.keeper.keep(self.conversation)

    def begin_anew(self) -> None:
        """What is said from now on is another chat."""
        if self.keeper is not None:
            self.keeper.begin_anew()

    @staticmethod
    def _follow(reply: Reply, view: AnswerView) -> Completion:
        shown = 0
        for event in reply:
            view.note(event)
            view.feed(event.text)
            shown += len(event.text)
        completion = reply.result()
        view.feed(completion.text[shown:])
        return completion
