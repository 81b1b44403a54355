"""Every sampling option takes a usual value: in the chat, on the command line, in the library, of a body, to hosts."""

from __future__ import annotations

import json
from dataclasses import make_dataclass
from typing import Any, get_args

import pytest
from rich.console import Console

from cortexmlx.cli import options
from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chat.slash import settings
from cortexmlx.cli.start import run
from cortexmlx.core.arguments import with_keywords
from cortexmlx.distributed.messages import NOT_SENT, from_sent_row, sent_param_types, to_sent_row
from cortexmlx.protocols import responses, simple
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.openai import chat_completions, completions
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.chat_commands import run_command
from support.cli.cli_fakes import Fakes

USUAL: dict[str, Any] = {
    "max_tokens": 40,
    "max_thinking_tokens": 5,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "seed": 7,
    "repetition_penalty": 1.1,
    "repetition_context": 64,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "stop": "END",
}
FORMS = {"schema", "open_schema", "regex", "choice"}
"""Options that make `structured`, which have tests of their own."""
BODIES = {
    chat_completions: {"messages": [{"role": "user", "content": "hi"}]},
    completions: {"prompt": "hi"},
    responses: {"input": "hi"},
    messages: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    simple: {"prompt": "hi"},
}
OTHER_NAMES = {responses: {"max_tokens": "max_output_tokens"}, messages: {"stop": "stop_sequences"}}


def test_each_option_takes_a_usual_value_everywhere(fakes: Fakes, session: ChatSession, screen: Console) -> None:
    assert (settings.SAMPLING.keys() | options.SAMPLING.keys()) - FORMS == USUAL.keys()
    for name, value in USUAL.items():
        meant = SamplingParams(**{name: value})
        run_command(f"/set {name} {json.dumps(value)}", session, screen)
        assert getattr(session.params, name) == getattr(meant, name), name
        if name in options.SAMPLING:
            flag = get_args(options.SAMPLING[name])[1].default  # where typer finds its first name
            assert run(["generate", "fake", "-p", "hi", flag, str(value)]) == 0
            assert getattr(fakes.engine.seen[-1][1], name) == getattr(meant, name), flag
        assert with_keywords(None, **{name: value}) == meant
        for protocol, body in BODIES.items():
            own = OTHER_NAMES.get(protocol, {}).get(name, name)
            if own in protocol.FIELDS.served:
                said = {**body, own: [value] if own == "stop_sequences" else value}
                read = protocol.read(said, RequestDefaults(SamplingParams()))
                assert getattr(read.params, name) == getattr(meant, name), (protocol.URL, own)
        sent = from_sent_row(to_sent_row(SamplingRow(meant, 7, (), ())))
        assert sent.params == (SamplingParams() if name in NOT_SENT else meant), name


def test_a_new_parameter_is_sent_to_hosts_unless_it_is_said_not_to_be() -> None:
    """What no bytes are known for, or what is no parameter any more, is an error at once."""
    more = make_dataclass("More", [("invented", "float", 1.0)], bases=(SamplingParams,), frozen=True)
    assert sent_param_types(more)["invented"] is float
    strange = make_dataclass("Strange", [("guide", "object", None)], bases=(SamplingParams,), frozen=True)
    with pytest.raises(TypeError, match="guide"):
        sent_param_types(strange)
    with pytest.raises(TypeError, match="max_tokens"):
        sent_param_types(make_dataclass("Fewer", [("top_k", "int", 0)], frozen=True))
