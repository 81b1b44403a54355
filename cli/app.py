"""The commands and their order in `cortexmlx --help`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from cortexmlx import __version__
from cortexmlx.cli.batch.command import batch
from cortexmlx.cli.bench.command import bench
from cortexmlx.cli.cache.command import cache, export, import_file, why
from cortexmlx.cli.chat.command import chat
from cortexmlx.cli.chats.command import chats
from cortexmlx.cli.chats.saved_chats import LAST
from cortexmlx.cli.doctor.command import DEFAULT_FILE, doctor
from cortexmlx.cli.eval import evaluate
from cortexmlx.cli.generate import generate
from cortexmlx.cli.launch import Agent, launch
from cortexmlx.cli.models import models
from cortexmlx.cli.plan.command import plan
from cortexmlx.cli.program import adapt_commands, program_name
from cortexmlx.cli.serve.command import serve
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import exit_codes
from cortexmlx.models.resolve import STARTER

EXAMPLES = """\
\b
Examples:
  cortexmlx chat                                  talk to the starter model
  cortexmlx batch smollm2 questions.jsonl -o answers.jsonl
"""

OPTIONS = """\
cortexmlx COMMAND --help: more. --version, --debug, --install-completion.
"""
"""The whole help is one screen of 24 lines, so the options take one line."""

COMMAND_SYNONYMS = {
    "run": "chat",
    "ask": "generate",
    "logs": "chats",
    "history": "chats",
    "list": "models",
    "ls": "models",
    "benchmark": "bench",
    "perplexity": "eval",
    "server": "serve",
    "start": "serve",
}
"""Names of commands in other programs, and the commands here."""

_DOWNLOAD_ADVICE = "a model is downloaded when it is first used: cortexmlx chat org/name"
_REMOVE_ADVICE = (
    "models of the hub lie in its cache: `hf cache rm`, or remove the folder that `cortexmlx models --json` names"
)
MISSING_COMMANDS = {
    **dict.fromkeys(("pull", "download", "get", "install"), _DOWNLOAD_ADVICE),
    **dict.fromkeys(("rm", "remove", "delete"), _REMOVE_ADVICE),
    **dict.fromkeys(("show", "info"), "what a model takes: cortexmlx plan MODEL; in a chat: /show"),
    **dict.fromkeys(("ps", "stop"), "nothing runs in the background, but for a server of yours: see its page"),
    **dict.fromkeys(("embed", "embeddings"), 'texts of a file: cortexmlx batch, lines with `"url": "/v1/embeddings"`'),
    "help": "cortexmlx --help, or cortexmlx COMMAND --help",
    "version": "cortexmlx --version",
    **dict.fromkeys(("update", "upgrade"), "git pull in its clone, and then make chat"),
}
"""Commands of other programs that do not exist here, and what to do instead."""


CACHE_SYNONYMS = {
    **dict.fromkeys(("clear", "clean", "purge"), "cortexmlx cache --clear"),
    **dict.fromkeys(("list", "ls", "show"), "cortexmlx cache"),
    **dict.fromkeys(("remove", "rm", "delete"), "cortexmlx cache --remove NAME"),
}
"""Words after `cortexmlx cache` that are options here, and what to type instead."""


FOREIGN_OPTIONS = {
    **dict.fromkeys(
        ("c", "ctx-size", "max-model-len"), "The context is the model's own; --kv-memory limits what it takes"
    ),
    **dict.fromkeys(("ctk", "ctv", "cache-type-k", "cache-type-v", "kv-cache-dtype"), "Here it is --kv-bits 8, or 4"),
    **dict.fromkeys(("f", "file"), "A file is piped in: < FILE. In the messages of a chat, @FILE puts its text there"),
    **dict.fromkeys(("gpu-layers", "n-gpu-layers", "ngl"), "The whole model is on the GPU"),
    **dict.fromkeys(("parallel", "max-num-seqs", "np"), "Here it is --max-rows N"),
    "api-key": "Here it is --api-key-file FILE, or CORTEXMLX_API_KEY in the environment: others see a command line",
    "gpu-memory-utilization": "Here it is --memory SIZE for all models of `cortexmlx serve`, or --kv-memory",
    "log-level": "Here it is --log-format text, json or none, of `cortexmlx serve`",
    "max-kv-size": "Here it is --keep-last N",
    "repeat-penalty": "Here it is --repetition-penalty X",
    "served-model-name": "Here it is --alias NAME, of `cortexmlx serve`",
    "system-prompt": "Here it is --system TEXT",
    "tensor-parallel-size": "Here it is --hosts HOSTS",
}
"""Options of llama.cpp, vLLM and mlx-lm that do not exist here, without their dashes, and what to do instead."""


class AdaptedHelp:
    """A command whose help shows commands as they must be typed here, such as `python -m cortexmlx chat`."""

    help: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the commands in it as they must be typed here."""
        self.help = adapt_commands(self.help or "")
        super().format_help(ctx, formatter)  # type: ignore[misc]


