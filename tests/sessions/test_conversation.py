"""Turns that are remembered, taken back, changed, forked and saved, and that compute only what is new."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.errors import ConversationFileError, InvalidRequest, PromptTooLong
from cortexmlx.sessions.conversation import Conversation
from cortexmlx.types.request import Completion, FinishReason
from support.models.tiny import EOS, write_tiny

BLOCK = 8
WORDS = SamplingParams(max_tokens=21, ignore_eos=True)


@pytest.fixture
def engine(tiny: Any) -> Iterator[Engine]:
    with Engine(tiny("one layer"), kv_memory="512KB", block_size=BLOCK, max_rows=2) as opened:
        yield opened


@pytest.fixture
def uncached(tiny: Any) -> Iterator[Engine]:
    """The judge: every prompt is computed anew."""
    with Engine(tiny("one layer"), kv_memory="512KB", block_size=BLOCK, max_rows=1, prefix_cache=False) as opened:
        yield opened


def new_tokens(completion: Completion) -> int:
    """Prompt tokens that were computed."""
    return completion.usage.prompt_tokens - completion.usage.cached_tokens


def contents(talk: Conversation) -> list[object]:
    return [message["content"] for message in talk.messages]


def test_a_turn_computes_only_what_is_new_though_the_answers_text_has_other_tokens(engine: Engine) -> None:
    """The tiny model writes bytes that are no characters, so its text does not lead back to its tokens."""
    talk = engine.conversation(system="Be brief.", params=WORDS)
    first = talk.ask("one")
    assert engine.encode(first.text) != list(first.token_ids)
    before = first.usage.total_tokens
    for number in range(4):
        answer = talk.ask(f"and {number}")
        added = answer.usage.prompt_tokens - before
        assert added <= 40 and new_tokens(answer) <= added + 1, "one token of the answer was never computed"
        before = answer.usage.total_tokens


def test_the_tokens_are_those_without_any_cache(engine: Engine, uncached: Engine) -> None:
    talks = [each.conversation(system="S", params=WORDS) for each in (engine, uncached)]

    def both(act: Any) -> tuple[object, object]:
        ours, judge = (act(talk) for talk in talks)
        return ours.token_ids, judge.token_ids

    for act in (
        lambda talk: talk.ask("one"),
        lambda talk: talk.ask("two"),
        lambda talk: talk.regenerate(SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=3)),
        lambda talk: talk.undo() and talk.ask("other"),
        lambda talk: talk.edit(0, "uno") or talk.ask("three"),
        lambda talk: talk.fork().ask("in a fork"),
        lambda talk: talk.ask([{"role": "tool", "content": "42"}, {"role": "user", "content": "well?"}]),
    ):
        ours, judge = both(act)
        assert ours == judge
    assert contents(talks[0]) == contents(talks[1])
    assert all(talk.tokens == len(talk.tokens and talk._begin_turn(talk._messages).prompt) for talk in talks)


def test_undo_regenerate_and_a_fork_compute_only_what_is_new(engine: Engine) -> None:
    talk = engine.conversation(params=WORDS)
    for text in ("a long first question, so that there are some blocks", "second", "third"):
        last = talk.ask(text)
    assert new_tokens(talk.regenerate()) <= BLOCK, "all but the last token was computed"
    assert [m["content"] for m in talk.undo()] == ["third"]
    other = talk.ask("another third")
    assert new_tokens(other) <= len("<s>user: another third\n<s>assistant: ") + BLOCK
    fork = talk.fork()
    in_fork = fork.ask("only here")
    assert new_tokens(in_fork) <= len("\n<s>user: only here\n<s>assistant: ") + BLOCK
    assert len(talk.messages) == 6 and len(fork.messages) == 8
    assert last.usage.prompt_tokens < in_fork.usage.prompt_tokens


def test_an_edit_computes_what_lies_behind_it(engine: Engine) -> None:
    talk = engine.conversation(params=WORDS)
    for text in ("the first question " * 4, "the second question", "the third question"):
        last = talk.ask(text)
    talk.edit(-2, "the third question, xxxx")
    answer = talk.regenerate()
    assert new_tokens(answer) <= len("\n<s>user: the third question, xxxx\n<s>assistant: ") + BLOCK
    assert answer.usage.prompt_tokens == last.usage.prompt_tokens + len(", xxxx")
    for index in (6, -7, "0", 1.0, None):
        with pytest.raises(InvalidRequest, match=f"there is no message {index}: the conversation has 6"):
            talk.edit(index, "x")  # type: ignore[arg-type]


def test_turns_are_taken_back_one_after_the_other(engine: Engine) -> None:
    talk = engine.conversation(messages=[{"role": "user", "content": "0"}, {"role": "assistant", "content": "zero"}])
    talk.ask([{"role": "tool", "content": "1"}, {"role": "user", "content": "one"}], WORDS)
    assert contents(talk)[:4] == ["0", "zero", "1", "one"]
    assert [m["content"] for m in talk.undo()] == ["1", "one"]
    assert [m["content"] for m in talk.undo()] == ["0"]
    assert talk.undo() == () and talk.messages == () and talk.tokens == 0
    with pytest.raises(InvalidRequest, match="nothing was asked yet"):
        talk.regenerate()


def test_no_question_and_an_empty_one_are_refused_and_no_answer_is_lost(engine: Engine) -> None:
    talk = engine.conversation(params=WORDS)
    talk.ask("one")
    before = talk.messages
    for question, why in ((None, r"regenerate\(\) answers the last one again"), ("", "the question is empty")):
        with pytest.raises(InvalidRequest, match=why):
            talk.ask(question)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=why):
            asyncio.run(talk.aask(question))  # type: ignore[arg-type]
    assert talk.messages == before


def test_a_turn_that_fails_or_is_not_read_leaves_no_trace(engine: Engine) -> None:
    talk = engine.conversation(params=WORDS)
    talk.ask("one")
    said = contents(talk)
    with pytest.raises(PromptTooLong):
        talk.ask("x" * 1000)
    with talk.stream("two") as reply:
        next(reply)
        with pytest.raises(InvalidRequest, match="is being answered"):
            talk.ask("three")
        with pytest.raises(InvalidRequest, match="is being answered"):
            talk.undo()
    assert contents(talk) == said
    talk.stream("dropped")
    talk.ask("two")
    assert contents(talk)[2] == "two"


def test_a_cancelled_answer_is_kept_as_far_as_it_came_and_goes_on_there(engine: Engine) -> None:
    talk = engine.conversation(params=SamplingParams(max_tokens=200, ignore_eos=True))
    reply = talk.stream("one")
    for count, _ in enumerate(reply):
        if count == 30:
            reply.cancel()
    completion = reply.result()
    assert completion.finish_reason is FinishReason.CANCELLED
    assert contents(talk) == ["one", completion.text]
    assert new_tokens(talk.ask("two", WORDS)) <= len("\n<s>user: two\n<s>assistant: ") + 16 + BLOCK


def test_a_turn_that_goes_on_is_there_as_far_as_it_was_read_and_no_token_before_it_is_computed_again(
    engine: Engine, tmp_path: Path
) -> None:
    talk = engine.conversation(params=SamplingParams(max_tokens=200, ignore_eos=True))
    first = talk.ask("one", WORDS)
    assert contents(talk.so_far()) == ["one", first.text], "nothing is being answered"
    with talk.stream("two") as reply:
        assert contents(talk.so_far()) == ["one", first.text, "two"]
        text = "".join(next(reply).text for _ in range(30))
        talk.so_far().save(tmp_path / "file")
    assert contents(talk) == ["one", first.text], "the turn itself was dropped"
    later = engine.conversation()
    later.load(tmp_path / "file")
    assert contents(later) == ["one", first.text, "two", text]
    assert later.ask("three", WORDS).usage.cached_tokens >= len(first.token_ids)


def test_half_a_character_is_a_question_mark(engine: Engine) -> None:
    """As in a text without a template: some terminals and files have such."""
    broken, whole = engine.conversation(params=WORDS), engine.conversation(params=WORDS)
    assert broken.ask("a\ud800b").token_ids == whole.ask("a?b").token_ids
    assert contents(broken)[0] == "a\ud800b" and broken.tokens == whole.tokens


def test_answers_that_end_by_a_token_or_a_stop_string_are_remembered_as_their_text(engine: Engine) -> None:
    talk = engine.conversation()
    bias = SamplingParams(max_tokens=5, logit_bias={EOS: 100})
    assert talk.ask("one", bias).token_ids == (EOS,) and contents(talk) == ["one", ""]
    free = talk.fork().ask("two", SamplingParams(max_tokens=20, ignore_eos=True))
    stop = free.text[6:8]
    stopped = talk.ask("two", SamplingParams(max_tokens=20, ignore_eos=True, stop=[stop]))
    assert stopped.finish_reason is FinishReason.STOP and contents(talk)[-1] == free.text.split(stop)[0]
    assert free.token_ids[9] not in free.token_ids[:9]
    other = engine.conversation(messages=talk.messages[:2])
    ended = other.ask("two", SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[free.token_ids[9]]))
    new = len(engine.encode("\n<s>user: three\n<s>assistant: "))
    assert ended.token_ids == free.token_ids[:10]
    assert other.ask("three", WORDS).usage.prompt_tokens == ended.usage.prompt_tokens + 9 + new
    judge = engine.conversation(messages=talk.messages)
    assert talk.ask("three", WORDS).token_ids == judge.ask("three", WORDS).token_ids


def test_tokens_and_what_is_left_of_the_context(engine: Engine) -> None:
    talk = engine.conversation(params=WORDS)
    assert (talk.tokens, talk.context_left) == (0, 512)
    answer = talk.ask("one")
    closing = len(engine.encode("\n<s>assistant: "))
    assert talk.tokens == answer.usage.total_tokens + closing
    assert talk.context_left == 512 - talk.tokens


def test_what_is_left_is_what_the_engine_holds(tiny: Any) -> None:
    with Engine(tiny("one layer"), kv_memory="16KB", block_size=BLOCK, max_request_tokens=70) as small:
        assert small.conversation().context_left == small.longest_request <= 70


@pytest.mark.slow
def test_a_conversation_that_goes_on_beyond_the_context_has_room_left(tiny: Any) -> None:
    with Engine(tiny("one layer"), kv_memory="16KB", block_size=BLOCK, keep_last=40) as kept:
        talk = kept.conversation(params=SamplingParams(max_tokens=60, ignore_eos=True))
        for turn in range(6):
            assert len(talk.ask(f"question {turn}").token_ids) == 60
        assert talk.tokens > 512 and talk.context_left > 10**6
    with Engine(tiny("one layer"), kv_memory="16KB", block_size=BLOCK, keep_last=40, max_request_tokens=700) as bounded:
        assert bounded.longest_request == 700


def test_for_asyncio(engine: Engine) -> None:
    async def talk() -> Conversation:
        talk = engine.conversation(params=WORDS)
        first = await talk.aask("one")
        pieces = [event.text async for event in talk.astream("two")]
        assert contents(talk) == ["one", first.text, "two", "".join(pieces)]
        async with talk.astream("three") as reply:
            await anext(reply)
        async for _ in talk.astream("four"):
            break
        assert len(talk.messages) == 4
        talk.undo()  # what was not read to its end, and dropped, answers no more
        await talk.aask("two")
        return talk

    judge = engine.conversation(params=WORDS)
    judge.ask("one"), judge.ask("two")
    assert contents(asyncio.run(talk())) == contents(judge)


def test_a_saved_conversation_goes_on_in_another_engine_with_the_same_tokens(
    tiny: Any, engine: Engine, tmp_path: Path
) -> None:
    talk = engine.conversation(system="S", params=WORDS)
    talk.ask("one")
    talk.ask("two")
    talk.save(tmp_path / "talk.json")
    judge = talk.ask("three")
    again = engine.conversation()
    again.load(tmp_path / "talk.json")
    assert (again.system, again.params, again.notes) == ("S", WORDS, ())
    answer = again.ask("three")
    assert answer.token_ids == judge.token_ids and new_tokens(answer) <= BLOCK, "found by the very same tokens"
    with Engine(tiny("one layer"), kv_memory="512KB", block_size=BLOCK) as restarted:
        there = restarted.conversation()
        there.load(tmp_path / "talk.json")
        assert there.ask("three").token_ids == judge.token_ids


@pytest.mark.parametrize("name", [pytest.param("gemma3_text", marks=pytest.mark.slow), "lfm2"])
def test_a_restart_computes_only_what_is_new_with_the_disk_tier(tiny: Any, tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"kv_memory": "2MB", "block_size": BLOCK, "kv_store": tmp_path / "store"}
    with Engine(tiny(name), **options) as engine:
        talk = engine.conversation(system="A system prompt of some length.", params=WORDS)
        talk.ask("one")
        last = talk.ask("two")
        talk.save(tmp_path / "talk.json")
        judge = talk.ask("three")
        talk.undo()
    with Engine(tiny(name), **options) as restarted:
        again = restarted.conversation()
        again.load(tmp_path / "talk.json")
        answer = again.ask("three")
        assert answer.token_ids == judge.token_ids
        assert new_tokens(answer) <= answer.usage.prompt_tokens - last.usage.total_tokens + 1 + BLOCK


def test_another_model_says_so_and_goes_on_with_the_texts(tiny: Any, engine: Engine, tmp_path: Path) -> None:
    talk = engine.conversation(params=WORDS)
    talk.ask("one")
    talk.save(tmp_path / "talk.json")
    with Engine(tiny("qwen3"), kv_memory="1MB", block_size=BLOCK) as other:
        there = other.conversation()
        there.load(tmp_path / "talk.json")
        ours, theirs = engine.info.name, other.info.name
        assert f"was saved with {ours} and continues with {theirs}: its texts are computed again" in there.notes[0]
        judge = other.conversation(messages=talk.messages).ask("two", WORDS)
        assert there.ask("two").token_ids == judge.token_ids


def test_a_model_is_the_same_wherever_it_lies_and_another_if_its_tokenizer_is(tmp_path: Path) -> None:
    """Both models have the same weights; in the other's tokenizer each byte is what its neighbour is in the first's."""
    first, moved = write_tiny(tmp_path / "model"), tmp_path / "moved"
    options: dict[str, Any] = {"kv_memory": "1MB", "block_size": BLOCK}
    with Engine(first, **options) as engine:
        talk = engine.conversation(params=WORDS)
        talk.ask("one")
        talk.save(tmp_path / "talk.json")
        judge = talk.ask("two")
    first.rename(moved)
    with Engine(moved, **options) as engine:
        there = engine.conversation()
        there.load(tmp_path / "talk.json")
        assert there.notes == () and there.ask("two").token_ids == judge.token_ids
    tokenizer = json.loads((moved / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    words = {token: word for word, token in vocab.items()}
    vocab.update({words[token]: token ^ 1 for token in range(256)})
    (moved / "tokenizer.json").write_text(json.dumps(tokenizer))
    moved.rename(first)
    with Engine(first, **options) as engine:
        there = engine.conversation()
        there.load(tmp_path / "talk.json")
        assert "was saved with another" in there.notes[0]
        judge = engine.conversation(messages=there.messages).ask("two", WORDS)
        assert there.ask("two").token_ids == judge.token_ids


def test_a_file_that_cannot_be_read_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    talk = engine.conversation(params=WORDS)
    talk.ask("one")
    said = talk.messages
    (tmp_path / "torn").write_text('{"format": ')
    with pytest.raises(ConversationFileError, match="is not a saved conversation"):
        talk.load(tmp_path / "torn")
    assert talk.messages == said
    talk.clear()
    assert talk.messages == ()


def test_clients_share_nothing(engine: Engine) -> None:
    for client, most in (("a", 0), ("b", 0), ("a", 99)):
        talk = engine.conversation(system="The same long system prompt.", params=WORDS, client=client)
        assert talk.ask("one").usage.cached_tokens <= most


@pytest.mark.parametrize(
    "name",
    ["gemma3_text", pytest.param("lfm2", marks=pytest.mark.slow)],
)
def test_windows_and_recurrent_states_compute_only_what_is_new(tiny: Any, name: str) -> None:
    with (
        Engine(tiny(name), kv_memory="4MB", block_size=BLOCK, max_rows=2) as engine,
        Engine(tiny(name), kv_memory="4MB", block_size=BLOCK, max_rows=1, prefix_cache=False) as uncached,
    ):
        talk, judge = (each.conversation(params=WORDS) for each in (engine, uncached))
        before = 0
        for number in range(2):
            answer = talk.ask(f"question {number}")
            assert answer.token_ids == judge.ask(f"question {number}").token_ids
            assert new_tokens(answer) <= answer.usage.prompt_tokens - before + 1
            before = answer.usage.total_tokens
        again = talk.regenerate()
        assert again.token_ids == answer.token_ids and new_tokens(again) <= BLOCK
        talk.undo(), judge.undo()
        other = talk.ask("another")
        assert other.token_ids == judge.ask("another").token_ids
        assert new_tokens(other) <= len("\n<s>user: another\n<s>assistant: ") + BLOCK


THINKING = (
    "{% for m in messages %}<s>{{ m['role'] }}: "
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}<s>assistant: {{ '<think>\n' }}"
)


def test_a_template_that_leaves_out_old_thoughts_is_followed_and_reuse_begins_before_them(
    tmp_path: Path,
) -> None:
    model = write_tiny(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": THINKING}))
    options: dict[str, Any] = {"kv_memory": "1MB", "block_size": BLOCK}
    with Engine(model, **options) as engine, Engine(model, **options, prefix_cache=False) as uncached:
        talks = [each.conversation(params=WORDS) for each in (engine, uncached)]
        for talk in talks:
            for question in ("a first question", "a second question"):
                talk.ask(question)
            assert str(talk.messages[-1]["content"]).startswith("<think>\n")
            talk.edit(-1, f"{talk.messages[-1]['content']}</think>yes")
        known = talks[0]._transcript.boundaries[-2][1]
        ours, judge = (talk.ask("a third question") for talk in talks)
        assert ours.token_ids == judge.token_ids and ours.usage.prompt_tokens == judge.usage.prompt_tokens
        thought = len(engine.encode("<think>\n"))
        assert known - thought - BLOCK <= ours.usage.cached_tokens < known, "all up to the thoughts"
