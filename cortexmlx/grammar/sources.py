"""The texts of grammars that llguidance compiles: of a form, and of what a model writes before its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from cortexmlx.request import Thoughts
from cortexmlx.structured.output import Form, StructuredOutput

_BLANKS = r"/[ \n\t\r]{1,64}/"
"""The blanks around a tag of thoughts."""

_JSON_BLANKS = r"(\x20|\x0A[\x20\x09]{0,40})"
"""The blanks that JSON may have between its parts: a space, or a line break with an indent. Small models and repetition
penalties lead to endless runs of blanks otherwise.
"""

Specials = Mapping[str, int]
"""The special tokens by the texts that tags write them as."""


def source_of(output: StructuredOutput, thoughts: Thoughts | None, drops_space: bool, specials: Specials) -> str:
    """Return the grammar of an answer with all that comes before it.

    The model's `thoughts` are free text. If the tokenizer `drops_space`, the answer may begin with a space, which is no
    part of its text.
    """
    before = _before(thoughts, specials)
    if drops_space:
        before = f'{before} " "?'
    body = _body(output)
    if not before:
        return json.dumps({"grammars": [body]})
    rules = [f"start: {before} @body"]
    if thoughts is not None:
        rules += _thought_rules(thoughts, specials)
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": "\n".join(rules)}, {**body, "name": "body"}]})


def _body(output: StructuredOutput) -> dict[str, Any]:
    """Return the grammar of the answer itself."""
    if output.form is Form.JSON:
        schema = json.loads(output.definition)
        if isinstance(schema, bool):  # options need an object; `not` of everything fits nothing
            schema = {} if schema else {"enum": []}
        own = schema.get("x-guidance")
        options = dict(own) if isinstance(own, dict) else {}
        if "whitespace_flexible" not in options:
            options.setdefault("whitespace_pattern", _JSON_BLANKS)
        if output.lenient:
            options |= {"lenient": True, "coerce_one_of": True}
        return {"json_schema": {**schema, "x-guidance": options}}
    if output.form is Form.REGEX:
        return {"lark_grammar": f"start: {_pattern(output.definition)}"}
    if output.form is Form.CHOICE:
        texts = json.loads(output.definition)
        return {"lark_grammar": "start: " + " | ".join(map(_quoted, texts))}
    return {"lark_grammar": output.definition}


def _before(thoughts: Thoughts | None, specials: Specials) -> str:
    """Return what stands before the answer, as a part of a rule."""
    if thoughts is None:
        return ""
    if thoughts.begun:
        return f"thoughts {_BLANKS}?"
    ways = [f"{_tag(thoughts.open, specials)} thoughts"]
    if thoughts.skipped:
        ways.append(_tag(thoughts.skipped, specials))
    return f"({_BLANKS}? ({' | '.join(ways)}) {_BLANKS}?)?"


def _thought_rules(thoughts: Thoughts, specials: Specials) -> list[str]:
    """Return the rules of the free text up to the tag that closes thoughts, with the tag."""
    first, *others = _parts(thoughts.close, specials)
    if isinstance(first, int):  # a text never contains a special token, so it ends there
        return [f"thoughts: /(.|\\n)*/ {_tag(thoughts.close, specials)}"]
    rest = _tag(thoughts.close[len(first) :], specials) if others else ""
    return [f"thoughts: thought_text {rest}", f"thought_text[lazy]: /(.|\\n)*{_escaped(first)}/"]


def _tag(tag: str, specials: Specials) -> str:
    """Return a tag as a part of a rule: texts in quotes, special tokens by their ids."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in _parts(tag, specials))


def _parts(tag: str, specials: Specials) -> list[str | int]:
    """Return the texts and the special tokens that a tag is made of."""
    known = [text for text in specials if text and text in tag]
    if not known:
        return [tag]
    parts = re.split(f"({'|'.join(map(re.escape, sorted(known, key=len, reverse=True)))})", tag)
    return [specials.get(part, part) for part in parts if part]


def _pattern(regex: str) -> str:
    """Return a regular expression between slashes, as Lark writes it."""
    from llguidance import LLMatcher

    source: str = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"]
    return source.removeprefix("start: ")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return a text as a regular expression between slashes."""
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$/#&-~" else char for char in text)
