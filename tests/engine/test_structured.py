"""Answers with a form: exactly the tokens that mlx-lm writes under llguidance's own matcher, in any batch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any, ClassVar

import jsonschema
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from openai.types.chat import ChatCompletion

from cortexmlx import (
    Engine,
    FinishReason,
    FormRefused,
    InvalidRequest,
    SamplingParams,
    StructuredOutput,
    StructuredOutputError,
)
from cortexmlx.core import open_requests
from cortexmlx.core.handle import RequestHandle
from cortexmlx.models.tokenizers.shared import TokenTable
from cortexmlx.protocols import responses, simple
from cortexmlx.protocols.openai import chat_completions, completions
from cortexmlx.protocols.request import ReplyInfo, Request
from cortexmlx.structured import matcher
from cortexmlx.structured.compiler import GrammarCompiler
from cortexmlx.structured.matcher import MAX_ITEMS, single_token_mask
from cortexmlx.structured.tools import Tool
from cortexmlx.types.request import Completion
from support.engine.core_driver import Driver
from support.engine.grammar_judge import constrained_greedy, forced_greedy, judge_tokenizer, schema_grammar
from support.models.thinking import SWITCHED, dictated, write_thinking
from support.models.tiny import EOS, tokens_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog", "horse"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LISTS = {"type": "array", "items": {"enum": [1, 22, 333, "four", None, True]}, "minItems": 3, "maxItems": 5}
"""The form of `PERSON` has no blanks, of which random models write as many as they may."""
PROTOCOLS = (simple, chat_completions, completions, responses)
THINKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]{{ '<think>' }}"
"""A template that opens the thoughts."""
SCHEMAS: tuple[dict[str, Any], ...] = (
    PERSON,
    LISTS,
    {"type": "object", "properties": {"a": PERSON}, "required": ["a"]},
)


@pytest.fixture(scope="session")
def judge(judged: Any) -> Any:
    """A function from a model's name, a prompt, a schema and a number of tokens to the judge's tokens."""
    vocabularies: dict[str, Any] = {}

    def answer(name: str, prompt: list[int], schema: dict[str, Any], max_tokens: int) -> list[int]:
        model, tokenizer = judged(name)
        vocabulary = vocabularies.setdefault(name, judge_tokenizer(tokenizer))
        return constrained_greedy(model, tokenizer, prompt, schema_grammar(schema), max_tokens, vocabulary)

    return answer


@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("llama4", marks=pytest.mark.slow)])
def test_a_ragged_batch_writes_the_tokens_of_the_judge(name: str, tiny: Any, judge: Any, theirs: Any) -> None:
    """Beside free answers, which stay as they are."""
    driver = Driver(tiny(name), tokens=1024, max_rows=4, forced_tokens=False)
    prompts = [tokens_of(5 + 9 * i, seed=i) for i in range(6)]
    handles = [driver.add(prompt, 48, ignore_eos=False, structured=SCHEMAS[i % 3]) for i, prompt in enumerate(prompts)]
    free = [driver.add(prompt, 30, ignore_eos=False) for prompt in prompts]
    driver.finish()
    for i, (prompt, handle) in enumerate(zip(prompts, handles, strict=True)):
        assert list(driver.result(handle).token_ids) == judge(name, prompt, SCHEMAS[i % 3], 48), i
    for prompt, handle in zip(prompts, free, strict=True):
        assert list(driver.result(handle).token_ids) == theirs(name, prompt, 30)
    assert driver.core.stats().steps_by_reason["ahead"] > 20


def test_a_tight_arena_and_forks_change_no_token(tiny: Any, judge: Any) -> None:
    driver = Driver(tiny("llama"), tokens=160, max_rows=3, forced_tokens=False)
    prompts = [tokens_of(30, seed=i) for i in range(3)]
    handles = [driver.add(prompt, 60, ignore_eos=False, structured=PERSON, n=2) for prompt in prompts]
    driver.finish()
    assert driver.core.scheduler.preemptions
    for prompt, handle in zip(prompts, handles, strict=True):
        answer = driver.result(handle)
        expected = judge("llama", prompt, PERSON, 60)
        assert [list(a.token_ids) for a in (answer, *answer.others)] == [expected, expected]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("llama", {"tokens": 160, "max_rows": 3}),
        ("llama4", {"pipeline": False}),
        ("lfm2", {}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("gemma3_text", "mamba")),
    ],
)
def test_forced_tokens_are_those_of_the_judge(name: str, setting: dict[str, Any], tiny: Any, judged: Any) -> None:
    """Computed together, in the same order."""
    driver = Driver(tiny(name), **{"tokens": 1024, **setting})
    model, tokenizer = judged(name)
    vocabulary = judge_tokenizer(tokenizer)
    asked = [(tokens_of(5 + 9 * i, seed=i), SCHEMAS[i % 3], 20 + 14 * i) for i in range(4)]
    handles = [driver.add(p, count, ignore_eos=False, structured=schema, logprobs=0) for p, schema, count in asked]
    driver.finish()
    forced = 0
    for (prompt, schema, count), handle in zip(asked, handles, strict=True):
        expected, some = forced_greedy(model, prompt, schema_grammar(schema), count, vocabulary)
        answer, forced = driver.result(handle), forced + some
        assert list(answer.token_ids) == expected
        assert answer.usage.completion_tokens == len(expected) and answer.logprobs is not None
        assert [one.token_id for one in answer.logprobs] == expected
    assert forced > 20
    assert "verify" in driver.core.stats().steps_by_reason


def test_a_model_that_is_not_paged_too(tiny: Any, judge: Any, unpaged: None) -> None:
    driver = Driver(tiny("llama"), tokens=512, forced_tokens=False)
    prompts = [tokens_of(5 + 9 * i, seed=i) for i in range(2)]
    answers = driver.answers(prompts, 48, ignore_eos=False, structured=PERSON)
    assert list(map(list, answers)) == [judge("llama", prompt, PERSON, 48) for prompt in prompts]


def test_seeded_answers_are_the_same_alone_and_in_a_batch_and_are_valid(tiny: Any) -> None:
    asked = [(tokens_of(5 + 9 * i, seed=i), i) for i in range(6)]
    sampled = {"temperature": 1.5, "top_p": 0.95, "presence_penalty": 0.5, "ignore_eos": False, "structured": PERSON}
    alone = []
    for prompt, seed in asked:
        alone.append(Driver(tiny("llama"), tokens=512).result_of(prompt, 200, seed=seed, **sampled))
    driver = Driver(tiny("llama"), tokens=400, max_rows=4)
    handles = [driver.add(prompt, 200, seed=seed, **sampled) for prompt, seed in asked]
    driver.finish()
    ended = 0
    for one, handle in zip(alone, handles, strict=True):
        answer = driver.result(handle)
        assert answer.token_ids == one.token_ids
        if answer.finish_reason is FinishReason.STOP:
            jsonschema.validate(answer.parsed, PERSON)
            ended += 1
    assert ended > 3


def test_log_probabilities_are_the_models_own(tiny: Any) -> None:
    """A token that the grammar forces keeps the probability that the model gives it."""
    prompt = tokens_of(12, seed=3)
    driver = Driver(tiny("llama"), tokens=512)
    free = driver.result_of(prompt, 1, logprobs=5)
    held = driver.result_of(prompt, 8, logprobs=5, ignore_eos=False, structured=PERSON)
    assert held.logprobs is not None and free.logprobs is not None
    assert held.text[0] == "{" and held.token_ids[0] != free.token_ids[0]
    assert [t for t, _ in held.logprobs[0].top] == [t for t, _ in free.logprobs[0].top]
    assert held.logprobs[0].logprob < free.logprobs[0].logprob


def test_drafts_that_break_the_form_are_not_taken(tiny: Any, judge: Any) -> None:
    """Right drafts, wrong ones and those that the grammar refuses: the tokens stay the judge's."""
    prompt = tokens_of(20, seed=1)
    expected = judge("llama", prompt, PERSON, 48)
    for wrong in (None, 0, 2):
        driver = Driver(tiny("llama"), tokens=512, forced_tokens=False)
        handle = driver.add(prompt, 48, ignore_eos=False, structured=PERSON)
        while not driver.core.idle:
            for job in driver.core.scheduler.jobs:
                drafts = expected[job.num_generated :][:4]
                if wrong is not None and len(drafts) > wrong:
                    drafts[wrong] = 0 if wrong else expected[0]
                driver.core.scheduler.set_drafts(job.id, drafts)
            driver.step()
        assert list(driver.result(handle).token_ids) == expected
        assert driver.core.stats().steps_by_reason["verify"]


