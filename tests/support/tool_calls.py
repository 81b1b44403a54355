"""Tool calls as models write them: the same calls in every format, written by code of its own, and broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from cortexmlx.structured.calls.format import AllowedCalls, CallFormat
from cortexmlx.structured.calls.reader import MAX_TAG_BLANKS
from cortexmlx.structured.compiler import grammar_source
from cortexmlx.structured.tools import Tool

Call = tuple[str, dict[str, Any]]
Write = Callable[[Sequence[Call]], str]


def mapping(name: str, properties: dict[str, Any], required: Sequence[str] = (), **schema: Any) -> dict[str, Any]:
    """A tool as in the OpenAI API."""
    parameters = {"type": "object", "properties": properties, "required": list(required), **schema}
    return {"type": "function", "function": {"name": name, "description": f"The {name}", "parameters": parameters}}


TOOLS = tuple(
    Tool.of(each)
    for each in (
        mapping("weather", {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 0}}, ["city"]),
        mapping("now", {}),
        mapping("write_file", {"path": {"type": "string"}, "text": {"type": "string"}}, ["path", "text"]),
        mapping(
            "search",
            {
                "query": {"type": "string"},
                "limit": {"type": ["integer", "null"]},
                "exact": {"type": "boolean"},
                "kind": {"enum": ["web", "news"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "range": {"type": "object", "properties": {"from": {"type": "number"}}, "required": ["from"]},
            },
            ["query"],
        ),
    )
)


class Case(NamedTuple):
    """A text before the calls, and the calls."""

    text: str
    calls: tuple[Call, ...]


def _one(name: str, **arguments: Any) -> Case:
    return Case("", ((name, arguments),))


GOOD = (
    _one("now"),
    _one("weather", city="Paris"),
    _one("weather", city="Paris", days=3),
    _one("weather", city=""),
    _one("weather", city=" two  blanks "),
    _one("weather", city="\ttab\nline\n\nlines"),
    _one("weather", city='"quoted" and \\ back\\slash'),
    _one("weather", city="漢字 🙂 é \u2028"),
    _one("weather", city="<tool_call> </tool_call> [TOOL_CALLS] [ARGS]"),
    _one("weather", city="{}[]{{"),
    _one("weather", city="</parameter> </function>"),
    _one("weather", city="null"),
    _one("weather", city="5"),
    _one("weather", city="true", days=0),
    _one("write_file", path="/a b/c.py", text="def f(x):\n    return x\n"),
    _one("write_file", path="x", text="\n"),
    _one("write_file", path="x", text="\n\nends with blanks  \n \n"),
    _one("write_file", path="x", text='{"name": "weather", "arguments": {}}'),
    _one("write_file", path="x", text="```json\n{}\n```"),
    _one("search", query="a"),
    _one("search", query="a", limit=3),
    _one("search", query="a", limit=None),
    _one("search", query="a", exact=True),
    _one("search", query="a", exact=False, kind="news"),
    _one("search", query="a", tags=[]),
    _one("search", query="a", tags=["x", 'y"z', "<｜tool▁sep｜>", ""]),
    _one("search", query="a", range={"from": -1.5}),
    _one("search", query="a", limit=-2, exact=True, kind="web", tags=["t"], range={"from": 100}),
    Case("Let me look.", (("weather", {"city": "Rome"}),)),
    Case("One line.\n\nTwo <b>lines</b> with {braces}", (("now", {}),)),
)

SEVERAL = (
    Case("", (("now", {}), ("now", {}))),
    Case("", (("weather", {"city": "a"}), ("weather", {"city": "b", "days": 1}), ("now", {}))),
    Case("Both:", (("write_file", {"path": "a", "text": "}\n"}), ("search", {"query": "]"}))),
)

PLAIN = ("", "Hello", "a < b, [1], {2}", "Half a tag: <tool_cal", "Many\n\n\nlines  ", "[TOOL_CALL and {name}", "漢🙂")
"""Answers without calls."""

WRONG = (
    _one("unknown"),
    _one("Weather", city="Paris"),
    _one("weather"),
    _one("weather", days=3),
    _one("weather", city="Paris", days="many"),
    _one("weather", city="Paris", days=-1),
    _one("weather", city="Paris", days=1.5),
    _one("weather", city="Paris", days=None),
    _one("weather", city="Paris", country="France"),
    _one("now", when="soon"),
    _one("write_file", path="x"),
    _one("write_file", text="x"),
    _one("search", query="a", kind="images"),
    _one("search", query="a", exact="yes"),
    _one("search", query="a", limit=1.5),
    _one("search", query="a", limit=[1]),
    _one("search", query="a", tags="x"),
    _one("search", query="a", tags=[1]),
    _one("search", query="a", range={}),
    _one("search", query="a", range={"from": "x"}),
    _one("search", query="a", range=[1]),
    Case("", (("now", {}), ("unknown", {}))),
    Case("Text", (("unknown", {}),)),
)
"""Calls that no schema allows. Their syntax is right."""


def grammar_takes(format: CallFormat, text: str, choice: str = "auto", parallel: bool = True) -> bool:
    """Whether the grammar of a format accepts a whole answer, byte by byte."""
    matcher = _grammar(format, choice, parallel).deep_copy()
    tokens = _bytes().tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


class Read(NamedTuple):
    """What a parser made of an answer."""

    text: str
    calls: tuple[Call, ...]
    pieces: tuple[str, ...]
    """The streamed arguments of each call, joined."""


def read(format: CallFormat, pieces: Sequence[str], streamed: bool = True) -> Read:
    """What the parser of a format makes of an answer that comes in pieces."""
    parser = AllowedCalls(format, TOOLS).make_parser("key", streamed)
    assert parser is not None
    told = [*map(parser.feed, pieces), parser.finish()]
    calls = parser.calls
    assert len({call.id for call in calls}) == len(calls)
    deltas = [delta for _, deltas in told for delta in deltas]
    joined = tuple("".join(d.arguments for d in deltas if d.index == number) for number in range(len(calls)))
    heads = [(d.id, d.name) for d in deltas if d.name]
    assert heads[: len(calls)] == [(call.id, call.name) for call in calls]
    return Read("".join(text for text, _ in told), tuple((call.name, call.values) for call in calls), joined)


def every_cut(text: str) -> Iterator[list[str]]:
    """A text in one piece, in two pieces cut at every place, and in single characters."""
    yield [text]
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    yield list(text)


def said(case: Case) -> str:
    """The text of a case, as a parser tells it: without the blanks before its calls."""
    return case.text[: max(len(case.text.rstrip()), len(case.text) - MAX_TAG_BLANKS)]


_kept: dict[Any, Any] = {}


def _bytes() -> Any:
    from llguidance import LLTokenizer

    if "bytes" not in _kept:
        _kept["bytes"] = LLTokenizer("byte")
    return _kept["bytes"]


def _grammar(format: CallFormat, choice: str, parallel: bool) -> Any:
    from llguidance import LLMatcher

    key = type(format), str(vars(format)), choice, parallel
    if key not in _kept:
        source = grammar_source(None, None, False, {}, AllowedCalls(format, TOOLS, choice, parallel))
        _kept[key] = LLMatcher(_bytes(), source, log_level=0)
        assert not _kept[key].get_error(), _kept[key].get_error()
    return _kept[key]


def dumped(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    """Qwen 2.5 and 3."""
    return "\n".join(
        f"<tool_call>\n{dumped({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


def mistral_list(calls: Sequence[Call]) -> str:
    """Mistral 7B v0.3, Nemo."""
    return f"[TOOL_CALLS]{dumped([{'name': name, 'arguments': arguments} for name, arguments in calls])}"


def mistral_tags(calls: Sequence[Call]) -> str:
    """Magistral, Devstral."""
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}" for name, arguments in calls)


def mistral_ids(calls: Sequence[Call]) -> str:
    """Mistral Small 3.2."""
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]abcdefg{number:02}[ARGS]{dumped(arguments)}"
        for number, (name, arguments) in enumerate(calls)
    )


def llama(calls: Sequence[Call]) -> str:
    """Llama 3.1 to 3.3."""
    return "; ".join(dumped({"name": name, "parameters": arguments}) for name, arguments in calls)


def deepseek_v3(calls: Sequence[Call]) -> str:
    """DeepSeek V3 and R1."""
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(each)}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    """DeepSeek V3.1."""
    each = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def harmony(calls: Sequence[Call]) -> str:
    """gpt-oss."""
    ((name, arguments),) = calls
    compact = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{compact}"


def qwen_coder(calls: Sequence[Call]) -> str:
    """Qwen3-Coder."""

    def written(value: Any) -> str:
        return value if isinstance(value, str) else dumped(value)

    def one(name: str, arguments: dict[str, Any]) -> str:
        given = "".join(f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def tagged(call: str, key: str, value: str, end: str, line: str = "\n", section: tuple[str, str] = ("", "")) -> Write:
    """A writer of a format with a tag for each argument. `call`, `key` and `value` have places for what they name."""

    def write(calls: Sequence[Call]) -> str:
        def one(name: str, arguments: dict[str, Any]) -> str:
            parts = [
                key.replace("KEY", each) + value.replace("VALUE", said if isinstance(said, str) else dumped(said))
                for each, said in arguments.items()
            ]
            return line.join([call.replace("NAME", name), *parts, end])

        return line.join([*filter(None, section[:1]), *(one(*each) for each in calls), *filter(None, section[1:])])

    return write


def glm(prefix: str, line: str) -> Write:
    """GLM 4.5 and 4.6 write line breaks between the tags, 4.7 none. LongCat's tags have a prefix."""
    key, value = f"<{prefix}arg_key>KEY</{prefix}arg_key>", f"<{prefix}arg_value>VALUE</{prefix}arg_value>"
    return tagged(f"<{prefix}tool_call>NAME", key + line, value, f"</{prefix}tool_call>", line)


