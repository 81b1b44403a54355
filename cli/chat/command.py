"""`cortexmlx chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortexmlx.cli import engine as engines
from cortexmlx.cli import options
from cortexmlx.cli.chat.sampling import FALLBACK_SAMPLING, default_sampling
from cortexmlx.cli.chat.tools.functions_file import load_tools
from cortexmlx.cli.chats.saved_chats import ChatSaver, describe_storage, find_chat, remove_leftovers, resume_command
from cortexmlx.cli.limits import incomplete_form_note
from cortexmlx.cli.prompts import check_variables, parse_template_vars
from cortexmlx.cli.shortage import shortage_line
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import FAILED
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.cli.terminal.signals import InterruptHandler, handle_signals
from cortexmlx.cli.terminal.text import clean_argument, gather_prompt
from cortexmlx.core.config import EngineConfig
from cortexmlx.disk.folder import default_folder
from cortexmlx.errors import InvalidRequest
from cortexmlx.models.resolve import resolve_model
from cortexmlx.sessions.saved import SavedConversation, parse_foreign_messages, read_text
from cortexmlx.structured.tools import Tool
from cortexmlx.types.request import FinishReason
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from cortexmlx.cli.chat.input import QuestionSource
    from cortexmlx.cli.chat.session import ViewFactory
    from cortexmlx.cli.chat.status import ArenaView
    from cortexmlx.cli.chat.view import ThoughtDisplay
    from cortexmlx.engine import Engine
    from cortexmlx.sessions.conversation import Conversation

ROWS = 4
"""Answers of `/n` that are generated at the same time."""


@options.add_sampling_options(
    excluded=("stop", "presence_penalty", "frequency_penalty"), follows_model=True, **FALLBACK_SAMPLING
)
@options.add_engine_options(has_store=True, max_rows=ROWS)
def chat(
    context: typer.Context,
    model: options.Model = None,
    model_option: options.ModelOption = None,
    prompt: options.Prompt = None,
    system: options.System = None,
    template_var: options.TemplateVar = None,
    think: options.Think = None,
    *,
    params: SamplingParams,
    once: Annotated[bool, typer.Option("--once", help="Leave after the first answer.")] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[NAME]",
            help="Go on with a saved chat: the last, or NAME, its beginning, or words in it.",
            show_default=False,
        ),
    ] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="Keep nothing of the chat on disk.")] = False,
    no_history: Annotated[bool, typer.Option("--no-history", help="Do not remember what is typed.")] = False,
    tools: Annotated[
        Path | None,
        typer.Option(
            "--tools", metavar="FILE.py", help="The model may call the functions of this file.", show_default=False
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Run the model's calls without asking.")] = False,
    config: EngineConfig,
) -> None:
    """Talk to a model. /help in the chat lists its commands.

    With a file or a pipe as input, that is the one question, before -p if given. With a file or a pipe as output,
    the answer is its plain text. Answers are sampled as the model's makers recommend (generation_config.json; the
    starter model with a light repetition penalty). --temp 0 --repetition-penalty 1 is greedy.

    A chat in a terminal is saved after every turn, in a file of the state folder that only you can read. --resume goes
    on with it: with its model, its system prompt and its settings, where the command line does not say otherwise. The
    lines that are typed are remembered there, too; keys and values go to the cache folder, those of a piped question
    as well. --no-save keeps none of the three.

    With --tools, the model may call the functions of a Python file. Each call is shown, and runs if you say so.
    """
    resumed_path = None if resume is None else find_chat(resume)
    model_name = options.model_name(model, model_option)
    if resumed_path is not None and model is None and model_option is None:
        model_name = model_of_chat(resumed_path) or model_name
    config = replace(config, model=model_name)
    if no_save and config.kv_store == default_folder():  # a folder that the user names is still used
        config = replace(config, kv_store=None)
    is_piped = not sys.stdin.isatty()
    pretty = console.is_terminal(sys.stdout)
    first_question = gather_prompt(prompt or ["-"] if is_piped else prompt or [])
    if is_piped and not first_question:
        resolve_model(model_name)
        raise typer.BadParameter('no question on stdin: pipe one in, or give -p "..."', param_hint="--prompt")
    system = None if system is None else clean_argument(system, "--system")
    if is_piped and tools is not None and not yes:
        raise typer.BadParameter("nobody can be asked before a call runs: add --yes to run all", param_hint="--tools")
    if yes and tools is None:
        raise typer.BadParameter("there are no calls to run: give --tools FILE.py", param_hint="--yes")
    loaded_tools = () if tools is None else load_tools(tools)
    saver = (
        None
        if no_save or (is_piped and resumed_path is None)
        else ChatSaver(None if resumed_path is None or model_of_chat(resumed_path) is None else resumed_path)
    )
    remember = not (no_history or no_save)
    if saver is not None:
        remove_leftovers()
    if line := shortage_line(config):
        console.print_note(line)
    with engines.ReplaceableEngine(config) as replaceable, handle_signals() as interrupts:
        if reason := replaceable.engine.info.why_no_chat:
            raise InvalidRequest(reason)
        replaceable.ignore_interrupt = lambda: interrupts.call_on_interrupt(lambda: None)
        conversation = open_conversation(
            replaceable.engine, options.given_sampling(context, params), system, resumed_path
        )
        if variables := parse_template_vars(template_var, think):
            conversation.template_vars = check_variables(replaceable.engine, conversation.template_vars | variables)
        if pretty and not (is_piped or once):
            store = replaceable.engine.stats().kv_store
            on_disk = describe_storage(saver, None if store is None else store.path)
            print_banner(replaceable.engine, console.stdout(), on_disk, resume_note(conversation, saver))
            if resumed_path is not None:
                from cortexmlx.cli.chat.slash.models import print_last_messages

                print_last_messages(conversation.messages, console.stdout())
        source = question_source(pretty and not is_piped, remember)
        interrupts.at_leave.append(source.close)
        if saver is not None:
            interrupts.at_leave.append(saver.close)
        try:
            settings = ChatSettings(pretty, first_question, is_piped or once, loaded_tools, ask_first=not yes)
            run_chat(replaceable, conversation, saver, source, interrupts, settings)
        finally:
            source.close()
            if saver is not None:
                saver.close()


def model_of_chat(path: Path) -> str | None:
    """Return the model of a saved chat; None for a file of messages from another program."""
    return (
        None
        if parse_foreign_messages(path, read_text(path)) is not None
        else SavedConversation.read(path).model.reopen_name
    )


def open_conversation(
    engine: Engine, sampling_options: dict[str, Any], system: str | None, resumed_path: Path | None
) -> Conversation:
    """Return a new conversation, or the one in the file `resumed_path`, with the options of the command line."""
    conversation = engine.conversation(system=system, params=default_sampling(engine.info))
    if resumed_path is not None:
        conversation.load(resumed_path)
        from cortexmlx.cli.chat.session import conversation_notes

        for remark in conversation_notes(engine, conversation):
            console.print_note(remark)
        conversation.system = conversation.system if system is None else system
    conversation.params = replace(conversation.params, **sampling_options)
    return conversation


@dataclass(frozen=True)
class ChatSettings:
    """The settings of a chat from the command line."""

    pretty: bool
    """Whether the terminal can do more than print lines."""
    first_question: str
    """The first question; empty: the user types it."""
    once: bool
    """Whether only one question is answered."""
    tools: tuple[Tool, ...]
    ask_first: bool
    """Whether the user is asked before a call of the model runs."""


def run_chat(
    replaceable: engines.ReplaceableEngine,
    conversation: Conversation,
    saver: ChatSaver | None,
    source: QuestionSource,
    interrupts: InterruptHandler,
    settings: ChatSettings,
) -> None:
    """Run a chat until the user leaves, or for one question if `settings.once`."""
    from cortexmlx.cli.chat.input import LineCleared
    from cortexmlx.cli.chat.session import ChatSession, TurnStopped
    from cortexmlx.cli.chat.slash.commands import LeaveChat
    from cortexmlx.cli.chat.status import ArenaView
    from cortexmlx.cli.chat.talk import ChatLoop
    from cortexmlx.cli.chat.view import ThoughtDisplay

    screen = console.stdout()
    pretty, once, first_question = settings.pretty, settings.once, settings.first_question
    arena = ArenaView(lambda: replaceable.engine.blocks()) if pretty else None
    thought_display = ThoughtDisplay()
    views = view_factory(replaceable, screen, arena, thought_display, interrupts)
    session = ChatSession(
        replaceable.engine,
        views,
        conversation,
        interrupts.call_on_interrupt,
        saver,
        arena,
        replaceable,
        thought_display=thought_display,
    )

    def saved_line() -> str:
        """Return how the chat is continued, or "" if it is not saved."""
        path = None if saver is None or once or not pretty else saver.saved_path
        return "" if path is None else f"saved: {resume_command(path)}"

    last_words = (interrupts.suspend_handler.erase_region, lambda: interrupts.suspend_handler.write_line(saved_line()))
    interrupts.at_leave[:0] = [session.save_partial, *last_words]
    if pretty:
        session.note = lambda text: console.print_indented(screen, text)
    session.ask_first = settings.ask_first
    if settings.tools:
        session.set_tools(settings.tools)
    chat_loop = ChatLoop(session, source, screen, interrupts, pretty=pretty)
    try:
        if not once:
            chat_loop.run(first_question)
        else:
            completion = chat_loop.run_once(first_question)
            if completion.finish_reason is FinishReason.CANCELLED:
                raise KeyboardInterrupt
            if incomplete_form_note(completion, session.params):
                raise typer.Exit(FAILED)
    except LeaveChat:
        return
    except (LineCleared, TurnStopped):
        raise KeyboardInterrupt from None
    finally:
        if line := saved_line():
            screen.print(line, style="dim", markup=False, soft_wrap=True)


def view_factory(
    replaceable: engines.ReplaceableEngine,
    screen: Console,
    arena: ArenaView | None,
    thought_display: ThoughtDisplay,
    interrupts: InterruptHandler,
) -> ViewFactory:
    """Return a maker of answer views: Markdown with a status line on a terminal, plain text where `arena` is None."""
    from cortexmlx.cli.chat.status import AnswerStatus
    from cortexmlx.cli.chat.view import MarkdownView, PlainTextView

    if arena is None:
        return lambda reply: PlainTextView()
    return lambda reply: MarkdownView(
        screen,
        AnswerStatus(reply, replaceable.engine.info.context_length, arena),
        thinking=bool(reply.opened),
        is_folded=thought_display.is_folded,
        suspension_guard=interrupts.suspend_handler.wait_for_lock,
    )


def question_source(pretty: bool, remember: bool) -> QuestionSource:
    """Return the source of user messages: an editable input line on a good terminal, plain lines elsewhere."""
    from cortexmlx.cli.chat.input import PlainInput, TerminalInput, history_path
    from cortexmlx.cli.chat.slash.commands import BY_NAME

    if not pretty:
        return PlainInput()
    return TerminalInput(BY_NAME, history_path() if remember else None)


def resume_note(conversation: Conversation, saver: ChatSaver | None) -> str:
    """Return a note on what a resumed chat contains; empty for a new chat."""
    if not conversation.messages or saver is None or saver.path is None:
        return ""
    note = f"{saver.path.stem}: {len(conversation.messages)} messages so far (/show messages)"
    is_unanswered = conversation.messages[-1]["role"] == "user"
    return note + "\nthe last question has no answer yet: /regen asks it again, /undo takes it back" * is_unanswered


def print_banner(engine: Engine, screen: Console, on_disk: str, so_far: str = "") -> None:
    """Print the model, its context and notes, what is stored on disk, and the note on a resumed chat."""
    from rich.text import Text

    info, stats = engine.info, engine.stats()
    name = info.name if info.adapter is None else f"{info.name} + {info.adapter}"
    size = f"{info.parameters / 1e6:,.0f} M parameters"
    window_text = f", then the first {stats.keep_first:,} and newest {stats.keep_last:,}" if stats.keep_last else ""
    context = f"context {info.context_length:,} tokens{window_text}"
    screen.print(Text.assemble((to_single_line(name), "bold"), f" · {size} · {context}"))
    lines = [*info.notes, on_disk, "/help lists the commands, /show tells more of the model, Ctrl-D leaves"]
    for line in [*lines, "", *([so_far, ""] if so_far else [])]:
        screen.print(line, style="dim", markup=False)
