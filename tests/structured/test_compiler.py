"""Forms become grammars: once, within bounds, after thoughts, and as far as the library can."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.models import load_model
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.structured import compiler as deep_stack
from cortexmlx.structured.calls.format import AllowedCalls, CallFormat
from cortexmlx.structured.calls.json_formats import Hermes, Llama
from cortexmlx.structured.compiler import MAX_KEPT, STACK_BYTES, GrammarCompiler, grammar_source, run_on_deep_stack
from cortexmlx.structured.matcher import MAX_ITEMS
from cortexmlx.structured.output import MAX_CHOICES, StructuredOutput, Thoughts
from cortexmlx.structured.tools import Tool
from support.tool_calls import TOOLS

X = 87
"""The token "x" of the tiny tokenizer, whose alphabet begins with "!"."""


@pytest.fixture
def compiler(tiny: Any) -> GrammarCompiler:
    return GrammarCompiler(SharedTokenizer(load_model(tiny("llama")).tokenizer), 300)


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    form = StructuredOutput.json({"type": "object"})
    assert not compiler._cached_grammars
    first = compiler.compile(form)
    assert (
        first in compiler._cached_grammars.values()
        and compiler.compile(StructuredOutput.json('{"type": "object"}')) is first
    )
    assert compiler.compile(StructuredOutput.json({"type": "object"}, lenient=True)) is not first
    thinking = compiler.compile(form, Thoughts("<think>", "</think>"))
    assert thinking is not first and compiler.compile(form, Thoughts("<think>", "</think>")) is thinking
    for number in range(MAX_KEPT):
        compiler.compile(StructuredOutput.choice([str(number)]))
    assert first not in compiler._cached_grammars.values() and compiler.compile(form) is not first


def test_threads_share_one_vocabulary(compiler: GrammarCompiler) -> None:
    failed: list[BaseException] = []

    def compile_some(begin: int) -> None:
        try:
            for number in range(begin, begin + 20):
                grammar = compiler.compile(StructuredOutput.choice([f"x{number % 7}"]))
                assert not grammar.make_matcher().accept(X)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=compile_some, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (StructuredOutput.json({"not": {"type": "string"}}), r'schema.*"not".*lenient=True'),
        (StructuredOutput.json({"type": "objekt"}), "objekt"),
        (StructuredOutput.json({"$ref": "#/nowhere"}), "nowhere"),
        (StructuredOutput.json({"type": "integer", "minimum": 5, "maximum": 2}), r"minimum \(5\)"),
        (StructuredOutput.json(False), "Unsatisfiable"),
        (StructuredOutput.regex("(a"), "regular expression"),
        (StructuredOutput.regex(r"(a)\1"), "regular expression"),
        (StructuredOutput.grammar("start: missing"), "grammar.*missing"),
        (StructuredOutput.grammar("no grammar at all"), "grammar"),
        (StructuredOutput.grammar("start: start"), "no text fits it$"),
        (StructuredOutput.json({"$ref": "#"}), "no text fits it$"),
        (StructuredOutput.regex("a[b&&c]"), "no text fits it$"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(
    form: StructuredOutput, words: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        compiler.compile(form)
    assert "\n" not in str(refused.value) and refused.value.field == "structured"
    assert not compiler._cached_grammars


def test_lenient_schemas_say_what_they_ignore(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "uniqueItems": True}
    assert any("uniqueItems" in note for note in compiler.compile(StructuredOutput.json(schema, lenient=True)).notes)
    own = {**schema, "x-guidance": {"lenient": True}}
    assert compiler.compile(StructuredOutput.json(own)).notes
    assert compiler.compile(StructuredOutput.json({"type": "array"})).notes == ()


def _recursion() -> dict[str, Any]:
    """An object that must have an object, and so on: no document is whole. Without blanks, all of it is forced."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    return {**schema, "x-guidance": {"whitespace_flexible": False}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (_recursion(), f"Too many items .limit {MAX_ITEMS}"),
        ({"type": "object", "properties": {f"k{i}": {} for i in range(600)}}, "row has .* items"),
    ],
    ids=["forced text without end", "600 optional properties"],
)
def test_a_form_that_cannot_begin_is_refused(schema: dict[str, Any], words: str, compiler: GrammarCompiler) -> None:
    """llguidance tells it with the first token. A request must not be accepted, and fail after that."""
    with pytest.raises(InvalidRequest, match=words) as refused:
        compiler.compile(StructuredOutput.json(schema))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_a_choice_may_have_as_many_texts_as_are_promised(compiler: GrammarCompiler) -> None:
    texts = [f"{number:05}" for number in range(MAX_CHOICES)]
    grammar = compiler.compile(StructuredOutput.choice(texts))
    for text in (texts[0], texts[-1]):
        matcher = grammar.make_matcher()
        ended = [matcher.accept(token) for token in compiler._vocabulary.encode(text)]  # type: ignore[union-attr]
        assert ended == [False] * (len(ended) - 1) + [True] and not matcher.error
    matcher = grammar.make_matcher()
    for token in compiler._vocabulary.encode("99999"):  # type: ignore[union-attr]
        if matcher.accept(token):
            break
    assert matcher.error


