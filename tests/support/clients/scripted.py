"""A tiny model that writes what a script says.

Its weights are random, but a logits processor leaves one token at each place: the next of the script's answer. All else
is real: the chat template, prefill and the paged cache, grammars, tool calls and the protocols.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cortexmlx import Engine
from support.models.tiny import write_tiny
from support.pages import ROOT

VOCABULARY = 8192
CONTEXT = 65536
END = "<|im_end|>"
_BEGIN = "<|im_start|>"
_SPECIAL = ("<|endoftext|>", _BEGIN, END)
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's, without what tells a model how to call."""


class Turn(NamedTuple):
    """One message of a prompt. The tools are the first, with the role `tools`."""

    role: str
    text: str


Answer = Callable[[Sequence[Turn]], str]
"""A script: what the model writes after these messages."""


def write_scripted(folder: Path) -> Path:
    """Write the model: one layer, and a tokenizer with words of English and of Python."""
    write_tiny(
        folder,
        "one layer",
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        eos_token_id=_SPECIAL.index(END),
        tie_word_embeddings=True,
    )
    _tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def _tokenizer() -> Any:
    """A byte-level tokenizer, trained on the documentation and the code of this repository."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(_TAGS),
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "cortexmlx").rglob("*.py")]
    tokenizer.train([str(path) for path in sorted(files)], trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in _TAGS])
    return tokenizer


class Script:
    """A logits processor: the model writes `answer` of the messages, and ends. It is right for any number of requests
    at once, since it finds the answer by the tokens alone.
    """

    def __init__(self, engine: Engine, answer: Answer) -> None:
        self._engine = engine
        self._answer = answer
        self._begin = engine.encode(_BEGIN)[-1]
        self._end = engine.encode(END)[-1]
        self._head = len(engine.encode(f"{_BEGIN}assistant\n"))
        self._answers: dict[bytes, list[int]] = {}

    def __call__(self, tokens: Any, logits: Any) -> Any:
        """Return logits with one token that is not -inf."""
        import mlx.core as mx
        import numpy as np

        known = np.array(tokens, np.int32)
        start = int(np.flatnonzero(known == self._begin)[-1]) + self._head
        prompt = known[:start].tobytes()
        if prompt not in self._answers:
            answer = self._answer(turns(self._engine.decode(known[:start].tolist())))
            self._answers[prompt] = [*self._engine.encode(answer), self._end]
        answer, written = self._answers[prompt], known[start:].tolist()
        assert answer[: len(written)] == written, f"not of the script: {self._engine.decode(written)!r}"
        token = answer[min(len(written), len(answer) - 1)]
        return mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)[None]


def turns(text: str) -> list[Turn]:
    """Return the messages of a rendered prompt."""
    parts = [part.removesuffix("\n").removesuffix(END) for part in text.split(_BEGIN)[1:-1]]
    return [Turn(*part.split("\n", 1)) for part in parts]


def call(name: str, /, **arguments: Any) -> str:
    """Return how a model writes a call of a tool."""
    said = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {said}}}\n</tool_call>'
