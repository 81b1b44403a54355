"""TranscriptReading: one prompt with what is remembered of earlier answers, and its own answers for the next."""

from __future__ import annotations

import errno
import hmac
import json
import logging
import secrets
import threading
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from cortexmlx.disk.folder import TRANSCRIPT, open_folder, open_plain
from cortexmlx.models.tokenizers.fitting import named_ids
from cortexmlx.sessions.turn import Encode, Render, Transcript, anchor_of, common_length, said_tokens, text_or_none
from cortexmlx.structured.output import Thoughts
from cortexmlx.structured.tools import Tool, ToolCall, loaded
from cortexmlx.system.files import in_place_of, remove_unfinished
from cortexmlx.types.messages import PromptReader
from cortexmlx.types.request import Completion, Message
from cortexmlx.types.sampling_params import SamplingParams


class TranscriptReading:
    """One prompt of a client. It is the `memory` of a ChatPrompt."""

    def __init__(
        self, table: TranscriptTable, client: str, messages: Sequence[Message], params: SamplingParams
    ) -> None:
        self._table = table
        self._client = client
        self._params = params
        self._reader: PromptReader | None = None
        self._render: Render | None = None
        self._read = Transcript()
        self._continued: Remembered | None = None
        self._answers: tuple[RememberedAnswer, ...] = ()
        self.messages = tuple(self._given_back(message) for message in messages)
        """The messages, with the calls as they were written."""

    def _given_back(self, message: Message) -> Message:
        """Return an answer with calls as it was given, if its calls are known by their ids."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls or not isinstance(calls[0], dict):
            return message
        for answer in self._table.answer_of(self._client, str(calls[0].get("id"))):
            if answer.is_said_by(message):
                self._answers = (*self._answers, answer)
                return answer.given_back(message)
        return message

    def tokens(
        self, reader: PromptReader, text: str, render: Callable[[Sequence[Message]], str | list[int]]
    ) -> list[int]:
        """Return the tokens of the rendered messages: those of what is remembered, as far as the texts agree."""
        encode = partial(reader.encode, add_special_tokens=False)
        rendered = self._render = text_or_none(render)
        self._reader = reader
        found = self._table.nearest(self._client, text, self.messages)
        if found is None:
            self._read = Transcript().read(text, encode)
        else:
            self._table.use(self._client, found)
            self._read = found.continued(text, self.messages, encode, rendered)
            self._continued = found if found.is_begin_of(self._read) else None
        return list(self._read.tokens)

    def anchor(self, thoughts: Thoughts | None) -> int:
        """See `PromptMemory`."""
        if self._reader is None or self._render is None:
            return 0
        encode = partial(self._reader.encode, add_special_tokens=False)
        return anchor_of(self._read, self.messages, thoughts, self._render, encode)

    def remember(self, completion: Completion) -> None:
        """Remember the answers to this prompt."""
        reader = self._reader
        if reader is None:  # the template makes tokens, so no text is known
            return
        instead = self._continued
        for answer in (completion, *completion.others):
            tokens, ended = said_tokens(answer, self._params, reader.eos_token_ids)
            if tokens is None:
                continue
            end = reader.token_bytes(answer.token_ids[-1]).decode("utf-8", "replace") if ended else ""
            answered = RememberedAnswer.of(answer, tokens, end, self._params.offered)
            self._table.keep(self._client, Remembered(self._read, len(self.messages), answered, self._answers), instead)
            instead = None


# RememberedAnswer: an answer, to be known again when a client sends it back.


THOUGHTS = "reasoning_content"
"""The field of a message that has its thoughts."""


@dataclass(frozen=True)
class RememberedAnswer:
    """An answer with the tokens that the model wrote."""

    content: str
    thinking: str
    calls: tuple[ToolCall, ...]
    text: str
    """All that the model wrote, without the token that ended it."""
    tokens: tuple[int, ...]
    """The tokens of `text`."""
    end: str
    """The text of the token that ended it; empty if none did."""
    omitted: tuple[str, ...] = ()
    """For each call, the defaults of the arguments that the model left out, as a JSON object. Some clients put them in:
    they mean the same.
    """

    @classmethod
    def of(
        cls, completion: Completion, tokens: tuple[int, ...], end: str, tools: Sequence[Tool] = ()
    ) -> RememberedAnswer:
        """Return what is remembered of a completion whose text has these tokens, and which could call `tools`."""
        calls, schemas = completion.tool_calls, {tool.name: tool.schema for tool in tools}
        omitted = tuple(_omitted_arguments(call, schemas.get(call.name, {})) for call in calls)
        return cls(completion.text, completion.thinking, calls, completion.raw_text, tokens, end, omitted)

    def is_said_by(self, message: Message) -> bool:
        """Whether a message is this answer. White space around its text, and the form of its calls' arguments, may
        differ. Of its thoughts nothing is known here: a template may leave them out.
        """
        said = message.get("content") or ""
        if message.get("role") != "assistant" or not isinstance(said, str) or said.strip() != self.content.strip():
            return False
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, list | tuple) or len(calls) != len(self.calls):
            return False
        omitted = self.omitted or ("{}",) * len(calls)
        return all(map(is_call, calls, self.calls, omitted))

    def thoughts_are_of(self, message: Message) -> bool:
        """Whether a message has the thoughts of this answer, or neither has any."""
        said = message.get(THOUGHTS) or ""
        return isinstance(said, str) and said.strip() == self.thinking.strip()

    def has(self, text: str) -> bool:
        """Whether a text is in what was written, also in a call whose arguments spell it with escapes."""
        values = (json.dumps(call.values, ensure_ascii=False) for call in self.calls)
        return text in self.text or any(text in each for each in values)

    def given_back(self, message: Message) -> Message:
        """Return a message of this answer's calls with their arguments in the order in which the model wrote them."""
        return {**message, "tool_calls": [call.as_mapping() for call in self.calls]}