def invoked(prefix: str, section: str) -> Write:
    """MiniMax M2 and Muse Spark."""
    key, value = f'<{prefix}parameter name="KEY">', f"VALUE</{prefix}parameter>"
    tags = f"<{section}>", f"</{section}>"
    return tagged(f'<{prefix}invoke name="NAME">', key, value, f"</{prefix}invoke>", section=tags)


def minicpm(calls: Sequence[Call]) -> str:
    """MiniCPM 5: what is more than a plain line stands in CDATA."""

    def written(value: Any) -> str:
        text = value if isinstance(value, str) else dumped(value)
        return f"<![CDATA[{text.replace(']]>', ']]]]><![CDATA[>')}]]>" if set(text) & set("<&\n") else text

    return "".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}">{written(value)}</param>' for key, value in arguments.items())
        + "</function>"
        for name, arguments in calls
    )


def kimi(calls: Sequence[Call]) -> str:
    """Kimi K2."""
    each = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{dumped(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def braces(begin: str, end: str, quote: str, enforced: bool = False) -> Write:
    """Gemma 4 and FunctionGemma: keys stand as they are, texts between two tags. Grammars make inner values JSON."""

    def written(value: Any, inner: bool = True) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if enforced and inner:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{written(each)}' for key, each in value.items())}}}"
        return f"[{','.join(map(written, value))}]" if isinstance(value, list) else dumped(value)

    return lambda calls: "".join(f"{begin}call:{name}{written(arguments, False)}{end}" for name, arguments in calls)


def pythonic(literal: Callable[[Any], str]) -> Write:
    """LFM2, whose templates write values as JSON, and LFM2.5, with the literals of Python."""

    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={literal(value)}' for key, value in arguments.items())})"

    return lambda calls: f"<|tool_call_start|>[{', '.join(one(*each) for each in calls)}]<|tool_call_end|>"
