"""GrammarCompiler: makes the grammar of an answer from the form that a request asks for, on the caller's thread."""

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
from cortexmlx.structured.matcher import Grammar, Raised
from cortexmlx.structured.output import Form, StructuredOutput, Thoughts
from cortexmlx.structured.schemas import allowed_escapes
from cortexmlx.types.request import QueuedRequest

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from cortexmlx.models.tokenizers.shared import SharedTokenizer, TokenTable
    from cortexmlx.structured.calls.format import Calls
    from cortexmlx.structured.tools import Tool


MOST_KEPT = 64
"""How many compiled grammars are kept. One of 24 tools takes some 5 MB."""

_MOST_TRIED = 64
"""How many properties of a tool are tried one by one, if all of them together cannot be enforced."""

_ANY_OBJECT = '{"type":"object","additionalProperties":true}'

_Key = tuple[StructuredOutput | None, Thoughts | None, "Calls | None"]


class GrammarCompiler:
    """Compiles the grammars of one model's answers, and keeps the newest `MOST_KEPT`. Any number of threads may use it
    at once. Nothing is imported or built before the first use.
    """

    def __init__(self, tokenizer: SharedTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._kept: OrderedDict[_Key, Grammar] = OrderedDict()

    def of_request(self, request: QueuedRequest) -> Grammar | None:
        """Return the grammar that the answers of a request follow; None: they are free. Raises InvalidRequest."""
        output, calls = request.params.form, request.calls
        if calls is None:
            return None if output is None else self.compile(output, request.thoughts)
        if output is None and calls.format.enforced and not calls.enforced:
            return None
        if calls.format.enforced and (output is not None or self.possible):
            return self.compile(output, request.thoughts, calls)
        if output is not None:
            raise InvalidRequest("`structured` and `tools` cannot be enforced together with this model", field="tools")
        if calls.required:
            raise InvalidRequest(
                f"tool_choice {calls.choice!r} cannot be enforced with this model: ask with 'auto'",
                field="tool_choice",
            )
        return None

    def compile(
        self, output: StructuredOutput | None, thoughts: Thoughts | None = None, calls: Calls | None = None
    ) -> Grammar:
        """Return the grammar of an answer of this form, or with these `calls`, after the model's `thoughts`.

        Tools that are not strict are enforced as far as possible, and the grammar's notes say what is not.

        Raises InvalidRequest if the form cannot be enforced. The message names the reason, such as a keyword of the
        schema.
        """
        key = output, thoughts, calls
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._table(), self._tokenizer.encode)
        try:
            grammar = self._made(self._vocabulary, output, thoughts, calls)
        except InvalidRequest:
            if calls is None:
                raise
            relaxed, notes = self._relaxed(self._vocabulary, calls)
            if not notes:
                raise
            grammar = self._made(self._vocabulary, output, thoughts, relaxed)
            grammar.notes += notes
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _made(
        self, vocabulary: _Vocabulary, output: StructuredOutput | None, thoughts: Thoughts | None, calls: Calls | None
    ) -> Grammar:
        source = source_of(output, thoughts, vocabulary.table.drops_space, vocabulary.specials, calls)
        grammar = on_deep_stack(lambda: Grammar(vocabulary.tokenizer, source, vocabulary.raised))
        if grammar.error:
            raise self._refused(vocabulary, output, calls, grammar.error)
        return grammar

    def _relaxed(self, vocabulary: _Vocabulary, calls: Calls) -> tuple[Calls, tuple[str, ...]]:
        """Return the calls without what cannot be enforced of tools that are not strict, and notes about it."""
        tools, notes = list(calls.tools), []
        for place, tool in enumerate(tools):
            if tool.strict or tool not in calls.callable:
                continue
            if why := self._problem(vocabulary, calls, tool):
                notes.append(why)
                tools[place] = self._loosened(vocabulary, calls, tool)
        return replace(calls, tools=tuple(tools)), tuple(notes)

    def _loosened(self, vocabulary: _Vocabulary, calls: Calls, tool: Tool) -> Tool:
        """Return a tool that takes any value in place of those that cannot be enforced, or any object at all."""
        schema = tool.schema
        properties: dict[str, Any] = schema.get("properties", {})
        if len(properties) <= _MOST_TRIED:
            without = {name: part for name, part in schema.items() if name != "required"}
            alone = {name: {**without, "properties": {name: part}} for name, part in properties.items()}
            kept = {
                name: not self._problem(vocabulary, calls, replace(tool, parameters=json.dumps(own)))
                for name, own in alone.items()
            }
            free = {name: part if kept[name] else True for name, part in properties.items()}
            looser = replace(tool, parameters=json.dumps({**schema, "properties": free}))
            if not self._problem(vocabulary, calls, looser):
                return looser
        return replace(tool, parameters=_ANY_OBJECT)

    def _problem(self, vocabulary: _Vocabulary, calls: Calls, tool: Tool) -> str:
        """Return why the calls of a tool cannot be enforced; empty: they can."""
        try:
            self._made(vocabulary, None, None, replace(calls, tools=(tool,), choice=tool.name))
        except InvalidRequest as error:
            return str(error)
        return ""

    @property
    def possible(self) -> bool:
        """Whether the answers of this model can follow a grammar."""
        try:
            with self._lock:
                self._vocabulary = self._vocabulary or _Vocabulary(self._table(), self._tokenizer.encode)
        except InvalidRequest:
            return False
        return True

    def _refused(
        self, vocabulary: _Vocabulary, output: StructuredOutput | None, calls: Calls | None, error: str
    ) -> InvalidRequest:
        """Return the error for a grammar that cannot be compiled. It names the tool, if one is to blame."""
        if calls is None:
            return InvalidRequest(_refusal(output, error), field="structured")
        if output is None and len(calls.tools) == 1:
            message = f"the parameters of the tool {calls.tools[0].name!r} cannot be enforced: {one_line(error)}"
            return InvalidRequest(message, field="tools")
        if output is not None:
            self._made(vocabulary, output, None, None)
        for tool in calls.callable:
            self._made(vocabulary, None, None, replace(calls, tools=(tool,), choice=tool.name))
        return InvalidRequest(f"these tools cannot be enforced together: {one_line(error)}", field="tools")

    def _table(self) -> TokenTable:
        table = self._tokenizer.token_table(self._vocab_size)
        if table is None:
            raise InvalidRequest(
                "structured output is not available with this model: the text of its tokens depends on the tokens "
                "before them",
                field="structured",
            )
        if not table.ends:
            raise InvalidRequest(
                "structured output is not available with this model: it has no token that ends an answer",
                field="structured",
            )
        return table