def is_call(message: object, call: ToolCall, omitted: str = "{}") -> bool:
    """Whether a call in a message is this one: the same id, function and arguments. It may also have `omitted`
    arguments, with these values.
    """
    function = message.get("function") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(function, Mapping):
        return False
    if message.get("id") != call.id or function.get("name") != call.name:
        return False
    return _same_arguments(function.get("arguments"), call, omitted)


def _same_arguments(arguments: object, call: ToolCall, omitted: str) -> bool:
    try:
        if canonical(arguments) == canonical(call.values):
            return True
        usual = loaded(omitted)
        if not usual or not isinstance(arguments, Mapping):
            return False
        said = {
            name: value
            for name, value in arguments.items()
            if name not in usual or canonical(value) != canonical(usual[name])
        }
        return canonical(said) == canonical(call.values)
    except (ValueError, TypeError, RecursionError):
        return False


def _omitted_arguments(call: ToolCall, schema: Mapping[str, Any]) -> str:
    """Return the defaults of a schema's properties that a call does not have, as a JSON object."""
    properties, values = schema.get("properties"), call.values
    if not isinstance(properties, Mapping):
        return "{}"
    usual = {
        name: part["default"]
        for name, part in properties.items()
        if name not in values and isinstance(part, Mapping) and "default" in part
    }
    return json.dumps(usual)


canonical: Callable[[Any], str] = json.JSONEncoder(sort_keys=True).encode
"""Returns JSON that is the same for equal values: unlike in Python, true is not 1."""


# The table of transcripts: for each client a bounded number of them, found by their longest common text.


_PER_TOKEN = 40
"""Bytes that a token takes, roughly."""
_PER_CUT = 120
"""Bytes that a cut takes, roughly."""
_PER_TRANSCRIPT = 1500
"""Bytes that a transcript takes beside its texts and tokens, roughly: many of them are short."""

MOST_COMPARED = 256
"""How many of a client's transcripts that are equally near to a text are compared by their answers: more than a prompt
has answers.
"""


