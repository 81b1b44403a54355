"""Ordinary schemas, as people type them after `--schema`: how many answers are whole.

    python -m cortexmlx.bench.studies.structured.ordinary [MODEL] [open]

Each of ten schemas is asked for as `cortexmlx generate --schema` asks, with its default of `max_tokens`: once greedily,
and with `SEEDS` at `TEMPERATURE`. An answer is whole if it ended by itself. The package jsonschema judges it by the
schema as it was typed. With `open`, objects may have other properties and blanks, as with `--open-schema`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from cortexmlx import Completion, Engine, FinishReason, SamplingParams
from cortexmlx.bench.studies.structured.maskbench import cut_place, judged
from cortexmlx.cli.files.schema_file import form_of_schema

SEEDS = (1, 2, 3, 4)
TEMPERATURE = 0.7
ROWS = 16

TEXT, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}


def _object(required: bool = True, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": [*properties]} if required else {})}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


ORDINARY: dict[str, tuple[str, dict[str, Any]]] = {
    "person": ("Invent a person.", _object(name=TEXT, age=INTEGER, email=TEXT)),
    "invoice": (
        "An invoice for two chairs at 40 euros and a table at 120 euros.",
        _object(number=TEXT, items=_list(_object(description=TEXT, quantity=INTEGER, price=NUMBER)), total=NUMBER),
    ),
    "tags": ("Tags for an article about growing tomatoes on a balcony.", _object(tags=_list(TEXT))),
    "recipe": (
        "A recipe for pancakes.",
        _object(title=TEXT, minutes=INTEGER, ingredients=_list(TEXT), steps=_list(TEXT)),
    ),
    "class": (
        "Classify this review: I waited an hour, and the soup was cold.",
        _object(sentiment={"type": "string", "enum": ["positive", "neutral", "negative"]}, confidence=NUMBER),
    ),
    "booking": (
        "Book a table for four at the Blue Fish on 12 May 2026 at 19:30 for Anna.",
        _object(False, name=TEXT, date=TEXT, time=TEXT, guests=INTEGER, remarks=TEXT),
    ),
    "address": (
        "Where is the Eiffel Tower?",
        _object(place=TEXT, address=_object(street=TEXT, city=TEXT, postcode=TEXT, country=TEXT)),
    ),
    "product": (
        "A pair of running shoes in three colours.",
        _object(name=TEXT, price=NUMBER, in_stock={"type": "boolean"}, colours=_list(TEXT)),
    ),
    "event": (
        "Extract the event: the choir sings in the town hall on Friday at 8 pm, tickets are 12 pounds.",
        _object(False, title=TEXT, place=TEXT, day=TEXT, price=NUMBER, people=_list(TEXT)),
    ),
    "reason": ("Is water wet?", _object(answer={"type": "string", "enum": ["yes", "no"]}, reason=TEXT)),
}
"""What is asked, and the schema, by the name of each case. None says `additionalProperties`."""


def run(engine: Engine, *, is_open: bool = False) -> Iterator[tuple[str, SamplingParams, Completion]]:
    """Ask for all answers. Yield the name of the case, how it was asked, and the answer."""
    asked = []
    for name, (prompt, schema) in ORDINARY.items():
        form = form_of_schema(json.dumps(schema), is_open=is_open)
        for seed in (None, *SEEDS):
            temperature = 0.0 if seed is None else TEMPERATURE
            params = SamplingParams(temperature=temperature, seed=seed, structured=form)
            asked.append((name, params, engine.submit([{"role": "user", "content": prompt}], params)))
    for name, params, handle in asked:
        yield name, params, handle.result()


def whole(name: str, answer: Completion) -> bool:
    """Return whether an answer ended by itself and fits the schema as it was typed."""
    return answer.finish_reason is FinishReason.STOP and not judged(ORDINARY[name][1], answer.text)


def main(model: str = "smollm2", is_open: bool = False) -> None:
    """Print what became of each answer that is not whole, and the share of those that are."""
    total = good = tokens = 0
    with Engine(model, kv_memory="1GB", max_rows=ROWS) as engine:
        for name, params, answer in run(engine, is_open=is_open):
            total += 1
            tokens += answer.usage.completion_tokens
            if whole(name, answer):
                good += 1
            else:
                why = f"cut in {cut_place(answer.text)}: ...{answer.text[-60:]!r}"
                print(f"{name}, seed {params.seed}: {why}", flush=True)
    print(f"{good} of {total} answers are whole ({good / total:.0%}), {tokens / total:.0f} tokens on average")


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "open"]
    main(given[0] if given else "smollm2", "open" in sys.argv[1:])
