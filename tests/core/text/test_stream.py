"""TextStream against the tokenizer's own decoding of all tokens at once, and against the plain definition of a stop."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cortexmlx.core.text import StopConditions, StopStringTable, TextDelta, TextStream, ThoughtCallReader
from cortexmlx.models.tokenizers.detokenize import ByteDetokenizer
from cortexmlx.models.tokenizers.folder import use_exact_detokenizer
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.calls.json_formats import Hermes
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples
from support.tool_calls import TOOLS

CORPUS = [
    "the theme of the song",
    "la la land",
    "STOP STO ST",
    "你好，世界",
    "héllo \U0001f600\U0001f468‍\U0001f469 é\n\n",
]
# Few letters, so that stop strings happen; several bytes per character, so that tokens cut characters.
TEXTS = st.text(st.sampled_from("abST \né́好世\U0001f600‍\x00�"), max_size=40) | st.text(max_size=20)
STOPS = st.lists(st.text(st.sampled_from("abST \ń好\U0001f600�"), min_size=1, max_size=4), max_size=4)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer like SmolLM2's: single digits apart, merges that cut across characters."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS * 4, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


@cache
def pieces() -> list[bytes]:
    """The bytes of each token, from the byte-level alphabet of GPT-2: printable bytes stand for themselves."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    byte_of = {chr(b): b for b in printable}
    byte_of |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in printable)}
    return [
        bytes(byte_of[c] for c in piece) for piece in tokenizer().convert_ids_to_tokens(list(range(len(tokenizer()))))
    ]


def stream(ids: list[int], stops: list[str]) -> tuple[TextStream, list[str]]:
    """The pieces that a caller is shown, ending with what `finish` returned."""
    text = TextStream(ByteDetokenizer(pieces()), StopConditions(in_answer=StopStringTable(stops)))
    shown = [text.push(token).text for token in ids]
    return text, [*shown, text.finish().text]


def cut(text: str, stops: list[str]) -> str:
    """The definition: read on until the text ends with a stop string, then take off the longest that it ends with."""
    for end in range(1, len(text) + 1):
        ending = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(ending)]
    return text


TOKENS = st.lists(st.integers(0, 339), max_size=40)  # any tokens at all, most of them broken UTF-8


@given(st.one_of(TOKENS, TEXTS.map(lambda text: tokenizer().encode(text))), STOPS)
@example(tokenizer().encode("aST STab"), ["ST b", "STa", "T"])
@example(tokenizer().encode("好\U0001f600"), ["�"])
def test_pieces_add_up_to_the_decoded_text_before_the_first_stop_string(ids: list[int], stops: list[str]) -> None:
    text, shown = stream(ids, stops)
    decoded = tokenizer().decode(ids)
    assert "".join(shown) == text.text == cut(decoded, stops)
    assert text.stopped == any(stop in decoded for stop in stops)


@given(TEXTS, STOPS)
def test_nothing_shown_has_to_be_taken_back(answer: str, stops: list[str]) -> None:
    ids = tokenizer().encode(answer)
    shown = ""
    text = TextStream(ByteDetokenizer(pieces()), StopConditions(in_answer=StopStringTable(stops)))
    for token in ids:
        shown += text.push(token).text
        assert cut(answer, stops).startswith(shown)


@given(TEXTS, STOPS)
def test_nothing_is_held_back_without_a_reason(answer: str, stops: list[str]) -> None:
    text = TextStream(ByteDetokenizer(pieces()), StopConditions(in_answer=StopStringTable(stops)))
    seen = b""
    for token in tokenizer().encode(answer):
        text.push(token)
        seen += pieces()[token]
        if text.stopped:
            break
        certain = _complete_characters(seen)
        held = certain[len(text.text) :]
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((b for b in beginnings if certain.endswith(b)), key=len, default="")
        assert held == longest


