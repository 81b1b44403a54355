"""A drafter that guesses that a text goes on as it did after the same tokens before (prompt lookup). Without mlx."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count
from os import urandom

import numpy as np

from cortexmlx.scheduling.job import Job, JobId
from cortexmlx.speculation.drafter import TokenDraft

INDEXED_AT_ONCE = 2048
"""Tokens that are indexed in a step besides the new ones: about 0.1 ms, so a long prompt holds up no step."""

ONE_BY_ONE = 64
"""So many new tokens are indexed faster one by one than by numpy."""

RESUME_DISTANCE = 48
"""After a long match breaks, the text often goes on so many tokens after the break: that is how an edit looks."""

LONG_MATCH = 8
"""From so many tokens on, a match is long."""

OWN, EARLIER, RESUMED = 0, 8, 16
"""Where a place is: in the row's own text, in another one, or near the end of its last long match. Drafts of these
kinds are right in different shares, so each has confidence classes of its own.
"""

_LIKENESS = (0, 0, 0, 1, 2, *[3] * 2, *[4] * 3, *[5] * 6, 6)
"""For each length of a match: 2, 3, 4, 5 to 6, 7 to 9, 10 to 15, 16 or more."""

_SURE_LENGTH = len(_LIKENESS) - 1
"""From so many tokens on, a match is of the highest confidence class."""


class _MatchedRow:
    """A row's text, and its match: a place in this or another text whose continuation the row may repeat."""

    __slots__ = (
        "broken_match",
        "client_texts",
        "kind",
        "length",
        "num_read",
        "offset",
        "resumes_until",
        "source",
        "starts",
        "text",
    )

    def __init__(self, client_texts: ClientTexts, text: RowText, starts: dict[int, int], num_read: int) -> None:
        self.client_texts = client_texts
        self.text = text
        self.starts = starts
        """The texts that it begins with, and how many of its tokens end in each."""
        self.num_read = num_read
        """How many tokens of the job are in its text."""
        self.source: RowText | None = None
        """The text that it follows; None: it follows none."""
        self.offset = 0
        """What it is expected to say next: an offset in `source`."""
        self.length = 0
        """How many tokens before that are the same."""
        self.kind = OWN
        self.broken_match: tuple[RowText, int] | None = None
        """Where its last long match broke."""
        self.resumes_until = 0
        """How long its own text is when that place no longer counts."""


