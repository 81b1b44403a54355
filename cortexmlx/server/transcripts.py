"""Transcripts: the tokens that the model read and wrote in earlier turns, so that a new turn reuses them instead of
tokenizing the text again.
"""

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
from typing import Any

from cortexmlx.core.prompt import common_length
from cortexmlx.disk.folder import TRANSCRIPT, open_folder, open_regular_file
from cortexmlx.models.tokenizers.fitting import find_named_ids
from cortexmlx.sessions.turn import Encode, Render, Transcript, answer_tokens, find_anchor, text_renderer
from cortexmlx.structured.output import Thoughts
from cortexmlx.structured.tools import Tool, ToolCall, load_json
from cortexmlx.system.files import remove_unfinished, write_atomically
from cortexmlx.types.messages import PromptTokenizer
from cortexmlx.types.request import Completion, Message
from cortexmlx.types.sampling_params import SamplingParams


class TranscriptMemory:
    """A ChatPrompt's `memory`: finds earlier turns' tokens in the client's transcripts, and remembers the answer."""

    def __init__(
        self, table: TranscriptTable, client: str, messages: Sequence[Message], params: SamplingParams
    ) -> None:
        self._table = table
        self._client = client
        self._params = params
        self._reader: PromptTokenizer | None = None
        self._render: Render | None = None
        self._read = Transcript()
        self._continued_turn: RememberedTurn | None = None
        self._answers: tuple[RememberedAnswer, ...] = ()
        self.messages = tuple(self._restore_calls(message) for message in messages)
        """The messages, with the calls as they were written."""

    def _restore_calls(self, message: Message) -> Message:
        """Return an assistant's message with its tool calls as the model wrote them, if their answer is remembered."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls or not isinstance(calls[0], dict):
            return message
        for answer in self._table.answers_with_call(self._client, str(calls[0].get("id"))):
            if answer.matches_message(message):
                self._answers = (*self._answers, answer)
                return answer.with_own_calls(message)
        return message

    def tokens(
        self, reader: PromptTokenizer, text: str, render: Callable[[Sequence[Message]], str | list[int]]
    ) -> list[int]:
        """Return the tokens of a rendered prompt: as remembered while the text is the same, then newly encoded."""
        encode = partial(reader.encode, add_special_tokens=False)
        render_text = self._render = text_renderer(render)
        self._reader = reader
        closest_turn = self._table.find_closest(self._client, text, self.messages)
        if closest_turn is None:
            self._read = Transcript().with_prompt(text, encode)
        else:
            self._table.mark_used(self._client, closest_turn)
            self._read = closest_turn.extend(text, self.messages, encode, render_text)
            self._continued_turn = closest_turn if closest_turn.is_prefix_of(self._read) else None
        return list(self._read.tokens)

    def anchor(self, thoughts: Thoughts | None) -> int:
        """Return how many tokens of this prompt the next turn's prompt will keep; 0 means all of them, or unknown."""
        if self._reader is None or self._render is None:
            return 0
        encode = partial(self._reader.encode, add_special_tokens=False)
        return find_anchor(self._read, self.messages, thoughts, self._render, encode)

    def remember(self, completion: Completion) -> None:
        """Remember the answers to this prompt, with their tokens, for later turns."""
        reader = self._reader
        if reader is None:  # the template makes tokens, so no text is known
            return
        replaced_turn = self._continued_turn
        for answer in (completion, *completion.others):
            tokens, has_end_token = answer_tokens(answer, self._params, reader.eos_token_ids)
            if tokens is None:
                continue
            end = reader.token_bytes(answer.token_ids[-1]).decode("utf-8", "replace") if has_end_token else ""
            remembered_answer = RememberedAnswer.from_completion(answer, tokens, end, self._params.offered)
            self._table.add(
                self._client,
                RememberedTurn(self._read, len(self.messages), remembered_answer, self._answers),
                replaced_turn,
            )
            replaced_turn = None


# RememberedAnswer: an answer, to be known again when a client sends it back.


THOUGHTS_FIELD = "reasoning_content"
"""The field of a message that has its thoughts."""


