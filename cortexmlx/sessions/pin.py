"""Pin: a prefix of prompts that stays in the prefix cache, given as text, tokens or messages; and in a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cortexmlx.core.arguments import is_list
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.prompt import Prompt, make_allowed_calls, render, template_variables, tokenize
from cortexmlx.core.worker import Submission, Worker
from cortexmlx.disk.stored_prefix import StoredPrefix, export_prefix, import_prefix, save_prefix
from cortexmlx.errors import EngineClosed, InvalidRequest, PrefixRefused
from cortexmlx.kv.prefix import Key, common_prefix_length
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.stats import StoreState
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.types.messages import NO_VARIABLES, ChatPrompt, TemplateVars
from cortexmlx.types.request import Message
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.core.core import EngineCore
    from cortexmlx.disk.segment_store import SegmentStore

_POLL_SECONDS = 0.01

_MAX_TRIES = 3
"""How often pieces that are missing on disk are written again before an export is refused."""

_WRITE_SECONDS = 60.0
"""How long an export waits at a time for pieces to be copied, and for pieces to be written."""


class Pin:
    """A prefix of prompts that `Engine.pin` keeps cached: `tokens` tokens, in whole blocks, with a `name` or None. It
    lasts until `unpin`, the end of its lifetime, of its `with` or of the engine, even if this object is dropped.
    """

    def __init__(
        self,
        tokens: int,
        remove: Callable[[], None],
        name: str | None = None,
        write: Callable[[Path], int] | None = None,
    ) -> None:
        self.tokens = tokens
        self.name = name
        self._remove: Callable[[], None] | None = remove
        self._write = write

    def __repr__(self) -> str:
        return f"<Pin{'' if self.name is None else f' {self.name!r}'}: {self.tokens} tokens>"

    def export(self, path: str | Path) -> int:
        """Write the tokens with their keys and values to a file, for `Engine.import_pin` and `cortexmlx cache import`.
        Return its bytes. It waits until they are on disk. The file appears complete or not at all.

        Raises PrefixRefused without a name or a `kv_store`, or if the store has no room for them, OSError if the file
        cannot be written, and EngineClosed.
        """
        if self._write is None:
            raise PrefixRefused("this prefix is in no folder: give it a name in an engine with a `kv_store`")
        return self._write(Path(path))

    def unpin(self) -> None:
        """Let the blocks be evicted like all others. Safe to call again, and after the engine is closed."""
        remove, self._remove = self._remove, None
        if remove is not None:
            with suppress(EngineClosed):
                remove()

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpin()


def pin_prompt(worker: Worker, submission: Submission, name: str | None = None, seconds: float | None = None) -> Pin:
    """Pin the prompt of a submission for `seconds` (None: for good), compute the prompt, and return the Pin. With a
    `name`, the engine's store, if there is one, keeps the prompt under that name.

    Raises PinRefused, InvalidRequest if there is no whole block to pin, and whatever ends the submission's request.
    """
    request = submission.request
    number, count = worker.ask(lambda core: core.pin(request.prompt, request.client, request.adapter, seconds))
    pin = Pin(count, lambda: worker.ask(lambda core: core.pins.remove(number)), name)
    handles: list[RequestHandle] = []
    try:
        # One token more: recurrent states are kept from before a prompt's last token.
        worker.submit([replace(submission, request=replace(request, prompt=request.prompt[: count + 1]))], handles)
        handles[0].result()
        worker.ask(lambda core: core.pins.pin_state(number))
        if name is not None:
            worker.ask(lambda core: core.pins.give_name(number, name))
            if wait_for_store(worker) is StoreState.OPEN:
                prefix, segments = worker.ask(
                    lambda core: _describe_prefix(core, name, request.prompt[:count], request.client, request.adapter)
                )
                try:
                    save_prefix(segments.path, prefix)
                except OSError as error:  # a full disk, or a folder that is gone: the pin is as good without its name
                    segments.warn_once("cannot be written", error, "it does not keep the name")
                pin._write = lambda path: _export_prefix(worker, prefix, segments, path)
    except BaseException:
        for handle in handles:
            handle.cancel()
        pin.unpin()
        raise
    return pin


def wait_for_store(worker: Worker) -> StoreState:
    """Wait until the weights are hashed, and return the state of the engine's store: OFF if there is no store."""
    while (state := worker.ask(lambda core: StoreState.OFF if core.disk is None else core.disk.state)) is (
        StoreState.HASHING
    ):
        time.sleep(_POLL_SECONDS)
    return state


