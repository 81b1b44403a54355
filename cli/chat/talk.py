"""The chat loop: read a line, answer it or run a command, until the user leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from cortexmlx.cli.answer_statistics import statistics_line
from cortexmlx.cli.chat.attachments import add_files, find_dropped_image, read_attachment, read_mentions
from cortexmlx.cli.chat.input import LineCleared, QuestionSource
from cortexmlx.cli.chat.sampling import loop_note
from cortexmlx.cli.chat.session import (
    NOT_BEGUN,
    ChatSession,
    FigureDisplay,
    Question,
    QuestionDraft,
    TurnStopped,
)
from cortexmlx.cli.chat.slash.commands import BY_NAME, LeaveChat
from cortexmlx.cli.chat.slash.files import attach, print_file_size
from cortexmlx.cli.chat.slash.parse import parse_input
from cortexmlx.cli.chat.slash.side_by_side import SideBySideDisplay, choose_answer
from cortexmlx.cli.limits import cut_reason, incomplete_form_note, room_advice
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import strip_controls, to_single_line
from cortexmlx.errors import CortexError, EngineClosed, KVCacheFull, PromptTooLong
from cortexmlx.sessions.tool_rounds import NOT_ALLOWED, ToolEvent, ToolRounds
from cortexmlx.structured.tools import ToolCall
from cortexmlx.types.cache_report import RecomputeReason
from cortexmlx.types.request import Completion, FinishReason

if TYPE_CHECKING:
    from cortexmlx.cli.terminal.signals import InterruptHandler
    from cortexmlx.sessions.conversation import Conversation

ARENA_KEY = "c-t"
"""Ctrl-T: `Typeahead` reads it, so it is no signal. On BSD systems it asks any program for its status."""


class ChatLoop:
    """A chat with a person at a prompt. `pretty` says whether the terminal can do more than print lines."""

    def __init__(
        self,
        session: ChatSession,
        source: QuestionSource,
        screen: Console,
        interrupts: InterruptHandler,
        *,
        pretty: bool,
    ) -> None:
        self._session = session
        self._source = source
        self._screen = screen
        self._interrupts = interrupts
        self._pretty = pretty

    def run_once(self, first_question: str) -> Completion:
        """Answer one question: `first_question`, or the one that the user types.

        Raises the error of the answer, LeaveChat at the end of the input, LineCleared if Ctrl-C comes twice.
        """
        step: Question | QuestionDraft | None = Question(first_question) if first_question else None
        while not isinstance(step, Question):
            step = self._read_and_respond(step)
        return self.answer(step)

    def run(self, first_question: str) -> None:
        """Chat until the user leaves. Raises LineCleared if Ctrl-C comes twice, EngineClosed if the engine ends."""
        step: Question | QuestionDraft | None = Question(first_question) if first_question else None
        while True:
            try:
                if isinstance(step, Question):
                    question, step = step, None
                    self._answer_reporting_errors(question)
                else:
                    draft, step = step, None
                    step = self._read_and_respond(draft)
            except LeaveChat:
                return
            except KeyboardInterrupt:  # counted by the signal handler already
                continue

    def _read_and_respond(self, draft: QuestionDraft | None) -> Question | QuestionDraft | None:
        """Read a line, with the draft for the user to edit, and carry the line out. Raises LeaveChat at the end of the
        input, LineCleared if Ctrl-C comes twice.
        """
        try:
            line = self._source.ask(draft=draft.text if draft is not None else "")
        except LineCleared:
            if self._interrupts.count_interrupt():
                raise
            console.print_indented(self._screen, "(Ctrl-C again, Ctrl-D or /bye leaves)")
            return None
        if line is None:
            raise LeaveChat
        step = self._respond(line)
        return (
            replace(step, replaces_last=draft.replaces_last, images=(*draft.images, *step.images))
            if draft is not None and isinstance(step, Question)
            else step
        )

    def answer(self, question: Question) -> Completion:
        """Answer a question, and print the statistics below the answer."""
        session, params = self._session, self._session.params
        if self._pretty:
            self._screen.print()
        previous_conversation = session.conversation.fork() if params.tools else None
        with self._collect_keys():
            if question.answers > 1:
                display = SideBySideDisplay(
                    self._screen, question.answers, self._interrupts.suspend_handler.wait_for_lock
                )
                completion = session.ask(question, display.show_reply)
            else:
                completion = session.ask(question)
        if previous_conversation is not None and _has_tool_calls(completion):
            completion = self._run_tool_calls(completion, previous_conversation)
        end_reason = cut_reason(completion, params, session.engine)
        if self._pretty and session.figures is not FigureDisplay.QUIET:
            self._screen.print(f"\n{self._statistics_line(completion, end_reason)}\n", style="dim")
        if form_note := incomplete_form_note(completion, params, end_reason):
            console.print_note(form_note)
        if self._pretty and (note := loop_note(completion, params)):
            console.print_indented(self._screen, note)
        return completion

    def _collect_keys(self) -> AbstractContextManager[None]:
        """Return a context in which typed keys wait for the next prompt, while an answer is written."""
        arena = self._session.arena
        return self._source.collect_keys({} if arena is None else {ARENA_KEY: arena.toggle})

    def _run_tool_calls(self, completion: Completion, previous_conversation: Conversation) -> Completion:
        """Run the tool calls of an answer, and those of the answers that follow. Return the last answer.

        If this fails or is stopped, the chat is `previous_conversation` again, as before the question.
        """
        session = self._session
        display = ToolCallDisplay(
            session.note, self._source.ask, session.allowed_functions, ask_first=session.ask_first
        )
        rounds = ToolRounds(session.params, on_event=display.show_result)
        try:
            while _has_tool_calls(completion):
                with redirect_stdout(sys.stderr):  # stdout is for the answer
                    results = rounds.run_calls(completion, display.ask_approval)
                with self._collect_keys():
                    completion = session.answer_tool_results(results, rounds.params)
        except BaseException as error:
            session.conversation = previous_conversation
            session.save()
            if isinstance(error, KeyboardInterrupt):
                raise TurnStopped(TAKEN_BACK) from None
            raise
        return completion

    def _statistics_line(self, completion: Completion, end_reason: str) -> str:
        """Return a line such as `24 tokens · 41.2 tok/s · TTFT 180 ms · prompt 37 tok (32 cached)`, and one about
        tokens that were cached once and had to be computed again.
        """
        line = statistics_line(completion, end_reason)
        if self._session.figures is FigureDisplay.VERBOSE:
            times = completion.timings
            line += (
                f"\nwaited {times.queued:.2f} s · prefill {times.prefill_tokens_per_second:.0f} tok/s · "
                f"{times.total:.2f} s in all · finish_reason {completion.finish_reason.value}"
            )
        report = completion.cache_report
        if report is not None and report.reason not in (None, RecomputeReason.THOUGHTS):
            line += f"\n{to_single_line(str(report))}"
        return line

    def _respond(self, line: str) -> Question | QuestionDraft | None:
        """Carry out a typed line, and print its error if it fails. Return the question or draft that follows, if there
        is one. If the engine has ended by itself, EngineClosed is raised.
        """
        try:
            parsed_input = parse_input(line, BY_NAME)
            if parsed_input.command is not None:
                step = BY_NAME[parsed_input.command](self._session, parsed_input.text, self._screen)
                typed_now = isinstance(step, Question) and step.typed_text == step.text
                return self._add_file_texts(step) if isinstance(step, Question) and typed_now else step
            return self._read_message(parsed_input.text) if parsed_input.text else None
        except EngineClosed as error:
            if self._session.has_model:
                raise
            console.print_error(str(error))
            console.print_indented(self._screen, self._session.no_model_advice)
            return None
        except (CortexError, OSError) as error:
            console.print_error(str(error))
            return None

    def _read_message(self, text: str) -> Question | None:
        """Return a typed message as a question with its files. A lone dropped image waits for the next message."""
        dropped = find_dropped_image(text)
        if dropped is None:
            return self._add_file_texts(Question(text))
        session, (path, rest) = self._session, dropped
        attach(session, read_attachment(path, session.why_no_images), self._screen, is_asked=bool(rest))
        return self._add_file_texts(Question(rest)) if rest else None

    def _add_file_texts(self, question: Question) -> Question:
        """Return the question with texts before it: of the files that it names, and of those that are attached."""
        session, text = self._session, question.text
        named_files, missing_names = read_mentions(text, session.why_no_images)
        for file in named_files:
            print_file_size(session, file, self._screen)
        for name in missing_names:
            console.print_indented(self._screen, f"@{name} is not a file here: it is sent as text")
        waiting_files, session.attached_files = session.attached_files, []
        files = [*waiting_files, *named_files]
        if not files:
            return question
        return add_files(replace(question, typed_text=text, attached_files=tuple(waiting_files)), files)

    def _answer_reporting_errors(self, question: Question) -> None:
        """Answer a question, and print an error that ends the turn. Only the end of the engine ends the chat.

        If no answer is kept, waiting files wait again. A new question without files counts as taken by `/undo`, so that
        `/regen` asks it again and leaves older answers alone.
        """
        session, undone_question = self._session, self._session.undone_question
        previous_conversation = session.conversation.fork()
        completion = self._answer_or_none(question)
        if completion is not None and question.answers > 1:
            self._keep_chosen_answer(completion, previous_conversation)
        if session.conversation.messages == previous_conversation.messages:
            if completion is None and not (question.replaces_last or question.attached_files or question.images):
                undone_question = question.text
            session.undone_question = undone_question
            session.attached_files = [*question.attached_files, *session.attached_files]
            if question.attached_files:
                names = ", ".join(str(each.path) for each in question.attached_files)
                console.print_indented(self._screen, f"for the next message: {names} (/clear forgets it)")

    def _answer_or_none(self, question: Question) -> Completion | None:
        """Answer a question. If that fails, print why and return None; only EngineClosed is raised."""
        previous_messages = self._session.conversation.messages
        try:
            return self.answer(question)
        except EngineClosed:
            raise
        except TurnStopped as stopped:
            console.print_indented(self._screen, str(stopped))
        except KeyboardInterrupt:  # before or after the answer; the signal handler has counted it
            is_answered = self._session.conversation.messages != previous_messages
            console.print_indented(self._screen, "stopped" if is_answered else NOT_BEGUN)
        except CortexError as error:
            console.print_error(str(error))
            if isinstance(error, PromptTooLong | KVCacheFull):
                advice = room_advice(self._session.engine, len(self._session.engine.encode(question.text)))
                console.print_indented(self._screen, f"nothing was sent: the question is too long alone. {advice}")
        return None

    def _keep_chosen_answer(self, completion: Completion, previous_conversation: Conversation) -> None:
        """Keep the answer that the user chooses, or restore the chat before the answers, `previous_conversation`."""
        session, answers, chosen_answer = self._session, (completion, *completion.others), None
        try:
            with suppress(LineCleared):
                chosen_answer = choose_answer(answers, partial(self._source.ask, typed_ahead=True), self._screen)
        finally:
            if chosen_answer is None:
                session.conversation = previous_conversation
                console.print_indented(self._screen, "none: the chat is as it was before")
            else:
                session.conversation.choose(chosen_answer)
            session.save()


def _has_tool_calls(completion: Completion) -> bool:
    """Return whether a complete answer calls tools."""
    return bool(completion.tool_calls) and completion.finish_reason is not FinishReason.CANCELLED


# The tool calls of a chat on the screen, and the user's consent to each.


CONSENT = "  run it? y, n, or a for always: "
TAKEN_BACK = "stopped: the question and its calls are taken back"

_SHOWN_LINES, _SHOWN_CHARACTERS = 6, 600
"""How much of a result is shown. The model reads all of it."""


class ToolCallDisplay:
    """Shows tool calls and the beginnings of results. If `ask_first`, only `allowed_functions` run unasked."""

    def __init__(
        self,
        tell: Callable[[str], None],
        ask: Callable[[str], str | None],
        allowed_functions: set[str],
        *,
        ask_first: bool,
    ) -> None:
        self._tell = tell
        self._ask = ask
        self._allowed_functions = allowed_functions
        self._ask_first = ask_first

    def ask_approval(self, call: ToolCall) -> bool:
        """Show this call, and return whether the user allows it. Raises TurnStopped on Ctrl-C and the input's end."""
        self._tell(format_call(call))
        if not self._ask_first or call.name in self._allowed_functions:
            return True
        while True:
            line = None
            with suppress(LineCleared):
                line = self._ask(CONSENT)
            if line is None:
                raise TurnStopped(TAKEN_BACK)
            answer = line.strip().lower()
            if answer in ("a", "always"):
                self._allowed_functions.add(call.name)
            if answer in ("y", "yes", "a", "always"):
                return True
            if answer in ("n", "no"):
                return False
            self._tell(
                "y runs this call, n tells the model that you do not allow it, a runs all calls of "
                f"{call.name} from now on"
            )

    def show_result(self, event: ToolEvent) -> None:
        """Print the beginning of a call's result."""
        if event.result is not None and event.result != NOT_ALLOWED:
            self._tell(f"= {shorten_result(event.result)}")


def format_call(call: ToolCall) -> str:
    """Return a tool call as Python code, with JSON values. Characters that a terminal hides or obeys are escaped."""
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.values.items())
    text = f"{call.name}({arguments})"
    return "".join(char if strip_controls(char) == char else json.dumps(char)[1:-1] for char in text)


def shorten_result(result: str) -> str:
    """Return the beginning of a result, and how much more there is."""
    lines = result.strip().splitlines() or ["(nothing)"]
    shown_text = "\n".join(lines[:_SHOWN_LINES])[:_SHOWN_CHARACTERS]
    hidden_count = len(result.strip()) - len(shown_text)
    return shown_text + (f" ... ({hidden_count:,} more characters)" if hidden_count > 0 else "")
