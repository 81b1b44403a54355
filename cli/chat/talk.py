"""The chat itself: asks, answers or carries out a command, and goes on until somebody leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from cortexmlx.cli.chat.commands import BY_NAME, Leave
from cortexmlx.cli.chat.full import advice
from cortexmlx.cli.chat.input import LineCleared, QuestionSource
from cortexmlx.cli.chat.session import NOT_BEGUN, ChatSession, Draft, Figures, Question, Stopped
from cortexmlx.cli.chat.slash.files import tell
from cortexmlx.cli.chat.slash.several import SideBySide, choose
from cortexmlx.cli.chat.typed.attached import mentioned, with_files
from cortexmlx.cli.chat.typed.reading import read
from cortexmlx.cli.figures import summary
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.limits import ending
from cortexmlx.errors import CortexError, EngineClosed, KVCacheFull, PromptTooLong
from cortexmlx.request import Completion

if TYPE_CHECKING:
    from cortexmlx.cli.terminal.signals.interrupts import Interrupts
    from cortexmlx.sessions.conversation import Conversation

ARENA_KEY = "c-t"
"""Ctrl-T, with which BSD systems ask a program how it is."""


class Talk:
    """A chat with a person. `pretty`: on a terminal that can do more than print lines."""

    def __init__(
        self, session: ChatSession, source: QuestionSource, screen: Console, presses: Interrupts, *, pretty: bool
    ) -> None:
        self._session = session
        self._source = source
        self._screen = screen
        self._presses = presses
        self._pretty = pretty

    def once(self, first: str) -> Completion:
        """One answer: to `first`, or to what is asked. Raises its error, Leave if nothing is asked, LineCleared for
        Ctrl-C twice.
        """
        step: Question | Draft | None = Question(first) if first else None
        while not isinstance(step, Question):
            step = self._asked(step)
        return self.answer(step)

    def go_on(self, first: str) -> None:
        """Until somebody leaves. Raises LineCleared for Ctrl-C twice, EngineClosed if the engine has gone."""
        step: Question | Draft | None = Question(first) if first else None
        while True:
            try:
                if isinstance(step, Question):
                    question, step = step, None
                    self._answer_or_say_why(question)
                else:
                    draft, step = step, None
                    step = self._asked(draft)
            except Leave:
                return
            except KeyboardInterrupt:  # counted by the signal handler already
                continue

    def _asked(self, draft: Draft | None) -> Question | Draft | None:
        """What comes of what is typed next, beginning with a draft. Raises Leave if there will be no more, LineCleared
        for Ctrl-C twice.
        """
        try:
            typed = self._source.ask(draft=draft.text if draft is not None else "")
        except LineCleared:
            if self._presses.again():
                raise
            self._screen.print("  (Ctrl-C again, Ctrl-D or /bye leaves)", style="dim")
            return None
        if typed is None:
            raise Leave
        step = self._respond(typed)
        return replace(step, again=draft.again) if draft is not None and isinstance(step, Question) else step

    def answer(self, question: Question) -> Completion:
        """One turn, and the line of figures below it."""
        session, params = self._session, self._session.params
        if self._pretty:
            self._screen.print()
        keys = {} if session.arena is None else {ARENA_KEY: session.arena.toggle}
        with self._source.busy(keys):
            if question.answers > 1:
                together = SideBySide(self._screen, question.answers, self._presses.away.waiting_for)
                completion = session.ask(question, together.follow)
            else:
                completion = session.ask(question)
        if self._pretty and session.figures is not Figures.QUIET:
            self._screen.print(
                f"\n{self._figures(completion, ending(completion, params, session.engine))}\n", style="dim"
            )
        return completion

    def _figures(self, completion: Completion, end: str) -> str:
        """`24 tokens · 41.2 tok/s · TTFT 180 ms · prompt 37 tok (32 cached)`."""
        line = summary(completion, end)
        if self._session.figures is Figures.VERBOSE:
            times = completion.timings
            line += (
                f"\nwaited {times.queued:.2f} s · prefill {times.prefill_tokens_per_second:.0f} tok/s · "
                f"{times.total:.2f} s in all · finish_reason {completion.finish_reason.value}"
            )
        return line

    def _respond(self, typed: str) -> Question | Draft | None:
        """Carry out a command. Returns what is to be answered, if there is something; an error is said, and no more."""
        try:
            said = read(typed, BY_NAME)
            if said.command is not None:
                step = BY_NAME[said.command].run(self._session, said.text, self._screen)
                typed_now = isinstance(step, Question) and step.typed == step.text
                return self._with_files(step) if isinstance(step, Question) and typed_now else step
            return self._with_files(Question(said.text)) if said.text else None
        except EngineClosed:
            raise
        except (CortexError, OSError) as error:
            console.error(str(error))
            return None

    def _with_files(self, question: Question) -> Question:
        """A question behind the files that it names and those that wait for it."""
        session, text = self._session, question.text
        found, missing = mentioned(text)
        for file in found:
            tell(session, file, self._screen)
        for name in missing:
            self._screen.print(f"  @{name} is no file here: it is sent as it is", style="dim", markup=False)
        files, session.attached = [*session.attached, *found], []
        return replace(question, text=with_files(files, text), typed=text) if files else question

    def _answer_or_say_why(self, question: Question) -> None:
        """One turn; an error ends the turn, and the chat only if the engine has gone."""
        before = self._session.conversation.fork()
        try:
            completion = self.answer(question)
        except EngineClosed:
            raise
        except Stopped as stopped:
            self._screen.print(f"  {stopped}", style="dim")
            return
        except KeyboardInterrupt:  # before there was an answer to stop, or behind it; the signal handler counted it
            answered = self._session.conversation.messages != before.messages
            self._screen.print(f"  {'stopped' if answered else NOT_BEGUN}", style="dim")
            return
        except CortexError as error:
            console.error(str(error))
            if isinstance(error, PromptTooLong | KVCacheFull):
                way = f"nothing was sent. {advice(self._session.engine)} /undo, /clear make room; /save keeps the chat."
                self._screen.print(f"  {way}", style="dim", markup=False)
            return
        if question.answers > 1:
            self._choose(completion, before)

    def _choose(self, completion: Completion, before: Conversation) -> None:
        """One of the answers, or the chat as it was `before` them."""
        session, answers = self._session, (completion, *completion.others)
        try:
            chosen = choose(answers, self._source.ask, self._screen)
        except LineCleared:
            chosen = None
        if chosen is None:
            session.conversation = before
            self._screen.print("  none: the chat is as it was before", style="dim")
        else:
            session.conversation.choose(chosen)
        session.keep()