def _nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def _chain(begin: str, link: str, length: int) -> str:
    """Rules that each name the next one, and a last one."""
    links = "".join(link.format(number, number + 1) for number in range(length))
    last = 'r{}: "x"' if begin.startswith("start") else ',"r{}":{{}}'
    return f"{begin}{links}{last.format(length)}"


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutput.json({"properties": {f"k{i}": {"enum": [f"v{j}" for j in range(99)]} for i in range(430)}}),
        StructuredOutput.json(_nested(100)),
        StructuredOutput.json({"enum": [f"value number {i}" for i in range(10_000)]}),
        StructuredOutput.choice(f"choice {i}" for i in range(10_000)),
        StructuredOutput.json({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "$ref": "#/$defs/a"}),
        StructuredOutput.json({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}),
        StructuredOutput.json({"type": "string", "minLength": 100_000}),
        StructuredOutput.json({"type": "array", "minItems": 100_000}),
        StructuredOutput.json({"properties": {f"k{i}": {} for i in range(1_500)}}),
        StructuredOutput.json({"allOf": [{"properties": {f"k{i}": {"type": "string"}}} for i in range(300)]}),
        StructuredOutput.regex("(a*)*b" * 200),
        StructuredOutput.regex("(.{1,500}){1,500}"),
        StructuredOutput.regex("a{1000000}"),
        StructuredOutput.regex("(" * 5_000 + "a" + ")" * 5_000),
        StructuredOutput.regex("[a-z]*.*[a-z]*.*x" * 20),
        StructuredOutput.grammar('start: start start | "a"'),
        StructuredOutput.grammar("start: " + " ".join(["a?"] * 300) + '\na: "a"'),
        StructuredOutput.grammar(_chain("start: r0\n", "r{}: r{}\n", 17_000)),
        StructuredOutput.json(
            json.loads(_chain('{"$ref":"#/r0"', ',"r{}":{{"items":{{"$ref":"#/r{}"}}}}', 2_000) + "}")
        ),
    ],
    ids=lambda form: f"{form.form}-{len(form.definition)}-{form.definition[:24]}",
)
def test_a_hostile_form_is_refused_or_compiled_in_bounded_time(form: StructuredOutput, tiny: Any) -> None:
    """The bound is on this process's CPU time, which no other program takes. Compiling releases Python's lock."""
    compiler = GrammarCompiler(SharedTokenizer(load_model(tiny("llama")).tokenizer), 300)
    began = time.process_time()
    try:
        grammar = compiler.compile(form)
    except InvalidRequest as refused:
        assert len(str(refused)) < 600
    else:
        assert grammar.first_mask.any()
    assert time.process_time() - began < 30


def test_a_schema_that_is_nested_too_deep_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match=r"recursion|deep"):
        compiler.compile(StructuredOutput.json(_nested(500)))


def test_a_tokenizer_without_bytes_of_tokens_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedTokenizer, "token_table", lambda self, size: None)
    with pytest.raises(InvalidRequest, match="not available with this model"):
        compiler.compile(StructuredOutput.json())
    required = SimpleNamespace(form=None, params=None, calls=AllowedCalls(Hermes(), TOOLS, "required"))
    required.params = required
    with pytest.raises(InvalidRequest, match="tool_choice 'required' cannot be enforced"):
        compiler.compile_request(required)  # type: ignore[arg-type]