def import_file(worker: Worker, path: Path, name: str | None, client: str | None) -> tuple[StoredPrefix, str | None]:
    """Write the prefix in a file into the engine's store. Return the prefix, and the name of its adapter.

    Raises PrefixRefused for a file that is damaged, or that another model, adapter or precision has computed.
    """
    if wait_for_store(worker) is not StoreState.OPEN:
        raise PrefixRefused("what a file carries goes to the disk tier: open the engine with a folder (kv_store)")
    own, segments = worker.ask(lambda core: _describe_prefix(core, "", (), client, None))
    adapters = {info.digest: name for name, info in worker.core.adapters.infos.items()}

    def check_prefix(prefix: StoredPrefix) -> None:
        prefix.check_model(own.fingerprint, own.parts, own.model)
        if prefix.adapter and prefix.adapter not in adapters:
            raise PrefixRefused(f"{prefix.name!r} was computed with an adapter that is not loaded: load it first")

    with _prefer_engine_closed(worker):
        prefix = import_prefix(segments, path, name, own.client, check_prefix)
    return prefix, adapters.get(prefix.adapter)


@contextmanager
def _prefer_engine_closed(worker: Worker) -> Iterator[None]:
    """Context in which the store's error becomes EngineClosed if the engine, and so the store, is closed."""
    try:
        yield
    except (PrefixRefused, OSError):
        worker.check_open()
        raise


def _describe_prefix(
    core: EngineCore, name: str, tokens: Sequence[int], client: str | None, adapter: str | None
) -> tuple[StoredPrefix, SegmentStore]:
    """Return the store's description of a pinned prefix, and the store's segments."""
    assert core.disk is not None
    digest = "" if adapter is None else core.adapters.infos[adapter].digest
    client = None if core.scheduler.config.share_between_clients else client
    return core.disk.describe_prefix(name, tokens, client, digest), core.disk.store.segments


def _store_missing_again(core: EngineCore, keys: Sequence[Key], missing: Collection[Key]) -> None:
    if core.disk is not None:
        core.disk.store_again(keys, missing)


def _export_prefix(worker: Worker, prefix: StoredPrefix, segments: SegmentStore, path: Path) -> int:
    """Wait until a pinned prefix is on disk, and write it to a file. Return the file's bytes."""
    pieces = list(prefix.pieces_in(segments))
    for _ in range(_MAX_TRIES):
        deadline = time.monotonic() + _WRITE_SECONDS
        while worker.ask(lambda core: core.disk is not None and core.disk.is_copying) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        writer = worker.ask(lambda core: None if core.disk is None else core.disk.store.writer)
        if writer is None or not writer.flush(_WRITE_SECONDS):
            continue
        found = segments.find(pieces)
        missing = {key for key in pieces if key not in found}
        if not missing:
            break
        keys = prefix.entry_keys(prefix.client)
        worker.ask(partial(_store_missing_again, keys=keys, missing=missing))
    with _prefer_engine_closed(worker):
        return export_prefix(segments, prefix, path)


def prefix_tokens(tokenizer: SharedTokenizer, prefix: Prompt, params: SamplingParams | None = None) -> list[int]:
    """Return the tokens that every prompt with this prefix, and the tools of `params`, begins with. Raises
    InvalidRequest.
    """
    calls = None if params is None else make_allowed_calls(tokenizer, params)
    if isinstance(prefix, ChatPrompt):
        return chat_prefix_tokens(tokenizer, prefix.messages, template_variables(tokenizer, prefix), calls)
    items: Any = list(prefix) if is_list(prefix) and not isinstance(prefix, str) else prefix
    if isinstance(items, list) and items and all(isinstance(item, Mapping) for item in items):
        return chat_prefix_tokens(tokenizer, items, calls=calls)
    return tokenize(tokenizer, items, params=params)


def chat_prefix_tokens(
    reader: SharedTokenizer,
    messages: Sequence[Message],
    variables: TemplateVars = NO_VARIABLES,
    calls: AllowedCalls | None = None,
) -> list[int]:
    """Return the tokens that every prompt continuing `messages` begins with, found by comparing two such prompts.

    These are not the tokens of the messages alone: a template writes more after the last message, and if it opens an
    answer there, other messages would not continue it. Raises InvalidRequest if the template can render no
    continuation.
    """
    roles = ("assistant", "user") if messages[-1].get("role") == "user" else ("user", "assistant")
    try:
        first_prompt, second_prompt = _two_continuations(reader, messages, variables, calls, roles[0])
    except InvalidRequest:
        first_prompt, second_prompt = _two_continuations(reader, messages, variables, calls, roles[1])
    tokens = first_prompt[: common_prefix_length(first_prompt, second_prompt)]
    if min(tokens, default=0) < 0:
        raise InvalidRequest("a prefix with images cannot be pinned: pin a text, and show images after it")
    return tokens


def _two_continuations(
    reader: SharedTokenizer, messages: Sequence[Message], variables: TemplateVars, calls: AllowedCalls | None, role: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of two prompts that continue the messages with different letters."""
    first_prompt, second_prompt = (
        render(reader, [*messages, {"role": role, "content": letter}], variables, calls) for letter in "ab"
    )
    return _encode_rendered(reader, first_prompt), _encode_rendered(reader, second_prompt)


def _encode_rendered(reader: SharedTokenizer, rendered_prompt: str | list[int]) -> list[int]:
    """Return the tokens of rendered messages: some templates return tokens already."""
    return reader.encode(rendered_prompt, False) if isinstance(rendered_prompt, str) else rendered_prompt