def test_cancel_stop_strings_and_a_cut_end_an_answer_early(tiny: Any) -> None:
    driver = Driver(tiny("llama"), tokens=512)
    cancelled = driver.add(tokens_of(9, seed=1), 60, structured=PERSON)
    driver.step(6)
    driver.core.cancel(cancelled.id)
    stopped = driver.add(tokens_of(9, seed=1), 60, structured=PERSON, stop=['"kind"'])
    cut = driver.add(tokens_of(9, seed=1), 5, structured=PERSON)
    driver.finish()
    assert driver.result(cancelled).finish_reason is FinishReason.CANCELLED
    assert driver.result(stopped).finish_reason is FinishReason.STOP
    for handle in (cancelled, stopped, cut):
        with pytest.raises(StructuredOutputError):
            _ = driver.result(handle).parsed
    assert driver.core.requests._constrainable == 0


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_what_leaves_no_token_fails_its_request_alone(ignore_eos: bool, tiny: Any, theirs: Any) -> None:
    """A matcher that has failed allows the end token, which must not end the answer as if it were whole."""
    driver = Driver(tiny("llama"), tokens=512)
    prompt = tokens_of(9, seed=1)
    free = driver.add(prompt, 30)
    lost = driver.add(prompt, 30, structured=StructuredOutput.regex("ab"), ignore_eos=ignore_eos)
    driver.step(2)
    (answer,) = (a for a in driver.core.requests.answers.values() if a.matcher is not None)
    assert answer.matcher is not None
    assert not answer.matcher.ll_matcher.consume_token(0)
    driver.finish()
    with pytest.raises(StructuredOutputError, match="cannot have the form"):
        driver.result(lost)
    assert list(driver.result(free).token_ids) == theirs("llama", prompt, 30)


