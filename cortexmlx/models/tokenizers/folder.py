"""Load the tokenizer of a model's folder with mlx-lm's loader or sentencepiece. The folder's own code is never run.

What cannot be read is refused with the name of its file, and with what can be read instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cortexmlx.errors import CortexError, ModelCorrupt, ModelUnsupported
from cortexmlx.mlx_lm.package import import_mlx_lm_utils
from cortexmlx.models.folder_config import read_json_object
from cortexmlx.models.messages import one_line, redirect_log
from cortexmlx.models.tokenizers.alphabet import byte_level_token_bytes
from cortexmlx.models.tokenizers.base import SpecialTokens
from cortexmlx.models.tokenizers.bytelevel import encode_without_gil
from cortexmlx.models.tokenizers.detokenize import (
    ByteDetokenizer,
    LeadingSpace,
    PieceDetokenizer,
    StreamingDetokenizer,
    TokenPiece,
    WindowDetokenizer,
)
from cortexmlx.models.tokenizers.least_tokens import iterate_parts
from cortexmlx.models.tokenizers.sentencepiece import SentencePieceTokenizer
from cortexmlx.models.tokenizers.templates import find_template, use_default_template
from cortexmlx.models.tokenizers.turn_ends import find_template_ends

_PLAIN_TYPE = "glm4"
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
        sentencepiece_tokenizer = load_sentencepiece_folder(folder, eos_ids)
        sentencepiece_tokenizer.eos_token_ids |= find_template_ends(
            sentencepiece_tokenizer,
            {t: i for t, i in sentencepiece_tokenizer.get_vocab().items() if i in sentencepiece_tokenizer.special_ids},
        )
        return sentencepiece_tokenizer, ()
    import_mlx_lm_utils()  # this imports transformers, so its logger exists from here on
    try:
        with redirect_log("transformers"):
            wrapper, notes = _load_wrapper(folder, eos_ids)
        tokenizer = use_exact_detokenizer(wrapper)
    except Exception as error:  # transformers and tokenizers raise anything, plain Exception included
        raise _tokenizer_error(folder, error) from error
    notes += use_default_template(tokenizer, folder)
    added_tokens = {str(token): index for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    tokenizer.eos_token_ids |= find_template_ends(tokenizer, added_tokens)
    return tokenizer, notes


def _load_wrapper(folder: Path, eos_ids: set[int]) -> tuple[Any, tuple[str, ...]]:
    """Load the tokenizer with mlx-lm, and return its wrapper and notes. tokenizer.json is read as it is if the class
    that the settings name fails, or cuts text in another way.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    def load(**options: Any) -> Any:
        settings = {"trust_remote_code": False, **options}
        return import_mlx_lm_utils().load_tokenizer(folder, settings, eos_token_ids=sorted(eos_ids) or None)

    file = folder / "tokenizer.json"
    try:
        wrapper = load()
    except Exception as error:  # a class for other vocabularies raises anything
        if not file.is_file() or _is_config_error(folder, error):
            raise
        try:
            wrapper = load(tokenizer_type=_PLAIN_TYPE)
        except Exception:
            raise error from None
        reason = "own Python code is not run" if "trust_remote_code" in str(error) else "class cannot read it"
        return wrapper, (f"its tokenizer's {reason}: tokenizer.json is read as it is",)
    tokenizer = wrapper._tokenizer
    if not file.is_file() or type(tokenizer) is PreTrainedTokenizerFast:
        return wrapper, ()
    core = Tokenizer.from_file(str(file))
    if _tokenizes_alike(tokenizer, core):
        return wrapper, ()
    settings_files = [read_json_object(folder / name) for name in _SETTINGS if (folder / name).is_file()]
    unset_names = [name for name in _SPECIAL_NAMES if not any(settings.get(name) for settings in settings_files)]
    tokens = {name: token for name in unset_names if (token := getattr(tokenizer, name)) in core.get_vocab()}
    plain_wrapper = load(tokenizer_type=_PLAIN_TYPE, **tokens)
    return plain_wrapper, (
        f"its tokenizer's class {type(tokenizer).__name__} cuts text otherwise: tokenizer.json is read as it is",
    )