class SuffixDrafter:
    """Drafts what followed the longest earlier match of a row's last tokens, at least two of them: in its own text,
    and in texts of the same client, also of answers that have ended. Of equally long matches the newest wins.

    `WAYS` places are compared in a search. A row whose guess was right follows the place, without a search. Jobs that
    share no prefixes share no texts either. What is kept takes at most 7 MB, and 4 bytes for each token of the running
    rows.
    """

    name = "suffix"

    def __init__(self, share_prefixes: bool = True) -> None:
        self._share_prefixes = share_prefixes
        self.forget()

    def forget(self) -> None:
        """Forget all texts, because the engine starts anew."""
        self.texts = TextStore()
        self._place_table = PlaceTable()
        self._rows: dict[JobId, _MatchedRow] = {}
        self._has_proposed = False

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[TokenDraft | None]:
        """Return what followed the longest match of each job's last tokens, up to `budget` tokens; None: no match."""
        self._has_proposed = True
        rows = [self._update_row(job) for job in jobs]
        self._index_texts(rows)
        return [self._draft_for(row, budget) for row in rows]

    def end(self, job: Job) -> None:
        """Keep an ended job's text for its client's next jobs. Keep nothing if `propose` was never called."""
        if self._has_proposed and self._shares_text(job):
            self.texts.finish(job.salt, self._update_row(job).text)
        self._rows.pop(job.id, None)

    def _shares_text(self, job: Job) -> bool:
        """Return whether a job and others may share text, as `RunningSet.shares_prefix` decides for blocks."""
        return self._share_prefixes and job.request.cache

    def _begin_row(self, job: Job) -> _MatchedRow:
        """Store the text of a new job, and return its row."""
        tokens = array("i", _newest_tokens(job, len(job.tokens) + len(job.dropped_tokens)))
        parent = None if job.fork_of is None else self._rows.get(job.fork_of.id)
        if self._shares_text(job):
            client_texts = self.texts.client_texts(job.salt)
        else:
            client_texts = ClientTexts() if parent is None else parent.client_texts
        text, starts = self.texts.add(client_texts, tokens)
        row = self._rows[job.id] = _MatchedRow(client_texts, text, starts, len(tokens))
        return row

    def _update_row(self, job: Job) -> _MatchedRow:
        """Append a job's new tokens to its text, and check whether they are the expected ones. Return its row."""
        row = self._rows.get(job.id)
        if row is None:
            return self._begin_row(job)
        count = len(job.tokens) + len(job.dropped_tokens) - row.num_read
        if not count:
            return row
        new_tokens = _newest_tokens(job, count)
        row.num_read += count
        row.text.tokens.extend(new_tokens)
        source, offset = row.source, row.offset
        if source is None:
            return row
        source_tokens = source.tokens
        same_count = 0
        while (
            same_count < count
            and offset + same_count < len(source_tokens)
            and source_tokens[offset + same_count] == new_tokens[same_count]
        ):
            same_count += 1
        row.offset += same_count
        row.length += same_count
        if same_count < count:
            row.source = None
            if row.length >= LONG_MATCH:
                row.broken_match, row.resumes_until = (source, row.offset), len(row.text.tokens) + RESUME_DISTANCE
                row.client_texts.mark_used(source.number)
        return row

    def _index_texts(self, rows: Sequence[_MatchedRow]) -> None:
        """Index some more of the rows' texts, then of their clients' ended texts, so that searches find their places.
        New tokens of a row do not wait for another one's long prompt.
        """
        remaining = INDEXED_AT_ONCE
        for row in rows:
            remaining -= self._index_text(row.client_texts.hash_key, row.text, max(remaining, ONE_BY_ONE))
            unindexed_texts = row.client_texts.unindexed_texts
            while unindexed_texts and remaining > 0:
                text = next(iter(unindexed_texts.values()))
                remaining -= self._index_text(row.client_texts.hash_key, text, remaining)
                if text.indexed_end == len(text.tokens):
                    del unindexed_texts[text.number]

    def _index_text(self, key: HashKey, text: RowText, max_places: int) -> int:
        """Index up to `max_places` places of a text; return how many. The text's end has no continuation yet."""
        begin = max(text.indexed_end, KEY_TOKENS)
        end = min(len(text.tokens), begin + max_places)
        if end - begin > ONE_BY_ONE:
            self._place_table.add_places(key, text.number, text.tokens, begin, end)
        else:
            for offset in range(begin, end):
                self._place_table.add_place(key, text.number, text.tokens, offset)
        text.indexed_end = max(text.indexed_end, end)
        return max(0, end - begin)

    def _draft_for(self, row: _MatchedRow, budget: int) -> TokenDraft | None:
        """Return what follows the row's matched place, at most `budget` tokens; None without a match."""
        if row.source is None or row.offset >= len(row.source.tokens):
            self._find_match(row)
        if row.source is None:
            return None
        tokens = row.source.tokens[row.offset : row.offset + budget]
        return TokenDraft(tokens, row.kind + _LIKENESS[min(row.length, _SURE_LENGTH)])

    def _find_match(self, row: _MatchedRow) -> None:
        """Set the row's match to the place after the longest earlier copy of its last tokens. Of equally long ones, a
        place near the end of the row's last long match is preferred.
        """
        row.source = None
        row_tokens = row.text.tokens
        if len(row_tokens) < KEY_TOKENS:
            return
        first, second = row_tokens[-2], row_tokens[-1]
        best_length, max_length = KEY_TOKENS - 1, min(len(row_tokens), LONGEST_MATCH)
        if row.broken_match is not None and len(row_tokens) <= row.resumes_until:
            source, break_offset = row.broken_match
            if offset := _find_pair(first, second, source.tokens, break_offset, break_offset + RESUME_DISTANCE):
                best_length = _match_length(row_tokens, source.tokens, offset)
                self._set_match(row, source, offset, best_length, RESUMED)
        for packed_place in self._place_table.find_places(row.client_texts.hash_key, first, second):
            if best_length == max_length:
                break
            text = row.client_texts.texts.get(place_text_number(packed_place))
            if text is None:
                continue
            offset = place_offset(packed_place)
            if offset <= best_length or text.tokens[offset - 1 - best_length] != row_tokens[-1 - best_length]:
                continue  # it is not longer
            length = _match_length(row_tokens, text.tokens, offset)
            if length > best_length:
                best_length = length
                is_own = text is row.text or text.start + offset < row.starts.get(text.number, 0)
                self._set_match(row, text, offset, length, OWN if is_own else EARLIER)

    def _set_match(self, row: _MatchedRow, source: RowText, offset: int, length: int, kind: int) -> None:
        """Make the row expect what follows a place in the text `source`."""
        row.source, row.offset, row.length, row.kind = source, offset, length, kind


