"""SuffixDrafter: guesses that a text goes on as it did after the same words before. Without mlx."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cortexmlx.scheduling.job import Job, JobId
from cortexmlx.speculation.drafter import Draft
from cortexmlx.speculation.places import ORDER, HashKey, PlaceTable, offset_of, text_of
from cortexmlx.speculation.texts import LONGEST, Shelf, Text, Texts

INDEXED_AT_ONCE = 2048
"""Tokens that are indexed in a step besides the new ones: about 0.1 ms, so a long prompt holds up no step."""

ONE_BY_ONE = 64
"""So many new tokens are indexed faster one by one than by numpy."""

NEAR = 48
"""After a long match breaks, the text often goes on so many tokens after the break: that is how an edit looks."""

LONG = 8
"""From so many tokens on, a match is long."""

OWN, EARLIER, RESUMED = 0, 8, 16
"""Where a place is: in the row's own text, in another one, or near the end of its last long match. Drafts of these
kinds are right in different shares, so each has likenesses of its own.
"""

_LIKENESS = (0, 0, 0, 1, 2, *[3] * 2, *[4] * 3, *[5] * 6, 6)
"""For each length of a match: 2, 3, 4, 5 to 6, 7 to 9, 10 to 15, 16 or more."""

_SURE = len(_LIKENESS) - 1
"""From so many tokens on, a match is of the highest likeness."""


class _Row:
    """A job's text, and the place that it follows."""

    __slots__ = ("broken", "kind", "length", "place", "read", "resumes_until", "shelf", "source", "starts", "text")

    def __init__(self, shelf: Shelf, text: Text, starts: dict[int, int], read: int) -> None:
        self.shelf = shelf
        self.text = text
        self.starts = starts
        """The texts that it begins with, and how many of its tokens end in each."""
        self.read = read
        """How many tokens of the job are in its text."""
        self.source: Text | None = None
        """The text that it follows; None: it follows none."""
        self.place = 0
        """What it is expected to say next: an offset in `source`."""
        self.length = 0
        """How many tokens before that are the same."""
        self.kind = OWN
        self.broken: tuple[Text, int] | None = None
        """Where its last long match broke."""
        self.resumes_until = 0
        """How long its own text is when that place no longer counts."""


