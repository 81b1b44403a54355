"""/model, /adapter and /show: the model and the adapter that answer, and facts about them and the chat."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cortexmlx.cli.chat import sampling
from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chat.slash import settings
from cortexmlx.cli.chat.slash.command import SlashCommand
from cortexmlx.cli.chat.view import MAX_WIDTH
from cortexmlx.cli.markdown.stream import render_markdown
from cortexmlx.cli.terminal.console import is_terminal, print_indented, print_rows
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.models.inventory import list_models
from cortexmlx.sessions.saved import message_markdown
from cortexmlx.types.messages import suggest_name
from cortexmlx.types.request import Message

TOPICS = ("info", "parameters", "system", "messages", "license", "modelfile", "template")


_LAST_MESSAGES = 4

NO_ADAPTER = "none"
"""What the model alone is called among its adapters."""
_LOADS = "/adapter NAME=FOLDER loads one"


def model_names() -> list[str]:
    """Return the names of the models on this machine."""
    return [each.name for each in list_models()]


@partial(SlashCommand, "/model", "[NAME]", "show the models, or switch to another", complete_values=model_names)
def switch_model(chat: ChatSession, argument: str, console: Console) -> None:
    """/model: list the models on this machine, or switch to another one."""
    if not argument:
        for each in list_models():
            marker = "*" if chat.replaceable is not None and str(chat.replaceable.config.model) == each.name else " "
            print_rows(console, [(f" {marker}", f"{each.name}  {format_bytes(each.size)}")], 3)
        answers = f"{chat.engine.info.name} answers; /model NAME switches to another"
        return print_indented(console, answers if chat.has_model else chat.no_model_advice)
    if chat.replaceable is None:
        raise InvalidRequest("this chat cannot change its model")
    if argument == str(chat.replaceable.config.model) and chat.has_model:
        return print_indented(console, f"{argument} answers already")
    chat.switch_engine(replace(chat.replaceable.config, model=argument, adapter=None, adapters=None, draft=None))
    chat.conversation.adapter = None
    info = chat.engine.info
    count = len(chat.conversation.messages)
    reread_note = f", and reads the {count} messages again" if count else ""
    print_indented(console, f"{info.name} answers now{reread_note}")
    for remark in info.notes:
        print_indented(console, remark)
    if not info.chat_template:
        raise InvalidRequest(f"{info.name} has no chat template, so it cannot answer here: /model NAME for another")


@partial(SlashCommand, "/adapter", "[NAME]", "show the adapters, or let one answer; none: the model alone")
def switch_adapter(chat: ChatSession, argument: str, console: Console) -> None:
    """/adapter: list the adapters, switch to one, or load one: /adapter NAME=FOLDER."""
    name, loads, folder = argument.strip().partition("=")
    adapter_names = chat.engine.adapters
    current_adapter = chat.conversation.adapter
    if not name:
        for each in (NO_ADAPTER, *adapter_names):
            marker = "*" if each == (current_adapter or NO_ADAPTER) else " "
            print_indented(console, f"{marker} {each}")
        return print_indented(console, "/adapter NAME lets one answer, and /adapter NAME=FOLDER loads another")
    if loads:
        folder = os.path.abspath(os.path.expanduser(folder))
        info = chat.engine.load_adapter(name, folder)
        if chat.replaceable is not None:  # so that it is there after /set, too
            chat.replaceable.config = replace(
                chat.replaceable.config, adapters={**(chat.replaceable.config.adapters or {}), name: folder}
            )
        print_indented(console, f"loaded {name}: rank {info.rank}, {format_bytes(info.bytes)}")
    elif name != NO_ADAPTER and name not in adapter_names:
        name_list = ", ".join(adapter_names) or "none"
        raise InvalidRequest(
            f"there is no adapter {name!r}{suggest_name(name, adapter_names)}: there are {name_list}. {_LOADS}"
        )
    chat.conversation.adapter = None if name == NO_ADAPTER and not loads else name
    phrase = "alone" if chat.conversation.adapter is None else f"with {chat.conversation.adapter}"
    print_indented(console, f"{chat.engine.info.name} answers {phrase} now")


@partial(
    SlashCommand, "/show", "[TOPIC]", f"the model and the chat: {', '.join(TOPICS[:4])}", complete_values=lambda: TOPICS
)
def show(chat: ChatSession, argument: str, console: Console) -> None:
    """/show: print everything about the model and the chat, or one topic."""
    topic = argument.strip().lower() or "all"
    if topic not in (*TOPICS, "all"):
        raise InvalidRequest(f"/show shows {', '.join(TOPICS)}, not {argument!r}")
    if topic in ("license", "modelfile", "template"):
        folder = Path(chat.engine.info.path)
        print_indented(console, f"it is in the model's files: {folder}")
    if topic in ("info", "all"):
        _print_info(chat, console)
    if topic in ("parameters", "all"):
        settings.change_setting(chat, "", console)
    if topic in ("system", "all"):
        settings.set_system_prompt(chat, "", console)
    if topic == "messages":
        _print_messages(chat, console)


def _print_info(chat: ChatSession, console: Console) -> None:
    """Print the facts about the model: files, architecture, context and more."""
    info, stats = chat.engine.info, chat.engine.stats()
    each = f"each {format_bytes(info.kv_bytes_per_token)} of KV memory"
    each = each if info.kv_bytes_per_token else "which take no KV memory"
    bits = f", {stats.kv_bits} bits" if stats.kv_bits else ""
    lines = {
        "model": info.name if info.adapter is None else f"{info.name} + {info.adapter}",
        "files": info.path,
        "architecture": f"{info.architecture}, {info.parameters / 1e6:,.0f} M parameters, {info.dtype}, "
        f"{format_bytes(info.weight_bytes)}",
        "context": f"{info.context_length:,} tokens, {each}",
        "KV memory": f"up to {format_bytes(stats.kv_bytes_limit)} in blocks of {stats.block_size} tokens{bits}",
        "computed by": f"{describe_device()} · {stats.attention_backend} attention",
        "sampling": sampling.describe_default_source(info),
        **({"notes": "\n".join(info.notes)} if info.notes else {}),
        "chat": f"{len(chat.conversation.messages)} messages",
    }
    if chat.conversation.adapter is not None:
        lines["model"] += f", with the adapter {chat.conversation.adapter}"
    if info.draft is not None:
        lines["draft model"] = f"{info.draft.name}, {format_bytes(info.draft.weight_bytes)}"
    if chat.saver is not None and chat.saver.saved_path is not None:
        lines["chat"] += f", saved as {chat.saver.saved_path.stem}"
    print_rows(console, ((f"  {label}", text) for label, text in lines.items()), 16)


def _print_messages(chat: ChatSession, console: Console) -> None:
    """Print the messages of the chat, rendered on a terminal."""
    if not chat.conversation.messages:
        return print_indented(console, "there are no messages yet")
    if not is_terminal(console.file):
        return console.print(chat.conversation.markdown(), markup=False, soft_wrap=True)
    system: list[Message] = [{"role": "system", "content": text}] if (text := chat.conversation.system) else []
    _print_lines([*system, *chat.conversation.messages], console)


def print_last_messages(messages: Sequence[Message], console: Console) -> None:
    """Print the last four messages, in two thirds of the window at most."""
    _print_lines(messages[-_LAST_MESSAGES:], console, max(console.height * 2 // 3, 8))


def _print_lines(messages: Sequence[Message], console: Console, most: int | None = None) -> None:
    """Print messages as Markdown, or only their last lines."""
    lines: list[Text] = []
    for message in messages:  # one at a time: a code block may lack its end
        lines += [*render_markdown(f"{message_markdown(message)}\n", min(console.width, MAX_WIDTH)), Text()]
    if most is not None and len(lines) > most:
        lines = [Text("...", style="dim"), *lines[-most:]]
    for line in lines:
        console.print(line, soft_wrap=True)


def describe_device() -> str:
    """Return the device, such as `Apple M3 Max (Metal)` or `CPU, OpenBLAS from scipy-openblas32, 2 threads`."""
    from cortexmlx.cpu import blas
    from cortexmlx.system.machine import metal_device

    gpu = metal_device()
    if gpu is not None:
        return f"{gpu} (Metal)"
    return f"CPU, {blas.status()}"
