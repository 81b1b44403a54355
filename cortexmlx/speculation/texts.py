"""Texts: what rows and ended answers have said, kept apart by client. Without mlx."""

from __future__ import annotations

from array import array
from itertools import count

import numpy as np

from cortexmlx.speculation.places import new_hash_key

MOST_TOKENS = 1 << 19
"""Tokens of ended texts that are kept, over all clients."""

CLIENT_TOKENS = 1 << 18
"""Tokens of ended texts that are kept of one client."""

LONGEST = 32
"""Tokens that are compared before a place. A text that goes on from another one repeats so many of it."""

_COST = 128
"""A text counts as so many tokens more, for its objects."""


class Text:
    """The tokens of a row from `begin` on: its beginning is in another text."""

    __slots__ = ("begin", "branch", "indexed", "key", "live", "number", "parent", "tokens")

    def __init__(self, number: int, tokens: array[int], parent: int, branch: int) -> None:
        """Make the text of a row with these `tokens`. It is the same as the text `parent` before its token `branch`."""
        self.number = number
        self.parent = parent
        self.branch = branch
        self.begin = max(0, branch - LONGEST)
        self.tokens = tokens[self.begin :]
        self.key: tuple[int, int, int] | None = None
        """Under what its client's other texts find it."""
        self.indexed = branch - self.begin
        """The places before this offset can be found. Those before `branch` are found in other texts."""
        self.live = True
        """Whether its row goes on."""

    @property
    def size(self) -> int:
        """Tokens that it counts for."""
        return len(self.tokens) + _COST


class Shelf:
    """The texts of one client, each beginning stored once: a tree, in which a text branches off another one.

    `texts` has the least recently used first. A text is used later than those that branch off it, so those go first.
    """

    def __init__(self) -> None:
        self.texts: dict[int, Text] = {}
        self.hash_key = new_hash_key()
        """How its places are found."""
        self.size = 0
        """What the ended texts count for."""
        self.unindexed: dict[int, Text] = {}
        """The ended texts of which some places cannot be found yet."""
        self._branches: dict[tuple[int, int, int], int] = {}

    def begin(self, number: int, tokens: array[int]) -> tuple[Text, dict[int, int]]:
        """Store the text of a row that begins with these `tokens`, of which only those are stored that no text begins
        with. Return it, and the texts that it begins with: their numbers, and the tokens of the row that end in each.
        """
        path = self._follow(0, 0, tokens, 0)
        parent, branch = next(reversed(path.items()), (0, 0))
        text = Text(number, tokens, parent, branch)
        if branch < len(tokens):
            self._enter(text)
        self.texts[number] = text
        self.use(parent)
        return text, path

    def end(self, text: Text) -> None:
        """Keep the text of a row that has ended, unless others say all of it."""
        text.live = False
        self.size += text.size
        if text.indexed < len(text.tokens):
            self.unindexed[text.number] = text
        if text.key is None and text.parent in self.texts:
            parent = self.texts[text.parent]
            at = _same_until(parent, text.branch, text.tokens, text.begin)
            path = {parent.number: at} | self._follow(parent.number, at, text.tokens, text.begin)
            text.parent, text.branch = next(reversed(path.items()))
            if text.branch == text.begin + len(text.tokens):
                self.drop(text)
            else:
                self._enter(text)
        self.use(text.number if text.number in self.texts else text.parent)

    def drop(self, text: Text) -> None:
        """Forget an ended text."""
        del self.texts[text.number]
        self.unindexed.pop(text.number, None)
        self.size -= text.size
        if text.key is not None and self._branches.get(text.key) == text.number:
            del self._branches[text.key]

    def use(self, number: int) -> None:
        """Note that a text is used, and then those that it begins with."""
        while number in self.texts:
            text = self.texts[number] = self.texts.pop(number)
            number = text.parent

    @property
    def oldest(self) -> Text | None:
        """The ended text that was not used for the longest time."""
        return next((text for text in self.texts.values() if not text.live), None)

    def _enter(self, text: Text) -> None:
        text.key = (text.parent, text.branch, text.tokens[text.branch - text.begin])
        self._branches.setdefault(text.key, text.number)

    def _follow(self, number: int, at: int, tokens: array[int], begin: int) -> dict[int, int]:
        """Return the texts that a row's tokens follow from the text `number`, which they leave at their token `at`, and
        where they leave each. The first of `tokens` is the row's token `begin`.
        """
        path = {}
        end = begin + len(tokens)
        while at < end:
            text = self.texts.get(self._branches.get((number, at, tokens[at - begin]), 0))
            if text is None:
                break
            number, at = text.number, _same_until(text, at, tokens, begin)
            path[number] = at
        return path


class Texts:
    """The texts of all clients: of each running row, and of ended ones what was used last.

    The ended ones have at most `most` tokens, and `most_of_client` of each client. The client who has asked nothing for
    the longest time loses its oldest text first. A token takes 4 bytes.
    """

    def __init__(self, most: int = MOST_TOKENS, most_of_client: int = CLIENT_TOKENS) -> None:
        self.shelves: dict[str | None, Shelf] = {}
        self.size = 0
        """What the ended texts of all clients count for."""
        self._most = most
        self._most_of_client = most_of_client
        self._numbers = count(1)

    def begin(self, shelf: Shelf, tokens: array[int]) -> tuple[Text, dict[int, int]]:
        """Store the text of a row: see `Shelf.begin`."""
        return shelf.begin(next(self._numbers), tokens)

    def shelf(self, salt: str | None) -> Shelf:
        """Return the texts of a client, who is the last to be forgotten now."""
        shelf = self.shelves[salt] = self.shelves.pop(salt) if salt in self.shelves else Shelf()
        return shelf

    def end(self, salt: str | None, text: Text) -> None:
        """Keep the text of a client's row that has ended, and make room for it."""
        shelf = self.shelf(salt)
        self.size -= shelf.size
        shelf.end(text)
        while shelf.size > self._most_of_client and (oldest := shelf.oldest):
            shelf.drop(oldest)
        self.size += shelf.size
        if self.size > self._most or not shelf.texts:
            self._make_room()

    def _make_room(self) -> None:
        """Forget texts until there are no more than allowed, and clients without any."""
        for salt, shelf in list(self.shelves.items()):
            while self.size > self._most and (oldest := shelf.oldest):
                shelf.drop(oldest)
                self.size -= oldest.size
            if not shelf.texts:
                del self.shelves[salt]


def _same_until(text: Text, at: int, tokens: array[int], begin: int) -> int:
    """Return up to which token a row says the same as a text, as both do up to the row's token `at`."""
    count = min(begin + len(tokens), text.begin + len(text.tokens)) - at
    if count <= 0:
        return at
    mine = np.frombuffer(tokens, np.int32, count, 4 * (at - begin))
    theirs = np.frombuffer(text.tokens, np.int32, count, 4 * (at - text.begin))
    differ = mine != theirs
    first = int(differ.argmax())
    return at + (first if differ[first] else count)
