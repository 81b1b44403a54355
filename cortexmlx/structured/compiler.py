"""GrammarCompiler: compiles the grammar of an answer from the form and the tools of a request, on the caller's
thread.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from cortexmlx.errors import InvalidRequest
from cortexmlx.models.messages import one_line
from cortexmlx.structured import lark
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.matcher import Grammar, TokenizerFailure
from cortexmlx.structured.output import Form, StructuredOutput, Thoughts
from cortexmlx.structured.schemas import allowed_escapes
from cortexmlx.types.request import QueuedRequest

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from cortexmlx.models.tokenizers.shared import SharedTokenizer, TokenTable
    from cortexmlx.structured.calls.format import AllowedCalls
    from cortexmlx.structured.tools import Tool


MAX_KEPT = 64
"""How many compiled grammars are kept. One of 24 tools takes some 5 MB."""

_MAX_TRIED = 64
"""How many properties of a tool are tried one by one, if all of them together cannot be enforced."""

_ANY_OBJECT = '{"type":"object","additionalProperties":true}'

_Key = tuple[StructuredOutput | None, Thoughts | None, "AllowedCalls | None"]


class GrammarCompiler:
    """Compiles the grammars of one model's answers, and keeps the `MAX_KEPT` last used. Any number of threads may use
    it at once. Nothing is imported or built before the first use.
    """

    def __init__(self, tokenizer: SharedTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: _GuidanceVocabulary | None = None
        self._cached_grammars: OrderedDict[_Key, Grammar] = OrderedDict()

    def compile_request(self, request: QueuedRequest) -> Grammar | None:
        """Return the grammar that the answers of a request follow; None if they are free. Raises InvalidRequest."""
        output, calls = request.params.form, request.calls
        if calls is None:
            return None if output is None else self.compile(output, request.thoughts)
        if output is None and not calls.is_enforced:
            return None
        if output is not None or self.can_enforce:
            return self.compile(output, request.thoughts, calls)
        if calls.is_required:
            raise InvalidRequest(
                f"tool_choice {calls.choice!r} cannot be enforced with this model: ask with 'auto'",
                field="tool_choice",
            )
        return None

    def compile(
        self, output: StructuredOutput | None, thoughts: Thoughts | None = None, calls: AllowedCalls | None = None
    ) -> Grammar:
        """Return the compiled grammar of an answer with this form or these `calls`, after the model's `thoughts`.

        Tools that are not strict are enforced as far as possible, and the grammar's notes say what is not.

        Raises InvalidRequest if the form cannot be enforced. The message names the reason, such as a keyword of the
        schema.
        """
        key = output, thoughts, calls
        with self._lock:
            if key in self._cached_grammars:
                self._cached_grammars.move_to_end(key)
                return self._cached_grammars[key]
            if self._vocabulary is None:
                self._vocabulary = _GuidanceVocabulary(self._token_table(), self._tokenizer.encode)
        try:
            grammar = self._compile_strictly(self._vocabulary, output, thoughts, calls)
        except InvalidRequest:
            if calls is None:
                raise
            relaxed_calls, notes = self._relax_calls(self._vocabulary, calls)
            if not notes:
                raise
            grammar = self._compile_strictly(self._vocabulary, output, thoughts, relaxed_calls)
            grammar.notes += notes
        with self._lock:
            self._cached_grammars[key] = grammar
            while len(self._cached_grammars) > MAX_KEPT:
                self._cached_grammars.popitem(last=False)
        return grammar

    def _compile_strictly(
        self,
        vocabulary: _GuidanceVocabulary,
        output: StructuredOutput | None,
        thoughts: Thoughts | None,
        calls: AllowedCalls | None,
    ) -> Grammar:
        """Compile a grammar. Raises InvalidRequest if it cannot be enforced as it is."""
        source = grammar_source(output, thoughts, vocabulary.table.drops_space, vocabulary.specials, calls)
        grammar = run_on_deep_stack(lambda: Grammar(vocabulary.tokenizer, source, vocabulary.tokenizer_failure))
        if grammar.error:
            raise self._compile_error(vocabulary, output, calls, grammar.error)
        return grammar

    def _relax_calls(
        self, vocabulary: _GuidanceVocabulary, calls: AllowedCalls
    ) -> tuple[AllowedCalls, tuple[str, ...]]:
        """Relax schemas of non-strict tools where they cannot be enforced. Return the calls, and notes about it."""
        tools, notes = list(calls.tools), []
        for index, tool in enumerate(tools):
            if tool.strict or tool not in calls.callable_tools:
                continue
            if reason := self._why_not_enforceable(vocabulary, calls, tool):
                notes.append(reason)
                tools[index] = self._relax_tool(vocabulary, calls, tool)
        return replace(calls, tools=tuple(tools)), tuple(notes)

    def _relax_tool(self, vocabulary: _GuidanceVocabulary, calls: AllowedCalls, tool: Tool) -> Tool:
        """Return a copy of a tool that allows any value where a property cannot be enforced, or else any object."""
        schema = tool.schema
        properties: dict[str, Any] = schema.get("properties", {})
        if len(properties) <= _MAX_TRIED:
            base_schema = {name: part for name, part in schema.items() if name != "required"}
            free_properties = dict.fromkeys(properties, True)
            single_schemas = {
                name: {**base_schema, "properties": {**free_properties, name: part}}
                for name, part in properties.items()
            }
            is_enforceable = {
                name: not self._why_not_enforceable(
                    vocabulary, calls, replace(tool, parameters=json.dumps(single_schema))
                )
                for name, single_schema in single_schemas.items()
            }
            relaxed_properties = {name: part if is_enforceable[name] else True for name, part in properties.items()}
            relaxed_tool = replace(tool, parameters=json.dumps({**schema, "properties": relaxed_properties}))
            if not self._why_not_enforceable(vocabulary, calls, relaxed_tool):
                return relaxed_tool
        return replace(tool, parameters=_ANY_OBJECT)

    def _why_not_enforceable(self, vocabulary: _GuidanceVocabulary, calls: AllowedCalls, tool: Tool) -> str:
        """Return why the calls of a tool cannot be enforced; empty if they can."""
        try:
            self._compile_strictly(vocabulary, None, None, replace(calls, tools=(tool,), choice=tool.name))
        except InvalidRequest as error:
            return str(error)
        return ""

    @property
    def can_enforce(self) -> bool:
        """Whether answers of this model can be made to follow a grammar."""
        try:
            with self._lock:
                self._vocabulary = self._vocabulary or _GuidanceVocabulary(self._token_table(), self._tokenizer.encode)
        except InvalidRequest:
            return False
        return True

    def _compile_error(
        self, vocabulary: _GuidanceVocabulary, output: StructuredOutput | None, calls: AllowedCalls | None, error: str
    ) -> InvalidRequest:
        """Return the error for a grammar that cannot be compiled. It names the tool, if one is to blame."""
        if calls is None:
            return InvalidRequest(_refusal_message(output, error), field="structured")
        if output is None and len(calls.tools) == 1:
            message = f"the parameters of the tool {calls.tools[0].name!r} cannot be enforced: {one_line(error)}"
            return InvalidRequest(message, field="tools")
        if output is not None:
            self._compile_strictly(vocabulary, output, None, None)
        for tool in calls.callable_tools:
            self._compile_strictly(vocabulary, None, None, replace(calls, tools=(tool,), choice=tool.name))
        return InvalidRequest(f"these tools cannot be enforced together: {one_line(error)}", field="tools")

    def _token_table(self) -> TokenTable:
        """Return the text of each token. Raises InvalidRequest if that cannot be had with this model."""
        table = self._tokenizer.token_table(self._vocab_size)
        if table is None:
            raise InvalidRequest(
                "structured output is not available with this model: the text of its tokens depends on the tokens "
                "before them",
                field="structured",
            )
        if not table.end_ids:
            raise InvalidRequest(
                "structured output is not available with this model: it has no token that ends an answer",
                field="structured",
            )
        return table


class _GuidanceVocabulary:
    """The model's vocabulary and tokenizer, in the form that llguidance takes."""

    def __init__(self, table: TokenTable, encode: Callable[..., list[int]]) -> None:
        from llguidance import LLTokenizer

        self.table = table
        self.specials = {
            table.pieces[t].decode("utf-8", "replace"): t for t in sorted(table.special) if _has_token(t, table)
        }
        self.tokenizer_failure = TokenizerFailure()
        self.encode = _TokenizerWrapper(table, encode, self.tokenizer_failure)
        """Returns the tokens of a text."""
        self.tokenizer: LLTokenizer = LLTokenizer(self.encode, eos_token=sorted(table.end_ids))  # type: ignore[arg-type]