class SuffixDrafter:
    """Drafts what followed the longest earlier match of a row's last tokens, at least two of them: in its own text, and
    in texts of the same client, also of answers that have ended. Of equally long matches the newest wins.

    `WAYS` places are compared in a search. A row whose guess was right follows the place, without a search. Jobs that
    share no prefixes share no texts either. What is kept takes at most 7 MB, and 4 bytes for each token of the running
    rows.
    """

    name = "suffix"

    def __init__(self, share_prefixes: bool = True) -> None:
        self._share_prefixes = share_prefixes
        self.forget()

    def forget(self) -> None:
        """See `Drafter`."""
        self.texts = Texts()
        self._places = PlaceTable()
        self._rows: dict[JobId, _Row] = {}
        self._asked = False

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[Draft | None]:
        """See `Drafter`."""
        self._asked = True
        rows = [self._read(job) for job in jobs]
        self._index(rows)
        return [self._draft(row, budget) for row in rows]

    def end(self, job: Job) -> None:
        """See `Drafter`. Nothing is remembered before a row was asked for: some engines cannot verify drafts."""
        if self._asked and self._shares(job):
            self.texts.end(job.salt, self._read(job).text)
        self._rows.pop(job.id, None)

    def _shares(self, job: Job) -> bool:
        """Return whether a job and others may use each other's text, as `RunningSet.shares` decides for blocks."""
        return self._share_prefixes and job.request.cache

    def _begin(self, job: Job) -> _Row:
        tokens = array("i", _newest(job, len(job.tokens) + len(job.dropped)))
        parent = None if job.fork_of is None else self._rows.get(job.fork_of.id)
        if self._shares(job):
            shelf = self.texts.shelf(job.salt)
        else:
            shelf = Shelf() if parent is None else parent.shelf
        text, starts = self.texts.begin(shelf, tokens)
        row = self._rows[job.id] = _Row(shelf, text, starts, len(tokens))
        return row

    def _read(self, job: Job) -> _Row:
        """Bring a job's text up to date, and see whether it says what was expected."""
        row = self._rows.get(job.id)
        if row is None:
            return self._begin(job)
        count = len(job.tokens) + len(job.dropped) - row.read
        if not count:
            return row
        new = _newest(job, count)
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
            if row.length >= LONG:
                row.broken, row.resumes_until = (source, row.place), len(row.text.tokens) + NEAR
                row.shelf.use(source.number)
        return row

    def _index(self, rows: Sequence[_Row]) -> None:
        """Let the places of the rows' texts be found, then those of their clients' ended texts: some in each step. New
        tokens of a row do not wait for another one's long prompt.
        """
        left = INDEXED_AT_ONCE
        for row in rows:
            left -= self._index_some(row.shelf.hash_key, row.text, max(left, ONE_BY_ONE))
            unindexed = row.shelf.unindexed
            while unindexed and left > 0:
                text = next(iter(unindexed.values()))
                left -= self._index_some(row.shelf.hash_key, text, left)
                if text.indexed == len(text.tokens):
                    del unindexed[text.number]

    def _index_some(self, key: HashKey, text: Text, most: int) -> int:
        """Index at most so many places of a text. Return how many. After its last token nothing was said yet."""
        begin = max(text.indexed, ORDER)
        end = min(len(text.tokens), begin + most)
        if end - begin > ONE_BY_ONE:
            self._places.add_range(key, text.number, text.tokens, begin, end)
        else:
            for offset in range(begin, end):
                self._places.add(key, text.number, text.tokens, offset)
        text.indexed = max(text.indexed, end)
        return max(0, end - begin)

    def _draft(self, row: _Row, budget: int) -> Draft | None:
        if row.source is None or row.place >= len(row.source.tokens):
            self._search(row)
        if row.source is None:
            return None
        tokens = row.source.tokens[row.place : row.place + budget]
        return Draft(tokens, row.kind + _LIKENESS[min(row.length, _SURE)])

    def _search(self, row: _Row) -> None:
        """Find the place to follow: after the longest match. One near the end of the last long match counts first."""
        row.source = None
        mine = row.text.tokens
        if len(mine) < ORDER:
            return
        first, second = mine[-2], mine[-1]
        longest, most = ORDER - 1, min(len(mine), LONGEST)
        if row.broken is not None and len(mine) <= row.resumes_until:
            source, begin = row.broken
            if place := _after(first, second, source.tokens, begin, begin + NEAR):
                longest = _alike(mine, source.tokens, place)
                self._follow(row, source, place, longest, RESUMED)
        for each in self._places.after(row.shelf.hash_key, first, second):
            if longest == most:
                break
            text = row.shelf.texts.get(text_of(each))
            if text is None:
                continue
            place = offset_of(each)
            if place <= longest or text.tokens[place - 1 - longest] != mine[-1 - longest]:
                continue  # it is not longer
            length = _alike(mine, text.tokens, place)
            if length > longest:
                longest = length
                own = text is row.text or text.begin + place < row.starts.get(text.number, 0)
                self._follow(row, text, place, length, OWN if own else EARLIER)

    def _follow(self, row: _Row, source: Text, place: int, length: int, kind: int) -> None:
        row.source, row.place, row.length, row.kind = source, place, length, kind


def _newest(job: Job, count: int) -> list[int]:
    """Return the last `count` tokens of a job's text, those included that `keep` has dropped."""
    tokens = job.tokens
    if job.keep is not None and count > len(tokens) - job.keep.first:
        tokens = [*tokens[: job.keep.first], *job.dropped, *tokens[job.keep.first :]]
    return tokens[len(tokens) - count :]


def _after(first: int, second: int, tokens: array[int], begin: int, end: int) -> int:
    """Return the first offset in `begin .. end` after these two tokens at which a text goes on; 0 if there is none."""
    end = min(end, len(tokens) - 1)
    while begin < end:
        try:
            begin = tokens.index(second, begin, end) + 1
        except ValueError:
            return 0
        if begin >= ORDER and tokens[begin - 2] == first:
            return begin
    return 0


def _alike(mine: array[int], theirs: array[int], place: int) -> int:
    """Return how many of the last tokens of a text are those before a `place` of another one, at most `LONGEST`."""
    most = min(len(mine), place, LONGEST)
    if most == LONGEST and mine[-LONGEST:] == theirs[place - LONGEST : place]:
        return LONGEST
    length = 0
    end = len(mine) - 1
    while length < most and mine[end - length] == theirs[place - 1 - length]:
        length += 1
    return length