class CommandGroup(AdaptedHelp, TyperGroup):
    """A command that has subcommands of its own."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a subcommand by name. If the name is an option here, the error has the right command line."""
        if self.get_command(ctx, args[0]) is None and args[0] in CACHE_SYNONYMS:
            ctx.fail(f"No such command {args[0]!r}. Type: {CACHE_SYNONYMS[args[0]]}")
        return super().resolve_command(ctx, args)


class Subcommand(AdaptedHelp, TyperCommand):
    """A subcommand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. The error for an option of another program names the one to use here."""
        words = [*args]  # the parser takes them away
        if typed := next((word for word in words if word in ("-ngl", "-np")), ""):  # else read as -n gl, and -n p
            ctx.fail(f"No such option: {typed}. {FOREIGN_OPTIONS[typed[1:]]}")
        try:
            return super().parse_args(ctx, args)
        except Exception as raised:
            error: Any = raised
            has_schema = any("--schema" in each.opts for each in self.params)
            if type(raised).__name__ == "NoSuchOption":
                typed = next((word for word in words if word.startswith(error.option_name)), "").partition("=")[0]
                if typed == "--json" and has_schema:
                    error.possibilities = ["--schema json"]
                elif advice := FOREIGN_OPTIONS.get(typed.lstrip("-")):
                    error.message, error.possibilities = f"No such option: {typed}. {advice}", None
            elif ctx.info_name == "chat" and "unexpected extra argument" in str(error):
                error.message += f". A question goes after -p, or type: {shlex.join(['cortexmlx', 'generate', *words])}"
            elif "'json' is not one of" in str(error) and has_schema:
                error.message += " For answers in JSON: --schema json"
            raise


class OptionalValueCommand(Subcommand):
    """A subcommand with an option that may come without a value, which typer cannot express."""

    default_values: Mapping[str, str] = {"--resume": LAST, "--report": DEFAULT_FILE}
    """What such an option means without a value: the last chat, the usual file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. An option that was typed without a value gets its default value first."""
        for index in range(len(args) - 1, -1, -1):
            next_char = args[index + 1][:1] if index + 1 < len(args) else "-"
            if args[index] in self.default_values and next_char == "-":
                args = [*args[: index + 1], self.default_values[args[index]], *args[index + 1 :]]
        return super().parse_args(ctx, args)


class LaunchCommand(Subcommand):
    """A subcommand that runs another program, which gets the arguments after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. The error for other words or options before `--` suggests the right command."""
        line, passed = ["cortexmlx", "launch"], args[args.index("--") + 1 :] if "--" in args else []
        try:
            rest = super().parse_args(ctx, [*args])
        except Exception as raised:
            if type(raised).__name__ != "NoSuchOption":
                raise
            error: Any = raised
            place = next((index for index, word in enumerate(args) if word.startswith(error.option_name)), 0)
            agent = [] if {*Agent} & {*args[:place]} else ["claude"]
            line += [*agent, *args[:place], "--", *(word for word in args[place:] if word != "--")]
            ctx.fail(f"{error.format_message()}. If it is the agent's: {shlex.join(line)}")
        words = ctx.params["arguments"] or []
        if len(words) > len(passed) and not ctx.resilient_parsing:
            line.append(ctx.params["agent"])
            meant = f"`{shlex.join([*line, '--model', words[0]])}`, or `{shlex.join([*line, '--', *words])}`"
            ctx.fail(f"{words[0]!r} is no option. As a model, or for the agent: {meant}")
        return rest