class _TokenizerWrapper:
    """Stands in for llguidance's `TokenizerWrapper`: calls the model's tokenizer, and keeps what it raises.

    llguidance holds it where Python's garbage collector does not look. So it must not lead to the LLTokenizer: neither
    would ever be freed, nor the model's tokenizer.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, table: TokenTable, encode: Callable[..., list[int]], tokenizer_failure: TokenizerFailure
    ) -> None:
        self.tokens = table.pieces
        self.eos_token_id = min(table.end_ids)
        self.special_token_ids = sorted(t for t in table.special | table.end_ids if _has_token(t, table))
        token_by_byte = {
            piece[0]: t for t, piece in enumerate(table.pieces) if len(piece) == 1 and t not in table.special
        }
        self._spelled_tokens = {
            t: [token_by_byte[byte] for byte in self.tokens[t]]
            for t in self.special_token_ids
            if token_by_byte.keys() >= set(self.tokens[t])
        }
        """The tokens that write the text of a special token: in a form, it is any text."""
        self._encode = encode
        self._tokenizer_failure = tokenizer_failure

    def __call__(self, text: str) -> list[int]:
        try:
            encoded = self._encode(text, add_special_tokens=False)
            return [each for token in encoded for each in self._spelled_tokens.get(token, (token,))]
        except BaseException as error:
            self._tokenizer_failure.error = error
            raise


def _has_token(token: int, table: TokenTable) -> bool:
    """Return whether a table has the text of a token."""
    return 0 <= token < len(table.pieces)


def _refusal_message(output: StructuredOutput | None, error: str) -> str:
    """Return the message for a form that cannot be enforced."""
    assert output is not None
    form_names = {Form.JSON: "this schema", Form.REGEX: "this regular expression", Form.CHOICE: "this choice"}
    reason = one_line(error)
    message = f"{form_names.get(output.form, 'this grammar')} cannot be enforced: {reason}"
    if output.form is Form.JSON and not output.lenient and "Unimplemented" in reason:
        message += (
            '. StructuredOutput.json(schema, lenient=True), or "strict": false in a body, ignores what '
            "cannot be enforced"
        )
    return message


# The texts of grammars that llguidance compiles: of a form, and of what a model writes before its answer.


_BLANKS = f"/{lark.BLANKS}{{1,{lark.MAX_BLANKS}}}/"
"""The blanks around a tag of thoughts."""

_JSON_BLANKS = r"(\x20|\x0A[\x20\x09]{0,40})"
"""The blanks that JSON may have between its parts: a space, or a line break with an indent. Small models and repetition
penalties lead to endless runs of blanks otherwise.
"""


def grammar_source(
    output: StructuredOutput | None,
    thoughts: Thoughts | None,
    drops_space: bool,
    specials: Specials,
    calls: AllowedCalls | None = None,
) -> str:
    """Return the source of an answer's grammar for llguidance, with all that comes before the answer.

    The model's `thoughts` are free text. An answer may end within them, unless it must have a form or a call. If the
    tokenizer `drops_space`, the answer may begin with a space, which is no part of its text. With `calls`, it may call
    tools instead of having its form, or besides its text. One of `output` and `calls` must be given.
    """
    prefix_rule = _thoughts_rule(thoughts, specials)
    if drops_space:
        prefix_rule = f'{prefix_rule} " "?'
    bodies: list[Mapping[str, Any]] = [] if output is None else [{**_form_grammar(output), "name": "body"}]
    if calls is None:
        if not prefix_rule:
            return json.dumps({"grammars": bodies})
        rules = [f"start: {prefix_rule} @body"]
    else:
        thoughts_tag = "" if thoughts is None or thoughts.opened_by_prompt else thoughts.open
        call_rules, schemas = calls.format.grammar(calls, "@body" if bodies else "", specials, thoughts_tag)
        rules = [f"start: {prefix_rule} answer", *call_rules]
        bodies += schemas
    if thoughts is not None:
        rules += lark.text_up_to_rules("thoughts", thoughts.close, specials)
        if output is None and calls is not None and not calls.is_required:
            rest, rest_rules = lark.unclosed_text_rules("thoughts", thoughts.close, specials)
            open_rule = "" if thoughts.opened_by_prompt else lark.tag_after_blanks(thoughts.open, specials)
            rules[0] += f" | {open_rule} {rest}"
            rules += rest_rules
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": "\n".join(rules)}, *bodies]})


def _form_grammar(output: StructuredOutput) -> dict[str, Any]:
    """Return the grammar of a form alone."""
    if output.form is Form.JSON:
        schema = json.loads(output.definition)
        if isinstance(schema, bool):  # options need an object; `not` of everything fits nothing
            schema = {} if schema else {"enum": []}
        schema_options = schema.get("x-guidance")
        options = dict(schema_options) if isinstance(schema_options, dict) else {}
        if output.compact:
            options.pop("whitespace_pattern", None)
            options["whitespace_flexible"] = False
        elif "whitespace_flexible" not in options:
            options.setdefault("whitespace_pattern", _JSON_BLANKS)
        if (escapes := allowed_escapes(schema)) is not None:
            options.setdefault("json_allowed_escapes", escapes)
        if output.lenient:
            options |= {"lenient": True, "coerce_one_of": True}
        return {"json_schema": {**schema, "x-guidance": options}}
    if output.form is Form.REGEX:
        return {"lark_grammar": f"start: {_lark_pattern(output.definition)}"}
    if output.form is Form.CHOICE:
        return {"lark_grammar": "\n".join(lark.choice_rules("start", json.loads(output.definition)))}
    return {"lark_grammar": output.definition}


def _thoughts_rule(thoughts: Thoughts | None, specials: Specials) -> str:
    """Return the part of a rule for thoughts before the answer."""
    if thoughts is None:
        return ""
    if thoughts.opened_by_prompt:
        return f"thoughts {_BLANKS}?"
    alternatives = [f"{lark.tag_after_blanks(thoughts.open, specials)} thoughts"]
    if thoughts.skip_text:
        alternatives.append(lark.tag_after_blanks(thoughts.skip_text, specials))
    return f"(({' | '.join(alternatives)}) {_BLANKS}?)?"


def _lark_pattern(regex: str) -> str:
    """Return a regular expression as Lark writes it, between slashes."""
    from llguidance import LLMatcher

    source: str = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"]
    return source.removeprefix("start: ")


# Run a function on a thread with a large stack.


T = TypeVar("T")

STACK_BYTES = 1 << 30
"""Address space for the stack; only what is used takes memory. llguidance descends from each rule or schema into those
that it names, and a thread that has used up its stack kills the process. The deepest grammars of a million characters
take some 800 MB, those in use a few hundred KB.
"""

_lock = threading.Lock()


def run_on_deep_stack(make: Callable[[], T]) -> T:
    """Call `make` on a thread with a stack of `STACK_BYTES`, and return its result. Raises what it raises.

    If the system refuses such a thread, it runs on this one.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="cortexmlx grammar", daemon=True)
    if _try_start(thread):
        thread.join()
    else:
        run()
    if errors:
        raise errors.pop()
    return results[0]


def _try_start(thread: threading.Thread) -> bool:
    """Start a thread with a stack of `STACK_BYTES`. Return whether the system allowed it. Python has one stack size for
    all new threads; others that begin meanwhile have this size, too, which does no harm.
    """
    with _lock:
        size = threading.stack_size()
        try:
            threading.stack_size(STACK_BYTES)
            thread.start()
        except (RuntimeError, ValueError):
            return False
        finally:
            threading.stack_size(size)
    return True
