"""`cortexmlx chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortexmlx import __version__
from cortexmlx.cli import engine as engines
from cortexmlx.cli import options
from cortexmlx.cli.chat.kept import Keeper, find, whereabouts
from cortexmlx.cli.chat.variables import checked
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import leave_now
from cortexmlx.cli.terminal.text import clean, gather_prompt
from cortexmlx.errors import CortexError, EngineClosed
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.request import Completion, FinishReason, SamplingParams
from cortexmlx.serving.config import EngineConfig
from cortexmlx.sessions.saved import Saved
from cortexmlx.store.folder import default_folder

if TYPE_CHECKING:
    from rich.console import Console

    from cortexmlx.cli.chat.input import QuestionSource
    from cortexmlx.cli.chat.session import ChatSession, Question, ViewFactory
    from cortexmlx.cli.chat.status import Arena
    from cortexmlx.engine import Engine
    from cortexmlx.sessions.conversation import Conversation

TWICE_SECONDS = 1.0


SAMPLING: dict[str, Any] = {"max_tokens": 2048, "temperature": 0.5, "top_p": 0.95, "repetition_penalty": 1.1}
"""What keeps small models from repeating themselves."""


@options.takes_sampling(without=("stop", "presence_penalty", "frequency_penalty"), **SAMPLING)
@options.takes_engine(stored=True, max_rows=1)
def chat(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    prompt: options.Prompt = None,
    system: options.System = None,
    template_var: options.TemplateVar = None,
    think: options.Think = None,
    *,
    params: SamplingParams,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[NAME]",
            help="Go on with a chat that was kept: the last, or NAME or its beginning.",
            show_default=False,
        ),
    ] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="Keep nothing of the chat on disk.")] = False,
    no_history: Annotated[bool, typer.Option("--no-history", help="Do not remember what is typed.")] = False,
    config: EngineConfig,
) -> None:
    """Talk to a model. /help in the chat lists its commands.

    With a file or a pipe as input, that is the one question, after -p if given. With a file or a pipe as output,
    the answer is its plain text. The default sampling keeps small models from repeating themselves; --temp 0
    --repetition-penalty 1 is greedy.

    A chat in a terminal is kept after every turn, in a file of the state folder that only you can read. --resume goes
    on with it: with its model, its system prompt and its settings, where the command line does not say otherwise. The
    lines that are typed are remembered there, too; keys and values go to the cache folder, those of a piped question
    as well. --no-save keeps none of the three.
    """
    resumed = None if resume is None else find(resume)
    named = options.model_name(model, model_option)
    if resumed is not None and model is None and model_option is None:
        named = Saved.read(resumed).model.found_as
    config = replace(config, model=named)
    if no_save and config.kv_store == default_folder():  # one that is named is wanted
        config = replace(config, kv_store=None)
    piped = not sys.stdin.isatty()
    first = gather_prompt(prompt or ["-"] if piped else prompt or [])
    if piped and not first:
        raise typer.BadParameter('no question on stdin: pipe one in, or give -p "..."', param_hint="--prompt")
    system = None if system is None else clean(system, "--system")
    keeper = None if no_save or (piped and resumed is None) else Keeper(resumed)
    with engines.open_engine(config) as engine, interrupts() as presses:
        conversation = begin(engine, params, system, resumed)
        if variables := options.template_vars(template_var, think):
            conversation.template_vars = checked(engine, conversation.template_vars | variables)
        talk(engine, conversation, keeper, presses, first=first, once=piped, remember=not (no_history or no_save))


def begin(engine: Engine, params: SamplingParams, system: str | None, resumed: Path | None) -> Conversation:
    """A new conversation, or the one in a file, with what the command line says."""
    conversation = engine.conversation(system=system, params=params)
    if resumed is not None:
        conversation.load(resumed)
        usual = vars(SamplingParams(**SAMPLING))
        asked = {name: value for name, value in vars(params).items() if value != usual[name]}
        conversation.params = replace(conversation.params, **asked)
        conversation.system = conversation.system if system is None else system
    return conversation


def talk(
    engine: Engine,
    conversation: Conversation,
    keeper: Keeper | None,
    presses: Interrupts,
    *,
    first: str,
    once: bool,
    remember: bool,
) -> None:
    """The chat itself: asks, answers, and ends. `once`: only the first question."""
    from cortexmlx.cli.chat.input import LineCleared
    from cortexmlx.cli.chat.session import ChatSession, Question
    from cortexmlx.cli.chat.status import Arena

    screen, pretty = console.stdout(), console.is_terminal(sys.stdout)
    arena = Arena(engine.blocks) if pretty else None
    views = view_factory(engine, screen, arena)
    session = ChatSession(engine, views, conversation, presses.calling, keeper, arena)
    if once:
        if answer(session, Question(first), screen, pretty).finish_reason is FinishReason.CANCELLED:
            raise KeyboardInterrupt
        return
    if pretty:
        store = engine.stats().kv_store
        banner(engine, screen, whereabouts(keeper, None if store is None else store.path))
        if conversation.messages and keeper is not None and keeper.path is not None:
            said = f"{keeper.path.stem}: {len(conversation.messages)} messages so far\n"
            screen.print(said, style="dim", markup=False)
    source = question_source(pretty, remember)
    question = Question(first) if first else None
    while True:
        try:
            if question is None:
                typed = source.ask()
                if typed is None:
                    return
                question = respond(session, typed, screen)
            if question is not None:
                pending, question = question, None
                answer_or_say_why(session, pending, screen, pretty)
        except LineCleared:
            if presses.again():
                raise KeyboardInterrupt from None
            screen.print("  (Ctrl-C again, Ctrl-D or /exit leaves)", style="dim")
        except KeyboardInterrupt:  # counted by the signal handler already
            continue


def respond(session: ChatSession, typed: str, screen: Console) -> Question | None:
    """Carry out a command. Returns the question that is to be answered, if there is one."""
    from cortexmlx.cli.chat.commands import Leave, run_command
    from cortexmlx.cli.chat.session import Question

    if not typed.startswith("/") or typed.startswith("//"):
        return Question(typed.removeprefix("/") if typed.startswith("//") else typed) if typed.strip() else None
    try:
        return run_command(typed, session, screen)
    except Leave:
        raise typer.Exit from None
    except (CortexError, OSError) as error:
        console.error(str(error))
        return None


def answer_or_say_why(session: ChatSession, question: Question, screen: Console, pretty: bool) -> None:
    """One turn; an error ends the turn, and the chat only if the engine has gone."""
    try:
        answer(session, question, screen, pretty)
    except EngineClosed:
        raise
    except CortexError as error:
        console.error(str(error))


def answer(session: ChatSession, question: Question, screen: Console, pretty: bool) -> Completion:
    """One turn, and the line of figures below it."""
    from cortexmlx.cli.chat.input import no_echo
    from cortexmlx.cli.generate import summary

    if pretty:
        screen.print()
    with no_echo():
        completion = session.ask(question)
    if pretty:
        stopped = " · stopped" if completion.finish_reason is FinishReason.CANCELLED else ""
        screen.print(f"\n[dim]{summary(completion)}{stopped}[/dim]\n")
    return completion


def view_factory(engine: Engine, screen: Console, arena: Arena | None) -> ViewFactory:
    """Rendered Markdown above a status on a terminal, plain text elsewhere, where there is no place for the arena."""
    from cortexmlx.cli.chat.status import Status
    from cortexmlx.cli.chat.view import MarkdownView, RawView

    if arena is None:
        return lambda reply: RawView()
    context = engine.info.context_length
    return lambda reply: MarkdownView(screen, Status(reply, context, arena), thinking=bool(reply.thinking))


def question_source(pretty: bool, remember: bool) -> QuestionSource:
    """The editing input line on a good terminal, plain lines elsewhere."""
    from cortexmlx.cli.chat.commands import completions
    from cortexmlx.cli.chat.input import PlainInput, TerminalInput, history_path

    if not pretty:
        return PlainInput()
    return TerminalInput(completions(), history_path() if remember else None)


def banner(engine: Engine, screen: Console, on_disk: str) -> None:
    """Which model, how much context and KV memory, on what, and what stays on disk."""
    from rich.markup import escape

    from cortexmlx.cli.device import device_line

    info, stats = engine.info, engine.stats()
    size = f"{info.parameters / 1e6:,.0f} M parameters"
    memory = f"KV memory up to {format_bytes(stats.kv_bytes_limit)} in blocks of {stats.block_size} tokens"
    if stats.kv_bits:
        memory += f", {stats.kv_bits} bits"
    if not info.kv_bytes_per_token:
        memory = "tokens take no KV memory"
    name = escape(info.name if info.adapter is None else f"{info.name} + {info.adapter}")
    screen.print(f"[bold]{name}[/bold] · {info.architecture}, {size}, {info.dtype} · cortexmlx {__version__}")
    kept = f", then the first {stats.keep_first:,} and newest {stats.keep_last:,}" if stats.keep_last else ""
    screen.print(f"[dim]context {info.context_length:,} tokens{kept} · {memory}[/dim]")
    screen.print(f"[dim]{device_line()} · {stats.attention_backend} attention[/dim]")
    for remark in info.notes:
        screen.print(remark, style="dim", markup=False)
    screen.print(on_disk, style="dim", markup=False)
    screen.print("[dim]/help lists the commands, Ctrl-D leaves[/dim]\n")


class Interrupts:
    """Counts Ctrl-C: the first stops what is going on, the second within a second ends the program."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._stop: Callable[[], None] | None = None

    def again(self) -> bool:
        """One more; True if the last was less than a second ago."""
        now = time.monotonic()
        since, self._last = now - self._last, now
        return since < TWICE_SECONDS

    @contextmanager
    def calling(self, stop: Callable[[], None]) -> Iterator[None]:
        """In this context the first Ctrl-C calls `stop`; elsewhere it raises KeyboardInterrupt."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """As a signal handler."""
        if self.again():
            leave_now()
        if self._stop is None:
            raise KeyboardInterrupt
        self._stop()


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Ctrl-C as a chat needs it."""
    presses = Interrupts()
    before = signal.signal(signal.SIGINT, presses.handle)
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)
