"""Answers that follow a JSON schema: the schema of a record, and the tokens of an answer where some tokens are
forced.
"""

from __future__ import annotations

from cortexmlx.bench.replay.texts import ReplayText
from cortexmlx.engine import Engine
from cortexmlx.errors import CortexError
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.structured.compiler import GrammarCompiler
from cortexmlx.structured.output import StructuredOutput

RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 1, "maximum": 9999},
        "customer_name": {"type": "string", "pattern": "^[A-Z][a-z]{2,20} [A-Z][a-z]{2,20}$"},
        "subscription_status": {"enum": ["active", "invited", "suspended", "deleted"]},
        "newsletter_subscribed": {"type": "boolean"},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_name": {"type": "string", "pattern": "^[A-Z][a-z]{3,20} (Street|Avenue|Road)$"},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country_code": {"enum": ["DE", "FR", "GB", "US"]},
            },
            "required": ["street_name", "postal_code", "country_code"],
            "additionalProperties": False,
        },
        "lifetime_value_euros": {"type": "integer", "minimum": 0, "maximum": 100000},
    },
    "required": [
        "identifier",
        "customer_name",
        "subscription_status",
        "newsletter_subscribed",
        "shipping_address",
        "lifetime_value_euros",
    ],
    "additionalProperties": False,
}
"""A customer of a shop. Its keys are half of its text."""

RECORDS = StructuredOutput.json({"type": "array", "items": RECORD}, compact=True)
"""What the answers of `AnswerKind.SCHEMA` follow."""

_AHEAD = 200
"""The first token of so many characters is that of the whole text."""


def apply_forced_tokens(text: ReplayText, engine: Engine) -> ReplayText:
    """Return a text whose answer has the tokens that the schema forces. An engine without forced tokens may choose
    them, too. Raises CortexError if the answer does not follow the schema.
    """
    tokenizer = SharedTokenizer(engine.inspect(lambda core: core.loaded.tokenizer))
    matcher = GrammarCompiler(tokenizer, engine.info.vocab_size).compile(RECORDS).make_matcher(forced_tokens=True)
    answer, tokens = engine.decode(text.answer), list[int]()
    written_text, is_finished = "", False
    while len(tokens) < len(text.answer) and len(written_text) < len(answer) and not is_finished:
        rest = answer[len(written_text) :][:_AHEAD]
        tokens.append(matcher.forced_tokens[0] if matcher.forced_tokens else _first_token(rest, engine))
        is_finished = matcher.accept(tokens[-1])
        written_text = engine.decode(tokens)
        if matcher.error or not answer.startswith(written_text):
            raise CortexError(f"an answer of the replay does not follow its schema at {rest[:20]!r}")
    return ReplayText(text.prompt, tuple(tokens))


def _first_token(text: str, engine: Engine) -> int:
    """Return the first token of a text."""
    prefix_ids = engine.encode("")  # what the tokenizer puts before each text
    token_ids = engine.encode(text)
    return token_ids[len(prefix_ids) if token_ids[: len(prefix_ids)] == prefix_ids else 0]
