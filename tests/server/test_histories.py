"""Conversations as others leave them: what a client cannot mend is no error, and an error names what it can mend."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx.protocols import responses, simple
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.openai import chat_completions
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.protocols.seal import Seal
from cortexmlx.types.sampling_params import SamplingParams
from support.histories import History, Maker

READERS: dict[str, Any] = {"chat": chat_completions, "responses": responses, "messages": messages, "simple": simple}
DEFAULTS = RequestDefaults(SamplingParams(), seal=Seal(b"s", ""), known_vars=frozenset())


def told(history: History, protocol: str) -> str:
    """All that the model is told of a conversation."""
    [prompt] = READERS[protocol].read(history.body, DEFAULTS).prompts
    return json.dumps(prompt, ensure_ascii=False)


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("protocol", READERS)
def test_no_history_is_an_error_that_a_client_cannot_mend(http: httpx.Client, protocol: str, count: int) -> None:
    """The slow ones are 1,200 histories. `simple` is the fourth: the lines of a batch file, without a server."""
    maker, refused = Maker(protocol, str(count)), Counter[str]()
    for _ in range(count):
        history = maker.make()
        if history.fault is None:
            said = told(history, protocol)
            assert [word for word in history.said if said.count(word) != 1] == [], (history.body, said)
        else:
            refused[history.fault.rpartition("].")[2]] += 1
            with pytest.raises(ValueError) as error:
                told(history, protocol)
            assert str(error.value.field).startswith(history.fault), (history, error.value)
        if protocol != "simple":
            path = READERS[protocol].URL
            reply = http.post(path, content=json.dumps(history.body).encode("utf-8", "surrogatepass"))
            assert reply.status_code == (200 if history.fault is None else 400), (history, reply.text)
            if history.fault is not None:
                assert history.fault in reply.text and len(reply.text) < 1000
    assert count < 100 or len(refused) > 4
    print(protocol, count, dict(refused))
