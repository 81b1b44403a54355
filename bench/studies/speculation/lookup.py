"""What looking for drafts in texts costs, and how often they are right: `python -m
cortexmlx.bench.studies.speculation.lookup [MODEL]`. Of the model only the tokenizer is used.

It prints the microseconds that a row takes in a step, with 16 rows: when its text goes on as a place that it follows,
when each step searches in vain, and when each step finds a short match that then breaks. Then the milliseconds in which
a prompt of 30,000 tokens is read and indexed, and the memory. Then, for texts made from this project's files, how many
tokens a step brings if all drafts of at most 15 tokens are verified, and how many of the drafted tokens are right.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cortexmlx.request import QueuedRequest
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.scheduling.drafts import MOST_DRAFTS
from cortexmlx.scheduling.job import Job, JobId
from cortexmlx.speculation.places import ORDER, PlaceTable
from cortexmlx.speculation.suffix import EARLIER, INDEXED_AT_ONCE, OWN, RESUMED, SuffixDrafter
from cortexmlx.speculation.texts import Texts

ROOT = Path(__file__).resolve().parents[3]
ROWS = 16
STEPS = 200
CONTEXTS = (400, 4_000, 30_000)
VOCABULARY = 49_152
KINDS = {OWN: "own", EARLIER: "earlier", RESUMED: "resumed"}
LENGTHS = ("2", "3", "4", "5-6", "7-9", "10-15", "16+")

Encode = Callable[[str], list[int]]


def job_of(number: int, prompt: Sequence[int]) -> Job:
    """Return a job that no scheduler knows."""
    request = QueuedRequest(tuple(prompt), SamplingParams(max_tokens=None))
    return Job(JobId(number), request, frozenset(), 1 << 20, 0.0, number, [])


# -- time and memory --------------------------------------------------------------------------------------------------


def step_microseconds(context: int, kind: str, rows: int = ROWS, steps: int = STEPS) -> float:
    """Return the median microseconds that a row takes in a step. `kind`: "follows", "nothing" or "breaks"."""
    drawn = random.Random(context)
    base = [drawn.randrange(VOCABULARY) for _ in range(context + steps)]
    drafter, jobs = SuffixDrafter(), [job_of(row, [row, *base[:context]]) for row in range(rows)]
    for _ in range(2 + rows * context // INDEXED_AT_ONCE):
        drafter.propose(jobs, MOST_DRAFTS)
    taken = []
    for step in range(steps):
        for job in jobs:
            place = step if kind == "follows" else drawn.randrange(context - ORDER)
            new = [drawn.randrange(VOCABULARY)] if kind == "nothing" else base[place : place + ORDER]
            job.tokens += new[:1] if kind == "follows" else new
        began = time.perf_counter()
        drafter.propose(jobs, MOST_DRAFTS)
        taken.append((time.perf_counter() - began) / rows * 1e6)
    return statistics.median(taken)


def index_milliseconds(tokens: int = 30_000) -> tuple[float, float, float]:
    """Return the milliseconds in which the text of a new prompt is stored, a step's part of it is indexed, and all."""
    drawn = random.Random(tokens)
    prompt = [drawn.randrange(VOCABULARY) for _ in range(tokens)]
    table, texts = PlaceTable(), Texts()
    began = time.perf_counter()
    shelf = texts.shelf(None)
    text, _ = texts.begin(shelf, array("i", prompt))
    stored = time.perf_counter()
    parts = []
    for begin in range(ORDER, tokens, INDEXED_AT_ONCE):
        before = time.perf_counter()
        table.add_range(shelf.hash_key, text.number, text.tokens, begin, min(begin + INDEXED_AT_ONCE, tokens))
        parts.append(time.perf_counter() - before)
    return (stored - began) * 1e3, statistics.median(parts) * 1e3, sum(parts) * 1e3


