"""/clear, /undo, /regen, /edit and /n: forget turns, or answer the last one again."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Draft, Question
from cortexmlx.cli.chat.slash.command import Command
from cortexmlx.cli.terminal.console import print_indented
from cortexmlx.errors import InvalidRequest

MOST = 9
"""Answers side by side, at most: one digit chooses among them."""

_WAYS = 3


@partial(Command, "/clear", "", "forget the conversation", aliases=("/reset",))
def clear(chat: ChatSession, argument: str, console: Console) -> None:
    """/clear: begin a new chat."""
    kept = chat.keeper.kept.stem if chat.keeper is not None and chat.keeper.kept is not None else None
    chat.conversation.clear()
    chat.attached.clear()
    chat.begin_anew()
    said = "the conversation is empty again" + (f"; what was said is kept as {kept}" if kept else "")
    print_indented(console, said)


@partial(Command, "/undo", "", "take the last turn back")
def undo(chat: ChatSession, argument: str, console: Console) -> None:
    """/undo: take the last turn back."""
    taken = chat.conversation.undo()
    chat.keep()
    if questions := [str(message.get("content", "")) for message in taken if message["role"] == "user"]:
        chat.taken_back = questions[0]
    text = "\n".join(_typed(chat, str(message.get("content", ""))) for message in taken)
    said = f"took back: {_first_line(text)}" if taken else "there is nothing to take back"
    print_indented(console, said)


@partial(Command, "/regen", "", "write the last answer again")
def regen(chat: ChatSession, argument: str, console: Console) -> Question:
    """/regen: write the last answer again."""
    question, again = _last_question(chat, "there is no answer to write again")
    _warn_of_the_same(chat, console)
    return Question(question, again=again)


@partial(Command, "/edit", "[TEXT]", "change the last question: here, or to TEXT", multiline=("",))
def edit(chat: ChatSession, argument: str, console: Console) -> Question | Draft:
    """/edit: ask the last question in other words, which are typed here or in the input line."""
    question, again = _last_question(chat, "there is no question to change")
    return Question(argument, again=again, typed=argument) if argument else Draft(_typed(chat, question), again)


@partial(
    Command,
    "/n",
    "3 [TEXT]",
    "several answers side by side, of which one goes on",
    multiline=tuple(map(str, range(2, MOST + 1))),
)
def several(chat: ChatSession, argument: str, console: Console) -> Question:
    """/n 3 [TEXT]: write several answers to the last question, or to TEXT, side by side."""
    first, _, text = argument.partition(" ")
    number = first or str(_WAYS)
    if number not in map(str, range(2, MOST + 1)):
        raise InvalidRequest(f"/n takes how many answers are wanted, 2 to {MOST}, and the question if it is a new one")
    if chat.params.seed is None:
        _warn_of_the_same(chat, console)
    if text.strip():
        return Question(text.strip(), answers=int(number), typed=text.strip())
    question, again = _last_question(chat, "there is no question to answer: /n 3 TEXT asks one")
    return Question(question, again=again, answers=int(number))


def _warn_of_the_same(chat: ChatSession, console: Console) -> None:
    if chat.params.temperature == 0:
        print_indented(console, "the same again, at temperature 0: /set temp 0.7 for another answer")


def _last_question(chat: ChatSession, without: str) -> tuple[str, bool]:
    """Return the last question, and whether it is still in the chat. If so, the turn of the next question replaces it.

    A question that `/undo` took back is not in the chat, so it replaces no older turn. Raises InvalidRequest with the
    text `without` if there is no question.
    """
    if chat.taken_back is not None:
        return chat.taken_back, False
    asked = [message.get("content", "") for message in chat.conversation.messages if message["role"] == "user"]
    if not asked:
        raise InvalidRequest(without)
    return str(asked[-1]), True


def _typed(chat: ChatSession, text: str) -> str:
    """Return what the user typed for a message that has files in it."""
    return chat.typed.get(text, text)


def _first_line(text: str) -> str:
    first, _, more = text.partition("\n")
    return first + (" ..." if more else "")
