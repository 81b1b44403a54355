"""SamplingParams: how the tokens of an answer are chosen, and when it ends. Without mlx or threads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Rational, Real
from typing import TYPE_CHECKING, Any, TypeVar

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.structured.tools import Tool, check_tool_choice, read_tools

if TYPE_CHECKING:
    import mlx.core as mx

T = TypeVar("T")

LogitsProcessor = Callable[["mx.array", "mx.array"], "mx.array"]
"""A function of the tokens so far, `[n] int32`, and the next token's logits, `[1, vocab] float32`. It returns the
logits to choose from. See `SamplingParams`.
"""

MAX_STOPS = 1024
"""How many stop strings a request may have. OpenAI allows 4; lists of words to end at have some hundred."""

MAX_STOP_CHARACTERS = 16_384
"""How many characters all stop strings of a request may have together. Their table takes up to 3 MB, and 20 ms to
build.
"""

MAX_STOP_TOKENS = 16_384
"""How many stop tokens a request may have. Lists of words to end at have a few thousand."""


class TokenBiases(Mapping[int, float]):
    """An immutable map from token ids to what is added to their logits. If all numbers are in their ranges, it is
    `valid`, and `ids` and `amounts` have it as arrays, for the sampler.
    """

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._biases: dict[int, float] = {python_number(token): python_number(bias) for token, bias in biases.items()}
        self.valid = all(_TOKEN.contains(token) and _BIAS.contains(bias) for token, bias in self._biases.items())
        self.ids = array("i", self._biases if self.valid else ())
        self.amounts = array("f", self._biases.values() if self.valid else ())

    def __getitem__(self, token: int) -> float:
        return self._biases[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._biases)

    def __len__(self) -> int:
        return len(self._biases)

    def __hash__(self) -> int:
        return hash(frozenset(self._biases.items()))

    def __repr__(self) -> str:
        return repr(self._biases)


@dataclass(frozen=True)
class NumberSpec:
    """The range of a number in `SamplingParams`, and how it is set on the command line and in a chat."""

    low: float
    high: float
    whole: bool = False
    """Whether it is an integer."""
    optional: bool = False
    """Whether None is allowed, too."""
    above: bool = False
    """Whether it must be above `low`."""
    below: bool = False
    """Whether it must be below `high`."""
    note: str = ""
    """What an error says after the range."""
    help: str = ""
    """The meaning of its option on the command line; empty: it has none."""
    flags: tuple[str, ...] = ()
    """The names of that option; none: it is called like the parameter."""
    setting: str = ""
    """Its meaning as a setting of a chat; empty: it is none."""
    recommended: bool = False
    """Whether models recommend a value in their generation_config.json."""

    def contains(self, value: object) -> bool:
        """Return whether a value is in range. Finite bounds also exclude infinities, NaN, integers beyond any float."""
        if value is None:
            return self.optional
        if not isinstance(value, int if self.whole else (int, float)) or isinstance(value, bool):
            return False
        inside = self.low < value if self.above else self.low <= value
        return inside and (value < self.high if self.below else value <= self.high)

    @property
    def range_text(self) -> str:
        """The range in words, for errors."""
        if self.whole:
            return f"an integer in {self.low}..{self.high}{self.note}{' or None' if self.optional else ''}"
        begin, end = "(" if self.above else "[", ")" if self.below else "]"
        return f"a number in {begin}{self.low:g}, {self.high:g}{end}{self.note}{' or None' if self.optional else ''}"


def _number_field(default: T, low: float, high: float, **about: Any) -> T:
    """Declare a dataclass field that is a number in a range: see `NumberSpec`."""
    number = NumberSpec(low, high, **about)
    return field(default=default, metadata={"number": number})


_INT_MAX = 2**31 - 1

_BIAS_MAX = 1e9


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Any iterable works for the lists and any mapping for `logit_bias`; they are copied, and NumPy's numbers become
    Python's. Raises InvalidRequest with the parameter, its value and its range. The ranges keep all arithmetic finite
    in float32. A request checks token ids against the model's vocabulary.

    `logits_processors` work as in mlx-lm's `generate`. They are called in order for every token, after bias and
    penalties and before the filters, on the engine's thread, while others wait. Each answer calls them with its tokens
    growing by one, also if it was preempted in between, and once more than it has tokens if a stop ended it. The
    answers of one request share them (`n`), so a function that keeps state should find its state by the tokens. If one
    raises, its request fails with LogitsProcessorError.
    """

    max_tokens: int | None = _number_field(
        256,
        1,
        _INT_MAX,
        whole=True,
        optional=True,
        note=" (0 only with prompt_logprobs)",
        flags=("--max-tokens", "-n"),
        help="Tokens to generate at most.",
        setting="tokens of an answer at most; none: until the context is full",
    )
    """None: until the context is full; with the engine's `keep_last`, without end. 0 is allowed with
    `prompt_logprobs`.
    """
    max_thinking_tokens: int | None = _number_field(
        None,
        0,
        _INT_MAX,
        whole=True,
        optional=True,
        help="Tokens of thoughts at most, then the answer.",
        setting="tokens of thoughts at most; none: no limit",
    )
    """How many tokens the thoughts before the answer may have, if messages are asked. Then the model is made to write
    the tag that closes them, and up to 3 tokens later if a character would be torn. 0: none. Models that do not think
    are not changed.
    """
    temperature: float = _number_field(
        0.0,
        0.0,
        100.0,
        note=" (0: greedy)",
        flags=("--temp",),
        help="Temperature; 0: always the likeliest token.",
        setting="0: always the likeliest token",
        recommended=True,
    )
    """0 is greedy."""
    top_p: float = _number_field(
        1.0,
        0.0,
        1.0,
        above=True,
        help="Sample from the likeliest, to this probability in all.",
        setting="from the likeliest tokens, to this probability in all",
        recommended=True,
    )
    """In (0, 1]."""
    top_k: int = _number_field(
        0,
        0,
        _INT_MAX,
        whole=True,
        note=" (0: all tokens)",
        help="Sample from the N likeliest; 0: from all.",
        setting="from so many of the likeliest; 0: from all",
        recommended=True,
    )
    """0: all tokens."""
    min_p: float = _number_field(
        0.0,
        0.0,
        1.0,
        below=True,
        help="Drop what is less likely than X times the likeliest.",
        setting="none less likely than so much of the likeliest",
        recommended=True,
    )
    """In [0, 1), relative to the probability of the best token."""
    repetition_penalty: float = _number_field(
        1.0,
        0.01,
        100.0,
        note=" (1: none)",
        help="Above 1: repeat less.",
        setting="above 1: repeat less",
        recommended=True,
    )
    """Divides positive logits of the last `repetition_context` tokens of prompt and answer, and multiplies negative
    ones, as mlx-lm does.
    """
    repetition_context: int = _number_field(20, 1, _INT_MAX, whole=True, setting="tokens that it looks back")
    presence_penalty: float = _number_field(
        0.0, -100.0, 100.0, help="As in the OpenAI API.", setting="as in the OpenAI API"
    )
    """Subtracted from the logits of tokens that the answer has already, as in the OpenAI API."""
    frequency_penalty: float = _number_field(
        0.0, -100.0, 100.0, help="As in the OpenAI API.", setting="as in the OpenAI API"
    )
    """The same, for each time that the answer has the token."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: TokenBiases({}))
    """Added to single logits, by token id."""
    logits_processors: Sequence[LogitsProcessor] = ()
    """Functions that change the logits."""
    stop: Sequence[str] = ()
    """A string or several. The first one that is complete ends the answer, and is not part of its text."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer."""
    ignore_eos: bool = False
    """Whether the model's own end tokens do not end the answer. An answer with a form or tools ends all the same."""
    seed: int | None = _number_field(
        None,
        -(2**63),
        2**64 - 1,
        whole=True,
        optional=True,
        help="Repeatable sampling.",
        setting="repeatable sampling; none: another each time",
    )
    """Makes the tokens repeatable, whatever else is in the batch."""
    logprobs: int | None = _number_field(None, 0, 100, whole=True, optional=True)
    """n: report the log-probability of each token and of the n likeliest; 0: only of the chosen token."""
    prompt_logprobs: int | None = _number_field(None, 0, 100, whole=True, optional=True)
    """The same for the prompt's tokens, each given those before it."""
    n: int = _number_field(1, 1, 128, whole=True)
    """How many answers to return."""
    best_of: int | None = _number_field(None, 1, 128, whole=True, optional=True, note=" (n or more)")
    """How many answers to compute, of which the `n` likeliest are returned; None: `n`."""
    priority: int = _number_field(0, -_INT_MAX, _INT_MAX, whole=True)
    """Among one client's requests, those with a higher priority go first."""
    structured: StructuredOutput | Mapping[str, Any] | type | str | None = None
    """The form that the answer must have: a JSON schema (a mapping), a type (a pydantic model, a dataclass, ...),
    "json" for any JSON object, or a StructuredOutput. It becomes a StructuredOutput. Thoughts before the answer are
    free.
    """
    tools: Sequence[Tool | Mapping[str, Any] | Callable[..., object]] = ()
    """What the model may call: Python functions with type hints, or tools as in the OpenAI API. Only for messages,
    since the chat template tells the model about them. They become Tools.
    """
    tool_choice: str = "auto"
    """"auto": an answer may have calls; "none": it has none; "required": it has one at least; the name of a tool: it
    calls this one, once.
    """
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "logit_bias":
                is_unchanged = isinstance(value, TokenBiases) or not isinstance(value, Mapping)
                normalized = value if is_unchanged else TokenBiases(value)
            elif each.name == "stop" and isinstance(value, str):
                normalized = (value,) if value else value
            elif each.name in ("stop", "stop_token_ids", "logits_processors"):
                normalized = _as_tuple(value)
            elif each.name == "tools":
                normalized = read_tools(value)
            elif each.name == "structured":
                normalized = None if value is None else StructuredOutput.of(value)
            else:
                normalized = python_number(value)
            object.__setattr__(self, each.name, normalized)
        self.validate()

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise InvalidRequest if a value is out of its range. `vocab_size` also bounds the token ids."""
        max_tokens_spec, scores_prompt = NUMBERS["max_tokens"], self.prompt_logprobs is not None
        self._check_number("max_tokens", replace(max_tokens_spec, low=0, note="") if scores_prompt else max_tokens_spec)
        for name, number in _FIXED_RANGES:
            self._check_number(name, number)
        self._check_number(
            "n", NumberSpec(1, 1, whole=True, note=" (max_tokens is 0)") if self.only_scores else NUMBERS["n"]
        )
        if self.best_of is not None:
            self._check_number("best_of", replace(NUMBERS["best_of"], low=self.n))
        for name in ("ignore_eos", "parallel_tool_calls"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        check_tool_choice(self.tool_choice, self.offered)
        self._check_stop_strings()
        functions = isinstance(self.logits_processors, tuple) and all(map(callable, self.logits_processors))
        self._require("logits_processors", functions, "a list of functions of (tokens, logits)")
        self._check_token_lists(_INT_MAX if vocab_size is None else vocab_size - 1)

    @property
    def form(self) -> StructuredOutput | None:
        """The form of the answer, as a StructuredOutput; None: free text."""
        assert self.structured is None or isinstance(self.structured, StructuredOutput)
        return self.structured

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model may call, as `Tool` objects."""
        assert isinstance(self.tools, tuple)
        return self.tools

    @property
    def only_scores(self) -> bool:
        """Whether nothing is generated (`max_tokens=0`), and only the prompt's tokens get log-probabilities."""
        return self.max_tokens == 0

    def _check_stop_strings(self) -> None:
        """Raise InvalidRequest unless `stop` is a list of non-empty strings within the limits."""
        texts = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        self._require("stop", texts, "a non-empty string or a list of them")
        characters = sum(map(len, self.stop))
        if len(self.stop) > MAX_STOPS or characters > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop has {len(self.stop):,} strings of {characters:,} characters together, but must have at most "
                f"{MAX_STOPS:,} of {MAX_STOP_CHARACTERS:,}: leave some out, or use stop_token_ids",
                field="stop",
            )

    def _check_token_lists(self, top: int) -> None:
        """Raise InvalidRequest unless the ids in `stop_token_ids` and `logit_bias` are in 0..top."""
        requirement, ids = f"a list of at most {MAX_STOP_TOKENS:,} token ids in 0..{top}", self.stop_token_ids
        is_id_list = isinstance(ids, tuple) and len(ids) <= MAX_STOP_TOKENS
        self._require("stop_token_ids", is_id_list and all(map(_TOKEN.contains, ids)), requirement)
        self._check_token_ids("stop_token_ids", requirement, top)
        requirement = f"a map from token ids in 0..{top} to numbers in {-_BIAS_MAX:g}..{_BIAS_MAX:g}"
        self._require("logit_bias", isinstance(self.logit_bias, TokenBiases) and self.logit_bias.valid, requirement)
        self._check_token_ids("logit_bias", requirement, top)

    def _check_token_ids(self, name: str, requirement: str, top: int) -> None:
        """Raise InvalidRequest if a token id is outside the vocabulary. The message names one of them."""
        ids = getattr(self, name)
        if not ids or (min(ids) >= 0 and max(ids) <= top):
            return
        invalid_ids = [token for token in ids if not 0 <= token <= top]
        if invalid_ids:
            others_text = f" and {len(invalid_ids) - 1:,} more like it" if len(invalid_ids) > 1 else ""
            raise InvalidRequest(
                f"{name} names the token id {invalid_ids[0]}{others_text}, but must be {requirement}", field=name
            )

    def _check_number(self, name: str, number: NumberSpec) -> None:
        """Raise InvalidRequest unless the parameter `name` is in its range."""
        if not number.contains(getattr(self, name)):
            self._require(name, False, number.range_text)

    def _require(self, name: str, ok: bool, requirement: str) -> None:
        """Unless `ok`, raise InvalidRequest with the parameter's name and value, and what it must be: `requirement`."""
        if not ok:
            raise InvalidRequest(f"{name} is {_value_text(getattr(self, name))}, but must be {requirement}", field=name)


NUMBERS: dict[str, NumberSpec] = {
    each.name: each.metadata["number"] for each in fields(SamplingParams) if each.metadata
}
"""The numbers by name, in the order of their fields."""

_FIXED_RANGES = [(name, number) for name, number in NUMBERS.items() if name not in ("max_tokens", "n", "best_of")]


_TOKEN, _BIAS = NumberSpec(-_INT_MAX, _INT_MAX, whole=True), NumberSpec(-_BIAS_MAX, _BIAS_MAX)


def python_number(value: Any) -> Any:
    """Return a number of NumPy as Python's own, and everything else unchanged."""
    if isinstance(value, Integral):
        return value if isinstance(value, bool) else int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, Rational) else value


def _as_tuple(value: Any) -> Any:
    """Return a list or another iterable as a tuple. Texts, bytes, mappings and scalar arrays are returned unchanged."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, Mapping)):
        return value
    array_of_one = getattr(value, "shape", None) == ()
    return value if array_of_one else tuple(python_number(item) for item in value)


def _value_text(value: object) -> str:
    """Return a value as text for an error message."""
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # an integer with more digits than Python prints
        return "an integer of more than 4000 digits"
    except Exception:  # an object of the caller's own may raise anything
        return f"a {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:117]}..."
