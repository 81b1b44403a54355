"""AsCompleted: runs many prompts, and yields their results in the order in which they finish."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from enum import Enum

from cortexmlx.core.arguments import checked_params, is_list
from cortexmlx.core.handle import NotCopyable, RequestHandle
from cortexmlx.core.prompt import Prompt
from cortexmlx.core.threads import forked_process_error
from cortexmlx.core.worker import Submission
from cortexmlx.errors import CortexError, EngineClosed, InvalidRequest, OutOfMemory
from cortexmlx.system.waits import take_next
from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.request import Completion, TokenEvent
from cortexmlx.types.sampling_params import SamplingParams

Result = tuple[int, Completion | CortexError]
Listener = Callable[[TokenEvent], None]


class PendingPrompt(Enum):
    """What an iterator of prompts yields while it has no next prompt yet, so that results are returned meanwhile."""

    NOT_YET = "not yet"


class AsCompleted(NotCopyable, Iterator[Result]):
    """Iterates over many prompts' results as they finish: (index of the prompt, its completion or its error).

    The thread that iterates reads the prompts. At most `ahead` prompts are read and not yet returned, and none is read
    that comes `window` or more after the oldest of these. With `together`, the prompts that are read in one go reach
    the scheduler in one go; otherwise each is submitted when it is read. `check` makes a submission, or raises what is
    wrong with it; after OutOfMemory it is called again when another prompt has ended. `submit` queues submissions and
    appends their handles.

    Whatever ends the iteration early (`close`, an interrupt, an error of the prompts' iterator, a closed engine)
    cancels what has not finished, and so does dropping the iterator.
    """

    def __init__(
        self,
        prompts: Iterable[tuple[Prompt | PendingPrompt, SamplingParams | None]],
        check: Callable[[Prompt, SamplingParams | None, Listener], Submission],
        submit: Callable[[Iterable[Submission], list[RequestHandle]], None],
        *,
        ahead: int,
        window: int | None = None,
        together: bool = False,
    ) -> None:
        self._open: dict[int, RequestHandle | CortexError | None] = {}  # None: being submitted
        self._closed = False
        self._ended_indices: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._read = 0
        self._prompts = iter(prompts)
        self._held: tuple[Prompt | PendingPrompt, SamplingParams | None] | None = None
        self._check = check
        self._submit = submit
        self._max_ahead = ahead
        self._window = sys.maxsize if window is None else window
        self._together = together
        self._process = os.getpid()

    def __next__(self) -> Result:
        try:
            if os.getpid() != self._process:
                raise forked_process_error()
            while not self._closed:
                prompt_pending = self._submit_ahead()
                if not (self._open or prompt_pending):
                    break
                if not prompt_pending and self._ended_indices.empty():
                    self._check_may_wait()
                try:
                    index = self._ended_indices.get_nowait() if prompt_pending else take_next(self._ended_indices)
                except queue.Empty:
                    continue
                if index in self._open:
                    return self._pop_result(index)
            raise StopIteration
        except BaseException:
            self.close()
            raise

    def finished(self) -> Iterator[Result]:
        """Yield the results that are ready and not returned yet, without waiting. It also works after `close`.
        Requests that a closed engine has ended are left out.
        """
        while not self._ended_indices.empty():
            index = self._ended_indices.get()
            if index in self._open:
                try:
                    result = self._pop_result(index)
                except EngineClosed:
                    continue
                yield result

    def close(self) -> None:
        """Cancel what has not finished, and read no more prompts. Safe to call again."""
        self._closed = True
        for item in self._open.values():
            if isinstance(item, RequestHandle):
                item.cancel()

    def __del__(self) -> None:
        self.close()

    def _submit_ahead(self) -> bool:
        """Read and submit prompts while there is room. Return whether it stopped at a prompt not available yet."""
        group: dict[int, Submission] = {}
        prompt_pending = False
        while self._has_room() and (prompt_and_params := self._held or next(self._prompts, None)) is not None:
            (prompt, params), self._held = prompt_and_params, None
            if isinstance(prompt, PendingPrompt):
                prompt_pending = True
                break
            index = self._read
            try:
                submission = self._check(prompt, params, _make_end_listener(self._ended_indices, index))
            except EngineClosed:
                raise
            except CortexError as error:
                waits = not all(isinstance(item, CortexError) for item in self._open.values())
                if waits and isinstance(error, OutOfMemory):  # the images of those that run leave no room for its own
                    self._held = prompt_and_params
                    break
                self._read += 1
                self._open[index] = error
                self._ended_indices.put(index)
                continue
            self._read += 1
            self._open[index] = None
            group[index] = submission
            if not self._together:
                self._submit_group(group)
                group = {}
        self._submit_group(group)
        return prompt_pending

    def _check_may_wait(self) -> None:
        """Raise CortexError if this thread must not wait, because it is the engine's own."""
        for item in self._open.values():
            if isinstance(item, RequestHandle):
                return item.check_may_wait()

    def _has_room(self) -> bool:
        """Return whether one more prompt may be submitted now."""
        oldest_index = next(iter(self._open), self._read)
        return len(self._open) < self._max_ahead and self._read < oldest_index + self._window

    def _submit_group(self, group: dict[int, Submission]) -> None:
        """Submit the requests of a group together, and keep their handles."""
        handles: list[RequestHandle] = []
        try:
            if group:
                self._submit(group.values(), handles)
        finally:  # what an interrupt finds submitted can be cancelled
            self._open.update(zip(group, handles, strict=False))

    def _pop_result(self, index: int) -> Result:
        """Remove a prompt that has ended, and return its index with its completion or error."""
        item = self._open.pop(index)
        if isinstance(item, CortexError):
            return index, item
        assert item is not None
        try:
            return index, item.result(0)
        except EngineClosed:
            raise
        except CortexError as error:
            return index, error


def pair_with_params(
    prompts: Iterable[Prompt | PendingPrompt], params: SamplingParams | Iterable[SamplingParams] | None
) -> Iterator[tuple[Prompt | PendingPrompt, SamplingParams | None]]:
    """Return each prompt with its sampling parameters: the same for all prompts, or one each.

    Raises InvalidRequest if the numbers differ: at once if both can be counted, otherwise when one of them ends. Also
    raises it for a single text, each character of which would be a prompt.
    """
    if isinstance(prompts, (str, bytes, ChatPrompt)):
        raise InvalidRequest("prompts are a list of prompts, or any other iterable: put a single one into a list")
    if not is_list(prompts):
        raise InvalidRequest(f"prompts are a list of prompts, or any other iterable, not {prompts!r:.80}")
    if isinstance(params, str) or not is_list(params):
        params = checked_params(params)
    if isinstance(params, SamplingParams):
        return ((prompt, params) for prompt in prompts)
    if isinstance(prompts, Sized) and isinstance(params, Sized) and len(prompts) != len(params):
        raise InvalidRequest(f"{len(prompts)} prompts need {len(prompts)} params, not {len(params)}")
    return _pair_one_each(prompts, params)


def _pair_one_each(
    prompts: Iterable[Prompt | PendingPrompt], params: Iterable[SamplingParams]
) -> Iterator[tuple[Prompt | PendingPrompt, SamplingParams | None]]:
    """Yield each prompt with its own parameters. Raises InvalidRequest when either ends before the other."""
    params_iterator, count = iter(params), 0
    for prompt in prompts:
        if isinstance(prompt, PendingPrompt):
            yield prompt, None
            continue
        count += 1
        prompt_params = next(params_iterator, None)
        if prompt_params is None:
            raise InvalidRequest(f"there are params for {count - 1} prompts only: give as many params as prompts")
        yield prompt, prompt_params
    if next(params_iterator, None) is not None:
        raise InvalidRequest(f"{count} prompts need {count} params, not more")


def _make_end_listener(ended_indices: queue.SimpleQueue[int], index: int) -> Listener:
    """Return a listener that puts `index` into `ended_indices` when a request ends. It keeps no `AsCompleted` alive."""

    def listen(event: TokenEvent) -> None:
        if event.completion is not None or event.error is not None:
            ended_indices.put(index)

    return listen