@dataclass(frozen=True)
class RememberedAnswer:
    """An earlier answer with the tokens that the model wrote, to recognize it when a client sends it back."""

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
    def from_completion(
        cls, completion: Completion, tokens: tuple[int, ...], end: str, tools: Sequence[Tool] = ()
    ) -> RememberedAnswer:
        """Make one from a completion, its text's `tokens`, the ending token's text `end` and the `tools` offered."""
        calls, schemas = completion.tool_calls, {tool.name: tool.schema for tool in tools}
        omitted_defaults = tuple(_omitted_arguments(call, schemas.get(call.name, {})) for call in calls)
        return cls(completion.text, completion.thinking, calls, completion.raw_text, tokens, end, omitted_defaults)

    def matches_message(self, message: Message) -> bool:
        """Whether a message is this answer. White space around its text, and the form of its calls' arguments, may
        differ. Thoughts are not compared: a template may leave them out.
        """
        content = message.get("content") or ""
        if (
            message.get("role") != "assistant"
            or not isinstance(content, str)
            or content.strip() != self.content.strip()
        ):
            return False
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, list | tuple) or len(calls) != len(self.calls):
            return False
        omitted_defaults = self.omitted or ("{}",) * len(calls)
        return all(map(matches_call, calls, self.calls, omitted_defaults))

    def matches_thoughts(self, message: Message) -> bool:
        """Whether a message has the same thoughts as this answer, or neither has any."""
        thoughts = message.get(THOUGHTS_FIELD) or ""
        return isinstance(thoughts, str) and thoughts.strip() == self.thinking.strip()

    def contains_text(self, text: str) -> bool:
        """Whether a text occurs in what the model wrote, also in call arguments that spell it with escapes."""
        values = (json.dumps(call.values, ensure_ascii=False) for call in self.calls)
        return text in self.text or any(text in each for each in values)

    def with_own_calls(self, message: Message) -> Message:
        """Return a message with this answer's tool calls, their arguments ordered as the model wrote them."""
        return {**message, "tool_calls": [call.as_mapping() for call in self.calls]}


def matches_call(message: object, call: ToolCall, omitted_defaults: str = "{}") -> bool:
    """Whether a message's tool call equals `call` (id, function, arguments), perhaps with `omitted_defaults` added."""
    function = message.get("function") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(function, Mapping):
        return False
    if message.get("id") != call.id or function.get("name") != call.name:
        return False
    return _matches_arguments(function.get("arguments"), call, omitted_defaults)


def _matches_arguments(arguments: object, call: ToolCall, omitted_defaults: str) -> bool:
    """Whether arguments equal those of a call, apart from defaults that the model omitted."""
    try:
        if canonical_json(arguments) == canonical_json(call.values):
            return True
        defaults = load_json(omitted_defaults)
        if not defaults or not isinstance(arguments, Mapping):
            return False
        explicit_arguments = {
            name: value
            for name, value in arguments.items()
            if name not in defaults or canonical_json(value) != canonical_json(defaults[name])
        }
        return canonical_json(explicit_arguments) == canonical_json(call.values)
    except (ValueError, TypeError, RecursionError):
        return False


def _omitted_arguments(call: ToolCall, schema: Mapping[str, Any]) -> str:
    """Return the schema's defaults of arguments that a call does not have, as a JSON object."""
    properties, values = schema.get("properties"), call.values
    if not isinstance(properties, Mapping):
        return "{}"
    defaults = {
        name: part["default"]
        for name, part in properties.items()
        if name not in values and isinstance(part, Mapping) and "default" in part
    }
    return json.dumps(defaults)


canonical_json: Callable[[Any], str] = json.JSONEncoder(sort_keys=True).encode
"""Returns JSON that is the same for equal values: unlike in Python, true is not 1."""


# The table of transcripts: for each client a bounded number of them, found by their longest common text.


_BYTES_PER_TOKEN = 40
"""Bytes that a token takes, roughly."""
_BYTES_PER_CUT = 120
"""Bytes that a cut takes, roughly."""
_TRANSCRIPT_OVERHEAD = 1500
"""Bytes that a transcript takes beside its texts and tokens, roughly: many of them are short."""

MAX_COMPARED = 256
"""How many of a client's transcripts that are equally near to a text are compared by their answers: more than a prompt
has answers.
"""


