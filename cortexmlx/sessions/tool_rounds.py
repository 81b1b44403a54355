"""ToolRounds: runs the tool calls of a question's answers, round by round, until the model answers."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from cortexmlx.core.config import is_count
from cortexmlx.core.deadlines import checked_timeout
from cortexmlx.errors import InvalidRequest, RequestTimeout
from cortexmlx.structured.functions import call_function, call_function_async
from cortexmlx.structured.tools import ToolCall, result_message
from cortexmlx.types.request import Completion, Message
from cortexmlx.types.sampling_params import SamplingParams, python_number

MAX_ROUNDS = 10
"""How many rounds of calls an answer may take. After them, the model must answer without tools."""

NOT_ALLOWED = "Error: the user did not allow this call"
"""What the model reads in place of a result, if `approve` returned False."""


@dataclass(frozen=True)
class ToolEvent:
    """A tool call that is about to run (`result` is None), or that has run, with its result."""

    call: ToolCall
    result: str | None = None
    """What the model reads: the result as a text, or a text that begins with "Error: "."""
    seconds: float = 0.0
    """How long the function took."""


OnToolEvent = Callable[[ToolEvent], object]
Approve = Callable[[ToolCall], bool]
AsyncApprove = Callable[[ToolCall], bool | Awaitable[bool]]


class ToolRounds:
    """Runs the tool calls of one question's answers, and says what the next round may call.

    A `tool_choice` that requires a call is for the first round. Raises InvalidRequest for tools without a function, and
    for several answers.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        max_rounds: int = MAX_ROUNDS,
        timeout: float | None = None,
        on_event: OnToolEvent | None = None,
    ) -> None:
        if missing_names := [tool.name for tool in params.offered if tool.function is None]:
            raise InvalidRequest(
                f"the tool {missing_names[0]!r} has no function to run: pass functions, or put the tools into the "
                "sampling parameters and run the calls of the answer yourself",
                field="tools",
            )
        timeout, max_rounds = checked_timeout(timeout), python_number(max_rounds)
        if not is_count(max_rounds, 1):
            raise InvalidRequest(f"max_rounds is {max_rounds!r}, but must be a number of at least 1")
        if params.n != 1:
            raise InvalidRequest(f"n is {params.n}, but functions are run for one answer: set n to 1", field="n")
        self._functions = {tool.name: tool.function for tool in params.offered}
        self.params = params
        """The sampling parameters of the next round."""
        self._rounds_left = max_rounds
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._on_event = on_event or (lambda event: None)

    @property
    def time_left(self) -> float | None:
        """Seconds until the timeout of the whole question; None without a timeout."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.001)

    def run_calls(self, answer: Completion, approve: Approve | None) -> list[Message]:
        """Run the tool calls of an answer in their order, and return the messages with their results."""
        messages = []
        for call in answer.tool_calls:
            is_allowed = approve is None or approve(call)
            self._on_event(ToolEvent(call))
            start_time = time.monotonic()
            result = call_function(self._find_function(call), call.arguments) if is_allowed else NOT_ALLOWED
            messages.append(self._report_result(call, result, start_time))
        self._next_round()
        return messages

    async def arun_calls(self, answer: Completion, approve: AsyncApprove | None) -> list[Message]:
        """`run_calls` for asyncio: coroutine functions run in this event loop, other functions on a thread. Raises
        RequestTimeout if a function still runs at the end of the time, and cancels the function if it is a coroutine.
        """
        try:
            async with asyncio.timeout(self.time_left) as limit:
                return await self._arun_calls(answer, approve)
        except TimeoutError:
            if not limit.expired():
                raise
            raise RequestTimeout("a function still ran at the end of the question's time: give it more time") from None

    async def _arun_calls(self, answer: Completion, approve: AsyncApprove | None) -> list[Message]:
        messages = []
        for call in answer.tool_calls:
            is_allowed = True if approve is None else approve(call)
            if inspect.isawaitable(is_allowed):
                is_allowed = await is_allowed
            self._on_event(ToolEvent(call))
            start_time = time.monotonic()
            result = await call_function_async(self._find_function(call), call.arguments) if is_allowed else NOT_ALLOWED
            messages.append(self._report_result(call, result, start_time))
        self._next_round()
        return messages

    def _find_function(self, call: ToolCall) -> Callable[..., object]:
        function = self._functions[call.name]
        assert function is not None
        return function

    def _report_result(self, call: ToolCall, result: str, start_time: float) -> Message:
        """Report a call's result to `on_event`, and return the message with the result."""
        self._on_event(ToolEvent(call, result, time.monotonic() - start_time))
        return result_message(call, result)

    def _next_round(self) -> None:
        """Count a round. After the last one, the model may call nothing."""
        self._rounds_left -= 1
        choice = "auto" if self._rounds_left and self.params.tool_choice != "none" else "none"
        self.params = replace(self.params, tool_choice=choice)
