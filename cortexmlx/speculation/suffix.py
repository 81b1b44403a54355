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
kinds are right in different shares, so each has likenesses of its own.
"""

_LIKENESS = (0, 0, 0, 1, 2, *[3] * 2, *[4] * 3, *[5] * 6, 6)
"""For each length of a match: 2, 3, 4, 5 to 6, 7 to 9, 10 to 15, 16 or more."""

_SURE_LENGTH = len(_LIKENESS) - 1
"""From so many tokens on, a match is of the highest likeness."""


class _MatchedRow:
    """A row's text, and the place in a text whose continuation it is expected to repeat."""

    __slots__ = ("broken", "kind", "length", "place", "read", "resumes_until", "shelf", "source", "starts", "text")

    def __init__(self, shelf: ClientTexts, text: RowText, starts: dict[int, int], read: int) -> None:
        self.shelf = shelf
        self.text = text
        self.starts = starts
        """The texts that it begins with, and how many of its tokens end in each."""
        self.read = read
        """How many tokens of the job are in its text."""
        self.source: RowText | None = None
        """The text that it follows; None: it follows none."""
        self.place = 0
        """What it is expected to say next: an offset in `source`."""
        self.length = 0
        """How many tokens before that are the same."""
        self.kind = OWN
        self.broken: tuple[RowText, int] | None = None
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
        self._places = PlaceTable()
        self._rows: dict[JobId, _MatchedRow] = {}
        self._asked = False

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[TokenDraft | None]:
        """Return what followed the longest match of each job's last tokens, at most `budget` tokens; None without a
        match.
        """
        self._asked = True
        rows = [self._update_row(job) for job in jobs]
        self._index_texts(rows)
        return [self._draft_for(row, budget) for row in rows]

    def end(self, job: Job) -> None:
        """Keep the text of a job that has ended, for others of its client. Nothing is kept before a row was asked for:
        some engines cannot verify drafts.
        """
        if self._asked and self._shares_text(job):
            self.texts.finish(job.salt, self._update_row(job).text)
        self._rows.pop(job.id, None)

    def _shares_text(self, job: Job) -> bool:
        """Return whether a job and others may use each other's text, as `RunningSet.shares_prefix` decides for
        blocks.
        """
        return self._share_prefixes and job.request.cache

    def _begin_row(self, job: Job) -> _MatchedRow:
        """Store the text of a new job, and return its row."""
        tokens = array("i", _newest_tokens(job, len(job.tokens) + len(job.dropped)))
        parent = None if job.fork_of is None else self._rows.get(job.fork_of.id)
        if self._shares_text(job):
            shelf = self.texts.client_texts(job.salt)
        else:
            shelf = ClientTexts() if parent is None else parent.shelf
        text, starts = self.texts.add(shelf, tokens)
        row = self._rows[job.id] = _MatchedRow(shelf, text, starts, len(tokens))
        return row

    def _update_row(self, job: Job) -> _MatchedRow:
        """Append a job's new tokens to its text, and check whether they are the expected ones. Return its row."""
        row = self._rows.get(job.id)
        if row is None:
            return self._begin_row(job)
        count = len(job.tokens) + len(job.dropped) - row.read
        if not count:
            return row
        new = _newest_tokens(job, count)
        row.read += count
        row.text.tokens.extend(new)
        source, place = row.source, row.place
        if source is None:
            return row
        said = source.tokens
        same = 0
        while same < count and place + same < len(said) and said[place + same] == new[same]:
            same += 1
        row.place += same
        row.length += same
        if same < count:
            row.source = None
            if row.length >= LONG_MATCH:
                row.broken, row.resumes_until = (source, row.place), len(row.text.tokens) + RESUME_DISTANCE
                row.shelf.mark_used(source.number)
        return row

    def _index_texts(self, rows: Sequence[_MatchedRow]) -> None:
        """Index the rows' texts, then their clients' ended texts, so that searches find their places: some in each
        step. New tokens of a row do not wait for another one's long prompt.
        """
        left = INDEXED_AT_ONCE
        for row in rows:
            left -= self._index_text(row.shelf.hash_key, row.text, max(left, ONE_BY_ONE))
            unindexed = row.shelf.unindexed
            while unindexed and left > 0:
                text = next(iter(unindexed.values()))
                left -= self._index_text(row.shelf.hash_key, text, left)
                if text.indexed == len(text.tokens):
                    del unindexed[text.number]

    def _index_text(self, key: HashKey, text: RowText, most: int) -> int:
        """Index at most `most` places of a text, and return how many. The place after its last token has no
        continuation yet.
        """
        begin = max(text.indexed, KEY_TOKENS)
        end = min(len(text.tokens), begin + most)
        if end - begin > ONE_BY_ONE:
            self._places.add_places(key, text.number, text.tokens, begin, end)
        else:
            for offset in range(begin, end):
                self._places.add_place(key, text.number, text.tokens, offset)
        text.indexed = max(text.indexed, end)
        return max(0, end - begin)

    def _draft_for(self, row: _MatchedRow, budget: int) -> TokenDraft | None:
        """Return what follows the row's matched place, at most `budget` tokens; None without a match."""
        if row.source is None or row.place >= len(row.source.tokens):
            self._find_match(row)
        if row.source is None:
            return None
        tokens = row.source.tokens[row.place : row.place + budget]
        return TokenDraft(tokens, row.kind + _LIKENESS[min(row.length, _SURE_LENGTH)])

    def _find_match(self, row: _MatchedRow) -> None:
        """Find the place to follow: after the longest earlier match of the row's last tokens. Of equally long ones, a
        place near the end of its last long match counts first.
        """
        row.source = None
        mine = row.text.tokens
        if len(mine) < KEY_TOKENS:
            return
        first, second = mine[-2], mine[-1]
        longest, most = KEY_TOKENS - 1, min(len(mine), LONGEST_MATCH)
        if row.broken is not None and len(mine) <= row.resumes_until:
            source, begin = row.broken
            if place := _find_pair(first, second, source.tokens, begin, begin + RESUME_DISTANCE):
                longest = _match_length(mine, source.tokens, place)
                self._set_match(row, source, place, longest, RESUMED)
        for each in self._places.find_places(row.shelf.hash_key, first, second):
            if longest == most:
                break
            text = row.shelf.texts.get(place_text_number(each))
            if text is None:
                continue
            place = place_offset(each)
            if place <= longest or text.tokens[place - 1 - longest] != mine[-1 - longest]:
                continue  # it is not longer
            length = _match_length(mine, text.tokens, place)
            if length > longest:
                longest = length
                own = text is row.text or text.begin + place < row.starts.get(text.number, 0)
                self._set_match(row, text, place, length, OWN if own else EARLIER)

    def _set_match(self, row: _MatchedRow, source: RowText, place: int, length: int, kind: int) -> None:
        """Make the row expect what follows a place in the text `source`."""
        row.source, row.place, row.length, row.kind = source, place, length, kind