@dataclass(frozen=True)
class RememberedTurn:
    """A remembered turn: the transcript that the model read, and the answer that it wrote."""

    transcript: Transcript
    """All that it read."""
    message_count: int
    """How many messages that was. The answer is the next."""
    answer: RememberedAnswer
    earlier_answers: tuple[RememberedAnswer, ...] = ()
    """Answers of the same conversation before that have calls."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Names it among all."""

    @property
    def size(self) -> int:
        """The bytes of memory that this turn takes, roughly."""
        answers = sum(
            len(each.text) * 3 + len(each.tokens) * _BYTES_PER_TOKEN for each in (self.answer, *self.earlier_answers)
        )
        read = (
            len(self.transcript.text)
            + len(self.transcript.tokens) * _BYTES_PER_TOKEN
            + len(self.transcript.boundaries) * _BYTES_PER_CUT
        )
        return read + answers + _TRANSCRIPT_OVERHEAD

    def extend(self, text: str, messages: Sequence[Message], encode: Encode, render: Render) -> Transcript:
        """Return the transcript of a newly rendered text, with this turn's tokens as far as the text agrees."""
        if not text.startswith(self.transcript.text):
            return self.transcript.with_prompt(text, encode)
        answer_text = self._find_rendered_answer(text, messages, render)
        return self.transcript.with_answer(
            self.answer.text if answer_text is None else answer_text, self.answer.tokens
        ).with_prompt(text, encode)

    def is_prefix_of(self, transcript: Transcript) -> bool:
        """Whether a transcript begins with all the tokens of this turn and its answer."""
        turn_tokens = (*self.transcript.tokens, *self.answer.tokens)
        return len(transcript.tokens) > len(turn_tokens) and transcript.tokens[: len(turn_tokens)] == turn_tokens

    def match_score(self, text: str, messages: Sequence[Message]) -> tuple[bool, int]:
        """Return whether the message after the transcript is the answer, and how far `text` agrees with the answer."""
        if not text.startswith(self.transcript.text):
            return False, 0
        is_next_answer = len(messages) > self.message_count and self.answer.matches_message(
            messages[self.message_count]
        )
        answer_start = len(self.transcript.text)
        return is_next_answer, common_length(
            self.answer.text, text[answer_start : answer_start + len(self.answer.text)]
        )

    def _find_rendered_answer(self, text: str, messages: Sequence[Message], render: Render) -> str | None:
        """Return the answer as the template wrote it in `text`; None if it is unchanged, absent or has no clear end."""
        end_text, answer = self.answer.end, self.answer
        answer_start = len(self.transcript.text)
        if text.startswith(answer.text, answer_start) or not end_text or len(messages) <= self.message_count:
            return None
        earlier_messages, message = messages[: self.message_count], messages[self.message_count]
        if (
            not answer.matches_message(message)
            or not answer.matches_thoughts(message)
            or answer.contains_text(end_text)
        ):
            return None
        if render(earlier_messages) != self.transcript.text:
            return None
        end_position = text.find(end_text, answer_start)
        text_up_to_answer = render((*earlier_messages, message)) if end_position >= 0 else None
        # Where the next message is written may depend on what follows: what is common to both surely is the answer.
        if text_up_to_answer is None or common_length(text_up_to_answer, text) < end_position + len(end_text):
            return None
        answer_text = text[answer_start:end_position]
        if find_named_ids(answer_text) != find_named_ids(answer.text):
            return None  # the results of its calls have the ids that the template writes
        if answer.thinking.strip():
            text_without_thoughts = render((*earlier_messages, {**message, THOUGHTS_FIELD: ""}))
            if (
                answer.thinking.strip() not in answer_text
                or text_without_thoughts is None
                or text_without_thoughts.startswith(text_up_to_answer[: end_position + len(end_text)])
            ):
                return None  # the template leaves thoughts out
        return answer_text