def test_special_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    """The end token is written `<end>`, and no answer may contain it, not even in a string."""
    table = compiler._token_table()
    (end,) = table.end_ids & table.special
    grammar = compiler.compile(StructuredOutput.regex(".*<end>.*"))
    matcher = grammar.make_matcher()
    assert matcher.accept(end) and matcher.error
    assert json.loads(StructuredOutput.json().definition) == {"type": "object"}


def test_nothing_is_left_of_a_compiler_that_was_used(tiny: Any) -> None:
    """llguidance is no part of what Python's garbage collector sees: a cycle through it would never be freed."""
    tokenizer = SharedTokenizer(load_model(tiny("llama")).tokenizer)
    compiler, seen = GrammarCompiler(tokenizer, 300), weakref.ref(tokenizer)
    matcher = compiler.compile(StructuredOutput.json({"type": "object"})).make_matcher(forced_tokens=True)
    assert not matcher.accept(compiler._tokenizer.encode("{", False)[0])
    del tokenizer, compiler, matcher
    gc.collect()
    assert seen() is None


def test_a_tool_is_enforced_as_far_as_possible_unless_it_is_strict(compiler: GrammarCompiler) -> None:
    """Of a schema with a pattern that cannot be enforced, the other properties still are."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "(?=x)"},
            "b": {"enum": ["yes"]},
            "c": {"items": {"$ref": "#/properties/b"}},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    broken = {"type": "object", "properties": {"a": {"type": "string"}}, "allOf": [{"$ref": "#/nowhere"}]}

    def takes(tool: Tool, arguments: str) -> bool:
        grammar = compiler.compile(None, None, AllowedCalls(Hermes(), (tool,), "required"))
        matcher = grammar.make_matcher()
        assert len(grammar.notes) == 1 and tool.name in grammar.notes[0]
        text = f'<tool_call>\n{{"name": "{tool.name}", "arguments": {arguments}}}'
        return not any(matcher.accept(token) for token in compiler._tokenizer.encode(text, False)) and not matcher.error

    odd = Tool.named("odd", "", schema)
    assert takes(odd, '{"a": "x", "b": "yes"}') and takes(odd, '{"a": 5, "b": "yes"}')
    assert not takes(odd, '{"a": "x", "b": "no"}') and not takes(odd, '{"d": "x"}')
    assert not takes(odd, '{"a": "x", "b": "yes", "c": ["no"]}')
    assert takes(Tool.named("loose", "", broken), '{"anything": [1]}')
    with pytest.raises(InvalidRequest, match="the tool 'odd' cannot be enforced"):
        compiler.compile(None, None, AllowedCalls(Hermes(), (Tool.named("odd", "", schema, True),), "required"))


# The grammars that llguidance gets: the answer's own, and what may come before it.


SPECIALS = {"<end>": 256, "<|channel|>": 257, "<|message|>": 258, "<|start|>": 259, "<|done|>": 260}
FORM = StructuredOutput.json({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
HARMONY = Thoughts(
    "<|channel|>analysis<|message|>",
    "<|done|><|start|>assistant<|channel|>final<|message|>",
    skip_text="<|channel|>final<|message|>",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The 256 bytes, and special tokens."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    class Bytes:
        eos_token_id = 256
        bos_token_id = None
        tokens = (*(bytes([i]) for i in range(256)), *(text.encode() for text in SPECIALS))
        special_token_ids = tuple(SPECIALS.values())

        def __call__(self, text: str) -> list[int]:
            if not isinstance(text, str):
                raise TypeError
            return list(text.encode())

    return LLTokenizer(TokenizerWrapper(Bytes()))


def ids(text: str) -> list[int]:
    """The tokens of a text, in which the special tokens are written out."""
    tokens: list[int] = []
    while text:
        special = next((s for s in SPECIALS if text.startswith(s)), None)
        tokens += [SPECIALS[special]] if special else list(text[0].encode())
        text = text[len(special or text[0]) :]
    return tokens


def follows(tokenizer: Any, source: str, text: str) -> bool | None:
    """Whether a text is whole; None if it is refused."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.is_accepting()) if matcher.consume_tokens(ids(text)) else None