def _newest_tokens(job: Job, count: int) -> list[int]:
    """Return the last `count` tokens of a job's text, with those that were dropped from its context."""
    tokens = job.tokens
    if job.keep is not None and count > len(tokens) - job.keep.first:
        tokens = [*tokens[: job.keep.first], *job.dropped, *tokens[job.keep.first :]]
    return tokens[len(tokens) - count :]


def _find_pair(first: int, second: int, tokens: array[int], begin: int, end: int) -> int:
    """Return the first offset in `begin .. end` right after these two tokens; 0 if there is none. The text must go on
    there.
    """
    end = min(end, len(tokens) - 1)
    while begin < end:
        try:
            begin = tokens.index(second, begin, end) + 1
        except ValueError:
            return 0
        if begin >= KEY_TOKENS and tokens[begin - 2] == first:
            return begin
    return 0


def _match_length(mine: array[int], theirs: array[int], place: int) -> int:
    """Return how many of the last tokens of a text equal those before a `place` of another one, at most
    `LONGEST_MATCH`.
    """
    most = min(len(mine), place, LONGEST_MATCH)
    if most == LONGEST_MATCH and mine[-LONGEST_MATCH:] == theirs[place - LONGEST_MATCH : place]:
        return LONGEST_MATCH
    length = 0
    end = len(mine) - 1
    while length < most and mine[end - length] == theirs[place - 1 - length]:
        length += 1
    return length


