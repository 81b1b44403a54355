"""PromptHistory: the tokens of each client's last prompts, to explain what was computed again. Without mlx.

No text is kept. The two texts of a difference are decoded from tokens when a prompt comes, on the caller's thread, and
only if it repeats known tokens after the difference.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cortexmlx.core.prompt import PromptSource, common_length
from cortexmlx.errors import CortexError
from cortexmlx.kv.prefix import common_prefix_length
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.types.arrays import IntArray
from cortexmlx.types.cache_report import CacheReport, RecomputeReason
from cortexmlx.types.messages import plain_message
from cortexmlx.types.request import Message, QueuedRequest

MAX_PATHS = 8
"""Token paths that are kept of a client. One that continues another takes its place."""

MAX_BYTES = 32 << 20
"""Bytes of all clients' paths. Beyond them, the client that asked the longest ago loses its oldest."""

MAX_REPORTS = 20
"""Reports that are kept of a client, the newest ones."""

MIN_RECOMPUTED = 32
"""Tokens below which nothing is explained: that few are computed again at the edges of blocks."""

_CLIENT_BYTES = 16 << 10
"""What a client's reports take at most, about."""

_RUN = 16
"""Tokens in a row that stand for the same text. Fewer may be what a template writes around each message."""

_WEIGHTS = np.random.default_rng(16).integers(1 << 62, size=_RUN, dtype=np.int64) | 1

_SHOWN = 60
"""Characters of each text of a difference."""

_NEAR = 48
"""Tokens within which the same text must go on for both texts of a difference to be shown whole."""


class ModelVersion(NamedTuple):
    """The model and adapter that computed a prompt."""

    identity: str
    """Names the content of the model's files."""
    name: str
    adapter: str
    """The hash of the adapter's content; empty: none."""


@dataclass(frozen=True, eq=False)
class PromptPath:
    """The tokens of a prompt and its answer, and hashes of what else the prompt was made of."""

    tokens: IntArray
    version: ModelVersion
    messages: tuple[int, ...] = ()
    """A hash of each message."""
    tools: tuple[int, ...] = ()
    variables: int = 0

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes."""
        return self.tokens.nbytes + 40 * len(self.tools + self.messages) + 512


@dataclass(frozen=True, eq=False)
class PromptTrace:
    """What is known of a prompt before it is computed; `finish` makes its report."""

    history: PromptHistory
    request: QueuedRequest
    path: PromptPath
    draft: CacheReport
    """The report as far as earlier prompts tell: its tokens computed again come after the difference."""

    def finish(self, cached: int, on_disk: int, in_memory: int, answer: Sequence[int] | None) -> CacheReport:
        """Add the prompt to the history, with the tokens of its `answer` (None: the prompt was not fully computed), and
        return the report. `cached` tokens were reused, `on_disk` of them from disk. The blocks of `in_memory` tokens
        were in memory, but reuse may need a state that was not.
        """
        draft, request = self.draft, self.request
        lost = min(draft.known_tokens, draft.prompt_tokens - 1) - cached
        recomputed, reason = min(draft.recomputed_tokens + max(0, lost), draft.prompt_tokens - cached), draft.reason
        if not request.cache:
            reason = RecomputeReason.CACHE_OFF
        elif request.scored_tokens or request.params.prompt_logprobs is not None:
            reason = RecomputeReason.SCORES
        elif lost > draft.recomputed_tokens and reason is not RecomputeReason.ADAPTER:
            is_there = in_memory >= draft.known_tokens - MIN_RECOMPUTED
            reason = RecomputeReason.STATE if is_there else RecomputeReason.EVICTED
        is_explained = recomputed >= MIN_RECOMPUTED
        if reason is not draft.reason or not is_explained:
            draft = CacheReport(draft.prompt_tokens, known_tokens=draft.known_tokens, model=draft.model)
        report = replace(
            draft,
            memory_tokens=cached - on_disk,
            disk_tokens=on_disk,
            recomputed_tokens=recomputed if is_explained else 0,
            reason=reason if is_explained else None,
            time=time.time(),
        )
        keeps_path = request.cache and answer is not None
        tokens = np.concatenate([self.path.tokens, np.array(answer or (), np.int32)]) if keeps_path else None
        self.history.add(request.client, report, None if tokens is None else replace(self.path, tokens=tokens))
        return report


@dataclass
class _Client:
    """What is kept of one client."""

    paths: list[PromptPath] = field(default_factory=list)
    """The oldest first."""
    reports: deque[CacheReport] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))


class PromptHistory:
    """Each client's last prompts as tokens, and reports on how much of them was cached, for one engine or all of a
    server. Any thread may use it.

    A prompt is compared with those of the same client only, so a report tells nothing of another's.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._clients: OrderedDict[str | None, _Client] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes."""
        return self._nbytes

    def trace(
        self, request: QueuedRequest, source: PromptSource | None, tokenizer: SharedTokenizer, version: ModelVersion
    ) -> PromptTrace:
        """Compare a prompt with its client's earlier ones, and return its trace. `source` has its messages; it is None
        if the prompt is no chat.
        """
        tools = tuple(hash((tool.name, tool.description, tool.parameters)) for tool in request.params.offered)
        path = PromptPath(
            np.array(request.prompt, np.int32),
            version,
            () if source is None else tuple(map(_hash_message, source.messages)),
            tools,
            0 if source is None else hash(repr(sorted(source.variables.items()))),
        )
        with self._lock:
            client = self._clients.get(request.client)
            known_paths = [] if client is None else client.paths[::-1]
        draft = CacheReport(len(request.prompt), model=version.name)
        if known_paths:
            draft = _Comparison(path, request, source, tokenizer).report(known_paths, draft)
        return PromptTrace(self, replace(request, images=None), path, draft)  # a handle keeps it after the end

    def add(self, client: str | None, report: CacheReport, path: PromptPath | None) -> None:
        """Keep a client's report and path. The path replaces older ones that it continues."""
        with self._lock:
            if client not in self._clients:
                self._clients[client] = _Client()
                self._nbytes += _CLIENT_BYTES
            kept = self._clients[client]
            self._clients.move_to_end(client)
            kept.reports.append(report)
            if path is not None:
                older = [each for each in kept.paths if not _continues(path, each)][-(MAX_PATHS - 1) :]
                self._nbytes += path.nbytes + sum(p.nbytes for p in older) - sum(p.nbytes for p in kept.paths)
                kept.paths = [*older, path]
            while self._nbytes > self._max_bytes and self._clients:
                name, oldest = next(iter(self._clients.items()))
                if oldest.paths:
                    self._nbytes -= oldest.paths.pop(0).nbytes
                if not oldest.paths:
                    del self._clients[name]
                    self._nbytes -= _CLIENT_BYTES

    def reports(self, client: str | None) -> list[CacheReport]:
        """Return the newest reports of a client, the newest first."""
        with self._lock:
            kept = self._clients.get(client)
            return [] if kept is None else list(reversed(kept.reports))