@pytest.mark.parametrize(
    ("thoughts", "whole", "part", "wrong"),
    [
        (None, ['{"a":1}', '{ "a" : 1 }', '{\n  "a": 1}'], ['{"a'], ['x{"a":1}', '<think>b</think>{"a":1}']),
        (
            Thoughts("<think>", "</think>", opened_by_prompt=True),
            ['</think>{"a":1}', 'so </thin k> {"a":2} é </think>\n\n{"a":1}'],
            ["", "hm", '{"a":1}', "hm </think>", '</think>\n{"a"'],
            ["</think>x", "<end>"],
        ),
        (
            Thoughts("<think>", "</think>"),
            ['{"a":1}', '<think></think>{"a":1}', '\n<think>\nwell\n</think>\n\n{"a":1}'],
            ["<thi", "<think>so", "\n"],
            ["<thx", "so", "<think>a</think>b"],
        ),
        (
            HARMONY,
            [
                '<|channel|>analysis<|message|>hm {"a"} <|done|><|start|>assistant<|channel|>final<|message|>{"a":1}',
                '<|channel|>final<|message|>{"a":1}',
                '{"a":1}',
            ],
            ["<|channel|>analysis<|message|>hm", "<|channel|>analysis<|message|>hm<|done|><|start|>assis"],
            ["<|channel|>commentary", "<|channel|>analysis<|message|>hm<|start|>", "<|message|>"],
        ),
    ],
)
def test_thoughts_are_free_and_the_answer_is_not(
    thoughts: Thoughts | None, whole: list[str], part: list[str], wrong: list[str], tokenizer: Any
) -> None:
    source = grammar_source(FORM, thoughts, False, SPECIALS)
    assert [follows(tokenizer, source, text) for text in whole] == [True] * len(whole)
    assert [follows(tokenizer, source, text) for text in part] == [False] * len(part)
    assert [follows(tokenizer, source, text) for text in wrong] == [None] * len(wrong)


