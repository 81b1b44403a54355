"""/clear, /undo, /regen, /edit, /n and /tools: what was said, and which functions may be called."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Question, QuestionDraft
from cortexmlx.cli.chat.slash.command import SlashCommand
from cortexmlx.cli.chat.tools.functions_file import load_tools
from cortexmlx.cli.terminal.console import print_indented, print_rows
from cortexmlx.errors import InvalidRequest

MAX_ANSWERS = 9
"""Answers side by side, at most: one digit chooses among them."""

_DEFAULT_ANSWERS = 3


@partial(SlashCommand, "/clear", "", "forget the conversation", aliases=("/reset",))
def clear_chat(chat: ChatSession, argument: str, console: Console) -> None:
    """/clear: begin a new chat."""
    saved_name = chat.saver.saved_path.stem if chat.saver is not None and chat.saver.saved_path is not None else None
    chat.conversation.clear()
    chat.attached_files.clear()
    chat.save_in_new_file()
    note = "the conversation is empty again" + (f"; what was said is saved as {saved_name}" if saved_name else "")
    print_indented(console, note)


@partial(SlashCommand, "/undo", "", "take the last turn back")
def undo_turn(chat: ChatSession, argument: str, console: Console) -> None:
    """/undo: remove the last turn."""
    question_messages = chat.conversation.undo()
    chat.save()
    if questions := [message.get("content", "") for message in question_messages if message["role"] == "user"]:
        chat.undone_question = questions[0]
    texts = [Question.from_content(message.get("content", "")).text for message in question_messages]
    first, _, rest = "\n".join(_typed_text(chat, each) for each in texts).partition("\n")
    note = f"took back: {first}{' ...' if rest else ''}" if question_messages else "there is nothing to take back"
    print_indented(console, note)


@partial(SlashCommand, "/regen", "", "write the last answer again")
def regenerate_answer(chat: ChatSession, argument: str, console: Console) -> Question:
    """/regen: write the last answer again."""
    question, replaces_last = _last_question(chat, "there is no answer to write again")
    _warn_if_greedy(chat, console)
    return replace(question, replaces_last=replaces_last)


@partial(SlashCommand, "/edit", "[TEXT]", "change the last question: here, or to TEXT", multiline=("",))
def edit_question(chat: ChatSession, argument: str, console: Console) -> Question | QuestionDraft:
    """/edit: ask the last question in other words, typed as an argument or in the input line."""
    question, replaces_last = _last_question(chat, "there is no question to change")
    return (
        Question(argument, replaces_last=replaces_last, typed_text=argument, images=question.images)
        if argument
        else QuestionDraft(_typed_text(chat, question.text), replaces_last, question.images)
    )


@partial(
    SlashCommand,
    "/n",
    "3 [TEXT]",
    "several answers side by side, of which one goes on",
    multiline=tuple(map(str, range(2, MAX_ANSWERS + 1))),
)
def answer_several_times(chat: ChatSession, argument: str, console: Console) -> Question:
    """/n 3 [TEXT]: write several answers to the last question, or to TEXT, side by side."""
    first, _, text = argument.partition(" ")
    number = first or str(_DEFAULT_ANSWERS)
    if number not in map(str, range(2, MAX_ANSWERS + 1)):
        raise InvalidRequest(
            f"/n takes how many answers are wanted, 2 to {MAX_ANSWERS}, and the question if it is a new one"
        )
    _warn_if_greedy(chat, console, f"all {number} will be the same")
    if text.strip():
        return Question(text.strip(), answers=int(number), typed_text=text.strip())
    question, replaces_last = _last_question(chat, "there is no question to answer: /n 3 TEXT asks one")
    return replace(question, replaces_last=replaces_last, answers=int(number))


def _warn_if_greedy(chat: ChatSession, console: Console, effect: str = "the same again") -> None:
    """Warn of the `effect` on new answers if temperature 0 or top_k 1 always takes the likeliest token."""
    if chat.params.temperature == 0:
        print_indented(console, f"{effect}, at temperature 0: /set temp 0.7 for another answer")
    elif chat.params.top_k == 1:
        print_indented(console, f"{effect}, with top_k 1: /set top_k 40 for another answer")


def _last_question(chat: ChatSession, error_message: str) -> tuple[Question, bool]:
    """Return the last question, and whether its turn is still in the chat; the next question then replaces that turn.

    A question that `/undo` took back is not in the chat, so it replaces no older turn. Raises InvalidRequest with the
    text `error_message` if there is no question.
    """
    if chat.undone_question is not None:
        return Question.from_content(chat.undone_question), False
    questions = [message.get("content", "") for message in chat.conversation.messages if message["role"] == "user"]
    if not questions:
        raise InvalidRequest(error_message)
    return Question.from_content(questions[-1]), True


def _typed_text(chat: ChatSession, text: str) -> str:
    """Return what the user typed for a message, without the texts of the files in it."""
    return chat.typed_texts.get(text, text)


# /tools: the functions that the model may call.


NONE = "none"


@partial(
    SlashCommand,
    "/tools",
    "[FILE.py]",
    "functions the model may call; none ends it",
    complete_values=lambda: (NONE,),
    values_meaning="no functions",
    takes_path=True,
)
def set_tools(chat: ChatSession, argument: str, console: Console) -> None:
    """/tools FILE.py: let the model call the functions of a file; /tools none: no functions; /tools: list them."""
    if argument == NONE:
        chat.set_tools(())
    elif argument:
        chat.set_tools(load_tools(Path(os.path.expanduser(argument.strip("\"'")))))
    if tools := chat.params.offered:
        print_rows(console, [(f"  {tool.name}", tool.description or "no description") for tool in tools], 22, "")
    else:
        print_indented(console, "the model may call no functions; /tools FILE.py lets it call those of a file")