# TextStore: what rows and ended answers have said, kept apart by client.


MOST_TOKENS = 1 << 19
"""Tokens of ended texts that are kept, over all clients."""

CLIENT_TOKENS = 1 << 18
"""Tokens of ended texts that are kept of one client."""

LONGEST_MATCH = 32
"""Tokens that are compared before a place. A text that goes on from another one repeats so many of it."""

_TEXT_OVERHEAD = 128
"""A text counts as so many tokens more, for its objects."""


class RowText:
    """The tokens of a row from `begin` on. Its beginning is in another text, and stored only there."""

    __slots__ = ("begin", "branch", "indexed", "key", "live", "number", "parent", "tokens")

    def __init__(self, number: int, tokens: array[int], parent: int, branch: int) -> None:
        """Make the text of a row with these `tokens`. It is the same as the text `parent` before its token `branch`."""
        self.number = number
        self.parent = parent
        self.branch = branch
        self.begin = max(0, branch - LONGEST_MATCH)
        self.tokens = tokens[self.begin :]
        self.key: tuple[int, int, int] | None = None
        """Under what its client's other texts find it."""
        self.indexed = branch - self.begin
        """The places before this offset can be found. Those before `branch` are found in other texts."""
        self.live = True
        """Whether its row goes on."""

    @property
    def size(self) -> int:
        """The tokens that the text counts for: its own and a constant for its objects."""
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
        self.unindexed: dict[int, RowText] = {}
        """The ended texts of which some places cannot be found yet."""
        self._branches: dict[tuple[int, int, int], int] = {}

    def add(self, number: int, tokens: array[int]) -> tuple[RowText, dict[int, int]]:
        """Store the text of a row that begins with these `tokens`, without the beginning that other texts have. Return
        it, and the texts that it begins with: their numbers, and the tokens of the row that end in each.
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
        text.live = False
        self.size += text.size
        if text.indexed < len(text.tokens):
            self.unindexed[text.number] = text
        if text.key is None and text.parent in self.texts:
            parent = self.texts[text.parent]
            at = _common_end(parent, text.branch, text.tokens, text.begin)
            path = {parent.number: at} | self._walk_tree(parent.number, at, text.tokens, text.begin)
            text.parent, text.branch = next(reversed(path.items()))
            if text.branch == text.begin + len(text.tokens):
                self.drop(text)
            else:
                self._add_branch(text)
        self.mark_used(text.number if text.number in self.texts else text.parent)

    def drop(self, text: RowText) -> None:
        """Remove an ended text."""
        del self.texts[text.number]
        self.unindexed.pop(text.number, None)
        self.size -= text.size
        if text.key is not None and self._branches.get(text.key) == text.number:
            del self._branches[text.key]

    def mark_used(self, number: int) -> None:
        """Mark a text as the most recently used, and then those that it begins with."""
        while number in self.texts:
            text = self.texts[number] = self.texts.pop(number)
            number = text.parent

    @property
    def oldest(self) -> RowText | None:
        """The ended text that was not used for the longest time; None if there is none."""
        return next((text for text in self.texts.values() if not text.live), None)

    def _add_branch(self, text: RowText) -> None:
        """Let others find a text where it branches off its parent."""
        text.key = (text.parent, text.branch, text.tokens[text.branch - text.begin])
        self._branches.setdefault(text.key, text.number)

    def _walk_tree(self, number: int, at: int, tokens: array[int], begin: int) -> dict[int, int]:
        """Return the texts that a row's tokens run along, each with the token at which they leave it. They leave the
        text `number` at their token `at`. The first of `tokens` is the row's token `begin`.
        """
        path = {}
        end = begin + len(tokens)
        while at < end:
            text = self.texts.get(self._branches.get((number, at, tokens[at - begin]), 0))
            if text is None:
                break
            number, at = text.number, _common_end(text, at, tokens, begin)
            path[number] = at
        return path


class TextStore:
    """The texts of all clients: of each running row, and of ended rows those that were used last.

    The ended ones have at most `most` tokens, and `most_of_client` of each client. The client who has asked nothing for
    the longest time loses its oldest text first. A token takes 4 bytes.
    """

    def __init__(self, most: int = MOST_TOKENS, most_of_client: int = CLIENT_TOKENS) -> None:
        self.shelves: dict[str | None, ClientTexts] = {}
        self.size = 0
        """What the ended texts of all clients count for."""
        self._most = most
        self._most_of_client = most_of_client
        self._numbers = count(1)

    def add(self, shelf: ClientTexts, tokens: array[int]) -> tuple[RowText, dict[int, int]]:
        """Store the text of a new row with its client's texts: see `ClientTexts.add`."""
        return shelf.add(next(self._numbers), tokens)

    def client_texts(self, salt: str | None) -> ClientTexts:
        """Return the texts of a client, and mark it as the most recently active client."""
        shelf = self.shelves[salt] = self.shelves.pop(salt) if salt in self.shelves else ClientTexts()
        return shelf

    def finish(self, salt: str | None, text: RowText) -> None:
        """Keep the text of a client's row that has ended, and make room for it."""
        shelf = self.client_texts(salt)
        self.size -= shelf.size
        shelf.finish(text)
        while shelf.size > self._most_of_client and (oldest := shelf.oldest):
            shelf.drop(oldest)
        self.size += shelf.size
        if self.size > self._most or not shelf.texts:
            self._make_room()

    def _make_room(self) -> None:
        """Remove ended texts until there are no more than allowed, and clients without any."""
        for salt, shelf in list(self.shelves.items()):
            while self.size > self._most and (oldest := shelf.oldest):
                shelf.drop(oldest)
                self.size -= oldest.size
            if not shelf.texts:
                del self.shelves[salt]


