"""Grammar and Matcher: a compiled grammar, and the state of one answer that follows it."""

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

MAX_ITEMS = 10_000
"""How many parser items one step of a grammar may make. A forced text may have no end: this bounds the time that it
takes on the engine's thread. No document of MaskBench needs 5,000. llguidance's own limit is 50,000.
"""


NO_TEXT = "no text fits it"

_FORM_ERRORS = (NO_TEXT, "parser error: ", "lexer error: ", "Parser Error: Current row has")
"""How errors begin for which the form is to blame. A refused token, or what fails in llguidance itself, is not."""


class TokenizerFailure(threading.local):
    """Keeps the exception that the tokenizer raised on this thread when llguidance called it.

    llguidance does not pass it on. The matcher fails, and then allows the end of the answer. What is thrown at a thread
    may land there, too.
    """

    error: BaseException | None = None

    def reraise(self, interrupts_only: bool = True) -> None:
        """Raise the kept exception, if any. With `interrupts_only`, drop an Exception: the matcher reports it."""
        error, self.error = self.error, None
        if error is not None and not (interrupts_only and isinstance(error, Exception)):
            raise error


class Grammar:
    """A compiled grammar, which never changes. `error` says why it cannot be used; empty if it can."""

    def __init__(self, tokenizer: LLTokenizer, source: str, tokenizer_failure: TokenizerFailure) -> None:
        """Compile `source`, and compute the mask of the first token, which is the slowest one. The
        exception that the tokenizer keeps in `tokenizer_failure`, if any, is raised.
        """
        from llguidance import LLMatcher, LLParserLimits

        self.tokenizer_failure = tokenizer_failure
        self.width = -(-tokenizer.vocab_size // 32)
        limits = LLParserLimits(step_max_items=MAX_ITEMS, verbose_errors=False)
        self._matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        self.error: str = _short_error(self._matcher.get_error())
        self.notes: tuple[str, ...] = ()
        """What of a schema is not enforced."""
        tokenizer_failure.reraise(interrupts_only=False)
        if self.error:
            return
        self.notes = tuple(self._matcher.get_grammar_warnings())
        self.first_mask = np.zeros((1, self.width), np.uint32)
        _fill_rows([(self._matcher, 0)], self.first_mask)
        self.first_forced_tokens: Sequence[int] = tuple(self._matcher.compute_ff_tokens())
        self.error = _short_error(self._matcher.get_error())
        if (
            not self.error and self.first_forced_tokens
        ):  # a forced text that goes beyond a limit says so with its first token
            probe_matcher = self._matcher.deep_copy()
            probe_matcher.consume_token(self.first_forced_tokens[0])
            self.error = _short_error(probe_matcher.get_error())
        tokenizer_failure.reraise(interrupts_only=False)

    def make_matcher(self, forced_tokens: bool = False) -> Matcher:
        """Make a matcher for one answer. With `forced_tokens`, it chooses tokens itself where only one text is left."""
        return Matcher(self, self._matcher.deep_copy(), forced_tokens)


class Matcher:
    """The state of one answer that follows a grammar: which tokens may come next. Used by one thread at a time."""

    def __init__(self, grammar: Grammar, matcher: Any, forced_tokens: bool = False) -> None:
        self.grammar = grammar
        self.ll_matcher = matcher
        self.is_fresh = True
        """Whether no token was taken, so that the grammar's first mask holds."""
        self._uses_forced_tokens = forced_tokens
        self._forced_run: Sequence[int] | None = grammar.first_forced_tokens if forced_tokens else ()

    @property
    def error(self) -> str:
        """Why the answer cannot go on; empty if it can."""
        return _short_error(self.ll_matcher.get_error())

    def accept(self, token: int) -> bool:
        """Accept the next token. Return whether the answer must end: its form is complete, or there is an `error`."""
        self.is_fresh = False
        if self._uses_forced_tokens:
            run = self._forced_run
            self._forced_run = run[1:] if run and run[0] == token and len(run) > 1 else None
        return not self.ll_matcher.consume_token(token) or bool(self.ll_matcher.is_stopped())

    @property
    def forced_tokens(self) -> Sequence[int]:
        """The next tokens if the grammar allows only one text, such as the keys of an object; often none. They are the
        tokens that the tokenizer makes of that text.
        """
        if self._forced_run is None:
            self._forced_run = self._compute_forced(self.ll_matcher)
        return self._forced_run

    def write_masks(self, drafts: Sequence[int], masks: Masks) -> None:
        """Write the mask of the next token, and one of the token after each draft, as if all drafts up to it were
        accepted. Masks after a draft that the grammar refuses are left unchanged. If the grammar fails for another
        reason, the masks from there on allow no token: a job that gets there asks again without drafts, and meets the
        error itself.
        """
        draft_matcher = self.ll_matcher.deep_copy()
        for index, row in enumerate(masks):
            if run := self.forced_tokens if index == 0 else self._compute_forced(draft_matcher):
                _allow_only(row, run[0])
            else:
                (draft_matcher if index else self.ll_matcher).unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if draft_matcher.is_error():
                masks[index:] = 0
                return
            if index == len(drafts) or not _is_allowed(row, drafts[index]):
                return
            if draft_matcher.consume_token(drafts[index]) and draft_matcher.is_stopped():
                return

    def _compute_forced(self, ll_matcher: Any) -> Sequence[int]:
        """Return the tokens that an llguidance matcher forces next; no tokens if forcing is off."""
        run = tuple(ll_matcher.compute_ff_tokens()) if self._uses_forced_tokens else ()
        self.grammar.tokenizer_failure.reraise()
        return run


def _short_error(error: str) -> str:
    """Shorten an error of llguidance to a line of at most 200 characters. A panic is logged."""
    if error.startswith("NoExtension"):
        return NO_TEXT
    if error.startswith("panic"):
        log.error("llguidance failed: %s", error)
        return "llguidance failed, as the log tells"
    return " ".join(error.partition("\n<")[0].split())[:200]


def is_form_error(error: str) -> bool:
    """Return whether a matcher's `error` comes from the form itself, so that every answer of this form has it."""
    return error.startswith(_FORM_ERRORS)


def fill_masks(matchers: Sequence[tuple[Matcher, Sequence[int]]]) -> Masks:
    """Compute the masks of the next tokens of several answers, on several threads.

    Each matcher has its drafted tokens, often none: it gets one row, and one more for each draft, as if the drafts
    before had been taken. Rows after a draft that the grammar refuses allow every token: nobody uses them. A forced
    token is the only one of its row. Check the `error` of each matcher afterwards.
    """
    width = matchers[0][0].grammar.width
    masks = np.full((sum(1 + len(drafts) for _, drafts in matchers), width), _ALL)
    pending_matchers: list[tuple[Any, int]] = []
    row = 0
    for matcher, drafts in matchers:
        if drafts:
            matcher.write_masks(drafts, masks[row : row + 1 + len(drafts)])
        elif forced_tokens := matcher.forced_tokens:
            _allow_only(masks[row], forced_tokens[0])
        elif matcher.is_fresh:
            masks[row] = matcher.grammar.first_mask[0]
        else:
            pending_matchers.append((matcher.ll_matcher, row))
        row += 1 + len(drafts)
    if pending_matchers:
        _fill_rows(pending_matchers, masks)
    matchers[0][0].grammar.tokenizer_failure.reraise()
    return masks


def single_token_mask(token: int, vocab_size: int) -> Mask:
    """Return a mask that allows one token."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    _allow_only(mask, token)
    return mask


def _is_allowed(mask: Mask, token: int) -> bool:
    return token // 32 < len(mask) and bool(mask[token // 32] >> np.uint32(token % 32) & 1)


def _allow_only(mask: Mask, token: int) -> None:
    """Change a mask to allow one token only."""
    mask[:] = 0
    mask[token // 32] = np.uint32(1 << token % 32)


def _fill_rows(matchers: list[tuple[Any, int]], masks: Masks) -> None:
    """Compute the mask of each matcher, into its row of `masks`."""
    _executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.shape[1] * 4, len(masks))


@cache
def _executor() -> Any:
    """Return llguidance's threads that compute masks, one set for the process."""
    from llguidance import LLExecutor

    return LLExecutor()