# One prompt beside the client's known paths.


@dataclass(frozen=True)
class _Comparison:
    """Compares a prompt with known paths, and explains where it begins to differ from the nearest one."""

    path: PromptPath
    request: QueuedRequest
    source: PromptSource | None
    tokenizer: SharedTokenizer

    def report(self, known_paths: Sequence[PromptPath], draft: CacheReport) -> CacheReport:
        """Return the report `draft`, completed by comparing the prompt with `known_paths`, the newest first."""
        version = self.path.version
        same_model = [each for each in known_paths if each.version.identity == version.identity]
        same_version = [each for each in same_model if each.version == version]
        shared = [_count_common(self.path.tokens, each.tokens) for each in same_version]
        known = max(shared, default=0)
        near, repeat = self._find_nearest(same_version, shared)
        with_other = [_count_common(self.path.tokens, p.tokens) for p in same_model if p.version != version]
        known_with_other = max(with_other, default=0)
        if known_with_other >= known + repeat.tokens + MIN_RECOMPUTED:
            return replace(draft, known_tokens=known_with_other, reason=RecomputeReason.ADAPTER)
        draft = replace(draft, known_tokens=known)
        if repeat.tokens >= MIN_RECOMPUTED:
            draft = replace(draft, recomputed_tokens=repeat.tokens)
            return self._explain(same_version[near], shared[near], repeat, draft)
        if known + repeat.tokens < MIN_RECOMPUTED:
            for each in known_paths:
                is_begun = 0 < len(each.messages) == common_prefix_length(each.messages, self.path.messages)
                if is_begun and each.version.identity != version.identity:
                    tokens = min(len(each.tokens), len(self.path.tokens))
                    detail = f"`{each.version.name}`"
                    return replace(draft, recomputed_tokens=tokens, reason=RecomputeReason.MODEL, detail=detail)
        return draft

    def _find_nearest(self, paths: Sequence[PromptPath], shared: Sequence[int]) -> tuple[int, _Repeat]:
        """Return the index of the path that best explains the prompt, and the prompt's tokens after its longest known
        prefix that this path has, too. `shared` has for each path the length of its common prefix with the prompt. The
        path with the longest one is chosen, unless another one repeats clearly more. Nothing counts as repeated if the
        prompt continues the path with the longest prefix, or is one itself.
        """
        tokens, known = self.path.tokens, max(shared, default=0)
        order = sorted(range(len(paths)), key=shared.__getitem__, reverse=True)
        if not paths or len(tokens) - known < MIN_RECOMPUTED or self._continues_conversation(paths[order[0]], known):
            return 0, _NO_REPEAT
        near, best = order[0], _NO_REPEAT
        for index in order:
            common = shared[index]
            repeat = _find_repeat(tokens[common:], paths[index].tokens[common:], known - common)
            if repeat.tokens >= best.tokens + MIN_RECOMPUTED:
                near, best = index, repeat
            if best.tokens >= len(tokens) - known - MIN_RECOMPUTED:
                break
        return near, best

    def _continues_conversation(self, path: PromptPath, shared: int) -> bool:
        """Return whether the prompt, which shares that many tokens with a path, goes on where it ends, or nearly so."""
        has_its_messages = path.messages == self.path.messages[: len(path.messages)]
        return has_its_messages and len(path.tokens) - shared < MIN_RECOMPUTED

    def _explain(self, near: PromptPath, shared: int, repeat: _Repeat, draft: CacheReport) -> CacheReport:
        """Return the report of a prompt that leaves a path after `shared` tokens, and later repeats a part of it."""
        old, new, offset = self._changed_texts(near, shared, repeat)
        draft = replace(draft, reason=RecomputeReason.TEXT, old=old, new=new, character=offset)
        if self.source is None:
            return draft
        if min(near.tokens[shared], self.path.tokens[shared]) < 0:
            return replace(draft, detail="another image", old="", new="")
        messages = self.source.messages
        index, character, is_inside = common_prefix_length(self.path.messages, near.messages), None, False
        if offset is not None:
            index, character, is_inside = self._find_message_at(index, offset)
        draft = replace(draft, character=character)
        if self.path.tools != near.tools and not is_inside:
            if sorted(self.path.tools) == sorted(near.tools):
                return replace(draft, reason=RecomputeReason.TOOL_ORDER, character=None, old="", new="")
            return replace(draft, reason=RecomputeReason.TOOLS, character=None, detail=self._describe_tools(near))
        if self.path.variables != near.variables and character is None:
            return replace(draft, reason=RecomputeReason.VARIABLES)
        if not 0 <= index < len(messages):
            return replace(draft, character=offset)
        draft = replace(draft, message=index + 1, role=str(messages[index].get("role", "")))
        if self.path.messages[index] in near.messages[index + 1 :]:
            return replace(draft, reason=RecomputeReason.CUT)
        closes = () if self.request.thoughts is None else (self.request.thoughts.close,)
        gone = self._decode(near.tokens[shared - _RUN : shared + repeat.old])
        if any(close in gone and close not in _text_of(messages[index]) for close in closes):
            return replace(draft, reason=RecomputeReason.THOUGHTS, character=None, old="", new="")
        return draft if offset is not None or index < len(near.messages) else replace(draft, message=None, role="")

    def _changed_texts(self, near: PromptPath, shared: int, repeat: _Repeat) -> tuple[str, str, int | None]:
        """Return the old and the new text where a path and the prompt differ, with the words around, and the index of
        the first different character in the prompt's text; None if the tokens do not tell it.
        """
        start, end = max(0, shared - _RUN), shared + _NEAR + _RUN
        for _ in range(3):  # a character may take four tokens
            if start and self._decode(self.path.tokens[start:end]).startswith("\N{REPLACEMENT CHARACTER}"):
                start -= 1
        old, new = self._decode(near.tokens[start:end]), self._decode(self.path.tokens[start:end])
        first = common_length(old, new)
        whole = self._decode(self.path.tokens[:end])
        offset: int | None = len(whole) - len(new) + first
        has_images = bool((self.path.tokens[:end] < 0).any())
        text = whole if self.source is None else self.source.text
        if has_images or not whole.endswith(new) or not text.startswith(whole[:offset]):
            offset = None
        old_end, new_end = first + _SHOWN, first + _SHOWN
        if max(repeat.old, repeat.new) <= _NEAR:  # what follows is the same: leave it out, up to the end of the word
            old_end = len(self._decode(near.tokens[start : shared + repeat.old]))
            new_end = len(self._decode(self.path.tokens[start : shared + repeat.new]))
            while min(old_end, new_end) > first and old[old_end - 1] == new[new_end - 1]:
                old_end, new_end = old_end - 1, new_end - 1
            while old_end < len(old) and new_end < len(new) and old[old_end] == new[new_end] and old[old_end].isalnum():
                old_end, new_end = old_end + 1, new_end + 1
        begin = first
        while begin > max(0, first - _SHOWN // 3) and not old[begin - 1].isspace():
            begin -= 1
        return _shorten(old[begin:old_end]), _shorten(new[begin:new_end]), offset

    def _find_message_at(self, changed: int, offset: int) -> tuple[int, int | None, bool]:
        """Return the index of the message that has the rendered text's character `offset` (-1: no message), the
        character's index in the message's text (None: not in it), and whether that is before the text's end. Mostly it
        is the first different message, `changed`, but a template may leave messages out or move them.
        """
        assert self.source is not None
        index, messages = changed, range(len(self.source.messages))
        start, end = self._find_text(changed) if changed in messages else (-1, -1)
        if not start <= offset <= end:
            index = bisect_right(messages, offset, key=lambda each: self._find_text(each)[0]) - 1
            start, end = self._find_text(index) if index in messages else (-1, -1)
        if start <= offset <= end:
            return index, offset - start, offset < end
        return changed if changed in (index, index + 1) else -1, None, False

    def _find_text(self, index: int) -> tuple[int, int]:
        """Return where a message's text begins and ends in the rendered text; (-1, -1) if that cannot be told. It
        begins where the rendered text changes if another text takes its place.
        """
        assert self.source is not None
        messages = list(self.source.messages)
        text = _text_of(messages[index])
        messages[index] = {**messages[index], "content": "\0"}
        try:
            rendered = self.source.render(messages)
        except CortexError:
            return -1, -1
        if not isinstance(rendered, str) or rendered == self.source.text:
            return -1, -1
        start = common_length(self.source.text, rendered)
        if not self.source.text.startswith(text[:_RUN], start):  # the template leaves out blanks before it
            start -= len(text) - len(text.lstrip())
        return start, start + len(text)

    def _describe_tools(self, near: PromptPath) -> str:
        """Return a text that says which tools are new or changed, and how many are gone."""
        offered = zip(self.path.tools, self.request.params.offered, strict=True)
        names = [f"`{tool.name}`" for number, tool in offered if number not in near.tools]
        gone = sum(number not in self.path.tools for number in near.tools)
        new_text = f"{', '.join(names[:5])} {'is' if len(names) == 1 else 'are'} new or changed" if names else ""
        return " and ".join(
            filter(None, [new_text, f"{gone} of before {'is' if gone == 1 else 'are'} not" * (gone > 0)])
        )

    def _decode(self, tokens: IntArray) -> str:
        """Return the text of tokens. Tokens of images have no text."""
        return self.tokenizer.decode(tokens[tokens >= 0].tolist(), True)


class _Repeat(NamedTuple):
    """The tokens that two prompts share after their first difference, in runs of at least `_RUN` tokens."""

    tokens: int
    """How many tokens."""
    old: int
    """After how many tokens the first run begins in the earlier prompt,"""
    new: int
    """and in the new one."""


_NO_REPEAT = _Repeat(0, 0, 0)


def _find_repeat(new: IntArray, old: IntArray, skipped: int) -> _Repeat:
    """Return which tokens of `new` are also in `old`, in runs of at least `_RUN`, without the first `skipped`."""
    if min(len(new), len(old)) < _RUN:
        return _NO_REPEAT
    new_hashes, old_hashes = _hash_runs(new), _hash_runs(old)
    table = np.zeros(1 << 20, np.bool_)  # most runs of another text are ruled out without sorting all hashes
    table[old_hashes >> 44] = True
    found = table[new_hashes >> 44]
    hashes, sorted_hashes = new_hashes[found], np.sort(old_hashes)
    found[found] = sorted_hashes[np.searchsorted(sorted_hashes[:-1], hashes)] == hashes
    if not found.any():
        return _NO_REPEAT
    first = int(found.argmax())
    covered = np.convolve(found, np.ones(_RUN, np.int8)) > 0
    return _Repeat(int(covered[skipped:].sum()), int((old_hashes == new_hashes[first]).argmax()), first)


def _hash_runs(tokens: IntArray) -> npt.NDArray[np.int64]:
    """Return a hash of each `_RUN` successive tokens, `[n - _RUN + 1]` for `n` tokens."""
    return np.lib.stride_tricks.sliding_window_view(tokens.astype(np.int64), _RUN) @ _WEIGHTS


def _count_common(first: IntArray, second: IntArray) -> int:
    """Return how many tokens two paths begin with in common."""
    length = min(len(first), len(second))
    unequal = first[:length] != second[:length]
    place = int(unequal.argmax()) if length else 0
    return place if length and unequal[place] else length


def _continues(path: PromptPath, other: PromptPath) -> bool:
    """Return whether a path begins with all tokens of another one of the same model."""
    return path.version == other.version and _count_common(path.tokens, other.tokens) == len(other.tokens)


def _hash_message(message: Message) -> int:
    """Return a hash of everything in a message."""
    return hash((message.get("role"), _text_of(message), repr(message.get("tool_calls")), message.get("tool_call_id")))


def _text_of(message: Message) -> str:
    """Return the text of a message, with a sign for each image; "" if the message has no text."""
    try:
        content = plain_message(message, lambda part: "\0").get("content")
    except CortexError:
        return ""
    return content if isinstance(content, str) else ""


def _shorten(text: str) -> str:
    """Return a text, or its first characters if it is too long to show."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