@dataclass(frozen=True)
class Remembered:
    """What a model read, and what it answered."""

    read: Transcript
    """All that it read."""
    place: int
    """How many messages that was. The answer is the next."""
    answered: RememberedAnswer
    earlier: tuple[RememberedAnswer, ...] = ()
    """Answers of the same conversation before that have calls."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Names it among all."""

    @property
    def size(self) -> int:
        """Bytes that it takes, roughly."""
        answers = sum(len(each.text) * 3 + len(each.tokens) * _PER_TOKEN for each in (self.answered, *self.earlier))
        read = len(self.read.text) + len(self.read.tokens) * _PER_TOKEN + len(self.read.cuts) * _PER_CUT
        return read + answers + _PER_TRANSCRIPT

    def continued(self, text: str, messages: Sequence[Message], encode: Encode, render: Render) -> Transcript:
        """Return the transcript of a rendered text, with this one's tokens as far as they go on."""
        if not text.startswith(self.read.text):
            return self.read.read(text, encode)
        said = self._as_rendered(text, messages, render)
        return self.read.wrote(self.answered.text if said is None else said, self.answered.tokens).read(text, encode)

    def is_begin_of(self, read: Transcript) -> bool:
        """Whether a transcript has all the tokens of this one, and of its answer."""
        whole = (*self.read.tokens, *self.answered.tokens)
        return len(read.tokens) > len(whole) and read.tokens[: len(whole)] == whole

    def answer_in(self, text: str, messages: Sequence[Message]) -> tuple[bool, int]:
        """Return how surely this answer follows in a text that begins with what was read: whether it is the next of
        the messages, and how many characters of it are in the text.
        """
        if not text.startswith(self.read.text):
            return False, 0
        said = len(messages) > self.place and self.answered.is_said_by(messages[self.place])
        begin = len(self.read.text)
        return said, common_length(self.answered.text, text[begin : begin + len(self.answered.text)])

    def _as_rendered(self, text: str, messages: Sequence[Message], render: Render) -> str | None:
        """Return how the template writes the answer in `text`, if that is not how the model wrote it; None if `text`
        does not have this answer, or it cannot be told where it ends.
        """
        end, own = self.answered.end, self.answered
        begin = len(self.read.text)
        if text.startswith(own.text, begin) or not end or len(messages) <= self.place:
            return None
        before, message = messages[: self.place], messages[self.place]
        if not own.is_said_by(message) or not own.thoughts_are_of(message) or own.has(end):
            return None
        if render(before) != self.read.text:
            return None
        place = text.find(end, begin)
        alone = render((*before, message)) if place >= 0 else None
        # Where the next message is written may depend on what follows: what is common to both surely is the answer.
        if alone is None or common_length(alone, text) < place + len(end):
            return None
        said = text[begin:place]
        if named_ids(said) != named_ids(own.text):
            return None  # the results of its calls have the ids that the template writes
        if own.thinking.strip():
            silent = render((*before, {**message, THOUGHTS: ""}))
            if own.thinking.strip() not in said or silent is None or silent.startswith(alone[: place + len(end)]):
                return None  # the template leaves thoughts out
        return said


class TranscriptStore(Protocol):
    """Where transcripts outlive the process."""

    def read(self, most: int) -> list[tuple[str, Remembered]]:
        """Return transcripts of at most so many bytes with their clients, the oldest first."""

    def put(self, client: str, remembered: Remembered) -> None:
        """Keep a transcript."""

    def remove(self, remembered: Remembered) -> None:
        """Remove a transcript."""