@pytest.mark.parametrize(
    "thoughts", [Thoughts("<think>", "<|done|>", opened_by_prompt=True), replace(HARMONY, opened_by_prompt=True)]
)
def test_a_special_token_that_is_spelled_out_closes_no_thoughts(thoughts: Thoughts, tokenizer: Any) -> None:
    """Who reads the text would take it for one, and everything after it for the answer."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar_source(FORM, thoughts, False, SPECIALS), log_level=0)
    begun = list(b"hm <|done|")
    assert matcher.try_consume_tokens([*begun, *b">"]) == len(begun)
    assert matcher.consume_tokens(ids(thoughts.close + '{"a":1}')) and matcher.is_accepting()


def test_a_tokenizer_that_drops_a_space_may_write_one(tokenizer: Any) -> None:
    """The first token of an answer often begins with it, and its text has none."""
    for thoughts in (None, Thoughts("<think>", "</think>")):
        source = grammar_source(FORM, thoughts, True, SPECIALS)
        assert follows(tokenizer, source, ' {"a":1}') and follows(tokenizer, source, '{"a":1}')
    assert follows(tokenizer, grammar_source(FORM, None, False, SPECIALS), ' {"a":1}') is None


@pytest.mark.parametrize(
    ("form", "whole", "wrong"),
    [
        (StructuredOutput.regex(r"a/b\n[é✓]+"), ["a/b\né✓"], ["a\\/b\né"]),
        (StructuredOutput.choice(["yes", "yes please", 'a "b"\n\\', "é✓😀", "/"]), ['a "b"\n\\', "é✓😀", "/"], ["no"]),
        (StructuredOutput.grammar('start: "a" b+\nb: "b" | "c"'), ["ab", "acb"], ["b"]),
        (StructuredOutput.json(True), ["1", '"x"', '[{"a":null}]'], ["x"]),
        (StructuredOutput.json(), ['{"x": [1, 2]}', "{}"], ["1", "[]"]),
        (StructuredOutput.json({"enum": [1, "é"]}), ["1", '"é"'], ["2"]),
        (StructuredOutput.json({"x-guidance": {"whitespace_flexible": False}, "type": "array"}), ["[1,2]"], ["[1, 2]"]),
        (StructuredOutput.json({"type": "array"}, compact=True), ["[1,2]"], ["[1, 2]"]),
        (StructuredOutput.json(True, compact=True), ['{"a":1}'], ['{"a": 1}']),
        (StructuredOutput.json({"x-guidance": {"whitespace_pattern": " "}}, compact=True), ['{"a":1}'], ['{"a": 1}']),
        (
            StructuredOutput.json({"type": "object", "properties": {"a": {}}}, closed=True),
            ["{}", '{"a": {"b": 1}}'],
            ['{"b": 1}', '{"a": 1, "b": 1}'],
        ),
    ],
)
def test_forms(form: StructuredOutput, whole: list[str], wrong: list[str], tokenizer: Any) -> None:
    for thoughts in (None, Thoughts("<think>", "</think>")):
        source = grammar_source(form, thoughts, False, SPECIALS)
        assert [follows(tokenizer, source, text) for text in whole] == [True] * len(whole)
        assert [follows(tokenizer, source, text) for text in wrong] == [None] * len(wrong)


def test_blanks_between_the_parts_of_json_are_bounded(tokenizer: Any) -> None:
    source = grammar_source(FORM, None, False, SPECIALS)
    assert follows(tokenizer, source, '{"a": ' + "1}") and follows(tokenizer, source, '{"a":\n' + " " * 40 + "1}")
    for blanks in ("  ", "\n\n", " \n", "\n" + " " * 41, "\t"):
        assert follows(tokenizer, source, '{"a":' + blanks + "1}") is None


TAGGED = Thoughts("<think>", "</think>")


def hermes_call(days: int) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "Oslo", "days": {days}}}}}\n</tool_call>'


def llama_call(days: int) -> str:
    return f'{{"name": "weather", "parameters": {{"city": "Oslo", "days": {days}}}}}'


@pytest.mark.parametrize(
    ("format", "call", "after_thoughts"),
    [(Hermes(), hermes_call, "\n\nwell "), (Llama(), llama_call, "\n\n")],
    ids=["hermes", "llama"],
)
def test_calls_come_after_thoughts_and_after_a_dropped_space(
    format: CallFormat, call: Callable[[int], str], after_thoughts: str, tokenizer: Any
) -> None:
    """What looks like a call in the thoughts is none, and need not fit a schema."""
    calls = AllowedCalls(format, TOOLS)
    for drops_space in (False, True):
        source = grammar_source(None, TAGGED, drops_space, SPECIALS, calls)
        begun = grammar_source(
            None, Thoughts("<think>", "</think>", opened_by_prompt=True), drops_space, SPECIALS, calls
        )
        whole = [call(1), f"<think>{call(-1)}</think>{call(1)}", f"<think>so</think>{after_thoughts}", "plain text"]
        assert [follows(tokenizer, source, text) for text in whole] == [True] * len(whole)
        assert follows(tokenizer, begun, f"{call(-1)}</think>{call(2)}") is True
        wrong = [call(-1), f"<think>so</think>{call(-1)}"]
        assert [follows(tokenizer, source, text) for text in wrong] == [None] * len(wrong)
        for open_, own in (("<think>", source), ("", begun)):
            assert follows(tokenizer, own, f"{open_}hm, {call(-1)}") is True, "an answer may end within its thoughts"
        required = grammar_source(None, TAGGED, drops_space, SPECIALS, AllowedCalls(format, TOOLS, "required"))
        assert not follows(tokenizer, required, f"<think>{call(1)}"), "unless a call is required"
        assert follows(tokenizer, source, " " + call(1)) is True or not drops_space


def test_a_form_or_calls_come_after_thoughts(tokenizer: Any) -> None:
    source = grammar_source(FORM, TAGGED, False, SPECIALS, AllowedCalls(Hermes(), TOOLS))
    for text in ('<think>hm</think>{"a":1}', f"<think>hm</think>{hermes_call(1)}", '{"a": 1}'):
        assert follows(tokenizer, source, text) is True
    assert not follows(tokenizer, source, "<think>hm"), "a form is asked for"
    for text in ("<think>hm</think>b", f'{{"a":1}}{hermes_call(1)}'):
        assert follows(tokenizer, source, text) is None


# A thread with a large stack.


def test_it_runs_elsewhere_and_the_size_is_that_thread_s_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        sizes.append(threading.stack_size())
        start(thread)

    before = threading.stack_size()
    monkeypatch.setattr(threading.Thread, "start", noted)
    assert run_on_deep_stack(threading.get_ident) != threading.get_ident()
    assert (sizes, threading.stack_size()) == ([STACK_BYTES], before)


def test_what_is_raised_there_is_raised_here() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        run_on_deep_stack(fail)


def test_without_such_a_thread_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    before = threading.stack_size()
    monkeypatch.setattr(deep_stack.threading.Thread, "start", refuse)
    assert run_on_deep_stack(threading.get_ident) == threading.get_ident()
    assert threading.stack_size() == before
