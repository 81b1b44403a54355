"""What the replies of chat completions and completions share."""

from __future__ import annotations

from dataclasses import replace

from cortexmlx.protocols.openai import chat_completions, completions
from cortexmlx.protocols.reply import ReplyInfo
from cortexmlx.protocols.request import Request
from cortexmlx.request import Completion, FinishReason, SamplingParams, Timings, Usage

TOKENS = (b"a", b" b", b"\xe2\x80", b"\x94", "é".encode(), b" ", b"stop")
INFO = ReplyInfo("7", "m", 1_767_225_600, TOKENS.__getitem__)


def test_the_usage_says_what_was_cached_unless_the_reply_is_to_be_repeatable() -> None:
    answer = Completion("a", (0,), FinishReason.STOP, Usage(5, 1, 3), Timings(0, 0, 0, 0, 0))
    request = Request(("hi",), SamplingParams())
    for module in (chat_completions, completions):
        assert module.write(request, [[answer]], INFO)["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        repeatable = module.write(request, [[answer]], replace(INFO, repeatable=True))
        assert "prompt_tokens_details" not in repeatable["usage"]