def _newest_tokens(job: Job, count: int) -> list[int]:
    """Return the last `count` tokens of a job's text, with those that were dropped from its context."""
    tokens = job.tokens
    if job.keep is not None and count > len(tokens) - job.keep.first:
        tokens = [*tokens[: job.keep.first], *job.dropped_tokens, *tokens[job.keep.first :]]
    return tokens[len(tokens) - count :]


def _find_pair(first: int, second: int, tokens: array[int], begin: int, end: int) -> int:
    """Return the first offset in `begin .. end` right after these two tokens, before the text's end; 0 if none."""
    end = min(end, len(tokens) - 1)
    while begin < end:
        try:
            begin = tokens.index(second, begin, end) + 1
        except ValueError:
            return 0
        if begin >= KEY_TOKENS and tokens[begin - 2] == first:
            return begin
    return 0


def _match_length(tokens: array[int], other_tokens: array[int], offset: int) -> int:
    """Return how many last tokens of a text equal those before an `offset` of another, at most `LONGEST_MATCH`."""
    max_length = min(len(tokens), offset, LONGEST_MATCH)
    if max_length == LONGEST_MATCH and tokens[-LONGEST_MATCH:] == other_tokens[offset - LONGEST_MATCH : offset]:
        return LONGEST_MATCH
    length = 0
    end = len(tokens) - 1
    while length < max_length and tokens[end - length] == other_tokens[offset - 1 - length]:
        length += 1
    return length


# TextStore: what rows and ended answers have said, kept apart by client.


MAX_TOKENS = 1 << 19
"""Tokens of ended texts that are kept, over all clients."""

CLIENT_TOKENS = 1 << 18
"""Tokens of ended texts that are kept of one client."""

LONGEST_MATCH = 32
"""Tokens that are compared before a place. A text that goes on from another one repeats so many of it."""

_TEXT_OVERHEAD = 128
"""A text counts as so many tokens more, for its objects."""


class RowText:
    """The tokens of a row from `start` on. Its beginning is in another text, and stored only there."""

    __slots__ = ("branch", "indexed_end", "is_live", "key", "number", "parent", "start", "tokens")

    def __init__(self, number: int, tokens: array[int], parent: int, branch: int) -> None:
        """Make the text of a row with these `tokens`. Before token `branch`, it is the same as the text `parent`."""
        self.number = number
        self.parent = parent
        self.branch = branch
        self.start = max(0, branch - LONGEST_MATCH)
        self.tokens = tokens[self.start :]
        self.key: tuple[int, int, int] | None = None
        """Under what its client's other texts find it."""
        self.indexed_end = branch - self.start
        """The places before this offset can be found. Those before `branch` are found in other texts."""
        self.is_live = True
        """Whether its row goes on."""

    @property
    def size(self) -> int:
        """The tokens that the text counts for in a limit on memory: its own, and a constant for its Python objects."""
        return len(self.tokens) + _TEXT_OVERHEAD


