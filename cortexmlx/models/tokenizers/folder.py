"""Load the tokenizer of a model's folder with mlx-lm's loader or sentencepiece. The folder's own code is never run.

What cannot be read is refused with the name of its file, and with what can be read instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cortexmlx.errors import CortexError, ModelCorrupt, ModelUnsupported
from cortexmlx.mlx_lm.package import mlx_lm_utils
from cortexmlx.models.json_file import read_json_object
from cortexmlx.models.messages import logged, one_line
from cortexmlx.models.tokenizers.bytelevel import encode_with
from cortexmlx.models.tokenizers.exact_text import use_exact_detokenizer
from cortexmlx.models.tokenizers.sentencepiece_folder import load_sentencepiece_folder
from cortexmlx.models.tokenizers.templates import use_default_template
from cortexmlx.models.tokenizers.turn_ends import template_ends

_PLAIN = "glm4"
"""A tokenizer type for which transformers reads tokenizer.json as it is, whatever class the folder asks for."""

_TIKTOKEN = "a tiktoken vocabulary, which says nothing of how text is cut into words: that is in Python code"
"""Why a tiktoken file alone is not enough."""


_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")

_HARD_TEXT = (
    " Don't  stop,\tI'LL: 1234567 x²+½ №5 ①٣ m³/s\r\n\n\n  def f(a_b, cD):\n\treturn 0.5e-3 # ok   \u2028"
    "naïve cafe\u0301 \ufb01n Ångström ÅNGSTRÖM Straße \u00a0ВОЙНА мир नमस्ते ไทย 漢字かな 한국어"
    " שלום 🙂\u200d🇩🇪 …—\x00\x7f_"
    " https://a.b/c?d=e&f#g $1,000.00 (([{}]))!!! ▁Ġ <0x41> ##ing </w> \n "
)
"""A text that tokenizers with different normalizers, words, digits, spaces or bytes cut in different ways."""


def load_tokenizer(folder: Path, eos_ids: set[int]) -> tuple[Any, tuple[str, ...]]:
    """Return the tokenizer of `folder`, with notes for the user. `eos_ids` are the ids that end a generation by the
    model's configuration.

    tokenizer.json says how text is cut, whatever class the settings name. An answer ends with `eos_ids`, with the
    settings' end token, and with the tokens that the chat template ends a turn with.

    Raises ModelCorrupt if its files cannot be read, and ModelUnsupported if they need code, which is not run.
    """
    if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        pieces = load_sentencepiece_folder(folder, eos_ids)
        pieces.eos_token_ids |= template_ends(
            pieces, {t: i for t, i in pieces.get_vocab().items() if i in pieces.special_ids}
        )
        return pieces, ()
    mlx_lm_utils()  # this imports transformers, so its logger exists from here on
    try:
        with logged("transformers"):
            wrapper, notes = _load(folder, eos_ids)
        tokenizer = use_exact_detokenizer(wrapper)
    except Exception as error:  # transformers and tokenizers raise anything, plain Exception included
        raise _unreadable(folder, error) from error
    notes += use_default_template(tokenizer, folder)
    added = {str(token): index for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    tokenizer.eos_token_ids |= template_ends(tokenizer, added)
    return tokenizer, notes


def _load(folder: Path, eos_ids: set[int]) -> tuple[Any, tuple[str, ...]]:
    """Return mlx-lm's wrapper around the tokenizer, and notes. If the class that the settings name makes another
    tokenizer than tokenizer.json describes, or none, the file is read as it is.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    def load(**options: Any) -> Any:
        settings = {"trust_remote_code": False, **options}
        return mlx_lm_utils().load_tokenizer(folder, settings, eos_token_ids=sorted(eos_ids) or None)

    file = folder / "tokenizer.json"
    try:
        wrapper = load()
    except Exception as error:  # a class for other vocabularies raises anything
        if not file.is_file() or _is_config_error(folder, error):
            raise
        try:
            wrapper = load(tokenizer_type=_PLAIN)
        except Exception:
            raise error from None
        why = "own Python code is not run" if "trust_remote_code" in str(error) else "class cannot read it"
        return wrapper, (f"its tokenizer's {why}: tokenizer.json is read as it is",)
    named = wrapper._tokenizer
    if not file.is_file() or type(named) is PreTrainedTokenizerFast:
        return wrapper, ()
    core = Tokenizer.from_file(str(file))
    if _cuts_alike(named, core):
        return wrapper, ()
    said = [read_json_object(folder / name) for name in _SETTINGS if (folder / name).is_file()]
    silent = [name for name in _SPECIAL_NAMES if not any(settings.get(name) for settings in said)]
    tokens = {name: token for name in silent if (token := getattr(named, name)) in core.get_vocab()}
    plain = load(tokenizer_type=_PLAIN, **tokens)
    return plain, (
        f"its tokenizer's class {type(named).__name__} cuts text otherwise: tokenizer.json is read as it is",
    )


