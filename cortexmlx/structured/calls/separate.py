"""SeparateArguments: formats of tool calls that write each argument by itself, with its name."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.calls.argument import (
    Argument,
    Arguments,
    find_broken_reference,
    to_json_text,
    unenforced_tool_keywords,
)
from cortexmlx.structured.calls.format import CallFormat, JsonGrammar, close_arguments, json_grammar
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.tools import Tool, load_json

TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
"""The characters of a tool's name."""

_REFERENCE = re.compile(r'"\$ref": "#(?=[/"])')


class SeparateArguments(CallFormat):
    """A format that writes each argument separately, with a grammar made from that argument's schema."""

    text_end: str = ""
    """Closes an argument that is any text; empty: it is a string of JSON."""

    @abstractmethod
    def can_write_key(self, key: str) -> bool:
        """Return whether this can be the name of an argument."""

    def notes(self, tool: Tool) -> Iterator[str]:
        """Yield notes on parts of a tool's schema that cannot be enforced here, such as relations between arguments."""
        for keyword in unenforced_tool_keywords(tool):
            yield f"{keyword} of the tool {tool.name!r} is not enforced: each argument is written by itself"

    def argument_grammars(self, number: int, tool: Tool, specials: Specials) -> Iterator[JsonGrammar]:
        """Yield a named grammar for each argument of a call. Raises InvalidRequest for an unwritable schema."""
        arguments = Arguments(tool)
        invalid_key = next((key for key in arguments if not self.can_write_key(key)), None)
        if invalid_key is not None:
            raise _schema_error(tool, f"{invalid_key!r:.80} is no name that this model can write")
        if (broken_reference := find_broken_reference(tool)) is not None:
            raise _schema_error(tool, f"the reference {broken_reference!r:.80} leads nowhere in them")
        if tool.strict and (note := next(self.notes(tool), None)):
            raise _schema_error(tool, note)
        for index, argument in enumerate(arguments.values()):
            if self.text_end and any(self.text_end in text for text in argument.listed_values):
                raise _schema_error(tool, f"a value holds the tag {self.text_end.strip()}")
            name = f"tool_{number}_{index}"
            schema = argument.schema
            if '"$ref": "#' in to_json_text(schema):  # it leads from the schema of the tool
                text = to_json_text({**schema, "$defs": {"tool": close_arguments(tool.schema)}})
                schema = load_json(_REFERENCE.sub(r"\g<0>/$defs/tool", text))
            json = json_grammar(name, schema, tool.strict, self.separators)
            yield from self.value_grammars(argument, json, specials)

    @abstractmethod
    def value_grammars(self, argument: Argument, json: JsonGrammar, specials: Specials) -> Iterator[JsonGrammar]:
        """Yield the grammar of a value, under the name of `json`, and the grammars that it refers to. `json` is the
        grammar of the value as JSON.
        """


def _schema_error(tool: Tool, reason: str) -> InvalidRequest:
    """Return the error for a tool whose arguments this format cannot enforce."""
    return InvalidRequest(f"the parameters of the tool {tool.name!r} cannot be enforced: {reason}", field="tools")