class ClientTexts:
    """The texts of one client, each beginning stored once: a tree, in which a text branches off another one.

    `texts` has the least recently used first. A text is used later than those that branch off it, so those go first.
    """

    def __init__(self) -> None:
        self.texts: dict[int, RowText] = {}
        self.hash_key = new_hash_key()
        """How its places are found."""
        self.size = 0
        """What the ended texts count for."""
        self.unindexed_texts: dict[int, RowText] = {}
        """The ended texts of which some places cannot be found yet."""
        self._branches: dict[tuple[int, int, int], int] = {}

    def add(self, number: int, tokens: array[int]) -> tuple[RowText, dict[int, int]]:
        """Store the text of a row that begins with these `tokens`, without the prefix that other texts have. Return the
        text, and where the row leaves each text that has a part of this prefix: a token index by the text's number.
        """
        path = self._walk_tree(0, 0, tokens, 0)
        parent, branch = next(reversed(path.items()), (0, 0))
        text = RowText(number, tokens, parent, branch)
        if branch < len(tokens):
            self._add_branch(text)
        self.texts[number] = text
        self.mark_used(parent)
        return text, path

    def finish(self, text: RowText) -> None:
        """Keep the text of a row that has ended, unless other texts have all of it."""
        text.is_live = False
        self.size += text.size
        if text.indexed_end < len(text.tokens):
            self.unindexed_texts[text.number] = text
        if text.key is None and text.parent in self.texts:
            parent = self.texts[text.parent]
            common_end = _common_end(parent, text.branch, text.tokens, text.start)
            path = {parent.number: common_end} | self._walk_tree(parent.number, common_end, text.tokens, text.start)
            text.parent, text.branch = next(reversed(path.items()))
            if text.branch == text.start + len(text.tokens):
                self.drop(text)
            else:
                self._add_branch(text)
        self.mark_used(text.number if text.number in self.texts else text.parent)

    def drop(self, text: RowText) -> None:
        """Remove an ended text."""
        del self.texts[text.number]
        self.unindexed_texts.pop(text.number, None)
        self.size -= text.size
        if text.key is not None and self._branches.get(text.key) == text.number:
            del self._branches[text.key]

    def mark_used(self, number: int) -> None:
        """Mark a text as the most recently used, and then those that it branches off."""
        while number in self.texts:
            text = self.texts[number] = self.texts.pop(number)
            number = text.parent

    @property
    def oldest(self) -> RowText | None:
        """The ended text that was not used for the longest time; None if there is none."""
        return next((text for text in self.texts.values() if not text.is_live), None)

    def _add_branch(self, text: RowText) -> None:
        """Register the token at which a text branches off its parent, so that a search of the tree finds the text."""
        text.key = (text.parent, text.branch, text.tokens[text.branch - text.start])
        self._branches.setdefault(text.key, text.number)

    def _walk_tree(self, number: int, position: int, tokens: array[int], start: int) -> dict[int, int]:
        """Return where a row leaves each text that it follows after leaving the text `number` at token `position`: a
        token index by the text's number. `tokens` are the row's tokens from `start` on.
        """
        path = {}
        end = start + len(tokens)
        while position < end:
            text = self.texts.get(self._branches.get((number, position, tokens[position - start]), 0))
            if text is None:
                break
            number, position = text.number, _common_end(text, position, tokens, start)
            path[number] = position
        return path


class TextStore:
    """The texts of all clients: of each running row, and of ended rows those that were used last.

    The ended ones have at most `max_tokens` tokens, and `max_client_tokens` of each client. The client who has asked
    nothing for the longest time loses its oldest text first. A token takes 4 bytes.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS, max_client_tokens: int = CLIENT_TOKENS) -> None:
        self.texts_by_client: dict[str | None, ClientTexts] = {}
        self.size = 0
        """What the ended texts of all clients count for."""
        self._max_tokens = max_tokens
        self._max_client_tokens = max_client_tokens
        self._numbers = count(1)

    def add(self, client_texts: ClientTexts, tokens: array[int]) -> tuple[RowText, dict[int, int]]:
        """Store the text of a new row with its client's texts: see `ClientTexts.add`."""
        return client_texts.add(next(self._numbers), tokens)

    def client_texts(self, salt: str | None) -> ClientTexts:
        """Return the texts of a client, and mark it as the most recently active client."""
        client_texts = self.texts_by_client[salt] = (
            self.texts_by_client.pop(salt) if salt in self.texts_by_client else ClientTexts()
        )
        return client_texts

    def finish(self, salt: str | None, text: RowText) -> None:
        """Keep the text of a client's row that has ended, and make room for it."""
        client_texts = self.client_texts(salt)
        self.size -= client_texts.size
        client_texts.finish(text)
        while client_texts.size > self._max_client_tokens and (oldest_text := client_texts.oldest):
            client_texts.drop(oldest_text)
        self.size += client_texts.size
        if self.size > self._max_tokens or not client_texts.texts:
            self._make_room()

    def _make_room(self) -> None:
        """Remove ended texts until there are no more than allowed, and clients without texts."""
        for salt, client_texts in list(self.texts_by_client.items()):
            while self.size > self._max_tokens and (oldest_text := client_texts.oldest):
                client_texts.drop(oldest_text)
                self.size -= oldest_text.size
            if not client_texts.texts:
                del self.texts_by_client[salt]


def _common_end(text: RowText, position: int, tokens: array[int], start: int) -> int:
    """Return where the common prefix of a row and a text ends: `position` or later. `tokens` begin at token `start`."""
    count = min(start + len(tokens), text.start + len(text.tokens)) - position
    if count <= 0:
        return position
    row_tokens = np.frombuffer(tokens, np.int32, count, 4 * (position - start))
    text_tokens = np.frombuffer(text.tokens, np.int32, count, 4 * (position - text.start))
    differ = row_tokens != text_tokens
    first = int(differ.argmax())
    return position + (first if differ[first] else count)