class _Vocabulary:
    """A vocabulary that llguidance knows."""

    def __init__(self, table: TokenTable, encode: Callable[..., list[int]]) -> None:
        from llguidance import LLTokenizer

        self.table = table
        self.specials = {
            table.pieces[t].decode("utf-8", "replace"): t for t in sorted(table.special) if _within(t, table)
        }
        self.raised = Raised()
        self.encode = _Callback(table, encode, self.raised)
        """Returns the tokens of a text."""
        self.tokenizer: LLTokenizer = LLTokenizer(self.encode, eos_token=sorted(table.ends))  # type: ignore[arg-type]


class _Callback:
    """A vocabulary in the place of llguidance's `TokenizerWrapper`. What the tokenizer raises is kept.

    llguidance holds it where Python's garbage collector does not look. So it must not lead to the LLTokenizer: neither
    would ever be freed, nor the model's tokenizer.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, encode: Callable[..., list[int]], raised: Raised) -> None:
        self.tokens = table.pieces
        self.eos_token_id = min(table.ends)
        self.special_token_ids = sorted(t for t in table.special | table.ends if _within(t, table))
        self._encode = encode
        self._raised = raised

    def __call__(self, text: str) -> list[int]:
        try:
            return self._encode(text, add_special_tokens=False)
        except BaseException as error:
            self._raised.error = error
            raise


def _within(token: int, table: TokenTable) -> bool:
    return 0 <= token < len(table.pieces)


def _refusal(output: StructuredOutput | None, error: str) -> str:
    """Return the message for a form that cannot be enforced."""
    assert output is not None
    what = {Form.JSON: "this schema", Form.REGEX: "this regular expression", Form.CHOICE: "this choice"}
    reason = one_line(error)
    message = f"{what.get(output.form, 'this grammar')} cannot be enforced: {reason}"
    if output.form is Form.JSON and not output.lenient and "Unimplemented" in reason:
        message += (
            '. StructuredOutput.json(schema, lenient=True), or "strict": false in a body, ignores what '
            "cannot be enforced"
        )
    return message


# The texts of grammars that llguidance compiles: of a form, and of what a model writes before its answer.


_BLANKS = f"/{lark.BLANKS}{{1,{lark.MOST_BLANKS}}}/"
"""The blanks around a tag of thoughts."""

_JSON_BLANKS = r"(\x20|\x0A[\x20\x09]{0,40})"
"""The blanks that JSON may have between its parts: a space, or a line break with an indent. Small models and repetition
penalties lead to endless runs of blanks otherwise.
"""


def source_of(
    output: StructuredOutput | None,
    thoughts: Thoughts | None,
    drops_space: bool,
    specials: Specials,
    calls: Calls | None = None,
) -> str:
    """Return the grammar of an answer with all that comes before it.

    The model's `thoughts` are free text. An answer may end within them, unless it must have a form or a call. If the
    tokenizer `drops_space`, the answer may begin with a space, which is no part of its text. With `calls`, it may call
    tools instead of having its form, or besides its text. One of `output` and `calls` must be given.
    """
    before = _before(thoughts, specials)
    if drops_space:
        before = f'{before} " "?'
    bodies: list[Mapping[str, Any]] = [] if output is None else [{**_body(output), "name": "body"}]
    if calls is None:
        if not before:
            return json.dumps({"grammars": bodies})
        rules = [f"start: {before} @body"]
    else:
        opens = "" if thoughts is None or thoughts.begun else thoughts.open
        called, schemas = calls.format.grammar(calls, "@body" if bodies else "", specials, opens)
        rules = [f"start: {before} answer", *called]
        bodies += schemas
    if thoughts is not None:
        rules += lark.up_to("thoughts", thoughts.close, specials)
        if output is None and calls is not None and not calls.required:
            rest, more = lark.never_closed("thoughts", thoughts.close, specials)
            opened = "" if thoughts.begun else lark.after_blanks(thoughts.open, specials)
            rules[0] += f" | {opened} {rest}"
            rules += more
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": "\n".join(rules)}, *bodies]})


def _body(output: StructuredOutput) -> dict[str, Any]:
    """Return the grammar of the answer itself."""
    if output.form is Form.JSON:
        schema = json.loads(output.definition)
        if isinstance(schema, bool):  # options need an object; `not` of everything fits nothing
            schema = {} if schema else {"enum": []}
        own = schema.get("x-guidance")
        options = dict(own) if isinstance(own, dict) else {}
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
        return {"lark_grammar": f"start: {_pattern(output.definition)}"}
    if output.form is Form.CHOICE:
        return {"lark_grammar": "\n".join(lark.one_of("start", json.loads(output.definition)))}
    return {"lark_grammar": output.definition}


def _before(thoughts: Thoughts | None, specials: Specials) -> str:
    """Return what stands before the answer, as a part of a rule."""
    if thoughts is None:
        return ""
    if thoughts.begun:
        return f"thoughts {_BLANKS}?"
    ways = [f"{lark.after_blanks(thoughts.open, specials)} thoughts"]
    if thoughts.skipped:
        ways.append(lark.after_blanks(thoughts.skipped, specials))
    return f"(({' | '.join(ways)}) {_BLANKS}?)?"


def _pattern(regex: str) -> str:
    """Return a regular expression between slashes, as Lark writes it."""
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


def on_deep_stack(make: Callable[[], T]) -> T:
    """Return `make()`, which runs on a thread with a stack of `STACK_BYTES`. Raises what it raises.

    If the system refuses such a thread, it runs on this one.
    """
    made: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="cortexmlx grammar", daemon=True)
    if _started(thread):
        thread.join()
    else:
        run()
    if raised:
        raise raised.pop()
    return made[0]


def _started(thread: threading.Thread) -> bool:
    """Start a thread, and return whether that was possible. Python knows one size for all new threads; another one that
    begins meanwhile has this size, too, which does no harm.
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