class _Transcripts:
    """The transcripts of one client, by their use and by their texts."""

    def __init__(self) -> None:
        self.by_use: OrderedDict[str, Remembered] = OrderedDict()
        """By their ids, the least recently used first."""
        self._texts: list[tuple[str, int, str]] = []
        """The text of each with the number of its last use and its id, sorted."""
        self._uses: dict[str, int] = {}
        self._numbers = count()

    def add(self, remembered: Remembered) -> None:
        """Add a transcript as the one that was used last."""
        number = self._uses[remembered.id] = next(self._numbers)
        self.by_use[remembered.id] = remembered
        insort(self._texts, (remembered.read.text, number, remembered.id))

    def pop(self, id: str) -> Remembered | None:
        """Remove and return a transcript; None if there is none."""
        found = self.by_use.pop(id, None)
        if found is not None:
            del self._texts[bisect_left(self._texts, (found.read.text, self._uses.pop(id), id))]
        return found

    def near(self, text: str) -> list[Remembered]:
        """Return transcripts that have the most in common with a text, in the order of their use: of those that are a
        beginning of it, and of longer ones, `MOST_COMPARED` at most. Their neighbours among the sorted texts have no
        more in common with it than they, so nothing else is looked at.
        """
        texts, place = self._texts, bisect_left(self._texts, (text,))
        common = max((common_length(known, text) for known, _, _ in texts[max(0, place - 1) : place + 1]), default=0)
        if not common:
            return []
        begin = text[:common]
        first, end = bisect_left(texts, (begin,)), bisect_left(texts, (begin, next(self._numbers)))
        longer = texts[max(end, place - MOST_COMPARED // 2) : place + MOST_COMPARED // 2]
        found = texts[max(first, end - MOST_COMPARED) : end] + [each for each in longer if each[0].startswith(begin)]
        return [self.by_use[id] for _, _, id in sorted(found, key=lambda each: each[1])]


class TranscriptTable:
    """The transcripts of all clients of one model. Any thread may use it.

    `most` bounds their bytes, roughly. Beyond it, the client with the most loses the one that was used least recently.
    What is on the `shelf` is read at the first use, and what is kept and lost afterwards is told to it.
    """

    def __init__(self, most: int, shelf: TranscriptStore | None = None) -> None:
        self._most = most
        self._shelf = shelf
        self._unread = shelf is not None
        self._lock = threading.RLock()
        self._clients: dict[str, _Transcripts] = {}
        self._sizes: dict[str, int] = {}
        self._calls: dict[str, dict[str, list[RememberedAnswer]]] = {}

    @property
    def size(self) -> int:
        """Bytes of all transcripts, roughly."""
        with self._lock:
            return sum(self._sizes.values())

    def all(self) -> list[tuple[str, Remembered]]:
        """Return all transcripts with their clients, for each the least recently used first."""
        with self._lock:
            return [(client, each) for client, kept in self._clients.items() for each in kept.by_use.values()]

    def nearest(self, client: str, text: str, messages: Sequence[Message]) -> Remembered | None:
        """Return a client's transcript that has the most in common with a rendered text; None if there is none. Of
        those that are equally near, it is one whose answer follows in `messages` or in the text, or else the one that
        was used last. The time does not depend on how many there are.
        """
        with self._lock:
            self._open()
            near = self._clients[client].near(text) if client in self._clients else []
        return max(reversed(near), key=lambda each: each.answer_in(text, messages), default=None)

    def answer_of(self, client: str, call: str) -> list[RememberedAnswer]:
        """Return the answers of a client that have a call with this id."""
        with self._lock:
            self._open()
            return list(self._calls.get(client, {}).get(call, ()))

    def use(self, client: str, remembered: Remembered) -> None:
        """Say that a transcript was continued."""
        with self._lock:
            kept = self._clients.get(client)
            if kept is not None and kept.pop(remembered.id) is not None:
                kept.add(remembered)

    def keep(self, client: str, remembered: Remembered, instead_of: Remembered | None = None) -> None:
        """Keep a transcript, in the place of one that it continues."""
        with self._lock:
            self._open()
            if self._shelf is not None:
                self._shelf.put(client, remembered)
            if instead_of is not None:
                self._drop(client, instead_of.id)
            self._add(client, remembered)

    def _open(self) -> None:
        """Read what is on the shelf, once."""
        if self._unread and self._shelf is not None:
            self._unread = False
            for client, remembered in self._shelf.read(self._most):
                self._add(client, remembered)

    def _add(self, client: str, remembered: Remembered) -> None:
        self._clients.setdefault(client, _Transcripts()).add(remembered)
        self._sizes[client] = self._sizes.get(client, 0) + remembered.size
        for answer in (*remembered.earlier, remembered.answered):
            for call in answer.calls:
                self._calls.setdefault(client, {}).setdefault(call.id, []).append(answer)
        while sum(self._sizes.values()) > self._most:
            largest = max(self._sizes, key=lambda name: self._sizes[name])
            self._drop(largest, next(iter(self._clients[largest].by_use)))

    def _drop(self, client: str, id: str) -> None:
        kept = self._clients.get(client)
        lost = None if kept is None else kept.pop(id)
        if kept is None or lost is None:
            return
        self._sizes[client] -= lost.size
        calls = self._calls.get(client, {})
        for answer in (*lost.earlier, lost.answered):
            for call in answer.calls:
                known = calls[call.id]
                known.remove(answer)
                if not known:
                    del calls[call.id]
        if not kept.by_use:
            del self._clients[client], self._sizes[client]
            self._calls.pop(client, None)
        if self._shelf is not None:
            self._shelf.remove(lost)


# The tables of all models: tokens of one mean nothing to another.


log = logging.getLogger("cortexmlx")


class TranscriptTables:
    """A table for each model, of at most `most` bytes; 0: none. With a `folder` they outlive the process."""

    def __init__(self, most: int, folder: Path | None = None) -> None:
        self._most = most
        self._folder = folder
        self._tables: dict[str, TranscriptTable] = {}

    def of(self, identity: str) -> TranscriptTable | None:
        """Return the table of the model with this identity; None if nothing is kept."""
        if not self._most:
            return None
        if identity not in self._tables:
            self._tables[identity] = TranscriptTable(self._most, self._shelf(identity))
        return self._tables[identity]

    def _shelf(self, identity: str) -> SavedTranscripts | None:
        try:
            return None if self._folder is None else SavedTranscripts(self._folder, identity)
        except OSError as error:
            log.warning("transcripts are not kept on disk: %s", error)
            return None


# Transcripts on disk, beside the keys and values of the same texts, so that agents go on after a restart.
#
# Each is a file of its own in the store's folder, readable by its user alone, and signed with the folder's secret. A
# file that is damaged, or from elsewhere, is removed.


_SIGNATURE = 32
_VERSION = 1
_OLDEST = 30 * 24 * 3600.0
"""Seconds after which a transcript that nobody continued is removed."""
_FOR_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)
"""Errors of a process that has too much open, which say nothing of a file."""
_ABANDONED = 3600.0
"""Seconds after which an unfinished file is that of a dead process."""


class SavedTranscripts:
    """The transcripts of one model in a folder. They are written and removed on a thread, in order.

    Raises OSError if the folder cannot be used.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._identity = identity
        self._key = hmac.digest(open_folder(folder), b"transcripts", sha256)
        self._thread = ThreadPoolExecutor(1, "cortexmlx transcripts")
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[str, Remembered] | None] = {}
        """What is to be written, or removed, by id. A slow disk keeps no more here than the table does."""

    def read(self, most: int) -> list[tuple[str, Remembered]]:
        """Return this model's transcripts with their clients, the newest `most` bytes of files, the oldest first. The
        others of this model are removed, and so is what cannot be used or is too old.
        """
        found: list[tuple[str, Remembered]] = []
        total, now = 0, time.time()
        with suppress(OSError):
            remove_unfinished(self._folder, _ABANDONED)
        for path, size, changed in self._files():
            try:
                each = None if now - changed > _OLDEST else self._read(path)
            except OSError as error:
                if error.errno in _FOR_NOW:
                    continue
                each = None
            mine = each is not None and each[0] == self._identity
            total += size if mine else 0
            if each is None or (mine and total > most):
                with suppress(OSError):
                    path.unlink()
            elif mine:
                found.append(each[1:])
        return found[::-1]

    def put(self, client: str, remembered: Remembered) -> None:
        """Write a transcript, soon."""
        self._ask(remembered.id, (client, remembered))

    def remove(self, remembered: Remembered) -> None:
        """Remove a transcript, soon."""
        self._ask(remembered.id, None)

    def close(self) -> None:
        """Wait until all is written."""
        self._thread.shutdown()

    def _files(self) -> list[tuple[Path, int, float]]:
        """Return the files of all models with their bytes and times, the newest first."""
        listed = []
        with suppress(OSError):
            for path in self._folder.iterdir():
                if TRANSCRIPT.fullmatch(path.name):
                    with suppress(OSError):
                        status = path.lstat()
                        listed.append((path, status.st_size, status.st_mtime))
        return sorted(listed, key=lambda each: each[2], reverse=True)

    def _read(self, path: Path) -> tuple[str, str, Remembered] | None:
        """Return the model, the client and the transcript in a file; None if it is not one of ours. Raises OSError."""
        try:
            with open_plain(path) as file:
                signature, data = file.read(_SIGNATURE), file.read()
            if not hmac.compare_digest(signature, hmac.digest(self._key, data, sha256)):
                return None
            said = json.loads(data)
            if said["version"] != _VERSION:
                return None
            return said["model"], said["client"], _from_json(said["transcript"], path.stem)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def _ask(self, id: str, wanted: tuple[str, Remembered] | None) -> None:
        with self._lock:
            known = id in self._asked
            self._asked[id] = wanted
        if not known:
            self._thread.submit(self._carry_out, id)

    def _carry_out(self, id: str) -> None:
        with self._lock:
            wanted = self._asked.pop(id)
        if wanted is None:
            with suppress(OSError):
                self._path(id).unlink()
        else:
            self._write(*wanted)

    def _write(self, client: str, remembered: Remembered) -> None:
        said = {"version": _VERSION, "model": self._identity, "client": client, "transcript": _to_json(remembered)}
        data = json.dumps(said, separators=(",", ":")).encode()
        try:
            with in_place_of(self._path(remembered.id), private=True) as file:
                file.write(hmac.digest(self._key, data, sha256) + data)
        except OSError as error:
            log.warning("a transcript is not kept on disk: %s", error)

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.transcript"


def _to_json(remembered: Remembered) -> dict[str, Any]:
    answers = [
        {**vars(each), "calls": [vars(call) for call in each.calls]}
        for each in (remembered.answered, *remembered.earlier)
    ]
    return {"read": vars(remembered.read), "place": remembered.place, "answers": answers}


def _from_json(said: dict[str, Any], id: str) -> Remembered:
    read = said["read"]
    transcript = Transcript(read["text"], tuple(read["tokens"]), tuple((a, b) for a, b in read["cuts"]))
    answered, *earlier = (_answer_from_json(each) for each in said["answers"])
    return Remembered(transcript, said["place"], answered, tuple(earlier), id)


def _answer_from_json(said: dict[str, Any]) -> RememberedAnswer:
    calls = tuple(ToolCall(**call) for call in said["calls"])
    return RememberedAnswer(
        **{**said, "calls": calls, "tokens": tuple(said["tokens"]), "omitted": tuple(said["omitted"])}
    )