def _complete_characters(data: bytes) -> str:
    for missing in range(4):
        try:
            return data[: len(data) - missing].decode("utf-8")
        except UnicodeDecodeError:
            continue
    raise AssertionError("valid text is never more than three bytes short of a character")


@pytest.mark.parametrize(
    ("answer", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("aab", ["ab"], "a"),
        ("aaab", ["aab"], "a"),
        ("abcabd", ["abd"], "abc"),
        ("abc", ["bc", "abc"], ""),
        ("abc", ["b", "abc"], "a"),
        ("stop", ["stop"], ""),
        ("sto", ["stop"], "sto"),
        ("ok \U0001f468‍\U0001f469!", ["‍"], "ok \U0001f468"),
        ("e\u0301", ["\u0301"], "e"),
    ],
)
def test_stop_strings_by_example(answer: str, stops: list[str], expected: str) -> None:
    ids = [token for char in answer for token in tokenizer().encode(char)]
    assert stream(ids, stops)[0].text == expected
    assert stream(tokenizer().encode(answer), stops)[0].text == expected


def test_tokens_after_the_stop_are_ignored() -> None:
    text, _ = stream(tokenizer().encode("a STOP b"), ["STOP"])
    assert text.stopped and text.push(5) == text.finish() == TextDelta() and text.text == "a "


def test_an_answer_that_ends_inside_a_character_shows_a_replacement_character() -> None:
    ids = [pieces().index(bytes([b])) for b in "好".encode()[:2]]
    text, shown = stream(ids, [])
    assert shown == ["", "", "\ufffd"] and text.text == tokenizer().decode(ids)


@pytest.mark.parametrize("detokenizer", [BPEStreamingDetokenizer, NaiveStreamingDetokenizer])
@given(st.text(st.sampled_from("abST \né好\U0001f600"), max_size=30).map(lambda text: "a" + text), STOPS)
@settings(max_examples=examples(50))
def test_the_detokenizers_of_mlx_lm_serve_as_well(detokenizer: type, answer: str, stops: list[str]) -> None:
    text = TextStream(detokenizer(tokenizer()), StopConditions(in_answer=StopStringTable(stops)))
    shown = [text.push(token).text for token in tokenizer().encode(answer)]
    assert "".join([*shown, text.finish().text]) == cut(answer, stops)


@cache
def wrapper() -> TokenizerWrapper:
    """As a model folder is loaded, with added tokens: with a space, outside the byte alphabet, nothing but spaces."""
    core = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    core.add_special_tokens(["<|a b|>"])
    core.add_tokens(["<｜end▁of｜>", "  "])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    return use_exact_detokenizer(TokenizerWrapper(wrapped, BPEStreamingDetokenizer))


@given(st.lists(st.integers(0, 342), max_size=30) | TEXTS.map(lambda text: wrapper().encode(text)), STOPS)
@example([], [])
def test_the_wrapper_of_a_model_folder_gives_exactly_what_its_tokenizer_decodes(
    ids: list[int], stops: list[str]
) -> None:
    text = TextStream(wrapper().detokenizer, StopConditions(in_answer=StopStringTable(stops)))
    shown = [text.push(token).text for token in ids]
    assert "".join([*shown, text.finish().text]) == cut(wrapper().decode(ids), stops)


def test_ids_that_a_vocabulary_leaves_out_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    ids_to_tokens = PreTrainedTokenizerFast.convert_ids_to_tokens
    with monkeypatch.context() as patch:
        missing = {7}
        patch.setattr(
            PreTrainedTokenizerFast,
            "convert_ids_to_tokens",
            lambda self, ids: [None if i in missing else t for i, t in zip(ids, ids_to_tokens(self, ids), strict=True)],
        )
        wrapped = use_exact_detokenizer(TokenizerWrapper(tokenizer(), BPEStreamingDetokenizer))
    text = TextStream(wrapped.detokenizer, StopConditions())
    assert [text.push(t) for t in [*tokenizer().encode("ab"), 7, len(wrapped) + 5]][-2:] == [TextDelta(), TextDelta()]


