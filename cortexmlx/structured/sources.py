"""The texts of grammars that llguidance compiles: of a form, and of what a model writes before its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cortexmlx.structured import lark
from cortexmlx.structured.escapes import allowed_escapes
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.output import Form, StructuredOutput
from cortexmlx.structured.thoughts import Thoughts

if TYPE_CHECKING:
    from cortexmlx.structured.calls.format import Calls

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