def _tokenizes_alike(tokenizer: Any, core: Any) -> bool:
    """Return whether a tokenizer of transformers cuts text as `core` does, which tokenizer.json describes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return bool(
            tokenizer.encode(_HARD_TEXT, add_special_tokens=False) == encode_without_gil(core, _HARD_TEXT, False)
        )
    for each in (backend, core):
        each.no_truncation()
        each.no_padding()
    return _core_settings(backend) == _core_settings(core) and encode_without_gil(
        backend, _HARD_TEXT, False
    ) == encode_without_gil(core, _HARD_TEXT, False)


def _core_settings(core: Any) -> list[object]:
    """Return a core's settings besides vocabulary and merges: normalizer, pre-tokenizer, decoder, model's options."""
    model, options = core.model, ("dropout", "byte_fallback", "ignore_merges")
    parts = [_part_settings(core.normalizer), _part_settings(core.pre_tokenizer, "trim_offsets")]
    parts.append(_part_settings(core.decoder, "trim_offsets", "add_prefix_space", "use_regex"))
    return [*parts, type(model).__name__, *(getattr(model, name, None) or None for name in options)]


def _part_settings(part: Any, *ignored_settings: str) -> object:
    """Return a part of a core as plain data, without settings of its `ByteLevel` that change no token and no text."""

    def drop_ignored(data: dict[str, Any]) -> dict[str, Any]:
        byte_level = data.get("type") == "ByteLevel"
        return {name: value for name, value in data.items() if not (byte_level and name in ignored_settings)}

    return None if part is None else json.loads(part.__getstate__(), object_hook=drop_ignored)


def _tokenizer_error(folder: Path, error: Exception) -> CortexError:
    """Return the error for a tokenizer that failed to load, with the next step."""
    if _is_config_error(folder, error):
        return ModelCorrupt(f"{folder / 'config.json'} does not describe a model: {one_line(error)}")
    if (folder / "tokenizer.json").is_file():
        return _damaged_file_error(folder, error)
    advice = "Take a folder with tokenizer.json or a sentencepiece tokenizer.model."
    if tiktoken_files := [*folder.glob("*.tiktoken"), *folder.glob("tiktoken.model")]:
        return ModelUnsupported(f"{tiktoken_files[0]} is {_TIKTOKEN}, which is not run. {advice}")
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
    return _damaged_file_error(folder, error)


def _damaged_file_error(folder: Path, error: Exception) -> ModelCorrupt:
    """Return the error for a damaged tokenizer file. It names a file of invalid JSON, or has the library's message."""
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
        with redirect_log("transformers"):
            AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as again:  # a configuration's class raises anything
        return "trust_remote_code" not in str(again) and str(again) == str(error)
    return False


# The tokenizer of a folder that has `tokenizer.model` and no `tokenizer.json`.
#
# transformers guesses a tokenizer class for such folders, and a wrong guess loses spaces without an error. Here
# sentencepiece itself tokenizes. The folder's settings only say which special tokens are around and within the text.


_TIKTOKEN_FILE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
"""How a tiktoken file begins: a token's bytes in base64, and its rank."""

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token")


def load_sentencepiece_folder(folder: Path, eos_ids: set[int]) -> SentencePieceTokenizer:
    """Load the sentencepiece tokenizer of `folder`. `eos_ids` are the ids that end a generation by the model's
    configuration.

    Raises ModelCorrupt if the model or a settings file cannot be read, and ModelUnsupported if the model is of another
    kind.
    """
    settings = _read_settings(folder, "tokenizer_config.json")
    special_texts = {name: _special_token_text(settings.get(name)) for name in _NAMED_TOKENS}
    for name, value in _read_settings(folder, "special_tokens_map.json").items():
        if name in _NAMED_TOKENS and special_texts[name] is None:
            special_texts[name] = _special_token_text(value)
    from sentencepiece import SentencePieceProcessor

    model = (folder / "tokenizer.model").read_bytes()
    try:
        core = SentencePieceProcessor(model_proto=model)
    except Exception as error:  # the library raises RuntimeError and others, all from parsing
        if _TIKTOKEN_FILE.match(model):
            raise ModelUnsupported(
                f"{folder / 'tokenizer.model'} is a tiktoken vocabulary, not a sentencepiece model, and needs Python "
                "code to cut text into words. Take a folder with tokenizer.json."
            ) from error
        raise ModelCorrupt(f"{folder / 'tokenizer.model'} cannot be read: {one_line(error)}") from error
    added_tokens = dict(_read_added_tokens(folder, settings))
    piece_count = core.vocab_size()
    for text in [*special_texts.values(), *map(_special_token_text, settings.get("additional_special_tokens") or [])]:
        if text and text not in added_tokens:
            index = core.piece_to_id(text)
            if index != core.unk_id():
                added_tokens[text] = index
    added_tokens = {text: index for text, index in added_tokens.items() if index != core.unk_id()}
    if any(index > piece_count + 100_000 for index in added_tokens.values()):
        raise ModelCorrupt(f"an added token of {folder} has an id far beyond the vocabulary of {piece_count}.")

    def find_id(name: str, default: int) -> int | None:
        text = special_texts[name]
        index = default if text is None else added_tokens.get(text, -1)
        return index if index >= 0 else None

    bos_id = find_id("bos_token", core.bos_id())
    special = SpecialTokens(
        bos_id=bos_id,
        eos_id=find_id("eos_token", core.eos_id()),
        unk_id=core.unk_id(),
        pad_id=find_id("pad_token", core.pad_id()),
        eos_ids=frozenset(eos_ids),
        add_bos=bool(settings.get("add_bos_token", True)) and bos_id is not None,
        add_eos=bool(settings.get("add_eos_token", False)),
    )
    legacy = settings.get("legacy")
    return SentencePieceTokenizer(
        model, special, find_template(folder).text, added_tokens, prefix_after_added=legacy is None or bool(legacy)
    )


