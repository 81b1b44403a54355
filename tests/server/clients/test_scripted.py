"""The scripted model writes its script in batches, after preemption, behind cached prefixes and under grammars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cortexmlx import Engine, SamplingParams
from cortexmlx.types.messages import ChatPrompt
from support.clients.scripted import Script, Turn, call

TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
ROWS = 3


def written(turns: Sequence[Turn]) -> str:
    """A text of many tokens that tells requests apart."""
    return f"{len(turns)} messages. " + turns[-1].text.upper() * 6


def test_every_row_writes_its_own_text_though_rows_are_preempted(scripted: Path) -> None:
    with Engine(str(scripted), kv_memory="36KB", block_size=16, max_rows=ROWS) as engine:
        params = SamplingParams(max_tokens=300, logits_processors=[Script(engine, written)])
        questions = [f"Question {number}: größer 🙂?" for number in range(ROWS)]
        prompts = [ChatPrompt([{"role": "user", "content": question}]) for question in questions]
        for _ in range(2):  # the second time, behind cached prefixes
            answers = [handle.result() for handle in [engine.submit(prompt, params) for prompt in prompts]]
            assert [one.text for one in answers] == [written([Turn("user", question)]) for question in questions]
        assert engine.stats().preemptions > 0
        assert engine.generate(prompts[0].messages, params).usage.cached_tokens > 0


def test_a_call_of_the_script_is_a_call_of_the_answer(scripted: Path) -> None:
    with Engine(str(scripted), kv_memory="1MB") as engine:

        def answer(turns: Sequence[Turn]) -> str:
            assert [turn.role for turn in turns] == ["tools", "user"] and '"note"' in turns[0].text
            return "I note it.\n" + call("note", text='say "hello"')

        params = SamplingParams(max_tokens=100, tools=[TOOL], logits_processors=[Script(engine, answer)])
        done = engine.generate([{"role": "user", "content": "Note it."}], params)
        assert done.text.strip() == "I note it."
        assert [one.arguments for one in done.tool_calls] == ['{"text": "say \\"hello\\""}']