def _common_end(text: RowText, at: int, tokens: array[int], begin: int) -> int:
    """Return up to which of its tokens a row equals a text. Both are equal up to the row's token `at`."""
    count = min(begin + len(tokens), text.begin + len(text.tokens)) - at
    if count <= 0:
        return at
    mine = np.frombuffer(tokens, np.int32, count, 4 * (at - begin))
    theirs = np.frombuffer(text.tokens, np.int32, count, 4 * (at - text.begin))
    differ = mine != theirs
    first = int(differ.argmax())
    return at + (first if differ[first] else count)


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
        self._next = np.zeros(_SETS, np.uint8)
        """Which place of each set is the oldest, so that the next one takes it."""
        self._place_at, self._next_at = self._places.data, self._next.data

    @property
    def nbytes(self) -> int:
        """The bytes that the table takes."""
        return self._places.nbytes + self._next.nbytes

    def add_place(self, key: HashKey, number: int, tokens: array[int], offset: int) -> None:
        """Add the place `offset` of the text `number` under the two tokens before it."""
        if offset <= _LAST_OFFSET:
            which = _bucket_index(key, tokens[offset - 2], tokens[offset - 1])
            way = self._next_at[which]
            self._place_at[which * WAYS + way] = number << _OFFSET_BITS | offset
            self._next_at[which] = (way + 1) % WAYS

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
        newest = ranks >= np.repeat(counts, counts) - WAYS  # each way is written once
        ways = (self._next[sets] + ranks) % WAYS
        places = sets.astype(np.int64) * WAYS + ways
        self._places[places[newest]] = (number << _OFFSET_BITS) + begin + order[newest]
        changed = sets[starts]
        self._next[changed] = (self._next[changed] + counts) % WAYS

    def find_places(self, key: HashKey, first: int, second: int) -> list[int]:
        """Return the places that may follow these two tokens, the newest first. A 0 is no place."""
        which = _bucket_index(key, first, second)
        begin, way = which * WAYS, self._next_at[which]
        places = self._place_at[begin : begin + WAYS].tolist()
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