class _ClientTranscripts:
    """The transcripts of one client, in the order of their last use and sorted by text."""

    def __init__(self) -> None:
        self.by_use: OrderedDict[str, RememberedTurn] = OrderedDict()
        """By their ids, the least recently used first."""
        self._texts: list[tuple[str, int, str]] = []
        """The text of each with the number of its last use and its id, sorted."""
        self._uses: dict[str, int] = {}
        self._numbers = count()

    def add(self, turn: RememberedTurn) -> None:
        """Add a transcript as the most recently used one."""
        number = self._uses[turn.id] = next(self._numbers)
        self.by_use[turn.id] = turn
        insort(self._texts, (turn.transcript.text, number, turn.id))

    def pop(self, id: str) -> RememberedTurn | None:
        """Remove and return a transcript; None if there is none."""
        turn = self.by_use.pop(id, None)
        if turn is not None:
            del self._texts[bisect_left(self._texts, (turn.transcript.text, self._uses.pop(id), id))]
        return turn

    def find_closest(self, text: str) -> list[RememberedTurn]:
        """Return the transcripts that share the longest prefix with a text, in the order of their last use. At most
        `MAX_COMPARED` of them end with the prefix, and at most as many go on after it. The longest prefix is that of a
        neighbour of the text in sorted order, so no other texts are compared.
        """
        texts, index = self._texts, bisect_left(self._texts, (text,))
        common = max(
            (common_length(other_text, text) for other_text, _, _ in texts[max(0, index - 1) : index + 1]), default=0
        )
        if not common:
            return []
        prefix = text[:common]
        first, end = bisect_left(texts, (prefix,)), bisect_left(texts, (prefix, next(self._numbers)))
        longer = texts[max(end, index - MAX_COMPARED // 2) : index + MAX_COMPARED // 2]
        candidates = texts[max(first, end - MAX_COMPARED) : end] + [
            each for each in longer if each[0].startswith(prefix)
        ]
        return [self.by_use[id] for _, _, id in sorted(candidates, key=lambda each: each[1])]


class TranscriptTable:
    """The transcripts of all clients of one model, within a memory limit. Any thread may use it.

    `max_bytes` bounds their bytes, roughly. Beyond it, the client with the most loses the one that was used least
    recently. Those in `storage` are read at the first use; later ones are saved there, and dropped ones are deleted.
    """

    def __init__(self, max_bytes: int, storage: SavedTranscripts | None = None) -> None:
        self._max_bytes = max_bytes
        self._storage = storage
        self._unread = storage is not None
        self._lock = threading.RLock()
        self._clients: dict[str, _ClientTranscripts] = {}
        self._sizes: dict[str, int] = {}
        self._calls: dict[str, dict[str, list[RememberedAnswer]]] = {}

    @property
    def size(self) -> int:
        """Bytes of all transcripts, roughly."""
        with self._lock:
            return sum(self._sizes.values())

    def all(self) -> list[tuple[str, RememberedTurn]]:
        """Return all transcripts with their clients, for each client the least recently used first."""
        with self._lock:
            return [
                (client, each) for client, transcripts in self._clients.items() for each in transcripts.by_use.values()
            ]

    def find_closest(self, client: str, text: str, messages: Sequence[Message]) -> RememberedTurn | None:
        """Return a client's transcript with the longest common prefix with a rendered text; None if there is none.
        Ties go to one whose answer follows in `messages` or in the text, then to the last used. The time does not
        depend on how many there are.
        """
        with self._lock:
            self._load_saved()
            candidates = self._clients[client].find_closest(text) if client in self._clients else []
        return max(reversed(candidates), key=lambda each: each.match_score(text, messages), default=None)

    def answers_with_call(self, client: str, call: str) -> list[RememberedAnswer]:
        """Return the answers of a client that have a tool call with this id."""
        with self._lock:
            self._load_saved()
            return list(self._calls.get(client, {}).get(call, ()))

    def mark_used(self, client: str, turn: RememberedTurn) -> None:
        """Mark a transcript as the most recently used."""
        with self._lock:
            transcripts = self._clients.get(client)
            if transcripts is not None and transcripts.pop(turn.id) is not None:
                transcripts.add(turn)

    def add(self, client: str, turn: RememberedTurn, replaced_turn: RememberedTurn | None = None) -> None:
        """Add a client's transcript, in the place of `replaced_turn` if the transcript continues that one."""
        with self._lock:
            self._load_saved()
            if self._storage is not None:
                self._storage.put(client, turn)
            if replaced_turn is not None:
                self._remove(client, replaced_turn.id)
            self._add_in_memory(client, turn)

    def _load_saved(self) -> None:
        """Load the saved transcripts, at the first use."""
        if self._unread and self._storage is not None:
            self._unread = False
            for client, turn in self._storage.read(self._max_bytes):
                self._add_in_memory(client, turn)

    def _add_in_memory(self, client: str, turn: RememberedTurn) -> None:
        """Add a transcript to the table in memory, and drop old ones beyond the limit."""
        self._clients.setdefault(client, _ClientTranscripts()).add(turn)
        self._sizes[client] = self._sizes.get(client, 0) + turn.size
        for answer in (*turn.earlier_answers, turn.answer):
            for call in answer.calls:
                self._calls.setdefault(client, {}).setdefault(call.id, []).append(answer)
        while sum(self._sizes.values()) > self._max_bytes:
            largest_client = max(self._sizes, key=lambda name: self._sizes[name])
            self._remove(largest_client, next(iter(self._clients[largest_client].by_use)))

    def _remove(self, client: str, id: str) -> None:
        """Remove a transcript from memory and from the storage."""
        transcripts = self._clients.get(client)
        removed_turn = None if transcripts is None else transcripts.pop(id)
        if transcripts is None or removed_turn is None:
            return
        self._sizes[client] -= removed_turn.size
        calls = self._calls.get(client, {})
        for answer in (*removed_turn.earlier_answers, removed_turn.answer):
            for call in answer.calls:
                call_answers = calls[call.id]
                call_answers.remove(answer)
                if not call_answers:
                    del calls[call.id]
        if not transcripts.by_use:
            del self._clients[client], self._sizes[client]
            self._calls.pop(client, None)
        if self._storage is not None:
            self._storage.remove(removed_turn)


# The tables of all models: tokens of one mean nothing to another.


log = logging.getLogger("cortexmlx")


class TranscriptTables:
    """A `TranscriptTable` for each model, of at most `max_bytes` (0: no tables), kept on disk in `folder`."""

    def __init__(self, max_bytes: int, folder: Path | None = None) -> None:
        self._max_bytes = max_bytes
        self._folder = folder
        self._tables: dict[str, TranscriptTable] = {}

    def for_model(self, identity: str) -> TranscriptTable | None:
        """Return the table of the model with this identity; None if transcripts are off."""
        if not self._max_bytes:
            return None
        if identity not in self._tables:
            self._tables[identity] = TranscriptTable(self._max_bytes, self._open_storage(identity))
        return self._tables[identity]

    def _open_storage(self, identity: str) -> SavedTranscripts | None:
        """Return the storage on disk for a model's transcripts; None if there is no folder, or if it cannot be used."""
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
_MAX_AGE = 30 * 24 * 3600.0
"""Seconds after which a transcript that nobody continued is removed."""
_TEMPORARY_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)
"""Errors of a process that has too much open, which say nothing of a file."""
_UNFINISHED_AGE = 3600.0
"""Seconds after which an unfinished file is that of a dead process."""


class SavedTranscripts:
    """The transcripts of one model as signed files in a folder, written and removed in order by one background thread.

    Raises OSError if the folder cannot be used.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._identity = identity
        self._key = hmac.digest(open_folder(folder), b"transcripts", sha256)
        self._thread = ThreadPoolExecutor(1, "cortexmlx transcripts")
        self._lock = threading.Lock()
        self._pending_writes: dict[str, tuple[str, RememberedTurn] | None] = {}
        """What is to be written, or removed, by id. A slow disk keeps no more here than the table does."""

    def read(self, max_bytes: int) -> list[tuple[str, RememberedTurn]]:
        """Return this model's newest transcripts with their clients, `max_bytes` bytes of files at most, the oldest
        first. Its other files are deleted, and so are damaged and outdated files of any model.
        """
        transcripts: list[tuple[str, RememberedTurn]] = []
        total, now = 0, time.time()
        with suppress(OSError):
            remove_unfinished(self._folder, _UNFINISHED_AGE)
        for path, size, modified_time in self._list_files():
            try:
                each = None if now - modified_time > _MAX_AGE else self._read_file(path)
            except OSError as error:
                if error.errno in _TEMPORARY_ERRORS:
                    continue
                each = None
            is_same_model = each is not None and each[0] == self._identity
            total += size if is_same_model else 0
            if each is None or (is_same_model and total > max_bytes):
                with suppress(OSError):
                    path.unlink()
            elif is_same_model:
                transcripts.append(each[1:])
        return transcripts[::-1]

    def put(self, client: str, turn: RememberedTurn) -> None:
        """Save a transcript in the background."""
        self._schedule(turn.id, (client, turn))

    def remove(self, turn: RememberedTurn) -> None:
        """Delete a transcript in the background."""
        self._schedule(turn.id, None)

    def close(self) -> None:
        """Wait until all pending writes are done."""
        self._thread.shutdown()

    def _list_files(self) -> list[tuple[Path, int, float]]:
        """Return the transcript files of all models with their sizes and times, the newest first."""
        files = []
        with suppress(OSError):
            for path in self._folder.iterdir():
                if TRANSCRIPT.fullmatch(path.name):
                    with suppress(OSError):
                        status = path.lstat()
                        files.append((path, status.st_size, status.st_mtime))
        return sorted(files, key=lambda each: each[2], reverse=True)

    def _read_file(self, path: Path) -> tuple[str, str, RememberedTurn] | None:
        """Return the model, client and transcript in a file; None if signature or version is wrong. Raises OSError."""
        try:
            with open_regular_file(path) as file:
                signature, data = file.read(_SIGNATURE), file.read()
            if not hmac.compare_digest(signature, hmac.digest(self._key, data, sha256)):
                return None
            record = json.loads(data)
            if record["version"] != _VERSION:
                return None
            return record["model"], record["client"], _from_json(record["transcript"], path.stem)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def _schedule(self, id: str, content: tuple[str, RememberedTurn] | None) -> None:
        """Queue the write of a transcript, or its removal (None), in place of an earlier one that is pending."""
        with self._lock:
            is_pending = id in self._pending_writes
            self._pending_writes[id] = content
        if not is_pending:
            self._thread.submit(self._apply_pending, id)

    def _apply_pending(self, id: str) -> None:
        """Write or delete a transcript's file, as was last queued."""
        with self._lock:
            content = self._pending_writes.pop(id)
        if content is None:
            with suppress(OSError):
                self._file_path(id).unlink()
        else:
            self._write_file(*content)

    def _write_file(self, client: str, turn: RememberedTurn) -> None:
        """Write a transcript's file, with its signature."""
        record = {"version": _VERSION, "model": self._identity, "client": client, "transcript": _to_json(turn)}
        data = json.dumps(record, separators=(",", ":")).encode()
        try:
            with write_atomically(self._file_path(turn.id), private=True) as file:
                file.write(hmac.digest(self._key, data, sha256) + data)
        except OSError as error:
            log.warning("a transcript is not kept on disk: %s", error)

    def _file_path(self, id: str) -> Path:
        return self._folder / f"{id}.transcript"


def _to_json(turn: RememberedTurn) -> dict[str, Any]:
    answers = [
        {**vars(each), "calls": [vars(call) for call in each.calls]} for each in (turn.answer, *turn.earlier_answers)
    ]
    return {"read": vars(turn.transcript), "place": turn.message_count, "answers": answers}


def _from_json(record: dict[str, Any], id: str) -> RememberedTurn:
    prompt_record = record["read"]
    transcript = Transcript(
        prompt_record["text"], tuple(prompt_record["tokens"]), tuple((a, b) for a, b in prompt_record["boundaries"])
    )
    answer, *earlier_answers = (_answer_from_json(each) for each in record["answers"])
    return RememberedTurn(transcript, record["place"], answer, tuple(earlier_answers), id)


def _answer_from_json(record: dict[str, Any]) -> RememberedAnswer:
    calls = tuple(ToolCall(**call) for call in record["calls"])
    return RememberedAnswer(
        **{**record, "calls": calls, "tokens": tuple(record["tokens"]), "omitted": tuple(record["omitted"])}
    )
