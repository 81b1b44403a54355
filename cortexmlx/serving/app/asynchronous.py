"""What an engine offers to asyncio. The event loop waits for nothing: no tokens, no queue, no thread's end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Unpack

from cortexmlx.progress import OnProgress
from cortexmlx.request import Completion, SamplingParams, TokenEvent
from cortexmlx.serving.app.arguments import checked_function
from cortexmlx.serving.app.callbacks import tell_progress
from cortexmlx.serving.app.keywords import SamplingKeywords, with_keywords
from cortexmlx.serving.app.opening import on_a_thread
from cortexmlx.serving.handle import RequestHandle
from cortexmlx.serving.prompt import Prompt, is_quick
from cortexmlx.serving.streams import AsyncTokenStream, Listener
from cortexmlx.serving.worker import Submission, Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable

_BEHIND_SECONDS = 0.002
"""How often it is looked whether the engine's thread takes submissions again."""


class AsyncCalls(ABC):
    """The part of `Engine` for asyncio. From any event loop, of any thread."""

    _worker: Worker

    @abstractmethod
    def _checked(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        listener: Listener | None = None,
        client: str | None = None,
        background: bool = False,
        cache: bool = True,
        timeout: float | None = None,
    ) -> Submission:
        """A request that can run; raises what is wrong with it."""

    @abstractmethod
    def _submit(self, checked: Submission) -> RequestHandle:
        """Queue it."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine."""

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        timeout: float | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsyncTokenStream:
        """`stream` for asyncio. The request is submitted with the first `anext`, which raises what `submit` raises."""
        asked = with_keywords(params, **sampling)
        return AsyncTokenStream(partial(self._asubmit, prompt, asked, cache, timeout))

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Completion:
        """`generate` for asyncio. A cancelled task cancels the request; `on_progress` is told in it."""
        params = with_keywords(params, **sampling)
        checked_function("on_progress", on_progress)
        if on_progress is None:
            return await ended(partial(self._asubmit, prompt, params, cache, timeout))
        done: Completion | None = None
        async with self.astream(prompt, params, cache=cache, timeout=timeout) as events:
            async for event in events:
                done = event.completion
                tell_progress(on_progress, event)
        assert done is not None  # the last event has it
        return done

    async def aclose(self) -> None:
        """`close` for asyncio. A cancelled task does not wait for the end, which comes all the same."""
        await on_a_thread(self.close)

    async def _asubmit(
        self, prompt: Prompt, params: SamplingParams | None, cache: bool, timeout: float | None, listener: Listener
    ) -> RequestHandle:
        check = partial(self._checked, prompt, params, listener, cache=cache, timeout=timeout)
        checked = check() if is_quick(prompt) else await on_a_thread(check, interruptible=True)
        while self._worker.behind:
            await asyncio.sleep(_BEHIND_SECONDS)
        return self._submit(checked)


async def ended(submit: Callable[[Listener], Awaitable[RequestHandle]]) -> Completion:
    """The completion of a request, once it has ended. Raises its error. A cancelled task cancels the request."""
    loop = asyncio.get_running_loop()
    end: asyncio.Future[TokenEvent] = loop.create_future()

    def settle(event: TokenEvent) -> None:
        if not end.done():
            end.set_result(event)

    def listen(event: TokenEvent) -> None:
        if event.completion is not None or event.error is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, event)

    handle = await submit(listen)
    try:
        handle.check_waiting()
        last = await end
    except BaseException:
        handle.cancel()
        raise
    if last.error is not None:
        raise last.error
    assert last.completion is not None
    return last.completion
