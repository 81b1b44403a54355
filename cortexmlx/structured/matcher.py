"""Grammar and Matcher: a compiled grammar, and one answer on its way through it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger("cortexmlx")

Mask = npt.NDArray[np.uint32]
"""`[ceil(vocabulary / 32)]`: bit `b` of word `w` is set if token `32 w + b` may be chosen."""

Masks = npt.NDArray[np.uint32]
"""`[rows, ceil(vocabulary / 32)]`: a `Mask` for each row."""

_ALL = np.uint32(0xFFFFFFFF)

MOST_ITEMS = 10_000
"""How many parser items one step of a grammar may make. A forced text may have no end: this bounds the time that it
takes on the engine's thread. No document of MaskBench needs 5,000. llguidance's own limit is 50,000.
"""


NO_TEXT = "no text fits it"

_FORMS_OWN = (NO_TEXT, "parser error: ", "lexer error: ", "Parser Error: Current row has")
"""How errors begin for which the form is to blame. A refused token, or what fails in llguidance itself, is not."""


class Raised(threading.local):
    """What the tokenizer raised on this thread when llguidance called it.

    llguidance does not pass it on. The matcher fails, and then allows the end of the answer. What is thrown at a thread
    may land there, too.
    """

    error: BaseException | None = None

    def check(self, interrupts_only: bool = True) -> None:
        """Raise it, if there is something. An Exception is not raised if `interrupts_only`: its matcher has failed."""
        error, self.error = self.error, None
        if error is not None and not (interrupts_only and isinstance(error, Exception)):
            raise error


class Grammar:
    """A compiled grammar. `error` says why it cannot be used; empty: it can. It does not change afterwards."""

    def __init__(self, tokenizer: LLTokenizer, source: str, raised: Raised) -> None:
        """Compile `source`, and compute the mask of the first token, which is the slowest one. `raised` is where the
        tokenizer keeps what it raises. Raises that.
        """
        from llguidance import LLMatcher, LLParserLimits

        self.raised = raised
        self.width = -(-tokenizer.vocab_size // 32)
        limits = LLParserLimits(step_max_items=MOST_ITEMS, verbose_errors=False)
        self._matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        self.error: str = _in_words(self._matcher.get_error())
        self.notes: tuple[str, ...] = ()
        """What of a schema is not enforced."""
        raised.check(interrupts_only=False)
        if self.error:
            return
        self.notes = tuple(self._matcher.get_grammar_warnings())
        self.first_mask = np.zeros((1, self.width), np.uint32)
        _fill([(self._matcher, 0)], self.first_mask)
        self.first_forced: Sequence[int] = tuple(self._matcher.compute_ff_tokens())
        self.error = _in_words(self._matcher.get_error())
        if not self.error and self.first_forced:  # a forced text that goes beyond a limit says so with its first token
            begun = self._matcher.deep_copy()
            begun.consume_token(self.first_forced[0])
            self.error = _in_words(begun.get_error())
        raised.check(interrupts_only=False)

    def matcher(self, forced_tokens: bool = False) -> Matcher:
        """Return a matcher for one answer, at its beginning. With `forced_tokens`, it chooses the tokens itself where
        the grammar leaves one text only: see `Matcher.forced`.
        """
        return Matcher(self, self._matcher.deep_copy(), forced_tokens)


class Matcher:
    """One answer on its way through a grammar. Used by one thread at a time."""

    def __init__(self, grammar: Grammar, matcher: Any, forced_tokens: bool = False) -> None:
        self.grammar = grammar
        self.inner = matcher
        self.fresh = True
        """Whether no token was taken, so that the grammar's first mask holds."""
        self._forces = forced_tokens
        self._forced: Sequence[int] | None = grammar.first_forced if forced_tokens else ()

    @property
    def error(self) -> str:
        """Why the answer cannot go on; empty: it can."""
        return _in_words(self.inner.get_error())

    def take(self, token: int) -> bool:
        """Follow the answer's next token. Return whether no further token can come: the form is complete, or there is
        an `error`.
        """
        self.fresh = False
        if self._forces:
            run = self._forced
            self._forced = run[1:] if run and run[0] == token and len(run) > 1 else None
        return not self.inner.consume_token(token) or bool(self.inner.is_stopped())

    @property
    def forced(self) -> Sequence[int]:
        """The next tokens, where the grammar leaves one text only: the keys of an object, and what is between them.
        They are the tokens that the tokenizer makes of that text. Often there are none.
        """
        if self._forced is None:
            self._forced = self._forced_after(self.inner)
        return self._forced

    def masks(self, drafts: Sequence[int], out: Masks) -> None:
        """Fill a mask for the next token, and one for each token after a draft, as if those before had been taken.
        Masks after a draft that the grammar refuses are left as they are. From a place on where it fails for another
        reason, no token is allowed. A job that comes there asks again without drafts, and meets the error itself.
        """
        inner = self.inner.deep_copy()
        for place, row in enumerate(out):
            if run := self.forced if place == 0 else self._forced_after(inner):
                _only(row, run[0])
            else:
                (inner if place else self.inner).unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if inner.is_error():
                out[place:] = 0
                return
            if place == len(drafts) or not _allows(row, drafts[place]):
                return
            if inner.consume_token(drafts[place]) and inner.is_stopped():
                return

    def _forced_after(self, inner: Any) -> Sequence[int]:
        run = tuple(inner.compute_ff_tokens()) if self._forces else ()
        self.grammar.raised.check()
        return run


