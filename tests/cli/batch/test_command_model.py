"""Every kind of body answered by a real model: the OpenAI package's types take the records, and tokens say the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseOutputText

from cortexmlx import Engine
from cortexmlx.cli.start import run

pytestmark = pytest.mark.model
SAID = [{"role": "user", "content": "How do you say good morning in Japanese? 日本"}]
TOKENS = [504, 2365, 282]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": SAID, "logprobs": True, "top_logprobs": 3, "max_tokens": 24, "store": True}),
    ("chat/completions", {"messages": SAID, "n": 2, "temperature": 1, "seed": 5, "max_completion_tokens": 8}),
    ("completions", {"prompt": ["The capital of France is", "日本の"], "n": 2, "logprobs": 2, "max_tokens": 12}),
    ("completions", {"prompt": TOKENS, "echo": True, "max_tokens": 4}),
    ("responses", {"input": "Hi", "instructions": "Be brief.", "include": ["message.output_text.logprobs"]}),
    ("responses", {"input": SAID, "max_output_tokens": 3, "metadata": {"a": "b"}}),
]


def test_every_body_is_answered_in_the_shape_of_the_openai_packages_types(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"custom_id": str(i), "url": f"/v1/{kind}", "body": body} for i, (kind, body) in enumerate(BODIES)]
    source.write_text("\n".join(map(json.dumps, lines)))
    assert run(["batch", "smollm2", str(source), "-o", str(out), "--no-kv-store", "--max-tokens", "40"]) == 0
    bodies = [json.loads(line)["response"]["body"] for line in out.read_text().splitlines()]
    scored, several = (ChatCompletion.model_validate(body, strict=True) for body in bodies[:2])
    texts, echoed = (Completion.model_validate(body, strict=True) for body in bodies[2:4])
    whole, cut = (Response.model_validate(body) for body in bodies[4:])

    assert scored.choices[0].logprobs is not None and scored.choices[0].logprobs.content is not None
    tokens = scored.choices[0].logprobs.content
    assert all(t.logprob == max(top.logprob for top in t.top_logprobs) for t in tokens), "greedy"
    said = b"".join(bytes(token.bytes or []) for token in tokens).removesuffix(b"<|im_end|>")
    assert said.decode("utf-8", "replace") == scored.choices[0].message.content
    assert scored.usage is not None and scored.usage.completion_tokens == len(tokens)
    assert len({choice.message.content for choice in several.choices}) == 2

    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    for choice in texts.choices:
        assert (
            choice.logprobs is not None
            and choice.logprobs.text_offset is not None
            and choice.logprobs.tokens is not None
        )
        for place, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
            assert token.startswith("bytes:") or choice.text[place:].startswith(token)
    with Engine("smollm2") as engine:
        assert echoed.choices[0].text.startswith(engine.decode(TOKENS))

    assert whole.status == "completed" and whole.output[0].type == "message"
    text = whole.output[0].content[0]
    assert isinstance(text, ResponseOutputText) and text.logprobs is not None
    assert "".join(token.token for token in text.logprobs).removesuffix("<|im_end|>") == text.text
    assert cut.status == "incomplete" and cut.metadata == {"a": "b"} and cut.usage is not None
    assert cut.usage.output_tokens == 3