# PlaceTable: where two tokens were followed by a third, in any text.


KEY_TOKENS = 2
"""Tokens before a place that name it. With two, a draft begins one step earlier after a change than with three."""

WAYS = 8
"""The newest places that are kept of each set."""

_SETS = 1 << 16
"""A set is named by a hash of 16 bits, which numpy sorts by radix."""

_OFFSET_BITS = 24
_LAST_OFFSET = (1 << _OFFSET_BITS) - 1
_SHIFT = 15

HashKey = tuple[int, int]
"""Two odd numbers of 31 bits, by which the two tokens are multiplied."""


def new_hash_key() -> HashKey:
    """Return a random hash key that nobody can guess."""
    first, second = (int.from_bytes(urandom(4), "little") >> 1 | 1 << 30 | 1 for _ in range(2))
    return first, second


class PlaceTable:
    """A hash table of the newest places in any text that follow the same two tokens. It keeps `WAYS` places for each
    hash, the newest first.

    A place is the number of a text and an offset into it. Places of texts that are gone stay until newer ones push them
    out, and tokens with the same hash share a set, so the caller compares the tokens. It takes 4 MB, whatever is added.

    All clients share the table, and each has a `HashKey`. With one hash for all, a client could fill the set of two
    tokens, and see by its drafts whether another one's text has them.
    """

    def __init__(self) -> None:
        self._places = np.zeros(_SETS * WAYS, np.int64)
        self._next_ways = np.zeros(_SETS, np.uint8)
        """Which place of each set is the oldest, so that the next one takes it."""
        self._place_view, self._next_way_view = self._places.data, self._next_ways.data

    @property
    def nbytes(self) -> int:
        """The bytes that the table takes."""
        return self._places.nbytes + self._next_ways.nbytes

    def add_place(self, key: HashKey, number: int, tokens: array[int], offset: int) -> None:
        """Add the place `offset` of the text `number` under the two tokens before it."""
        if offset <= _LAST_OFFSET:
            bucket = _bucket_index(key, tokens[offset - 2], tokens[offset - 1])
            way = self._next_way_view[bucket]
            self._place_view[bucket * WAYS + way] = number << _OFFSET_BITS | offset
            self._next_way_view[bucket] = (way + 1) % WAYS

    def add_places(self, key: HashKey, number: int, tokens: array[int], begin: int, end: int) -> None:
        """Add the places `begin .. end` of the text `number`, as if one by one."""
        end = min(end, _LAST_OFFSET + 1)
        if begin >= end:
            return
        text = np.frombuffer(tokens, np.int32)[begin - KEY_TOKENS : end - 1].astype(np.int64)
        sets = ((text[:-1] * key[0] + text[1:] * key[1]) >> _SHIFT).astype(np.uint16)
        order = np.argsort(sets, kind="stable")
        sets = sets[order]
        starts = np.flatnonzero(np.r_[True, sets[1:] != sets[:-1]])
        counts = np.diff(starts, append=len(sets))
        ranks = np.arange(len(sets)) - np.repeat(starts, counts)
        newest_mask = ranks >= np.repeat(counts, counts) - WAYS  # each way is written once
        ways = (self._next_ways[sets] + ranks) % WAYS
        places = sets.astype(np.int64) * WAYS + ways
        self._places[places[newest_mask]] = (number << _OFFSET_BITS) + begin + order[newest_mask]
        changed_sets = sets[starts]
        self._next_ways[changed_sets] = (self._next_ways[changed_sets] + counts) % WAYS

    def find_places(self, key: HashKey, first: int, second: int) -> list[int]:
        """Return the places that may follow these two tokens, the newest first. 0 is an empty entry."""
        bucket = _bucket_index(key, first, second)
        start, way = bucket * WAYS, self._next_way_view[bucket]
        places = self._place_view[start : start + WAYS].tolist()
        return [*places[way - 1 :: -1], *places[: way - 1 : -1]] if way else places[::-1]


def place_text_number(place: int) -> int:
    """Return the number of the text that a place is in."""
    return place >> _OFFSET_BITS


def place_offset(place: int) -> int:
    """Return the offset of a place in its text."""
    return place & _LAST_OFFSET


def _bucket_index(key: HashKey, first: int, second: int) -> int:
    """Return which bucket of the hash table has the entries for two tokens."""
    return (first * key[0] + second * key[1]) >> _SHIFT & (_SETS - 1)