def _in_words(error: str) -> str:
    """Return an error of llguidance for people: a line of at most 200 characters. That of a panic is logged."""
    if error.startswith("NoExtension"):
        return NO_TEXT
    if error.startswith("panic"):
        log.error("llguidance failed: %s", error)
        return "llguidance failed, as the log tells"
    return " ".join(error.partition("\n<")[0].split())[:200]


def is_forms_own(error: str) -> bool:
    """Return whether a matcher's `error` is that of the form, so that another answer of that form has it, too."""
    return error.startswith(_FORMS_OWN)


def fill_masks(matchers: Sequence[tuple[Matcher, Sequence[int]]]) -> Masks:
    """Return the masks of the next tokens of several answers, computed on several threads.

    Each matcher has its drafted tokens, often none: it gets one row, and one more for each draft, as if the drafts
    before had been taken. Rows after a draft that the grammar refuses allow every token: nobody uses them. A forced
    token is the only one of its row. Check the `error` of each matcher afterwards.
    """
    width = matchers[0][0].grammar.width
    masks = np.full((sum(1 + len(drafts) for _, drafts in matchers), width), _ALL)
    plain: list[tuple[Any, int]] = []
    row = 0
    for matcher, drafts in matchers:
        if drafts:
            matcher.masks(drafts, masks[row : row + 1 + len(drafts)])
        elif forced := matcher.forced:
            _only(masks[row], forced[0])
        elif matcher.fresh:
            masks[row] = matcher.grammar.first_mask[0]
        else:
            plain.append((matcher.inner, row))
        row += 1 + len(drafts)
    if plain:
        _fill(plain, masks)
    matchers[0][0].grammar.raised.check()
    return masks


def only(token: int, vocab_size: int) -> Mask:
    """Return a mask that allows one token."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    _only(mask, token)
    return mask


def _allows(mask: Mask, token: int) -> bool:
    return token // 32 < len(mask) and bool(mask[token // 32] >> np.uint32(token % 32) & 1)


def _only(mask: Mask, token: int) -> None:
    """Allow one token."""
    mask[:] = 0
    mask[token // 32] = np.uint32(1 << token % 32)


def _fill(matchers: list[tuple[Any, int]], masks: Masks) -> None:
    _executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.shape[1] * 4, len(masks))


@cache
def _executor() -> Any:
    """Return the threads that compute masks, of which a process has one set."""
    from llguidance import LLExecutor

    return LLExecutor()