def test_byte_level_tokens_are_known_by_themselves_whatever_mlx_lm_takes_them_for() -> None:
    wrapped = use_exact_detokenizer(TokenizerWrapper(tokenizer(), NaiveStreamingDetokenizer))
    assert isinstance(wrapped.detokenizer, ByteDetokenizer)


def test_an_answer_stays_stopped_at_a_string_with_a_tag_beside_strings_of_the_answer() -> None:
    """The text before a tag's string goes through the strings of the answer, too, which are not complete."""
    thoughts = Thoughts("<think>", "</think>")
    stops = StopConditions.from_params(SamplingParams(stop=["never", "</think>"]), (), thoughts)
    text = TextStream(ByteDetokenizer(pieces()), stops, thoughts)
    shown = [text.push(token) for token in tokenizer().encode("<think>why</think>because")]
    assert text.stopped and text.finish() == TextDelta()
    assert (text.text, text.thinking, "".join(piece.thinking for piece in shown)) == ("", "why", "why")


CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
OPENER = 256
WITH_OPENER = [*(bytes([byte]) for byte in range(OPENER)), b"<tool_call>"]


@pytest.mark.parametrize(
    ("said", "runs", "thinking"),
    [
        (["I call it.\n", OPENER, CALL], 1, "I call it."),
        ([OPENER, f"\n{CALL}\n", OPENER, CALL, "\n"], 2, ""),
        (["Perhaps ", OPENER, CALL, " or rather\n", OPENER, CALL], 1, f"Perhaps <tool_call>{CALL} or rather"),
        (["The tag ", OPENER, " opens a call. ", OPENER, CALL], 1, "The tag <tool_call> opens a call."),
        ([f"<tool_call>{CALL}"], 0, f"<tool_call>{CALL}"),  # spelled with ordinary tokens
        ([OPENER, CALL, " But no."], 0, f"<tool_call>{CALL} But no."),
        ([OPENER, CALL[:-3]], 0, f"<tool_call>{CALL[:-3]}"),
        ([OPENER, CALL.replace("weather", "nosuch")], 0, f"<tool_call>{CALL.replace('weather', 'nosuch')}"),
        ([OPENER, CALL.replace('"Oslo"', "7")], 0, f"<tool_call>{CALL.replace(chr(34) + 'Oslo' + chr(34), '7')}"),
        ([OPENER, CALL, "</think>Hello"], 0, f"<tool_call>{CALL}"),
        ([OPENER, CALL, "</think>", OPENER, CALL], 1, f"<tool_call>{CALL}"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_calls_at_the_end_of_thoughts_count(said: list[str | int], runs: int, thinking: str, ended: bool) -> None:
    format = Hermes()
    format.opener = OPENER
    calls = AllowedCalls(format, TOOLS)
    parser, in_thoughts = calls.make_parser("key", streaming=True), ThoughtCallReader(calls, "key")
    text = TextStream(
        ByteDetokenizer(WITH_OPENER), StopConditions(), Thoughts("<think>", "</think>"), parser, in_thoughts
    )
    tokens = [token for part in ["<think>", *said] for token in ([part] if isinstance(part, int) else part.encode())]
    shown = [*map(text.push, tokens), text.finish(ended)]
    closed = "</think>" in str(said)
    if not ended and not closed:  # the answer was cut
        runs, thinking = 0, "".join("<tool_call>" if part == OPENER else str(part) for part in said)
    assert (len(text.calls), text.thinking.strip()) == (runs, thinking.strip())
    assert "".join(piece.thinking for piece in shown) == text.thinking
    assert [delta.name for piece in shown for delta in piece.calls if delta.name] == ["weather"] * runs
    assert len({call.id for call in text.calls}) == runs
    assert bool(text.notes) == (not closed and "<tool_call>" in text.thinking and not runs)
