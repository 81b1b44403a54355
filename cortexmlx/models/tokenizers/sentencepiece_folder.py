"""The tokenizer of a folder that has `tokenizer.model` and no `tokenizer.json`.

transformers guesses a tokenizer class for such folders, and a wrong guess loses spaces without an error. Here
sentencepiece itself tokenizes. The folder's settings only say which special tokens are around and within the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models.json_file import read_json_object
from cortexmlx.models.messages import one_line
from cortexmlx.models.tokenizers.base import SpecialTokens
from cortexmlx.models.tokenizers.sentencepiece import SentencePieceTokenizer
from cortexmlx.models.tokenizers.templates import find_template

_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
"""How a tiktoken file begins: a token's bytes in base64, and its rank."""

_NAMED = ("bos_token", "eos_token", "pad_token")


def load_sentencepiece_folder(folder: Path, eos_ids: set[int]) -> SentencePieceTokenizer:
    """Return the tokenizer of `folder`. `eos_ids` are the ids that end a generation by the model's configuration.

    Raises ModelCorrupt if the model or a settings file cannot be read, and ModelUnsupported if the model is of another
    kind.
    """
    settings = _settings(folder, "tokenizer_config.json")
    named = {name: _content(settings.get(name)) for name in _NAMED}
    for name, value in _settings(folder, "special_tokens_map.json").items():
        if name in _NAMED and named[name] is None:
            named[name] = _content(value)
    from sentencepiece import SentencePieceProcessor

    model = (folder / "tokenizer.model").read_bytes()
    try:
        core = SentencePieceProcessor(model_proto=model)
    except Exception as error:  # the library raises RuntimeError and others, all from parsing
        if _TIKTOKEN.match(model):
            raise ModelUnsupported(
                f"{folder / 'tokenizer.model'} is a tiktoken vocabulary, not a sentencepiece model, and needs Python "
                "code to cut text into words. Take a folder with tokenizer.json."
            ) from error
        raise ModelCorrupt(f"{folder / 'tokenizer.model'} cannot be read: {one_line(error)}") from error
    added = dict(_added(folder, settings))
    pieces = core.vocab_size()
    for text in [*named.values(), *map(_content, settings.get("additional_special_tokens") or [])]:
        if text and text not in added:
            index = core.piece_to_id(text)
            if index != core.unk_id():
                added[text] = index
    added = {text: index for text, index in added.items() if index != core.unk_id()}
    if any(index > pieces + 100_000 for index in added.values()):
        raise ModelCorrupt(f"an added token of {folder} has an id far beyond the vocabulary of {pieces}.")

    def id_of(name: str, default: int) -> int | None:
        text = named[name]
        index = default if text is None else added.get(text, -1)
        return index if index >= 0 else None

    bos_id = id_of("bos_token", core.bos_id())
    special = SpecialTokens(
        bos_id=bos_id,
        eos_id=id_of("eos_token", core.eos_id()),
        unk_id=core.unk_id(),
        pad_id=id_of("pad_token", core.pad_id()),
        eos_ids=frozenset(eos_ids),
        add_bos=bool(settings.get("add_bos_token", True)) and bos_id is not None,
        add_eos=bool(settings.get("add_eos_token", False)),
    )
    legacy = settings.get("legacy")
    return SentencePieceTokenizer(
        model, special, find_template(folder).text, added, prefix_after_added=legacy is None or bool(legacy)
    )


def _settings(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return read_json_object(path) if path.is_file() else {}


def _content(token: Any) -> str | None:
    """Return the text of a special token, which is written as text or as an object with a `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _added(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the tokens that stand for one id wherever they occur, from both files that may list them."""
    for text, index in _settings(folder, "added_tokens.json").items():
        if text and isinstance(index, int) and index >= 0:
            yield text, index
    decoder = settings.get("added_tokens_decoder")
    for index, token in (decoder if isinstance(decoder, dict) else {}).items():
        content = _content(token)
        if content and str(index).isdecimal():
            yield content, int(index)
