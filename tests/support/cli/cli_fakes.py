"""An engine without a model, for tests of the command line: it answers at once, in words, as the real one would.

What it says depends only on the prompt: `hello there` is answered by `You said: hello there`. Prompts with a `!` verb
make it do what a test needs: `!fail` and `!full` fail the request, `!slow` takes 50 ms per word, `!long` talks for 200
words, `!say X` says X, `!call NAME JSON` calls a function and then tells its result, `!read N` computes its prompt in N
pieces first. `!script` says the pieces of a list in a JSON file; a null makes it wait (`support/cli/terminal.py`).

Environment: FAKE_SCRIPT names that JSON file. FAKE_BEGUN names a file that appears with the fourth word. FAKE_CONTEXT
is the number of tokens of its context; a token is a character. With FAKE_MACHINE it says nothing of the machine.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from cortexmlx.cli import engine as engines
from cortexmlx.cli.chat.slash import models
from cortexmlx.cli.terminal import signals
from cortexmlx.core.as_completed import AsCompleted, pair_with_params
from cortexmlx.core.config import EngineConfig
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.text import StopConditions, TextStream
from cortexmlx.errors import EngineClosed, InvalidRequest, KVCacheFull, ModelNotFound, PromptTooLong
from cortexmlx.models.resolve import resolve_model
from cortexmlx.models.tokenizers.templates import accept_variables
from cortexmlx.sessions.conversation import Conversation
from cortexmlx.stats import (
    ArenaWrites,
    BlockMap,
    BlockState,
    EngineStats,
    GroupBlocks,
    Latency,
    SpeculationStats,
    StoreStats,
    UsageSample,
)
from cortexmlx.structured.calls.format import CallFormat
from cortexmlx.structured.calls.json_formats import Hermes
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.embeddings import EmbeddingInfo
from cortexmlx.types.messages import NO_VARIABLES, ChatPrompt
from cortexmlx.types.progress import OnProgress, Progress
from cortexmlx.types.request import Completion, FinishReason, Timings, TokenEvent, Usage
from cortexmlx.types.sampling_params import SamplingParams

if __name__ == "__main__":  # a program of its own, which does not find the tests' modules
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.cli.fake_answers import Prompt, answer_to, scripted, take_long, text_of
from support.fakes.adapters import FakeAdapters, with_each

THOUGHTS = Thoughts("<think>", "</think>")


@dataclass(frozen=True)
class FakeInfo:
    """What the commands read of `Engine.info`."""

    name: str = "fake"
    path: str = "/models/fake"
    architecture: str = "llama"
    context_length: int = field(default_factory=lambda: int(os.environ.get("FAKE_CONTEXT", "8192")))
    vocab_size: int = 1000
    parameters: int = 134_000_000
    weight_bytes: int = 98_000_000
    dtype: str = "float32"
    kv_bytes_per_token: int = 46_080
    chat_template: bool = True
    notes: tuple[str, ...] = ()
    adapter: str | None = None
    draft: None = None
    identity: str = "fa4e"
    template_vars: tuple[str, ...] = ("enable_thinking", "reasoning_effort")  # what the fake chat template reads
    sampling: tuple[tuple[str, float], ...] = ()
    embedding: EmbeddingInfo | None = None
    why_no_chat: str = ""

    @property
    def known_vars(self) -> frozenset[str]:
        return frozenset(self.template_vars)


class Words:
    """A detokenizer whose tokens are the texts themselves."""

    def __init__(self) -> None:
        self._new = ""

    def add_token(self, token: Any) -> None:
        self._new = token

    def finalize(self) -> None:
        self._new = ""

    @property
    def last_segment(self) -> str:
        return self._new


@dataclass(frozen=True)
class FakeReader:
    """Code points for tokens."""

    engine: FakeEngine
    eos_token_ids: frozenset[int] = frozenset()
    thoughts: Thoughts | None = THOUGHTS
    reads_thoughts_field: bool = False
    images: None = None
    call_format: CallFormat = field(default_factory=Hermes)
    images = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, object] = NO_VARIABLES,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        accept_variables(variables, frozenset(self.engine.info.template_vars))
        lines = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        return lines + "<assistant>" + self.engine.template_end


@dataclass
class FakeEngine(FakeAdapters):
    """A thread answers each prompt. `seen`: every prompt, `most_in_flight`: the crowd, `ended`: how many ended."""

    sees_images = False

    options: EngineConfig
    info: FakeInfo = field(default_factory=FakeInfo)
    seen: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    ended: int = 0
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    cancelled: set[int] = field(default_factory=set)
    template_end: str = ""

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True

    def encode(self, prompt: Prompt) -> list[int]:
        """Code points; messages as `<role>content` lines, and what the template adds."""
        if isinstance(prompt, str):
            return list(map(ord, prompt))
        if isinstance(prompt, ChatPrompt):
            return list(map(ord, FakeReader(self).render(prompt.messages, prompt.template_vars)))
        if all(isinstance(item, int) for item in prompt):
            return [*prompt]  # type: ignore[list-item]
        return list(map(ord, FakeReader(self).render(prompt)))  # type: ignore[arg-type]

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def decode(self, tokens: Iterable[int], *, special_tokens: bool = False) -> str:
        return "".join(map(chr, tokens))

    def conversation(self, *, adapter: str | None = None, **options: Any) -> Conversation:
        host: Any = self
        talk = Conversation(host, FakeReader(self), **options)
        talk.adapter = adapter
        return talk

    @property
    def longest_request(self) -> int:
        return self.info.context_length

    def blocks(self) -> BlockMap:
        """An arena of one group, of which a request in flight has three blocks."""
        used = bytes([BlockState.PRIVATE] * 3 * self.in_flight + [BlockState.CACHED] * 2)
        return BlockMap(32, (GroupBlocks(30, None, 2**20, 1024, used.ljust(64, b"\0")),))

    def stats(self) -> EngineStats:
        values: dict[str, Any] = {f.name: 0 for f in fields(EngineStats)}
        values |= {"rows_running": self.in_flight, "max_rows": self.options.max_rows, "block_size": 32}
        values |= {"attention_backend": "reference", "attention_notes": (), "sequences": (), "requests": ()}
        values |= {"total_blocks": 4, "kv_store": None, "arena_writes": ArenaWrites(), "command_buffers": None}
        values |= {"speculation": SpeculationStats()}
        if self.options.kv_store is not None:
            values["kv_store"] = StoreStats(str(self.options.kv_store), 10**9, 0, 0, 0, 0, 0, 0)
        if (keep := self.options.keep) is not None:
            values |= {"keep_first": keep.first, "keep_last": keep.last, "dropped_tokens": 1234}
        latency = Latency(3, 0.5, 0.25, 1.5, 2.0)
        values |= {"queued": latency, "time_to_first_token": latency, "inter_token": latency}
        values |= {
            "timeline": tuple(UsageSample(float(i), used, 0, 4 - used, 1, 0) for i, used in enumerate((0, 4, 2)))
        }
        values |= {"prompt_tokens": 200, "cached_tokens": 150}
        values |= {"kv_bytes": 2**30, "kv_bytes_limit": 2**31, "kv_bytes_in_use": 2**20, "generated_tokens": 120}
        return EngineStats(**values)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_event: Any = None,
        listener: Any = None,
        client: str | None = None,
        background: bool = False,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> RequestHandle:
        handles: list[RequestHandle] = []
        self._start([self._checked(prompt, params, on_event or listener, adapter=adapter)], handles)
        return handles[0]

    def as_completed(
        self, prompts: Iterable[Prompt], params: Any = None, *, window: int | None = None, adapter: Any = None
    ) -> AsCompleted:
        start, check = self._start, with_each(self._checked, adapter)
        return AsCompleted(
            pair_with_params(prompts, params), check, start, ahead=4 * self.options.max_rows, window=window
        )

    def _checked(
        self, prompt: Prompt, params: SamplingParams | None, listener: Any, *, adapter: str | None = None
    ) -> Any:
        self.note_adapter(adapter)
        params = params or SamplingParams()
        params.validate(self.info.vocab_size)
        if not text_of(prompt):
            raise InvalidRequest("the prompt is empty")
        if isinstance(prompt, ChatPrompt):
            accept_variables(prompt.template_vars, frozenset(self.info.template_vars))
        return prompt, params, listener

    def _start(self, checked: Iterable[Any], handles: list[RequestHandle]) -> None:
        for prompt, params, listener in checked:
            with self.lock:
                self.seen.append((prompt, params))
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                handle = RequestHandle(len(self.seen), self.cancelled.add, listener)
            handles.append(handle)
            asked = (handle, prompt, text_of(prompt), params)
            threading.Thread(target=self._answer_and_count, args=asked, daemon=True).start()

    def _answer_and_count(self, *asked: Any) -> None:
        self._answer(*asked)
        with self.lock:
            self.ended += 1

    def _answer(self, handle: RequestHandle, prompt: Prompt, text: str, params: SamplingParams) -> None:
        if "!fail" in text:
            time.sleep(0.002)
            self._left()
            handle.fail(PromptTooLong("prompt has 9120 tokens, the cache holds 8192: raise --kv-memory or shorten it"))
            return
        if "!full" in text:
            self._left()
            handle.fail(KVCacheFull("the cache is full: raise --kv-memory"))
            return
        if "!read" in text:
            self._read(handle, int(text.split("!read ")[1]))
        words: list[str | None] = scripted() if "!script" in text else [*answer_to(text), *[None] * ("!slow" in text)]
        limit = len(words) if params.max_tokens is None else params.max_tokens
        said: list[str] = []
        begun = self.template_end.strip() == THOUGHTS.open
        thoughts = None if isinstance(prompt, str) else replace(THOUGHTS, opened_by_prompt=begun)
        calls = getattr(prompt, "calls", None)
        told = TextStream(
            Words(), StopConditions(), thoughts, calls and calls.make_parser(str(handle.id), streaming=True)
        )
        reason = FinishReason.STOP if limit >= len(words) else FinishReason.LENGTH
        stops = 0
        for number, word in enumerate(words[:limit]):
            if word is None:
                self._wait(os.environ["FAKE_SCRIPT"] if "!script" in text else "", stops, handle)
                stops += 1
            if self.closed or handle.id in self.cancelled:
                reason = FinishReason.CANCELLED
                break
            if word is None:
                continue
            time.sleep(0.05 if "!slow" in text else 0.0002 if "!script" in text else 0.0005)
            said.append(word)
            if number == 3 and "FAKE_BEGUN" in os.environ:
                Path(os.environ["FAKE_BEGUN"]).touch()
            piece = told.push(word)  # type: ignore[arg-type]
            handle.push(TokenEvent(piece.text, token_id=number, thinking=piece.thinking))
        timings = Timings(
            queued=0.0, ttft=0.012, total=0.5, prefill_tokens_per_second=500.0, decode_tokens_per_second=40.0
        )
        rest = told.finish()
        cached = 0 if isinstance(prompt, str) else 2
        usage = Usage(len(text.split()) + 3, len(said), cached, thinking_tokens=told.thinking_tokens)
        tokens = tuple(map(ord, "".join(said)))
        parts: dict[str, Any] = {"thinking": told.thinking, "raw_text": told.raw_text, "tool_calls": told.calls}
        if told.calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        done = Completion(told.text, tokens, reason, usage, timings, **parts)
        done = replace(done, others=tuple(replace(done, index=index) for index in range(1, params.n)))
        self._left()
        handle.push(TokenEvent(rest.text, finish_reason=reason, completion=done, thinking=rest.thinking))

    def _read(self, handle: RequestHandle, pieces: int) -> None:
        """Pieces of 100 tokens, none behind one in which it is cancelled: half a second each, or held by the test."""
        script = os.environ.get("FAKE_SCRIPT", "")
        held = os.path.exists(f"{script}.held")
        for piece in range(pieces):
            handle.progress = Progress("prefilling", 100 * piece, 100 * pieces)
            handle.push(TokenEvent("", progress=handle.progress))
            time.sleep(0.0 if held else 0.5)
            while held and not os.path.exists(f"{script}.go{piece}"):
                time.sleep(0.002)
            if handle.id in self.cancelled:
                return

    def _left(self) -> None:
        with self.lock:
            self.in_flight -= 1

    def _wait(self, script: str, number: int, handle: RequestHandle) -> None:
        """Say that the script, if there is one, has come to a stop, and wait for the test or a cancellation."""
        if script:
            Path(f"{script}.stop{number}").touch()
        while not ((script and os.path.exists(f"{script}.go{number}")) or self.closed or handle.id in self.cancelled):
            time.sleep(0.002)


@dataclass
class Fakes:
    """The engines that the commands opened; `template_end` is what the chat template puts after the last message."""

    info: FakeInfo = field(default_factory=FakeInfo)
    template_end: str = ""
    opened: list[FakeEngine] = field(default_factory=list)

    @property
    def engine(self) -> FakeEngine:
        return self.opened[-1]

    def load(self, options: EngineConfig) -> FakeEngine:
        """In the place of `cortexmlx.cli.engine.load_engine`. What is called slow never ends."""
        name = str(options.model)
        if "missing" in name:
            raise ModelNotFound(f"no model {name!r}: no such folder or .gguf file, and not a hub id (org/name).")
        if "broken" in name:
            raise RuntimeError("a bug")
        if "memory" in name:
            raise MemoryError
        if "closed" in name:
            raise EngineClosed("the engine's thread failed")
        if "slow" in name:
            take_long("loading", options.on_progress)
        self.opened.append(FakeEngine(options, info=self.info, template_end=self.template_end))
        return self.engine

    @staticmethod
    def fetch(model: str | Path, on_progress: OnProgress) -> None:
        """In the place of `cortexmlx.cli.engine.download_model`. What is called large is not here, and never comes."""
        resolve_model(model)
        if "large" in str(model):
            take_long("downloading", on_progress)

    @classmethod
    def check(cls, options: EngineConfig, on_progress: OnProgress) -> dict[str, Exception]:
        """In the place of `cortexmlx.cli.engine.check_loadable`. The model `fake` is there."""
        if str(options.model) != "fake":
            cls.fetch(options.model, on_progress)
        folders = (options.adapters or {}).items()
        return {name: ModelNotFound(f"no adapter folder {path}.") for name, path in folders if "missing" in str(path)}


class TwiceFile:
    """In the place of `signals.TWICE_SECONDS`: while the file is there every Ctrl-C is the second, else none is."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def __gt__(self, seconds: float) -> bool:
        return self._path.exists()


def main() -> None:
    """Run the command line on fake engines, for tests that need a process: `cli_fakes.py generate ...`."""
    from cortexmlx.cli import main as command

    if "FAKE_MACHINE" in os.environ:  # what the chat says of this one would be another everywhere
        models.describe_device = lambda: "a CPU"
    if "FAKE_TWICE" in os.environ:
        signals.TWICE_SECONDS = TwiceFile(os.environ["FAKE_TWICE"])  # type: ignore[assignment]
    fakes = Fakes()
    engines.load_engine, engines.download_model, engines.check_loadable = fakes.load, fakes.fetch, fakes.check  # type: ignore[assignment]
    command()


if __name__ == "__main__":
    main()
