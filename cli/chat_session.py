"""A chat: turns that are answered, stopped or rolled back, whatever they are typed and shown on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cortexmlx.cli.chat_view import AnswerView
from cortexmlx.cli.conversation import Conversation
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.request import Completion, FinishReason, Message, SamplingParams

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.serving.handle import RequestHandle

THINK = ("<think>\n", "<think>")


class Stopped(CortexError):
    """The user stopped a turn before there was anything to keep."""


@dataclass(frozen=True)
class Question:
    """A message to be answered. `again`: it is the last one, whose answer gives way to the new one."""

    text: str
    again: bool = False


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: its tokens, and the opening think tag that the template put at its end, if it did."""

    tokens: list[int]
    thinking: str


ViewFactory = Callable[[Prompt], AnswerView]


@dataclass
class ChatSession:
    """The state of one chat.

    `show` opens a view for an answer. `stoppable(stop)` is a context in which the user may end the answer, by a call of
    `stop`: an exception could come between a word and its place on the screen.
    """

    engine: Engine
    show: ViewFactory
    params: SamplingParams
    conversation: Conversation = field(default_factory=Conversation)
    stoppable: Callable[[Callable[[], None]], AbstractContextManager[object]] = nullcontext

    def ask(self, question: Question) -> Completion:
        """Answer one question and remember both, also when the answer was stopped.

        Raises CortexError if the turn failed, Stopped if it was stopped before the first word: then the conversation
        is what it was.
        """
        before = self.conversation.turns[:-2] if question.again else self.conversation.turns
        history = Conversation(self.conversation.system, before)
        prompt = self._render(history.messages(question.text))
        with self.show(prompt) as view:
            handle = self.engine.submit(prompt.tokens, self.params)
            with self.stoppable(handle.cancel):
                completion = self._follow(handle, view)
        if completion.finish_reason is FinishReason.CANCELLED and not completion.text:
            raise Stopped("stopped before the first word")
        history.add(question.text, prompt.thinking + completion.text)
        self.conversation = history
        return completion

    def prompt_tokens(self) -> int:
        """Tokens of the conversation so far, as the next turn will send them."""
        messages = self.conversation.messages()
        return len(self.engine.tokenize(messages)) if messages else 0

    def _render(self, messages: list[Message]) -> Prompt:
        if not self.engine.info.chat_template:
            name = self.engine.info.name
            raise InvalidRequest(f"{name} has no chat template: try `cortexmlx generate {name} --raw -p ...`")
        tokens = self.engine.tokenize(messages)
        return Prompt(tokens, next((tag for tag in THINK if self._ends_with(tokens, tag)), ""))

    def _ends_with(self, tokens: list[int], tag: str) -> bool:
        """Whether `tokens` end in those of `tag`, which may begin with the model's own start token."""
        tail = self.engine.tokenize(tag)
        return any(part and tokens[-len(part) :] == part for part in (tail, tail[1:] if len(tail) > 1 else []))

    @staticmethod
    def _follow(handle: RequestHandle, view: AnswerView) -> Completion:
        shown = 0
        try:
            for event in handle:
                view.feed(event.text)
                shown += len(event.text)
        except BaseException:
            handle.cancel()
            raise
        completion = handle.result()
        view.feed(completion.text[shown:])
        return completion
