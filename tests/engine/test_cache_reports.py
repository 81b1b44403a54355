"""Cache reports: after each edit of an agent's conversation, what was computed again, why, and where the texts differ.

The judge is the two prompts' tokens, compared one by one, and the place of the edit in the message.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx import Engine
from cortexmlx.core.prompt_history import PromptHistory
from cortexmlx.types.cache_report import CacheReport, RecomputeReason
from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.sampling_params import SamplingParams
from support.models.adapters import write_adapter
from support.models.thinking import write_thinking
from support.models.tiny import tokens_of
from support.models.tool_templates import HERMES
from support.store.stored import reading_pays

TEMPLATE = "effort: {{ reasoning_effort | default('medium') }}\n" + HERMES
RULES = "Never guess; read the file, then say in one line what you found and where. Ask before you write anything. "
SYSTEM = f"You are an agent. The time is 10:41 now. {RULES}"
Messages = list[dict[str, Any]]
CONVERSATION: Messages = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Which of the parsers in src/ reads a comment that never ends, and what does it say?"},
    {"role": "assistant", "content": "The one in lexer.c: it stops at the end of the file, without a word about it."},
    {"role": "user", "content": "Have it say the line of the comment's beginning, as all the other errors there do."},
    {"role": "assistant", "content": "Done: `lexer.c:212` keeps the line, and the message names it before the text."},
    {"role": "user", "content": "Now run the tests."},
]


def tool(name: str, about: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = [tool("read_file", "Returns the text of a file."), tool("run_tests", "Runs the tests below a folder.")]


def edited(index: int, old: str, new: str) -> Messages:
    """The conversation with one message's text changed."""
    messages = [dict(message) for message in CONVERSATION]
    assert messages[index]["content"].count(old) == 1
    messages[index]["content"] = messages[index]["content"].replace(old, new)
    return messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinking(tmp_path_factory.mktemp("agent") / "tiny", TEMPLATE, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), kv_memory="16MB", max_rows=2) as opened:
        yield opened


@pytest.fixture
def engine(opened: Engine) -> Engine:
    """The engine without anything known: in memory, or of anybody's prompts."""
    opened.on_memory_pressure("critical")
    opened.share_history(PromptHistory())
    return opened


def ask(
    engine: Engine,
    messages: Messages = CONVERSATION,
    tools: list[Any] | None = None,
    variables: dict[str, object] | None = None,
    client: str | None = "agent",
    **options: Any,
) -> CacheReport:
    """Ask, and return the report, which is the client's newest."""
    params = SamplingParams(max_tokens=3, ignore_eos=True, tools=tuple(TOOLS if tools is None else tools))
    completion = engine.submit(ChatPrompt(messages, variables or {}), params, client=client, **options).result()
    report = completion.cache_report
    assert report is not None and report == engine.cache_reports(client)[0]
    assert report.memory_tokens + report.disk_tokens == completion.usage.cached_tokens
    return report


def tokens_of_prompt(engine: Engine, messages: Messages = CONVERSATION, tools: list[Any] | None = None) -> list[int]:
    return engine.encode(ChatPrompt(messages), SamplingParams(tools=tuple(TOOLS if tools is None else tools)))