def test_a_form_that_is_not_whole_never_ends_as_if_it_were(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a mask says: the matcher of the answer itself judges its end."""
    driver = Driver(tiny("llama"), tokens=512)
    handle = driver.add(tokens_of(9, seed=1), 30, structured=PERSON, ignore_eos=False)
    driver.step(4)
    monkeypatch.setattr(open_requests, "fill_masks", lambda asked: single_token_mask(EOS, 320)[None].repeat(9, axis=0))
    driver.finish()
    with pytest.raises(StructuredOutputError, match="cannot have the form"):
        driver.result(handle)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_what_the_tokenizer_raises_within_the_grammar_ends_no_answer_as_if_it_were_whole(
    kind: type[BaseException], tiny: Any
) -> None:
    """llguidance swallows it. It may be raised for a step, for a drafted one, and on threads of llguidance's own."""
    driver = Driver(tiny("llama"), tokens=512)
    prompt, asked = tokens_of(20), {"ignore_eos": False, "structured": PERSON}
    whole = driver.result_of(prompt, 60, **asked)
    vocabulary = driver.grammars._vocabulary
    assert whole.finish_reason is FinishReason.STOP and vocabulary is not None
    encode, calls, outcomes = vocabulary.encode._encode, [0], []

    def faulty(text: str, **options: Any) -> list[int]:
        calls[0] -= 1
        if calls[0] == 0 or (calls[0] < 0 and kind is ValueError):  # one error alone mostly changes nothing
            raise kind("thrown")
        return encode(text, **options)

    vocabulary.encode._encode = faulty
    for at in (1, 4, 10, 16, 20):
        calls[0] = at
        handles = [driver.add(prompt, 60, **asked) for _ in range(2)]
        try:
            driver.finish()
        except KeyboardInterrupt:
            driver.core.reset()
            outcomes.append("interrupted")
            continue
        for handle in handles:
            try:
                assert driver.result(handle).text == whole.text
            except StructuredOutputError as error:
                outcomes.append(str(error))
    vocabulary.encode._encode = encode
    assert driver.result_of(prompt, 60, **asked).text == whole.text
    assert outcomes and all(told == "interrupted" or "llguidance failed, as the log tells" in told for told in outcomes)
    assert ("interrupted" in outcomes) is (kind is KeyboardInterrupt)
    assert not any("panic" in told or "backtrace" in told for told in outcomes)


@pytest.mark.parametrize("drafted", [False, True])
def test_a_form_that_becomes_too_complex_is_refused(
    drafted: bool, tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask after the second token fails, also where that token is a draft, so that a copy of the matcher fails."""
    monkeypatch.setattr(matcher, "MAX_ITEMS", 400)
    letters, capitals = ascii_lowercase, ascii_uppercase
    branches = {"x": [f'"{c}" y' for c in letters], "y": [f'"{c}" z' for c in capitals], "z": ['"0"', '"1" x']}
    rules = "\n".join(f"{name}: {' | '.join(parts)}" for name, parts in branches.items())
    driver = Driver(tiny("llama"), tokens=512, forced_tokens=False)
    prompt = tokens_of(9, seed=1)
    free = driver.add(prompt, 30)
    lost = driver.add(prompt, 30, structured=StructuredOutput.grammar(f'start: "-" "+" x\n{rules}'), ignore_eos=False)
    while not driver.core.idle:
        for job in driver.core.scheduler.jobs:
            if drafted and job.id == lost.id - 1:
                driver.core.scheduler.set_drafts(job.id, driver.encode("-+aB0")[job.num_generated :])
        driver.step()
    with pytest.raises(FormRefused, match="after 2 tokens of it: parser error: Too many items"):
        driver.result(lost)
    assert list(driver.result(free).token_ids) == theirs("llama", prompt, 30)
    assert not drafted or driver.core.stats().steps_by_reason["verify"]


@pytest.mark.parametrize("forced_tokens", [False, True])
def test_a_forced_text_without_end_fails_its_request_alone(forced_tokens: bool, tiny: Any, theirs: Any) -> None:
    objects = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    endless = {
        "type": "array",
        "prefixItems": [{"enum": [1, 2]}, {"$ref": "#/$defs/a"}],
        "minItems": 2,
        "$defs": {"a": objects},
        "x-guidance": {"whitespace_flexible": False},
    }
    driver = Driver(tiny("llama"), tokens=512, forced_tokens=forced_tokens)
    prompt = tokens_of(9, seed=1)
    free = driver.add(prompt, 30)
    lost = driver.add(prompt, 30, structured=endless)
    driver.finish()
    with pytest.raises(FormRefused, match=f"Too many items .limit {MAX_ITEMS}"):
        driver.result(lost)
    assert list(driver.result(free).token_ids) == theirs("llama", prompt, 30)
    assert driver.core.requests._constrainable == 0


def test_answers_of_one_request_that_fail_in_the_same_step_fail_it_once(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here no mask of theirs allows a token any more."""
    driver = Driver(tiny("llama"), tokens=512)
    prompt = tokens_of(9, seed=1)
    free = driver.add(prompt, 30)
    lost = driver.add(prompt, 30, structured=StructuredOutput.regex("[ab]{9}"), n=3, temperature=1.0)
    driver.step(4)
    monkeypatch.setattr(open_requests, "fill_masks", lambda asked: np.zeros((len(asked), 10), np.uint32))
    driver.finish()
    with pytest.raises(StructuredOutputError, match="no text fits it"):
        driver.result(lost)
    assert list(driver.result(free).token_ids) == theirs("llama", prompt, 30)
    assert driver.core.requests._constrainable == 0


def test_an_engine_takes_schemas_types_and_texts(tiny: Any) -> None:
    with Engine(tiny("llama"), kv_memory="1MB", block_size=8) as engine:
        colours = engine.generate("Sky?", structured=StructuredOutput.choice(["blue", "red"]), temperature=1.0, n=4)
        assert {c.text for c in (colours, *colours.others)} <= {"blue", "red"}
        assert colours.parsed == colours.text and colours.finish_reason is FinishReason.STOP
        number = engine.generate("7", structured=StructuredOutput.regex(r"\d{3}-\d{4}"))
        assert len(number.text) == 8 and number.text[3] == "-"
        listed = engine.generate("1", structured=list[bool], seed=1, temperature=1.0, max_tokens=400)
        assert all(isinstance(each, bool) for each in listed.parsed)
        assert engine.generate("1", structured={"const": "a<s>"}).parsed == "a<s>"  # as any text
        assert engine.generate("1", structured=StructuredOutput.regex("</s>[b]")).text == "</s>b"
        with pytest.raises(InvalidRequest, match="uniqueItems") as refused:
            engine.generate("1", structured={"type": "array", "uniqueItems": True})
        assert refused.value.field == "structured"
        lenient = StructuredOutput.json({"type": "array", "uniqueItems": True, "maxItems": 1}, lenient=True)
        answer = engine.generate("1", structured=lenient)
        assert any("uniqueItems" in note for note in answer.notes)
        info = ReplyInfo("1", "m", 0, engine.token_bytes)
        said = [p.write(Request(("1",), SamplingParams()), [[answer]], info) for p in PROTOCOLS]
        assert [(body.get("choices") or [body])[0]["notes"] for body in said] == [list(answer.notes)] * len(PROTOCOLS)
        ChatCompletion.model_validate(said[1])
        assert engine.generate("1", max_tokens=3).parsed is None


@pytest.mark.parametrize("opened", [False, True])
def test_thoughts_are_free_and_the_answer_after_them_is_not(opened: bool, tmp_path: Path) -> None:
    """The model writes what it is told, as far as the form allows it."""
    template = THINKS if opened else SWITCHED
    folder = write_thinking(tmp_path / "m", template, ("<think>", "</think>"))
    says = "\nWhat {if} it?\n</think>\n\n" if opened else "<think>\nWhat {if} it?\n</think>\n\n"
    form = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with Engine(folder, kv_memory="1MB", block_size=8) as engine:
        asked = [{"role": "user", "content": "hi"}]
        answer = engine.generate(asked, dictated(engine, says + '{"a": 12}', structured=form))
        assert (answer.parsed, answer.thinking) == ({"a": 12}, "What {if} it?")
        with pytest.raises(StructuredOutputError, match=r"excluded by the form.*or by the logits processors"):
            engine.generate(asked, dictated(engine, says + "twelve", structured=form))
        cut = engine.generate(asked, dictated(engine, says, structured=form, max_tokens=9))
        assert cut.finish_reason is FinishReason.LENGTH and not cut.text
        if not opened:
            assert engine.generate(asked, dictated(engine, '{"a": 3}', structured=form)).parsed == {"a": 3}


def test_a_tokenizer_that_drops_a_space_may_write_it_before_the_answer() -> None:
    """sentencepiece's first token of a text often begins with one, which is no part of the text."""
    table = TokenTable((b"a", b" a", b"b", b""), frozenset({3}), frozenset({3}), drops_space=True)

    class Tokens:
        def token_table(self, size: int) -> TokenTable:
            return table

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return []

    compiler = GrammarCompiler(Tokens(), 4)  # type: ignore[arg-type]
    mask = compiler.compile(StructuredOutput.regex("ab")).first_mask
    assert mask[0, 0] == 0b0011


def test_ignored_end_tokens_end_no_answer_before_its_form_does(tiny: Any) -> None:
    driver = Driver(tiny("llama"), tokens=512)
    answer = driver.result_of(tokens_of(9, seed=1), 60, structured=StructuredOutput.regex("(ab){2,9}"), ignore_eos=True)
    assert answer.finish_reason is FinishReason.STOP and answer.text[:4] == "abab"


def test_an_ignored_end_token_after_the_form_is_no_text(tiny: Any) -> None:
    """A form has an end even where more could come, and only the end token says so."""
    with Engine(str(tiny("llama")), kv_memory="4MB") as engine:
        ends = {EOS: 60.0, engine.encode("a")[-1]: 50.0}
        for form in (StructuredOutput.regex("a{3,9}"), StructuredOutput.regex("a+")):
            answer = engine.generate("x", structured=form, logit_bias=ends, ignore_eos=True, max_tokens=20)
            assert (answer.finish_reason, answer.text) == (FinishReason.STOP, "aaa" if "3" in form.definition else "a")


def test_a_plan_holds_no_type_of_the_callers(tiny: Any) -> None:
    class Own:
        pass

    form = StructuredOutput(StructuredOutput.json().form, json.dumps({"type": "object"}), result_type=Own)
    driver = Driver(tiny("llama"), tokens=512)
    driver.add(tokens_of(9, seed=1), 4, structured=form)
    driver.add(tokens_of(9, seed=1), 4, tools=[Tool("f", function=print)])
    plan = driver.core.scheduler.plan(0)
    assert plan is not None and plan.sampling is not None
    assert [(row.params.structured, row.params.tools) for row in plan.sampling] == [(None, ())] * 2


def test_params_keep_the_form() -> None:
    params = SamplingParams(structured={"type": "object"})
    assert params.form is not None and json.loads(params.form.definition) == {"type": "object"}
    assert SamplingParams().form is None


# Any order of structured and free requests, steps, cancels, stops and memory pressure: every answer is the one that
# its request gets alone, or the beginning of it.


COMPACT = {"whitespace_flexible": False}
SCHEMA = {
    "x-guidance": COMPACT,
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy", 3]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS: tuple[Any, ...] = (
    None,
    SCHEMA,
    StructuredOutput.regex("[ab]{2,20}-?"),
    StructuredOutput.choice(["red", "green", "greenish blue"]),
)


class Machine(RuleBasedStateMachine):
    """A core with few rows and a tight arena."""

    folder: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(self.folder, tokens=160, max_rows=3)
        self.asked: list[tuple[RequestHandle, dict[str, Any]]] = []

    @rule(
        form=st.integers(0, len(FORMS) - 1),
        prompt=st.integers(1, 40),
        count=st.integers(1, 40),
        seed=st.integers(0, 3),
        n=st.sampled_from((1, 1, 2)),
        stop=st.sampled_from(((), (), ("b",), ('"b"',))),
    )
    def add(self, **asked: Any) -> None:
        self.asked.append((_add(self.driver, asked), asked))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        self.driver.step(count)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.asked:
            self.driver.core.cancel(data.draw(st.sampled_from(self.asked))[0].id)

    @rule(critical=st.booleans())
    def relieve(self, critical: bool) -> None:
        self.driver.core.relieve(critical)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.driver.core.check_invariants()
        requests = self.driver.core.requests
        assert requests._constrainable == sum(answer.matcher is not None for answer in requests.answers.values())

    def teardown(self) -> None:
        self.driver.finish()
        assert self.driver.core.requests._constrainable == 0
        for handle, asked in self.asked:
            answer = handle.result(0)
            alone = _alone(self.folder, tuple(sorted(asked.items())))
            for mine, other in zip((answer, *answer.others), (alone, *alone.others), strict=True):
                _check(mine, other, FORMS[asked["form"]])


def _add(driver: Driver, asked: dict[str, Any]) -> RequestHandle:
    form = FORMS[asked["form"]]
    # A free answer is greedy: with 320 tokens to draw from, rounding in another batch now and then draws the next one.
    temperature = 0.0 if asked["seed"] == 0 or form is None else 1.5
    return driver.add(
        tokens_of(asked["prompt"], seed=asked["prompt"]),
        asked["count"],
        seed=asked["seed"],
        n=asked["n"],
        stop=asked["stop"],
        structured=form,
        temperature=temperature,
        ignore_eos=form is None,
    )


@cache
def _alone(folder: Path, asked: tuple[tuple[str, Any], ...]) -> Completion:
    """The answer of an engine that has nothing else to do."""
    driver = Driver(folder, tokens=512)
    handle = _add(driver, dict(asked))
    driver.finish()
    return handle.result(0)


def _check(mine: Completion, alone: Completion, form: Any) -> None:
    if mine.finish_reason is FinishReason.CANCELLED:
        assert alone.token_ids[: len(mine.token_ids)] == mine.token_ids
        return
    assert (mine.token_ids, mine.text, mine.finish_reason) == (alone.token_ids, alone.text, alone.finish_reason)
    if form is SCHEMA and mine.finish_reason is FinishReason.STOP and mine.text.endswith("}"):
        jsonschema.validate(mine.parsed, SCHEMA)


@pytest.mark.parametrize(
    ("name", "examples"),
    [
        ("llama", 6),
        pytest.param("llama", 120, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 60, marks=pytest.mark.slow),
        pytest.param("mamba", 40, marks=pytest.mark.slow),
    ],
)
def test_every_answer_is_the_one_that_its_request_gets_alone(name: str, examples: int, tiny: Any) -> None:
    Machine.folder = tiny(name)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None)
    )
