"""Formats with a tag for each argument, whose texts stand between the tags as they are: Qwen3-Coder, GLM, MiniMax and
others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cortexmlx.structured import lark
from cortexmlx.structured.calls.argument import Argument, Arguments, escape_json, required_arguments, to_json_text
from cortexmlx.structured.calls.format import AllowedCalls, JsonGrammar, read_json_call
from cortexmlx.structured.calls.json_formats import CLOSE, OPEN
from cortexmlx.structured.calls.literals import value_to_json
from cortexmlx.structured.calls.reader import AnswerReader, NotACall, Reading
from cortexmlx.structured.calls.separate import TOOL_NAME, SeparateArguments
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.tools import Tool

_KEY = re.compile(r"[^\s<>](?:[^<>\n]*[^\s<>])?")
"""The names of arguments that can stand in a tag."""

CDATA, CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True)
class Tags:
    """The tags of one format of tool calls, in the order in which they are written. Line breaks may separate them."""

    name: str
    call: str
    """Opens a call."""
    key: str
    """Opens the name of an argument."""
    key_end: str
    value_end: str
    end: str
    """Closes a call."""
    head: str = ""
    """What stands between the tag `call` and the name of the tool."""
    name_end: str = ""
    value: str = ""
    """Opens the value of an argument; empty: the value begins after `key_end`."""
    suffix: str = ""
    """What stands after `end`."""
    section: str = ""
    """Opens all calls; empty: each call stands alone."""
    section_end: str = ""
    always_enforced: bool = False
    """See `CallFormat`."""
    lines: bool = False
    """Whether each tag has a line of its own, so that the line breaks around a value are no part of it. Otherwise they
    are. Models write line breaks between the other tags or not. An empty value has one line break or two.
    """
    cdata: bool = False
    """Whether a value may stand in a CDATA section."""
    json: bool = False
    """Whether some models of the family write a JSON object between `call` and `end`."""


QWEN_CODER = Tags(
    "Qwen3-Coder",
    call=OPEN,
    head="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value_end="\n</parameter>",
    end="</function>",
    suffix=CLOSE,
    always_enforced=True,
    lines=True,
)
GLM = Tags(
    "GLM",
    call=OPEN,
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    end=CLOSE,
    json=True,
)
LONGCAT = Tags(
    "LongCat",
    call="<longcat_tool_call>",
    key="<longcat_arg_key>",
    key_end="</longcat_arg_key>",
    value="<longcat_arg_value>",
    value_end="</longcat_arg_value>",
    end="</longcat_tool_call>",
    json=True,
)
MINIMAX = Tags(
    "MiniMax M2",
    section="<minimax:tool_call>",
    call='<invoke name="',
    name_end='">',
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    end="</invoke>",
    section_end="</minimax:tool_call>",
)
MUSE = Tags(
    "Muse Spark",
    section="<atem:function_calls>",
    call='<atem:invoke name="',
    name_end='">',
    key='<atem:parameter name="',
    key_end='">',
    value_end="</atem:parameter>",
    end="</atem:invoke>",
    section_end="</atem:function_calls>",
)
MINICPM = Tags(
    "MiniCPM 5",
    call='<function name="',
    name_end='">',
    key='<param name="',
    key_end='">',
    value_end="</param>",
    end="</function>",
    cdata=True,
)


class Tagged(SeparateArguments):
    """A format with a tag for each argument. The argument's schema says whether its value is a text or JSON."""

    def __init__(self, tags: Tags) -> None:
        self.tags = tags
        self.name = tags.name
        self.always_enforced = tags.always_enforced
        self.trigger = tags.section or tags.call
        self._line = '"\\n"' if tags.lines else '"\\n"?'
        self.close = f"\n{tags.section_end}" if tags.section else ""
        self.text_end = tags.value_end

    # -- the grammar --------------------------------------------------------------------------------------------------

    def _separator_rule(self, specials: Specials) -> str:
        """Return the rule part that matches what separates two calls."""
        return "" if self.tags.section else f"{self._line} {lark.tag_rule(self.tags.call, specials)}"

    def _end_rule(self, specials: Specials) -> str:
        """Return the rule part that matches what follows all calls."""
        # A line break of its own, as before each call: the lexer does not go back from half a tag.
        return f"{self._line} {lark.tag_rule(self.tags.section_end, specials)}" if self.tags.section else ""

    def call_rule(self, number: int, tool: Tool, specials: Specials) -> str:
        """Return the part of a grammar rule for one call in this format."""
        tags, line = self.tags, self._line

        def make_tag_rule(text: str) -> str:
            return lark.tag_rule(text, specials)

        required = required_arguments(tool)
        parts = [line, make_tag_rule(tags.call)] if tags.section else []
        parts += [*([line] if tags.head else []), make_tag_rule(tags.head + tool.name + tags.name_end), line]
        for index, (key, argument) in enumerate(Arguments(tool).items()):
            head = [make_tag_rule(tags.key + key + tags.key_end)]
            if tags.value or (tags.lines and not argument.is_free_text):
                head += [line, make_tag_rule(tags.value)] if tags.value else [line]
            end = "" if argument.is_free_text else make_tag_rule(tags.value_end)
            part = f"{' '.join(head)} @tool_{number}_{index} {end} {line}"
            parts.append(part if key in required else f"({part})?")
        return " ".join([*parts, make_tag_rule(tags.end), *([line, make_tag_rule(tags.suffix)] if tags.suffix else [])])

    def notes(self, tool: Tool) -> Iterator[str]:
        """Yield notes on parts of a tool's schema that cannot be enforced here, such as limits of raw texts."""
        for key, argument in Arguments(tool).items():
            for keyword in argument.unenforced_keywords:
                yield f"{keyword} of {key!r} of the tool {tool.name!r} is not enforced: it is written as raw text"
        yield from super().notes(tool)

    def can_write_key(self, key: str) -> bool:
        """Return whether this can be the name of an argument in a tag."""
        return _KEY.fullmatch(key) is not None

    def value_grammars(self, argument: Argument, json: JsonGrammar, specials: Specials) -> Iterator[JsonGrammar]:
        """Yield the grammar of an argument, which ends at its closing tag if it is any text."""
        if argument.listed_values:
            rules = lark.choice_rules("start", argument.listed_values)
        elif argument.is_free_text:
            rules = self._free_text_rules(specials)
        else:
            yield json
            return
        yield {"name": json["name"], "lark_grammar": "\n".join(rules)}

    def _free_text_rules(self, specials: Specials) -> list[str]:
        """Return the grammar rules for a text argument: anything up to the tag that closes it."""
        end = self.tags.value_end
        if not self.tags.cdata:
            return lark.text_up_to_rules("start", end, specials, begin="\n" if self.tags.lines else "")
        plain_rules = lark.text_up_to_rules("plain", end, specials, not_first=CDATA)
        return [
            f"start: {lark.quote(CDATA)} data | plain",
            *plain_rules,
            *lark.text_up_to_rules("data", CDATA_END + end, specials),
        ]

    # -- the reader ---------------------------------------------------------------------------------------------------

    def parse(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse a whole answer in this format. See `CallFormat.parse`."""
        tags = self.tags
        while (yield from self._find_next_call(reader)):
            yield from reader.skip_blanks()
            if tags.json and (yield from reader.peek_char()) == "{":
                yield from read_json_call(reader, calls)
                yield from reader.skip_blanks()
                yield from reader.skip_text(tags.end)
            else:
                yield from self._read_call(reader, calls)
            reader.end_call()
            if not tags.section:
                reader.end_calls()

    def _find_next_call(self, reader: AnswerReader) -> Reading[bool] | Reading[str]:
        """Read up to the next call. The result is false (False, or an empty text) at the end of the answer."""
        tags = self.tags
        if tags.section:
            return reader.find_next_call(tags.section, tags.call, tags.section_end)
        return reader.read_text_up_to(tags.call)

    def _read_call(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse a call: the name of its tool, and its arguments."""
        tags = self.tags
        yield from reader.skip_text(tags.head)
        yield from reader.skip_blanks()
        name = yield from reader.read_run(TOOL_NAME)
        yield from reader.skip_blanks()
        yield from reader.skip_text(tags.name_end)
        arguments, seen_keys = calls.arguments(name), set[str]()
        reader.begin_call(name)
        yield from reader.skip_blanks()
        while (yield from reader.read_one_of(tags.key, tags.end)) != tags.end:
            key = (yield from reader.read_up_to(tags.key_end)).strip()
            if key in seen_keys or not _KEY.fullmatch(key):
                raise NotACall(f"{key!r:.80} comes twice, or is no name")
            reader.add_arguments(f"{', ' if seen_keys else '{'}{to_json_text(key)}: ")
            seen_keys.add(key)
            if tags.value:
                yield from reader.skip_blanks()
                yield from reader.skip_text(tags.value)
            yield from self._read_value(reader, arguments[key])
            yield from reader.skip_blanks()
        reader.add_arguments("}" if seen_keys else "{}")
        if tags.suffix:
            yield from reader.skip_blanks()
            yield from reader.skip_text(tags.suffix)

    def _read_value(self, reader: AnswerReader, argument: Argument) -> Reading[None]:
        """Read a value up to its closing tag, and add it to the call's arguments as JSON."""
        tags, value_end = self.tags, self.tags.value_end
        if tags.lines and (yield from reader.peek_char()) == "\n":
            yield from reader.skip_text("\n")
            tight = value_end.lstrip("\n")
            if (yield from reader.peek_one_of(f"{tight}\n{tags.key}", f"{tight}\n{tags.end}")):
                value_end = tight
        pieces: list[str] = []
        add_piece = pieces.append
        is_json = not (argument.is_free_text or argument.listed_values)
        if argument.is_free_text:
            reader.add_arguments('"')

            def add_piece(piece: str) -> None:
                reader.add_arguments(escape_json(piece))

        if tags.cdata and (yield from reader.peek_one_of(CDATA)):
            while (yield from reader.peek_one_of(CDATA)):  # a text with the closing tag is cut in two sections
                yield from reader.skip_text(CDATA)
                yield from reader.read_value_up_to(CDATA_END, add_piece)
            yield from reader.skip_text(tags.value_end)
        elif is_json and reader.streaming and (yield from reader.peek_one_of("{", "[")):  # of a grammar
            add_piece((yield from reader.read_json()))
            yield from reader.skip_text(tags.value_end)
        else:
            yield from reader.read_value_up_to(value_end, add_piece)
        text = "".join(pieces)
        reader.add_arguments('"' if argument.is_free_text else argument.to_json(text, value_to_json(text)))
