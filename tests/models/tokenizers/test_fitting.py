"""Conversations are fitted to chat templates that refuse them, or would lose a part of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.core.prompt import render as prompt_of
from cortexmlx.errors import InvalidRequest
from cortexmlx.models.tokenizers.folder import load_tokenizer
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.models.tokenizers.templates import render_template
from support.models import loop_templates
from support.models.loop_templates import ALL, fitted
from support.models.thinking import write_thinking

GENERATION = re.compile(r"(<\|im_start\|>assistant\n|<\|assistant\|>|\]~b\]ai\n|<\|start\|>assistant|<\|im_assistant\|>"
                        r"assistant<\|im_middle\|>|<start_of_turn>model\n|<\|turn>model\n|<｜Assistant｜>|"
                        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n)$")  # fmt: skip
"""How a template begins an answer."""


def plainly(template: str, messages: Any) -> str:
    return render_template(template, messages, None, {"add_generation_prompt": True})


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calling(*ids: str | None, name: str = "weather", **more: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": {"city": "Oslo"}}
    calls = [{**({} if id is None else {"id": id}), "type": "function", "function": function} for id in ids]
    return {"role": "assistant", "content": "", **more, "tool_calls": calls}


def result(id: str | None, text: str = "cold") -> dict[str, Any]:
    return {"role": "tool", **({} if id is None else {"tool_call_id": id}), "content": text}


# -- system messages, and who speaks when -----------------------------------------------------------------------------


def test_what_a_template_takes_it_gets_untouched() -> None:
    said = [
        system("a"),
        system("b"),
        user("c"),
        user("d"),
        calling("functions.weather:7"),
        result("functions.weather:7"),
    ]
    said += [system("e"), answer("f"), system("g"), user("h")]
    for name in ("qwen3", "glm", "kimi"):
        assert fitted(ALL[name], *said) == plainly(ALL[name], said)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ((system("a"), system("b"), user("hi")), "S:a\n\nb|U:hi|"),
        ((user("hi"), system("late")), "U:hi\n<system>\nlate\n</system>|"),
        ((system("a"), user("hi"), answer("yes"), system("b"), user("so")),
         "S:a|U:hi|A:yes|U:<system>\nb\n</system>\nso|"),
        ((user("hi"), answer("yes"), system("b")), "U:hi|A:yes|U:<system>\nb\n</system>|"),
        ((user("hi"), answer("yes"), system("b"), answer("no"), user("so")),
         "U:hi|A:yes|U:<system>\nb\n</system>|A:no|U:so|"),
        ((user("q"), calling("1"), system("b"), result("1")), "U:q|A:Oslo|T:cold\n<system>\nb\n</system>|"),
        ((user("q"), calling("1"), result("1"), system("b"), system("c")),
         "U:q|A:Oslo|T:cold\n<system>\nb\n</system>\n<system>\nc\n</system>|"),
        ((user("q"), calling("1"), result("1"), system("a </system> b")),
         "U:q|A:Oslo|T:cold\n<system>\na </system> b\n</system>|"),
    ],
)  # fmt: skip
def test_later_system_messages_stand_where_they_were_said(messages: Any, text: str) -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.role[0] | upper }}:{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments.values() | first }}"
        "{% endfor %}|{% endfor %}"
    )
    assert fitted(strict, *messages) == text


def test_neighbours_are_one_and_the_system_prompt_is_the_users_where_a_template_wants_that() -> None:
    said = fitted(loop_templates.GEMMA2, system("a"), user("b"), user("c"), answer("d"), answer("e"), user("f"))
    assert re.findall(r"<start_of_turn>(\w+)\n(.*?)<end_of_turn>", said, re.DOTALL) == [
        ("user", "a\n\nb\n\nc"),
        ("model", "d\n\ne"),
        ("user", "f"),
    ]
    assert "<start_of_turn>user\nonly<end_of_turn>" in fitted(loop_templates.GEMMA2, system("only"))
    spoken = user("q"), answer("a"), calling("123456789"), result("123456789"), answer("b"), user("c")
    assert fitted(loop_templates.MISTRAL, *spoken).count("[INST]") == 2, "the turns are refused as they are"
    late = fitted(loop_templates.MISTRAL, user("q"), calling("123456789"), result("123456789"), user("and?"))
    assert late.count("[INST]") == 1 and 'cold\n<user>\nand?\n</user>, "call_id"' in late


def test_a_refusal_that_comes_late_changes_nothing_of_earlier_turns() -> None:
    """The template takes system messages and neighbours, until it does not."""
    template = (
        "{% for m in messages %}{% if loop.index > 5 and m.role != 'assistant' and m.role == messages[loop.index0 - 1]"
        ".role %}{{ raise_exception('no') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    early = [user("a"), user("b"), answer("c"), system("d"), user("e")]
    late = [answer("f"), user("g"), user("h")]
    said = fitted(template, *early, *late)
    assert said == plainly(template, early) + "[assistant]f[user]g\n\nh"
    assert fitted(template, *early, *late, answer("i"), user("j")) == said + "[assistant]i[user]j"


def test_a_conversation_that_no_repair_helps_is_refused_in_the_templates_words() -> None:
    hopeless = "{{ raise_exception('not today: ' ~ messages | length) }}"
    with pytest.raises(InvalidRequest, match="not today: 3"):
        fitted(hopeless, system("a"), system("b"), user("c"))


def test_a_message_of_a_role_that_a_template_leaves_out_is_refused() -> None:
    said = [user("a"), {"role": "wizard", "content": "a spell"}]
    for name in ALL.keys() - {"mistral"}:  # whose template refuses it itself
        is_read = "a spell" in plainly(ALL[name], said)
        with nullcontext() if is_read else pytest.raises(InvalidRequest, match="of the role 'wizard', so it would"):
            assert "a spell" in fitted(ALL[name], *said), name


def test_all_messages_are_fitted_before_a_template_reads_them(tmp_path: Path) -> None:
    """Every prompt of messages goes this way: those of the library, of the chat, and of all protocols."""
    folder = write_thinking(tmp_path / "tiny", loop_templates.QWEN35)
    tokenizer = SharedTokenizer(load_tokenizer(folder, {257})[0])
    said = [{"role": "developer", "content": "a"}, system("b"), user("c"), answer("d"), system("e"), user("f")]
    one = [system("a\n\nb"), user("c"), answer("d"), user("<system>\ne\n</system>\nf")]
    assert prompt_of(tokenizer, said) == plainly(loop_templates.QWEN35, one)


# -- calls and their results ------------------------------------------------------------------------------------------


def kimis_ids(*messages: Any) -> list[str]:
    return re.findall(r"(?:call_begin\|>|Return of )(.*?)(?:<|\n)", fitted(loop_templates.KIMI, *messages))


@pytest.mark.parametrize(
    ("messages", "ids"),
    [
        ((calling("call_abc"), result("call_abc")), ["weather:0"] * 2),
        ((calling("functions.weather:3"), result("functions.weather:3")), ["weather:3"] * 2),  # the model's own
        ((calling("functions.time:0"), result("functions.time:0")), ["weather:0"] * 2),  # of another function
        ((calling("a", "b"), result("b"), result("a")), ["weather:0", "weather:1"] * 2),
        ((calling("a"), result("a"), calling("a"), result("a")), ["weather:0"] * 2 + ["weather:1"] * 2),
        ((calling("x", "x"), result("x"), result("x")), ["weather:0", "weather:1"] * 2),
        ((calling(None, None), result(None), result(None)), ["weather:0", "weather:1"] * 2),
        ((calling("a"), result("zzz")), ["weather:0"] * 2),
        ((calling("a"), result("a"), result("zzz")), ["weather:0", "weather:0", "zzz"]),
        ((result("zzz"), calling("a"), result("a")), ["zzz", "weather:0", "weather:0"]),
        (
            (calling("toolu_1"), result("toolu_1"), calling("functions.weather:0"), result("functions.weather:0")),
            ["weather:0"] * 2 + ["weather:1"] * 2,  # another server began to count again
        ),
        (
            (calling("functions.weather:1"), result("functions.weather:1"), calling("call_1"), result("call_1")),
            ["weather:1"] * 2 + ["weather:2"] * 2,  # 1 is taken
        ),
    ],
)
def test_kimis_calls_have_their_functions_names(messages: Any, ids: list[str]) -> None:
    assert [id.removeprefix("functions.") for id in kimis_ids(user("q"), *messages)] == ids


def test_ids_of_other_servers_are_those_that_mistral_takes() -> None:
    long, own = "call_0123456789abcdef01234567", "aB3dE6gH9"
    said = fitted(
        loop_templates.MISTRAL, user("q"), calling(long), result(long), calling(own), result(own), answer("a")
    )
    ids = re.findall(r'"(?:id|call_id)": "(\w{9})"', said)
    assert len(ids) == 4 and ids[0] == ids[1] and ids[2:] == [own, own]
    again = fitted(loop_templates.MISTRAL, user("q"), calling(long), result(long))
    assert said.startswith(again), "an id depends on nothing else"


def test_arguments_are_text_for_templates_that_add_them_to_their_own() -> None:
    said = fitted(loop_templates.DEEPSEEK, user("q"), calling("1"), result("1"))
    assert 'weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>' in said
    assert 'call:weather{city:<|"|>Oslo<|"|>}' in fitted(loop_templates.GEMMA4, user("q"), calling("1"), result("1"))


def test_answers_with_several_calls_are_parted_for_templates_that_write_one() -> None:
    for template in (loop_templates.LLAMA, loop_templates.GPT_OSS):
        said = fitted(template, user("q"), calling("1", "2"), result("2", "second"), result("1", "first"), user("so"))
        assert [said.count(word) for word in ("Oslo", "first", "second")] == [2, 1, 1]
        assert said.index("Oslo") < said.index("first") < said.rindex("Oslo") < said.index("second")


def test_results_stand_in_the_order_of_their_calls() -> None:
    """Clients send them as the tools end, and most templates tell them apart by their order alone."""
    results = [result(id, f"result {id}") for id in "abc"]
    mixed = [user("q"), calling("a", "b", "c"), results[2], *results[:2], answer("z"), user("r")]
    for name in ALL.keys() - {"gemma2"}:
        text = fitted(ALL[name], *mixed)
        assert re.findall("result [abc]", text) == ["result a", "result b", "result c"], name
    for other in ([result("x", "result x")], [result(None, "result x")]):  # it is not known whose that is
        text = fitted(ALL["qwen3.5"], user("q"), calling("a", "b"), results[1], *other)
        assert re.findall("result [abx]", text) == ["result b", "result x"]


def test_words_beside_thoughts_and_calls_are_kept_where_a_template_takes_one_of_them() -> None:
    said = calling("1", content="let me look", reasoning_content="hm")
    assert "analysis<|message|>hm\n\nlet me look<|end|>" in fitted(loop_templates.GPT_OSS, user("q"), said, result("1"))
    del said["reasoning_content"]
    text = fitted(loop_templates.GEMMA4, user("q"), said, result("1"))
    assert "thought\nlet me look<channel|><|tool_call>" in text and text.endswith("<tool_response|>")


def test_texts_are_parts_where_a_template_reads_nothing_else() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% for each in m.content | selectattr('type', 'equalto', 'text') %}"
        " {{ each.text }}{% endfor %};{% endfor %}"
    )
    assert fitted(template, user("hi"), answer("yes?"), user("why?")) == "user: hi;assistant: yes?;user: why?;"


def test_calls_and_results_are_texts_where_a_template_knows_none() -> None:
    """LFM2's leaves calls out, Phi's results too, and Gemma's refuse both: the history may be another model's."""
    said = [user("q"), calling("1", "2", content="so"), result("1"), result("2", "wet"), answer("a"), user("r")]
    calls = "so\n<|tool_call_start|>[weather(city='Oslo'), weather(city='Oslo')]<|tool_call_end|>"
    text = fitted(loop_templates.LFM2, *said)
    assert f"{calls}<|im_end|>" in text and text.count("<|tool_response_start|>") == 2
    assert f"{calls}<end_of_turn>" in (text := fitted(loop_templates.GEMMA2, *said))
    assert "<tool_response>\ncold\n</tool_response>\n\n<tool_response>\nwet\n</tool_response><end_of_turn>" in text
    toolless = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }} {% endfor %}"
    assert "cold" in fitted(toolless, *said)


# -- all of them ------------------------------------------------------------------------------------------------------

ROUND = st.sampled_from(
    [("ask",), ("ask", "ask"), ("system", "ask"), ("ask", "system"), ("ask", "call"), ("ask", "call", "system"),
     ("ask", "two calls", "call", "system", "call"), ("call", "ask"), ("system",), ("ask", "answer")]
)  # fmt: skip


def conversation(rounds: Sequence[Sequence[str]]) -> tuple[list[Any], list[int]]:
    """The messages of rounds, each with words of its own, and the places of its prompts' ends."""
    said: list[Any] = [user("word0.")]
    ends = []
    for kinds in rounds:
        ends.append(len(said))
        said.append(answer(f"word{len(said)}."))
        for kind in kinds:
            word = f"word{len(said)}."
            ids = [f"call_{len(said)}_{n}" for n in range({"call": 1, "two calls": 2}.get(kind, 0))]
            if ids:
                ends.append(len(said))
                said += [calling(*ids), *(result(id, f"word{len(said)}.{id[-1]}.") for id in ids)]
            else:
                said.append({"ask": user, "system": system, "answer": answer}[kind](word))
    ends.append(len(said))
    return said, ends


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=20)
@given(rounds=st.lists(ROUND, min_size=1, max_size=4))
def test_all_is_said_once_and_in_order_and_no_turn_changes_an_earlier_one(
    name: str, rounds: list[tuple[str, ...]]
) -> None:
    if name == "mistral":  # leaves out what is said right before calls
        rounds = [kinds for kinds in rounds if kinds[0] != "call"]
    said, ends = conversation(rounds)
    text = fitted(ALL[name], *said)
    words = [word for each in said for word in re.findall(r"word\S+", each["content"])]
    places = [text.find(word) for word in words]
    assert all(text.count(word) == 1 for word in words), [w for w in words if text.count(w) != 1]
    assert sorted(places) == places or name in ("gpt-oss", "llama"), "these write a call's result after the call"
    for end in ends:
        before = GENERATION.sub("", fitted(ALL[name], *said[:end]))
        common = next((n for n, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        assert "word" not in before[common:], "the last message may go on, and nothing before it changes"