def common(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_a_first_prompt_and_one_that_goes_on_need_no_explanation(engine: Engine) -> None:
    first = ask(engine)
    assert (first.memory_tokens, first.known_tokens, first.recomputed_tokens, first.reason) == (0, 0, 0, None)
    more = [*CONVERSATION, {"role": "assistant", "content": "All pass."}, {"role": "user", "content": "Commit. " * 30}]
    report = ask(engine, more)
    assert report.reason is None and report.memory_tokens == report.known_tokens > 0
    other = engine.encode("effort: medium") + tokens_of(300)  # a new conversation that begins alike
    last = engine.submit(other, max_tokens=2, client="agent").result().cache_report
    assert last is not None and last.reason is None and last.memory_tokens > 0
    assert engine.stats().recomputed_tokens == {}


@pytest.mark.parametrize(
    ("index", "old", "new", "shown"),
    [
        (0, "10:41", "10:42", ("10:41", "10:42")),
        (2, "without a word", "with a word", ("without", "with")),
        (3, "all the other errors there", "the others", None),
    ],
    ids=["time", "answer", "question"],
)
def test_an_edited_message_is_named_with_the_character_and_both_texts(
    engine: Engine, index: int, old: str, new: str, shown: Any
) -> None:
    ask(engine)
    before = engine.stats().recomputed_tokens.get("text", 0)
    messages = edited(index, old, new)
    report = ask(engine, messages)
    known, prompt = tokens_of_prompt(engine), tokens_of_prompt(engine, messages)
    begin = common(known, prompt)
    assert report.reason is RecomputeReason.TEXT and report.known_tokens == report.memory_tokens == begin
    assert (report.message, report.role) == (index + 1, CONVERSATION[index]["role"])
    texts = [CONVERSATION[index]["content"], messages[index]["content"]]
    assert report.character == next(i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b)
    assert report.old in texts[0] and report.new in texts[1] and shown in (None, (report.old, report.new))
    assert report.recomputed_tokens == common(known[begin:][::-1], prompt[begin:][::-1])
    assert engine.stats().recomputed_tokens["text"] == before + report.recomputed_tokens
    place = "system message" if index == 0 else f"message {index + 1} ({report.role})"
    assert str(report) == (
        f"{place}, character {report.character}: `{report.old}` became `{report.new}`; "
        f"{report.recomputed_tokens:,} tokens computed again"
    )


@settings(max_examples=10)
@given(st.data())
def test_whatever_is_changed_is_found(opened: Engine, data: st.DataObject) -> None:
    """Another character anywhere in any message but the last: whatever is reported is right."""
    opened.share_history(PromptHistory())
    index = data.draw(st.integers(0, len(CONVERSATION) - 2))
    text = CONVERSATION[index]["content"]
    place = data.draw(st.integers(0, len(text) - 1))
    inserted = data.draw(st.sampled_from(["é", "Zq", "\n", "7", "\N{GRINNING FACE}"]))
    messages = [dict(message) for message in CONVERSATION]
    messages[index]["content"] = changed = text[:place] + inserted + text[place + data.draw(st.integers(0, 1)) :]
    ask(opened)
    report = ask(opened, messages)
    first = next((i for i, (a, b) in enumerate(zip(text, changed, strict=False)) if a != b), len(text))
    assert (report.reason, report.message, report.character) == (RecomputeReason.TEXT, index + 1, first)
    assert report.old in text and report.new in changed and report.old != report.new


def test_other_tools(engine: Engine) -> None:
    ask(engine)
    known = tokens_of_prompt(engine)
    added = [*TOOLS, tool("write_file", "Writes a file.")]
    report = ask(engine, tools=added)
    begin = common(known, tokens_of_prompt(engine, tools=added))
    assert report.reason is RecomputeReason.TOOLS and report.detail == "`write_file` is new or changed"
    assert (report.known_tokens, report.recomputed_tokens) == (begin, len(known) - begin)
    ask(engine)
    assert ask(engine, tools=TOOLS[:1]).detail == "1 of before is not"
    ask(engine)
    changed = [TOOLS[0], tool("run_tests", "Runs all tests, and says which failed.")]
    assert ask(engine, tools=changed).detail == "`run_tests` is new or changed and 1 of before is not"


def test_tools_in_another_order(engine: Engine) -> None:
    ask(engine)
    report = ask(engine, tools=TOOLS[::-1])
    assert report.reason is RecomputeReason.TOOL_ORDER and (report.message, report.old, report.new) == (None, "", "")
    known, prompt = tokens_of_prompt(engine), tokens_of_prompt(engine, tools=TOOLS[::-1])
    assert common(known[::-1], prompt[::-1]) <= report.recomputed_tokens <= len(prompt) - common(known, prompt)


def test_an_edit_before_other_tools_is_an_edit(tmp_path: Path) -> None:
    """Where the template writes the tools last, the message is what differs first."""
    body, tools_last = HERMES.partition("{% endif %}{% for m in messages %}")[::2]
    template = "{% for m in messages %}" + tools_last.replace("<|im_start|>assistant\n", "") + body + "{% endif %}"
    with Engine(str(write_thinking(tmp_path / "m", template, max_position_embeddings=8192)), kv_memory="8MB") as engine:
        ask(engine)
        report = ask(engine, edited(1, "never ends", "ends late"), tools=TOOLS[:1])
        assert (report.reason, report.message) == (RecomputeReason.TEXT, 2)


def test_a_place_is_that_of_the_rendered_text(tmp_path: Path) -> None:
    """Templates that write the system message last, or leave old messages out: what is named is what differs there."""
    turn = "{{ m.role }}: {% if loop.last %}{{ messages[0].content }}{% endif %}{{ m.content }}\n"
    more = [{"role": "assistant", "content": "All pass."}, {"role": "user", "content": "Commit and push, please."}]
    for name, each, edit, place in (
        ("moved", "messages[1:]", 3, (6, "user", 0)),
        ("left out", "messages[-5:]", 3, (4, "user", 0)),
        ("moved", "messages[1:]", 0, (4, "user", 52)),
    ):
        write_thinking(tmp_path / name, f"{{% for m in {each} %}}{turn}{{% endfor %}}", max_position_embeddings=8192)
        with Engine(str(tmp_path / name), kv_memory="8MB", max_rows=2) as engine:
            ask(engine, tools=[])
            changed = edited(3, "all the", "the")
            changed[0] = {"role": "system", "content": "Other rules."}
            report = ask(engine, [*CONVERSATION, *more] if edit else changed, tools=[])
            assert (report.reason, report.message, report.role, report.character) == (RecomputeReason.TEXT, *place)


def test_a_place_within_characters_of_several_tokens(engine: Engine) -> None:
    for face in "\N{GRINNING FACE}\N{GRINNING FACE WITH SMILING EYES}":
        text = "\N{GRINNING FACE}" * 17 + face * 3
        report = ask(engine, [*CONVERSATION[:1], {"role": "user", "content": text}, *CONVERSATION[1:]])
    assert (report.message, report.character) == (2, 17) and text.count(report.new)


def test_images(tmp_path: Path) -> None:
    """A text beside an image is a text, and another image is no edit of the message that follows."""
    pytest.importorskip("PIL")
    from support.models.sighted import picture, shown, write_sighted

    first, second = picture(24, 32, 0), picture(24, 32, 1)
    more = [*CONVERSATION[2:4], shown(RULES, second), {"role": "assistant", "content": "Two."}]
    write_sighted(tmp_path / "m", "qwen3_vl", max_position_embeddings=4096)
    with Engine(str(tmp_path / "m"), kv_memory="16MB", max_rows=2) as engine:
        ask(engine, [shown(RULES, first), *more[:-1]], tools=[])
        report = ask(engine, [shown(RULES.replace("line", "word"), first), *more], tools=[])
        assert (report.message, report.old, report.new) == (1, "line", "word")
        report = ask(engine, [shown(RULES, second), *more], tools=[])
        assert str(report) == f"another image; {report.recomputed_tokens:,} tokens computed again"


def test_template_variables(engine: Engine) -> None:
    ask(engine)
    report = ask(engine, variables={"reasoning_effort": "high"})
    assert report.reason is RecomputeReason.VARIABLES and (report.old, report.new) == ("medium", "high")
    assert str(report).startswith("other template variables, `medium` became `high`; ")


def test_messages_that_were_cut_out(engine: Engine) -> None:
    ask(engine)
    cut = CONVERSATION[:1] + CONVERSATION[3:]
    report = ask(engine, cut)
    known, prompt = tokens_of_prompt(engine), tokens_of_prompt(engine, cut)
    assert (report.reason, report.message, report.role) == (RecomputeReason.CUT, 2, "user")
    begin = common(known, prompt)
    assert report.recomputed_tokens >= common(known[begin:][::-1], prompt[begin:][::-1])
    assert str(report).startswith("messages before message 2 (user) are gone: `Which of the parsers")
    assert ask(engine, CONVERSATION[:2]).reason is None  # nothing that follows was known


def test_an_answer_is_known_up_to_its_last_token(engine: Engine) -> None:
    prompt = tokens_of(100)
    answer = engine.submit(prompt, max_tokens=60, ignore_eos=True, client="agent").result()
    engine.on_memory_pressure("critical")
    more = [*prompt, *answer.token_ids, *tokens_of(40, seed=9)]
    report = engine.submit(more, max_tokens=2, client="agent").result().cache_report
    assert report is not None and (report.reason, report.known_tokens) == (RecomputeReason.EVICTED, 160)


def test_what_was_evicted_or_kept_out_of_the_cache(engine: Engine) -> None:
    ask(engine)
    count = len(tokens_of_prompt(engine))
    off = ask(engine, cache=False)
    assert (off.reason, off.recomputed_tokens, off.memory_tokens) == (RecomputeReason.CACHE_OFF, count - 1, 0)
    ask(engine, cache=False, client="secretive")
    assert ask(engine, client="secretive").known_tokens == 0
    engine.on_memory_pressure("critical")
    report = ask(engine)
    assert (report.reason, report.recomputed_tokens, report.known_tokens) == (RecomputeReason.EVICTED, count - 1, count)
    assert report.message is None and "no longer in memory" in str(report)


def test_another_client_is_told_nothing(engine: Engine) -> None:
    ask(engine)
    for client in ("hostile", None):
        for messages in (CONVERSATION, edited(0, "10:41", "10:42")):
            report = ask(engine, messages, client=client)
            assert "10:41" not in f"{report!r} {report}" or messages is not CONVERSATION
        assert [each.recomputed_tokens for each in engine.cache_reports(client)][1] == 0
        assert engine.cache_reports(client)[1].known_tokens == engine.cache_reports(client)[1].memory_tokens == 0
    assert len(engine.cache_reports("agent")) == 1 and engine.cache_reports("nobody") == []


def test_another_adapter_and_another_model(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "style", folder, keys=("self_attn.q_proj",), num_layers=1, seed=1)
    other = write_thinking(tmp_path / "other", TEMPLATE, max_position_embeddings=8192, num_hidden_layers=2)
    history = PromptHistory()
    with Engine(str(folder), kv_memory="16MB", adapters={"style": adapter}) as engine, Engine(str(other)) as second:
        engine.share_history(history)
        second.share_history(history)
        ask(engine)
        count = len(tokens_of_prompt(engine))
        report = ask(engine, adapter="style")
        assert (report.reason, report.recomputed_tokens) == (RecomputeReason.ADAPTER, count - 1)
        assert ask(engine, adapter="style").reason is None
        report = ask(second)
        assert (report.reason, report.detail) == (RecomputeReason.MODEL, f"`{folder.name}`")
        assert report.recomputed_tokens == count and ask(second).reason is None
        assert ask(second, client="else").reason is None


def test_a_model_with_states_says_that_it_has_none_at_that_place(tiny: Any) -> None:
    """The blocks are all in memory, but the last state is a long way before the end."""
    with Engine(tiny("lfm2"), kv_memory="4MB", max_rows=1) as engine:
        prompt = tokens_of(400)
        engine.generate(prompt, max_tokens=2)
        report = engine.generate(prompt[:300], max_tokens=2).cache_report
        assert report is not None and report.reason is RecomputeReason.STATE
        assert report.recomputed_tokens == 299 - report.memory_tokens >= 32


def test_what_was_read_from_disk_is_told_apart(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading_pays(monkeypatch)
    for is_second in (False, True):
        with Engine(str(folder), kv_memory="16MB", kv_store=tmp_path / "kv") as engine:
            report = ask(engine)
            whole = len(tokens_of_prompt(engine)) // 32 * 32
            assert (report.memory_tokens, report.disk_tokens) == (0, whole * is_second)


def test_an_engine_without_a_prefix_cache_explains_nothing(folder: Path) -> None:
    with Engine(str(folder), kv_memory="4MB", prefix_cache=False) as engine:
        assert engine.generate("hello", max_tokens=2).cache_report is None and engine.cache_reports() == []