class RootCommand(TyperGroup):
    """The `cortexmlx` command itself: it runs a subcommand and turns its errors into exit codes."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Set the program's name in usage lines to what was typed; shell completion needs the plain name."""
        completes = any("completion" in argument for argument in args)
        return super().make_context(info_name if completes else program_name(), args, parent, **extra)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in their order. Typer puts those with subcommands first."""
        return [name for name, _, _ in COMMANDS]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands. The global options come in the epilog."""
        self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, then the global options."""
        self.epilog = adapt_commands(self.epilog or "")
        super().format_epilog(ctx, formatter)
        with formatter.indentation():
            formatter.write_text(adapt_commands(OPTIONS))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a subcommand by name. For another program's command or a model, the error suggests the right command."""
        first_argument = args[0]
        if self.get_command(ctx, first_argument) is None:
            if command := COMMAND_SYNONYMS.get(first_argument):
                if command == "chat" and len(args) > 2 and not args[2].startswith("-"):
                    command = "generate"  # it takes a question
                line = shlex.join(["cortexmlx", command, *args[1:]])
                ctx.fail(f"No such command {first_argument!r}. Did you mean {command!r}? Type: {line}")
            if first_argument in MISSING_COMMANDS:
                ctx.fail(f"No such command {first_argument!r}: {MISSING_COMMANDS[first_argument]}")
            if first_argument == STARTER or "/" in first_argument or first_argument.endswith(".gguf"):
                ctx.fail(f"No such command {first_argument!r}. To talk to a model: cortexmlx chat {first_argument}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; its errors and Ctrl-C become exit codes."""
        with exit_codes(debug=bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


app = typer.Typer(
    cls=RootCommand,
    help="Language models on Apple Silicon, in one process with a paged KV arena.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(is_requested: bool) -> None:
    """Print the version and exit."""
    if is_requested:
        console.print_result(f"cortexmlx {__version__}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the log.")] = False,
) -> None:
    """The options of all commands."""


COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    ("chat", chat, "Talk to a model."),
    ("chats", chats, "List, rename or delete saved chats."),
    ("generate", generate, "Answer one prompt."),
    ("batch", batch, "Answer every request of a file."),
    ("serve", serve, "Answer programs that speak OpenAI's, Anthropic's or Ollama's API."),
    ("launch", launch, "Run Claude Code, Codex or opencode with a model."),
    ("eval", evaluate, "Measure the perplexity of a text."),
    ("plan", plan, "Say what fits into this machine's memory."),
    ("cache", cache, "Show or clear what chats and batches keep on disk."),
    ("models", models, "List the models on this machine."),
    ("doctor", doctor, "Check the installation."),
    ("bench", bench, "Measure speed, alone or beside mlx-lm."),
)
SUBCOMMANDS: tuple[tuple[str, str, Callable[..., None], str], ...] = (
    ("cache", "why", why, "Ask a server why it computed prompts again."),
    ("cache", "export", export, "Write a beginning of prompts to a file."),
    ("cache", "import", import_file, "Put such a file into the folder."),
)
"""The subcommands of commands: of which command, name, function and summary."""

_OWN_CLASSES = {chat: OptionalValueCommand, doctor: OptionalValueCommand, launch: LaunchCommand}
"""The classes of commands that parse their arguments in a way of their own."""

for name, command, summary in COMMANDS:
    if children := [each for each in SUBCOMMANDS if each[0] == name]:
        group = typer.Typer(cls=CommandGroup, invoke_without_command=True, rich_markup_mode=None)
        group.callback()(command)
        for _, child_name, child, child_summary in children:
            group.command(child_name, short_help=child_summary, cls=Subcommand)(child)
        app.add_typer(group, name=name, short_help=summary)
        continue
    app.command(name, short_help=summary, cls=_OWN_CLASSES.get(command, Subcommand))(command)
