"""Grammar and Matcher: a compiled grammar, and one answer on its way through it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Masks = npt.NDArray[np.uint32]
"""`[rows, ceil(vocabulary / 32)]`: bit `b` of word `w` is set if token `32 w + b` may be chosen."""

_ALL = np.uint32(0xFFFFFFFF)


class Grammar:
    """A compiled grammar. `error` says why it cannot be used; empty: it can. It does not change afterwards."""

    def __init__(self, tokenizer: LLTokenizer, source: str, vocab_size: int) -> None:
        """Compile `source`, and compute the mask of the first token, which is the slowest one."""
        from llguidance import LLMatcher

        self.width = -(-vocab_size // 32)
        self._matcher = LLMatcher(tokenizer, source, log_level=0)
        self.error: str = self._matcher.get_error()
        self.notes: tuple[str, ...] = ()
        """What of a schema is not enforced."""
        if self.error:
            return
        self.notes = tuple(self._matcher.get_grammar_warnings())
        self.first_mask = np.zeros((1, self.width), np.uint32)
        _fill([(self._matcher, 0)], self.first_mask)
        self.error = self._matcher.get_error()

    def matcher(self) -> Matcher:
        """Return a matcher for one answer, at its beginning."""
        return Matcher(self, self._matcher.deep_copy())


class Matcher:
    """One answer on its way through a grammar. Used by one thread at a time."""

    def __init__(self, grammar: Grammar, matcher: Any) -> None:
        self.grammar = grammar
        self.inner = matcher
        self.fresh = True
        """Whether no token was taken, so that the grammar's first mask holds."""

    @property
    def error(self) -> str:
        """Why the answer cannot go on; empty: it can."""
        message: str = self.inner.get_error()
        return message.partition("\n")[0]

    def take(self, token: int) -> bool:
        """Follow the answer's next token. Return whether no further token can come: the form is complete, or there is
        an `error`.
        """
        self.fresh = False
        return not self.inner.consume_token(token) or bool(self.inner.is_stopped())


def fill_masks(matchers: Sequence[tuple[Matcher, Sequence[int]]]) -> Masks:
    """Return the masks of the next tokens of several answers, computed on several threads.

    Each matcher has its drafted tokens, often none: it gets one row, and one more for each draft, as if the drafts
    before had been taken. Rows after a draft that the grammar refuses allow every token: nobody uses them. Check the
    `error` of each matcher afterwards.
    """
    width = matchers[0][0].grammar.width
    masks = np.full((sum(1 + len(drafts) for _, drafts in matchers), width), _ALL)
    plain: list[tuple[Any, int]] = []
    drafted: list[tuple[Any, int, list[int]]] = []
    row = 0
    for matcher, drafts in matchers:
        if drafts:
            drafted.append((matcher.inner, row, list(drafts)))
        elif matcher.fresh:
            masks[row] = matcher.grammar.first_mask[0]
        else:
            plain.append((matcher.inner, row))
        row += 1 + len(drafts)
    if plain:
        _fill(plain, masks)
    if drafted:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, masks.ctypes.data, width * 4, len(masks))
    return masks


def _fill(matchers: list[tuple[Any, int]], masks: Masks) -> None:
    _executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.shape[1] * 4, len(masks))


@cache
def _executor() -> Any:
    """Return the threads that compute masks, of which a process has one set."""
    from llguidance import LLExecutor

    return LLExecutor()
