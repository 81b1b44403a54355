"""Schemas of the field: how many are enforced, how many answers end, and how many of those are valid.

    python -m cortexmlx.bench.studies.structured.maskbench FOLDER [MODEL] [EVERY] [plain]

FOLDER has the files of MaskBench (`maskbench/data` of jsonschemabench), each with a `schema`; every 45th is used. The
model writes a document for each schema that can be enforced, of at most 512 tokens. The package jsonschema judges the
answers that end by the schema as it is in the file. Schemas that are refused, and answers that are not valid, are named
with the reason; for answers that do not end, it is said in what they were cut.

A small model is asked as its users should ask it: with closed and compact forms, a repetition penalty and a frequency
penalty. With `plain` nothing of this is used, so that an answer may have any properties beside those of the schema,
blanks, and loops.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cortexmlx import (
    Completion,
    CortexError,
    Engine,
    FinishReason,
    SamplingParams,
    StructuredOutput,
)
from cortexmlx.errors import (
    InvalidRequest,
)

TOKENS = 512
ROWS = 16
SHOWN = 2000
"""How many characters of its schema the model is shown."""
TAIL = 160
"""How many of the last characters are looked at for a loop."""
AGAINST_LOOPS = {"repetition_penalty": 1.1, "repetition_context": 64, "frequency_penalty": 0.1}
"""The first leads out of long loops. The second grows, and so leads out of short ones, whose tokens are too likely."""


_CONTAINERS = {"[": "an array", "{": "an object"}
_PARTS = re.compile(
    r'"(?:[^"\\]|\\.)*"|(?P<text>".*)|(?P<opens>[\[{])|(?P<closes>[\]}])|(?P<number>[-+.\w]+$)', re.DOTALL
)
"""The parts of a document that was cut. A text or a number that did not end is the last."""


@dataclass
class Outcome:
    """What became of the schemas."""

    schemas: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """The names of schemas that cannot be enforced, each with the reason."""
    failed: dict[str, str] = field(default_factory=dict)
    """The names of schemas whose answer ended with an error, each with the error."""
    cut: dict[str, str] = field(default_factory=dict)
    """The names of schemas whose answer did not end within the tokens, each with what it was cut in."""
    ended: int = 0
    invalid: dict[str, str] = field(default_factory=dict)
    """The names of schemas whose answer ended and is not valid, each with the keyword and the place."""

    def lines(self) -> Iterator[str]:
        """Yield the report."""
        compiled = self.schemas - len(self.refused)
        yield f"{self.schemas} schemas: {compiled} enforced, {len(self.refused)} refused by name"
        for reason, count in Counter(self.refused.values()).most_common():
            yield f"  {count:4} {reason}"
        share = self.ended / max(compiled, 1)
        yield f"{self.ended} of {compiled} answers end within {TOKENS} tokens ({share:.1%}); {len(self.failed)} failed"
        for place, count in Counter(self.cut.values()).most_common():
            yield f"  {count:4} cut in {place}"
        yield f"{len(self.invalid)} of {self.ended} are not valid ({len(self.invalid) / max(self.ended, 1):.1%})"
        for name, why in {**self.failed, **self.invalid}.items():
            yield f"  {name}: {why}"


def schemas_in(folder: Path, every: int) -> Iterator[tuple[str, Any]]:
    """Yield the names and the schemas of every so-manieth file."""
    for path in sorted(folder.rglob("*.json"))[::every]:
        yield path.stem, json.loads(path.read_text())["schema"]


def judged(schema: Any, text: str) -> str:
    """Return the keyword and the place that a document breaks; empty if it is valid."""
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]

    kind = validator_for(schema)
    try:
        document = json.loads(text)
    except ValueError as error:
        return f"it is no JSON: {error}"
    broken = next(iter(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(document)), None)
    return "" if broken is None else f"{broken.validator} at {broken.json_path}"


def reason(error: Exception) -> str:
    """Return why a schema is refused, without what is only its own."""
    said = str(error).partition("cannot be enforced: ")[2] or str(error)
    return said.partition(". StructuredOutput")[0].partition(";")[0][:100]


def cut_place(text: str) -> str:
    """Return what a document was cut in: the innermost part around its whole tail, and whether that is a loop."""
    opened = [(-1, "nothing")]
    for found in _PARTS.finditer(text):
        if found.lastgroup == "closes":
            opened.pop()
        elif found.lastgroup:
            what = _CONTAINERS[found[0]] if found.lastgroup == "opens" else f"a {found.lastgroup}"
            opened.append((found.start(), what))
    tail = text[-TAIL:]
    looped = len(tail) == TAIL and any(tail[period:] == tail[:-period] for period in range(1, TAIL // 2 + 1))
    place = [what for start, what in opened if start < max(1, len(text) - TAIL)][-1]
    return f"{place}{', in a loop' if looped else ''}"


def run(engine: Engine, folder: Path, every: int, plain: bool = False) -> Outcome:
    """Ask for a document of each schema."""
    outcome = Outcome()
    sampling = {"temperature": 0.0, **dict(engine.info.sampling), **({} if plain else AGAINST_LOOPS)}
    asked: list[tuple[str, Any, Any]] = []
    for number, (name, schema) in enumerate(schemas_in(folder, every)):
        outcome.schemas += 1
        shown = json.dumps(schema, ensure_ascii=False)[:SHOWN]
        prompt = [{"role": "user", "content": f"Write a short JSON document of this schema:\n{shown}"}]
        try:
            form = StructuredOutput.json(schema, compact=not plain, closed=not plain)
            params = SamplingParams(max_tokens=TOKENS, seed=number, structured=form, **sampling)  # type: ignore[arg-type]
            asked.append((name, schema, engine.submit(prompt, params, background=True, cache=False)))
        except InvalidRequest as error:
            outcome.refused[name] = reason(error)
    for name, schema, handle in asked:
        try:
            take(outcome, name, schema, handle.result())
        except CortexError as error:
            outcome.failed[name] = str(error)[:200]
    return outcome


def take(outcome: Outcome, name: str, schema: Any, answer: Completion) -> None:
    """Count an answer."""
    if answer.finish_reason is not FinishReason.STOP:
        outcome.cut[name] = cut_place(answer.text)
        return
    outcome.ended += 1
    if why := judged(schema, answer.text):
        outcome.invalid[name] = why


def main(folder: str, model: str = "smollm2", every: int = 45, plain: bool = False) -> None:
    """Print the report."""
    with Engine(model, kv_memory="2GB", max_rows=ROWS) as engine:
        for line in run(engine, Path(folder), every, plain).lines():
            print(line)


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "plain"]
    chosen = given[1] if len(given) > 1 else "smollm2"
    main(given[0], chosen, int(given[2]) if len(given) > 2 else 45, "plain" in sys.argv[1:])