def bytes_of(texts: int, tokens: int) -> tuple[int, int]:
    """Return the bytes that a drafter takes without any text, and those that ended `texts` of so many tokens add."""
    drawn = random.Random(texts)
    prompts = [[drawn.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(texts)]
    tracemalloc.start()
    try:
        drafter = SuffixDrafter()
        drafter.propose([job_of(0, [1, 2, 3])], 1)
        empty = tracemalloc.get_traced_memory()[0]
        for number, prompt in enumerate(prompts):
            drafter.end(job_of(number + 1, prompt))
        return empty, tracemalloc.get_traced_memory()[0] - empty
    finally:
        tracemalloc.stop()


# -- texts ------------------------------------------------------------------------------------------------------------


@dataclass
class Right:
    """How far drafts carried answers of `tokens` tokens."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    by_likeness: dict[int, list[int]] = field(default_factory=dict)
    """For each likeness: drafts, those whose first token was right, and all tokens that were right."""

    def __str__(self) -> str:
        share = self.accepted / max(self.drafted, 1)
        return f"{self.tokens:7,} tokens {self.tokens / self.steps:6.2f} a step, {share:4.0%} of the drafted right"


def replay(drafter: SuffixDrafter, job: Job, answer: Sequence[int], right: Right) -> None:
    """Let a job say an answer, and count what the drafts were worth. Each step verifies a draft."""
    said = 0
    while said < len(answer):
        (draft,) = drafter.propose([job], MOST_DRAFTS)
        guessed = [] if draft is None else list(draft.tokens)
        same = 0
        while same < min(len(guessed), len(answer) - said) and guessed[same] == answer[said + same]:
            same += 1
        if draft is not None:
            counts = right.by_likeness.setdefault(draft.likeness, [0, 0, 0])
            for index, more in enumerate((1, same > 0, same)):
                counts[index] += more
        right.drafted, right.accepted, right.steps = (
            right.drafted + len(guessed),
            right.accepted + same,
            right.steps + 1,
        )
        job.tokens += answer[said : said + same + 1]
        said += same + 1
    right.tokens += len(answer)


def edits(encode: Encode) -> Iterator[tuple[list[int], list[int]]]:
    """Yield files of this project, each with the same file of which three lines are changed."""
    drawn = random.Random(3)
    for path in drawn.sample(sorted((ROOT / "cortexmlx").rglob("*.py")), 40):
        lines = path.read_text(encoding="utf-8").splitlines()[:60]
        code = [index for index, line in enumerate(lines) if len(line.split()) > 3]
        if len(code) < 20:
            continue
        changed = list(lines)
        for index in drawn.sample(code, 3):
            words = changed[index].split(" ")
            words[-2] = drawn.choice(("renamed", "self.other", "None", "(count + 1)"))
            changed[index] = " ".join(words)
        yield encode("Change three lines:\n" + "\n".join(lines)), encode("\n" + "\n".join(changed) + "\n")


def prose(encode: Encode) -> Iterator[tuple[list[int], list[int]]]:
    """Yield pieces of this project's documentation, each with what follows it."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = encode(path.read_text(encoding="utf-8"))
        yield from ((text[at : at + 800], text[at + 800 : at + 1600]) for at in range(0, len(text) - 1600, 3200))


def records(encode: Encode) -> Iterator[tuple[list[int], list[int]]]:
    """Yield a request and records as JSON."""
    drawn = random.Random(5)
    for _ in range(10):
        people = [
            {
                "id": number,
                "name": f"{drawn.choice(('Anna', 'Ben', 'Carla'))} {drawn.choice(('Ito', 'Miller', 'Sousa'))}",
                "active": drawn.random() < 0.5,
                "score": round(drawn.random() * 100, 2),
                "address": {"city": drawn.choice(("Accra", "Lima", "Osaka")), "zip": drawn.randrange(10**4, 10**5)},
            }
            for number in range(10)
        ]
        yield encode("List ten users as JSON.\n"), encode(json.dumps(people, indent=2))


def turns(encode: Encode) -> Iterator[tuple[list[int], list[int]]]:
    """Yield an answer that repeats what another answer of the same client said, in a conversation of its own."""
    answers = [answer for _, answer in edits(encode)]
    yield from ((encode(f"Write file {number} again:"), answer) for number, answer in enumerate(answers * 2))


TEXTS = {"a file with three changed lines": edits, "prose": prose, "JSON": records, "files said twice": turns}


def right_of(pairs: Iterator[tuple[Sequence[int], Sequence[int]]]) -> Right:
    """Replay answers to prompts, one client's."""
    right, drafter = Right(), SuffixDrafter()
    for number, (prompt, answer) in enumerate(pairs):
        job = job_of(number, prompt)
        replay(drafter, job, answer, right)
        drafter.end(job)
    return right


def kind_of(likeness: int) -> str:
    """Return what a likeness says, in words."""
    kind = RESUMED if likeness >= RESUMED else EARLIER if likeness >= EARLIER else OWN
    return f"{KINDS[kind]} {LENGTHS[likeness - kind]}"


def main(model: str) -> None:
    """Print all figures."""
    from cortexmlx.models.load import load_model

    print(f"context   follows   nothing   breaks   (microseconds a row and step, {ROWS} rows)")
    for context in CONTEXTS:
        print(
            f"{context:7,}"
            + "".join(f"{step_microseconds(context, k):10.1f}" for k in ("follows", "nothing", "breaks"))
        )
    stored, part, whole = index_milliseconds()
    print(f"30,000 tokens: stored in {stored:.1f} ms, indexed in {whole:.1f} ms, {part:.2f} ms of it in a step")
    empty, more = bytes_of(200, 1000)
    print(f"{empty:,} bytes without texts, {more / 200_000:.1f} more a token in 200 texts of 1,000")
    tokenizer = load_model(model).tokenizer

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    for name, pairs in TEXTS.items():
        right = right_of(pairs(encode))
        print(f"{name:32}{right}")
        for likeness, (drafts, first, tokens) in sorted(right.by_likeness.items()):
            shares = f"{first / drafts:4.0%} begin right, {tokens / drafts:5.1f} tokens"
            print(f"    {kind_of(likeness):16}{drafts:6,} drafts, {shares}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