def _cuts_alike(tokenizer: Any, core: Any) -> bool:
    """Return whether a tokenizer of transformers cuts text as `core` does, which tokenizer.json describes."""
    own = getattr(tokenizer, "backend_tokenizer", None)
    if own is None:
        return bool(tokenizer.encode(_HARD_TEXT, add_special_tokens=False) == encode_with(core, _HARD_TEXT, False))
    for each in (own, core):
        each.no_truncation()
        each.no_padding()
    return _parts(own) == _parts(core) and encode_with(own, _HARD_TEXT, False) == encode_with(core, _HARD_TEXT, False)


def _parts(core: Any) -> list[object]:
    """Return what a tokenizers core does to a text, apart from its vocabulary and merges."""
    model, options = core.model, ("dropout", "byte_fallback", "ignore_merges")
    parts = [_part(core.normalizer), _part(core.pre_tokenizer, "trim_offsets")]
    parts.append(_part(core.decoder, "trim_offsets", "add_prefix_space", "use_regex"))
    return [*parts, type(model).__name__, *(getattr(model, name, None) or None for name in options)]


def _part(part: Any, *without: str) -> object:
    """Return a part of a core as plain data, without settings of its `ByteLevel` that change no token and no text."""

    def kept(data: dict[str, Any]) -> dict[str, Any]:
        byte_level = data.get("type") == "ByteLevel"
        return {name: value for name, value in data.items() if not (byte_level and name in without)}

    return None if part is None else json.loads(part.__getstate__(), object_hook=kept)


def _unreadable(folder: Path, error: Exception) -> CortexError:
    if _is_config_error(folder, error):
        return ModelCorrupt(f"{folder / 'config.json'} does not describe a model: {one_line(error)}")
    if (folder / "tokenizer.json").is_file():
        return _damaged(folder, error)
    advice = "Take a folder with tokenizer.json or a sentencepiece tokenizer.model."
    if tiktoken := [*folder.glob("*.tiktoken"), *folder.glob("tiktoken.model")]:
        return ModelUnsupported(f"{tiktoken[0]} is {_TIKTOKEN}, which is not run. {advice}")
    if (folder / "tekken.json").is_file():
        return ModelUnsupported(f"{folder / 'tekken.json'} is a tokenizer of the mistral-common package only. {advice}")
    if "trust_remote_code" in str(error):
        return ModelUnsupported(f"the tokenizer in {folder} wants to run code of its own, which is refused. {advice}")
    if (folder / "tokenizer.json").is_dir():
        return ModelCorrupt(f"{folder / 'tokenizer.json'} is a folder, and should be a file: download the model again.")
    if not any((folder / name).is_file() for name in ("vocab.json", "vocab.txt")):
        return ModelCorrupt(
            f"{folder} has no tokenizer: no tokenizer.json in it, and no tokenizer.model. Download it again."
        )
    return _damaged(folder, error)


def _damaged(folder: Path, error: Exception) -> ModelCorrupt:
    """Return the error for the file that is not valid JSON, otherwise an error with what the tokenizer's library
    says.
    """
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                read_json_object(folder / name)
            except ModelCorrupt as damage:
                return damage
    return ModelCorrupt(f"the tokenizer in {folder} cannot be read: {one_line(error)}. Download it again.")


def _is_config_error(folder: Path, error: Exception) -> bool:
    """Return whether the error is about config.json, which transformers reads before a tokenizer's files."""
    from transformers import AutoConfig

    try:
        with logged("transformers"):
            AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as again:  # a configuration's class raises anything
        return "trust_remote_code" not in str(again) and str(again) == str(error)
    return False