def _read_settings(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of the folder; empty if there is none."""
    path = folder / name
    return read_json_object(path) if path.is_file() else {}


def _special_token_text(token: Any) -> str | None:
    """Return the text of a special token, which is a string or an object with a `content`; None if it has none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _read_added_tokens(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the added tokens, each with its id, from both files that may list them."""
    for text, index in _read_settings(folder, "added_tokens.json").items():
        if text and isinstance(index, int) and index >= 0:
            yield text, index
    decoder = settings.get("added_tokens_decoder")
    for index, token in (decoder if isinstance(decoder, dict) else {}).items():
        content = _special_token_text(token)
        if content and str(index).isdecimal():
            yield content, int(index)


# Exact text for mlx-lm's tokenizer wrapper: precisely what its tokenizer decodes.


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def use_exact_detokenizer(tokenizer: Any) -> Any:
    """Replace the detokenizer of mlx-lm's TokenizerWrapper by one of ours, if its kind of tokens is known. Return the
    wrapper.

    mlx-lm's detokenizers have these faults:

    - The one for byte-level tokens loses the first space of an answer, which is part of a continued text. It shows NUL
      bytes as another character, and fails on ids that a vocabulary leaves out. It takes longer per token as a run of
      broken UTF-8 gets longer.
    - The one for sentencepiece's tokens fails on ids beyond the vocabulary, which a padded embedding can produce.
    - The one for all other tokens loses the space at the beginning of a line.
    - It is chosen by the decoder in tokenizer.json. Some files have the decoder of another kind of vocabulary: then
      answers have U+0120 or U+2581 for each space. What encodes the spaces says how the tokens write them.
    """
    exact = _make_detokenizer(tokenizer)
    if exact is not None:
        tokenizer._detokenizer = exact  # copied and reset for every request
    return tokenizer


def _make_detokenizer(tokenizer: Any) -> StreamingDetokenizer | None:
    """Return our detokenizer for the tokenizer's kind of tokens; None if the kind is unknown."""
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, SPMStreamingDetokenizer

    mlx_detokenizer = tokenizer.detokenizer
    core = getattr(getattr(tokenizer, "_tokenizer", None), "backend_tokenizer", None)
    encoding_parts = [] if core is None else [*iterate_parts(core.normalizer), *iterate_parts(core.pre_tokenizer)]
    decoding_parts = [] if core is None else list(iterate_parts(core.decoder))
    marker_parts = [part for part in encoding_parts if _uses_space_marker(part)]
    is_byte_level = any(part["type"] == "ByteLevel" for part in encoding_parts) and not marker_parts
    has_other_decoders = len(decoding_parts) > 1 and any(part["type"] == "ByteLevel" for part in decoding_parts)
    if (is_byte_level and not has_other_decoders) or (
        isinstance(mlx_detokenizer, BPEStreamingDetokenizer) and not marker_parts
    ):
        return ByteDetokenizer(
            [b"" if token is None else byte_level_token_bytes(token) for token in _all_tokens(tokenizer)]
        )
    if isinstance(mlx_detokenizer, SPMStreamingDetokenizer):
        return _make_piece_detokenizer(tokenizer, mlx_detokenizer.trim_space)
    if marker_parts and not any(map(_uses_space_marker, decoding_parts)):
        adds_prefix = (part["type"] != "Replace" and part.get("prepend_scheme") != "never" for part in marker_parts)
        return _make_piece_detokenizer(tokenizer, any(adds_prefix))
    return WindowDetokenizer(tokenizer.decode) if isinstance(mlx_detokenizer, NaiveStreamingDetokenizer) else None


def _uses_space_marker(part: dict[str, Any]) -> bool:
    """Return whether a part of a tokenizer writes U+2581 for a space, or reads it as one."""
    return part["type"] in ("Metaspace", "Replace", "Prepend") and _SPACE in json.dumps(part, ensure_ascii=False)


def _make_piece_detokenizer(tokenizer: Any, trim_space: bool) -> PieceDetokenizer:
    """Return a detokenizer for a vocabulary of sentencepiece's tokens."""
    leading_space = LeadingSpace.DROP_ONE if trim_space else LeadingSpace.KEEP
    return PieceDetokenizer([_make_piece(token or "") for token in _all_tokens(tokenizer)], leading_space)


def _all_tokens(tokenizer: Any) -> list[str | None]:
    """Return the text of each token of the vocabulary, by id."""
    tokens: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return tokens


def _make_piece(token: str) -> TokenPiece:
    """Return what a sentencepiece token stands for: a byte, or a text with spaces for its markers."""
    byte = _BYTE.fullmatch(token)
    text = token.replace(_SPACE, " ")
    return TokenPiece(text, has_marker=text.startswith(" "), byte=int(byte[1], 16) if byte else None)
