"""The chat loop: read a line, answer it or run a command, until the user leaves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from cortexmlx.cli.chat.attachments import mentioned, with_files
from cortexmlx.cli.chat.input import LineCleared, QuestionSource
from cortexmlx.cli.chat.session import NOT_BEGUN, Attached, ChatSession, Draft, Figures, Question, Stopped
from cortexmlx.cli.chat.slash.commands import BY_NAME, Leave
from cortexmlx.cli.chat.slash.files import tell
from cortexmlx.cli.chat.slash.parse import read
from cortexmlx.cli.chat.slash.side_by_side import SideBySide, choose
from cortexmlx.cli.chat.tools.calls import TAKEN_BACK, CallDisplay
from cortexmlx.cli.figures import summary
from cortexmlx.cli.limits import advice, cut_form, ending
from cortexmlx.cli.terminal import console
from cortexmlx.errors import CortexError, EngineClosed, KVCacheFull, PromptTooLong
from cortexmlx.sessions.tool_rounds import ToolRounds
from cortexmlx.types.request import Completion, FinishReason

if TYPE_CHECKING:
    from cortexmlx.cli.terminal.signals import Interrupts
    from cortexmlx.sessions.conversation import Conversation

ARENA_KEY = "c-t"
"""Ctrl-T, which asks a program for its status on BSD systems."""


class ChatLoop:
    """A chat with a person. `pretty` says whether the terminal can do more than print lines."""

    def __init__(
        self, session: ChatSession, source: QuestionSource, screen: Console, presses: Interrupts, *, pretty: bool
    ) -> None:
        self._session = session
        self._source = source
        self._screen = screen
        self._presses = presses
        self._pretty = pretty

    def once(self, first: str) -> Completion:
        """Answer one question: `first`, or the one that the user types.

        Raises the error of the answer, Leave at the end of the input, LineCleared if Ctrl-C comes twice.
        """
        step: Question | Draft | None = Question(first) if first else None
        while not isinstance(step, Question):
            step = self._asked(step)
        return self.answer(step)

    def go_on(self, first: str) -> None:
        """Ask and answer until the user leaves. Raises LineCleared if Ctrl-C comes twice, EngineClosed if the engine
        ends.
        """
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
        """Read a line that begins with a draft, and act on it. Raises Leave at the end of the input, LineCleared if
        Ctrl-C comes twice.
        """
        try:
            typed = self._source.ask(draft=draft.text if draft is not None else "")
        except LineCleared:
            if self._presses.again():
                raise
            console.print_indented(self._screen, "(Ctrl-C again, Ctrl-D or /bye leaves)")
            return None
        if typed is None:
            raise Leave
        step = self._respond(typed)
        return replace(step, again=draft.again) if draft is not None and isinstance(step, Question) else step

    def answer(self, question: Question) -> Completion:
        """Answer one question and print the line of figures below the answer."""
        session, params = self._session, self._session.params
        if self._pretty:
            self._screen.print()
        before = session.conversation.fork() if params.tools else None
        with self._writing():
            if question.answers > 1:
                together = SideBySide(self._screen, question.answers, self._presses.away.waiting_for)
                completion = session.ask(question, together.follow)
            else:
                completion = session.ask(question)
        if before is not None and _calls(completion):
            completion = self._with_results(completion, before)
        ended = ending(completion, params, session.engine)
        if self._pretty and session.figures is not Figures.QUIET:
            self._screen.print(f"\n{self._figures(completion, ended)}\n", style="dim")
        if cut := cut_form(completion, params, ended):
            console.note(cut)
        return completion

    def _writing(self) -> AbstractContextManager[None]:
        """Return a context in which an answer is written."""
        arena = self._session.arena
        return self._source.busy({} if arena is None else {ARENA_KEY: arena.toggle})

    def _with_results(self, completion: Completion, before: Conversation) -> Completion:
        """Run the calls of an answer, and those of the answers to their results. Return the last answer.

        If this fails or is stopped, the chat is as it was `before` the question.
        """
        session = self._session
        display = CallDisplay(session.note, self._source.ask, session.allowed, ask_first=session.ask_first)
        rounds = ToolRounds(session.params, session.params.offered, on_event=display.show)
        try:
            while _calls(completion):
                with redirect_stdout(sys.stderr):  # stdout is for the answer
                    results = rounds.results(completion, display.approve)
                with self._writing():
                    completion = session.report(results, rounds.params)
        except BaseException as error:
            session.conversation = before
            session.keep()
            if isinstance(error, KeyboardInterrupt):
                raise Stopped(TAKEN_BACK) from None
            raise
        return completion

    def _figures(self, completion: Completion, end: str) -> str:
        """Return a line such as `24 tokens · 41.2 tok/s · TTFT 180 ms · prompt 37 tok (32 cached)`."""
        line = summary(completion, end)
        if self._session.figures is Figures.VERBOSE:
            times = completion.timings
            line += (
                f"\nwaited {times.queued:.2f} s · prefill {times.prefill_tokens_per_second:.0f} tok/s · "
                f"{times.total:.2f} s in all · finish_reason {completion.finish_reason.value}"
            )
        return line

    def _respond(self, typed: str) -> Question | Draft | None:
        """Carry out a typed line. Return the question or draft that follows, if there is one. Print an error. If the
        engine has ended by itself, EngineClosed is raised.
        """
        try:
            said = read(typed, BY_NAME)
            if said.command is not None:
                step = BY_NAME[said.command](self._session, said.text, self._screen)
                typed_now = isinstance(step, Question) and step.typed == step.text
                return self._with_files(step) if isinstance(step, Question) and typed_now else step
            return self._with_files(Question(said.text)) if said.text else None
        except EngineClosed as error:
            if self._session.has_model:
                raise
            console.error(str(error))
            console.print_indented(self._screen, self._session.without_model)
            return None
        except (CortexError, OSError) as error:
            console.error(str(error))
            return None

    def _with_files(self, question: Question) -> Question:
        """Return the question after the texts of the files that it names and of those that wait for it."""
        session, text = self._session, question.text
        found, missing = mentioned(text)
        for file in found:
            tell(session, file, self._screen)
        for name in missing:
            console.print_indented(self._screen, f"@{name} is not a file here: it is sent as text")
        waited, session.attached = session.attached, []
        files = [*waited, *found]
        if not files:
            return question
        return replace(question, text=with_files(files, text), typed=text, waited=tuple(waited))

    def _answer_or_say_why(self, question: Question) -> None:
        """Answer one question. An error ends the turn; only the end of the engine ends the chat.

        If no answer is kept, the question that `/undo` took and the waiting files are kept as they were.
        """
        session, taken = self._session, self._session.taken_back
        before = session.conversation.fork()
        completion = self._answered(question)
        if completion is not None and question.answers > 1:
            self._choose(completion, before)
        if session.conversation.messages == before.messages:
            session.taken_back = taken
            self._wait_again(question.waited)

    def _answered(self, question: Question) -> Completion | None:
        """Return the answer. If there is no answer, print why and return None."""
        before = self._session.conversation.messages
        try:
            return self.answer(question)
        except EngineClosed:
            raise
        except Stopped as stopped:
            console.print_indented(self._screen, str(stopped))
        except KeyboardInterrupt:  # before or after the answer; the signal handler has counted it
            answered = self._session.conversation.messages != before
            console.print_indented(self._screen, "stopped" if answered else NOT_BEGUN)
        except CortexError as error:
            console.error(str(error))
            if isinstance(error, PromptTooLong | KVCacheFull):
                way = f"nothing was sent. {advice(self._session.engine)} /undo, /clear make room; /save keeps the chat."
                console.print_indented(self._screen, way)
        return None

    def _wait_again(self, files: Sequence[Attached]) -> None:
        """Send these files with the next message."""
        self._session.attached = [*files, *self._session.attached]
        if files:
            names = ", ".join(str(each.path) for each in files)
            console.print_indented(self._screen, f"for the next message: {names} (/clear forgets it)")

    def _choose(self, completion: Completion, before: Conversation) -> None:
        """Keep the answer that the user chooses, or restore the chat from `before` the answers."""
        session, answers = self._session, (completion, *completion.others)
        try:
            chosen = choose(answers, self._source.ask, self._screen)
        except LineCleared:
            chosen = None
        if chosen is None:
            session.conversation = before
            console.print_indented(self._screen, "none: the chat is as it was before")
        else:
            session.conversation.choose(chosen)
        session.keep()


def _calls(completion: Completion) -> bool:
    return bool(completion.tool_calls) and completion.finish_reason is not FinishReason.CANCELLED
