"""InProcessModel: an engine's model in this process, with its runner and its store."""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from cortexmlx.attention.backends import auto_backend_name
from cortexmlx.attention.selfcheck import KernelCheck
from cortexmlx.autotune.chooser import SECONDS
from cortexmlx.core.config import EngineConfig
from cortexmlx.core.embedding_support import detect_support
from cortexmlx.core.engine_model import Call, check_prefix_cache, model_info, scheduler_config
from cortexmlx.core.threads import MlxTask
from cortexmlx.disk.connector import StoreConnector
from cortexmlx.disk.setup import StoreSetup
from cortexmlx.errors import AdapterRefused, CortexError, InvalidRequest, ModelCorrupt, ModelUnsupported
from cortexmlx.execution.autotuning import choose_kernels, should_time, use_mlx_matmuls
from cortexmlx.execution.boundary import AdapterSet, raise_if_refused, return_refusals
from cortexmlx.execution.execution_modes import ExecutionMode, PagedMode, choose_execution_mode, kv_store_notes
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.execution.sight_memory import predict_sight_bytes
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.sizing import (
    PREFILL_BUDGET,
    ArenaDemand,
    bytes_per_token,
    check_kv_memory,
    default_kv_bytes,
    draft_kv_bytes,
    format_bytes,
    kv_memory_warning,
    max_long_tail_rows,
    reserved_bytes,
    row_state_bytes,
)
from cortexmlx.kv.spec import GroupCounts, LayerGroup
from cortexmlx.models import LoadedModel, load_model, weights
from cortexmlx.models.assistant import Assistant, read_assistant
from cortexmlx.models.draft_head import DraftHead, read_draft_head
from cortexmlx.models.folder_config import ASSISTANT, note_unread_inputs, read_config
from cortexmlx.models.loaded import check_logits
from cortexmlx.models.tokenizers.shared import SharedTokenizer, TokenTable
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.speculation.drafter import HeadDrafter
from cortexmlx.stats import HostStats, ModelInfo, StoreState, TimedChoice
from cortexmlx.system.machine import memory_bytes, release_freed_memory, working_set_bytes
from cortexmlx.types.progress import OnProgress, Progress
from cortexmlx.vision.families import FAMILIES
from cortexmlx.vision.reader import ImageReader
from cortexmlx.vision.sight import Sight


class InProcessModel:
    """A model in this process, ready to be served: its weights, its execution mode, the runner that owns the memory,
    and the store. Only the engine's thread may use it.
    """

    hosts: tuple[HostStats, ...] = ()

    def __init__(
        self,
        config: EngineConfig,
        wake: Callable[[Call], None],
        has_waiters: Callable[[], bool] = lambda: False,
        draft: InProcessModel | None = None,
        head_folder: Path | None = None,
    ) -> None:
        """`wake(call)` has the engine's thread run a call between two steps; the store's threads use it. Nothing is
        timed while `has_waiters()`. `draft` is the draft model, which gets a part of the KV memory. Raises
        InvalidRequest if its tokens are not the model's. `head_folder` has the model's assistant, or a checkpoint of
        the model with its draft head. Raises ModelUnsupported for those of another model.
        """
        self._config = config
        self._wake = wake
        self.draft = draft
        """The draft model. If it is of no use here, it is released, and None."""
        self.choices: tuple[TimedChoice, ...] = ()
        """What was chosen to compute attention, and why. Empty where the rules choose everything."""
        self._store: StoreSetup | None = None
        self.disk: StoreConnector | None = None
        self._warm_up = KernelWarmUp()
        self._head_folder = head_folder
        self._notes: tuple[str, ...] = ()
        self._sight_bytes = 0
        self.images: ImageReader | None = None
        """The preprocessor of images in chat messages; None if the model reads text only."""
        try:
            if config.kv_bytes is not None:
                check_kv_memory(config.kv_bytes, memory_bytes(), working_set_bytes())
            if config.kv_store is not None and config.prefix_cache:
                self._store = StoreSetup(config.kv_store, config.store_bytes)
            self._load()
            self._open_parts(wake)
            self._warm_up.finish(config.on_progress or (lambda progress: None))
            self._choose_attention_at_opening(has_waiters)
        except BaseException:
            self.release()
            raise

    def _load(self) -> None:
        """Load the weights. If there is a store, the weights are hashed for it meanwhile."""
        config, store = self._config, self._store
        self.loaded = load_model(
            config.model,
            adapter=config.adapter,
            dequantize=config.dequantize,
            on_progress=config.on_progress,
            weights_hash=None if store is None else store.weights,
            on_built=self._compile_early,
        )
        if store is not None:
            store.weights.check_arrays(self.loaded.model)

    def _compile_early(self, model: Any) -> None:
        """Begin to compile kernels before the weights are read, unless a later step may change the layers."""
        config = self._config
        attention = auto_backend_name() if config.attention == "auto" else config.attention
        if attention == "metal" and config.adapter is None and not config.dequantize:
            with suppress(Exception):  # `_open_parts` chooses again, and raises it
                self._choose_mode(model)

    def _choose_mode(self, model: Any) -> None:
        """Choose the execution mode and the attention backend, and begin to compile the kernels that they need."""
        config = self._config
        mode = choose_execution_mode(model, config.kv_bits, config.kv_group_size)
        self.backend = mode.choose_backend(config.attention)
        if config.reproducible:  # the kernel rotates by other cosines than MLX does in steps with a neighbour's prompt
            self.backend = replace(self.backend, writer=None)
        self._warm_up.add(mode.kernel_checks(self.backend, config.block_size))
        self._mode = mode

    def _open_parts(self, wake: Callable[[Call], None]) -> None:
        """Make everything that needs the loaded model: the runner, the store, and what `info` says."""
        config, loaded = self._config, self.loaded
        if "_mode" not in vars(self):
            self._choose_mode(loaded.model)
        mode = self._mode
        vocab_size = check_logits(loaded)
        self.sight = self._add_sight(mode)
        """The vision tower and its features of images; None if the model reads text only."""
        self.head = self._add_head(mode)
        """The model's own draft head, or its assistant; None without either, or if nothing is to be drafted."""
        if self.draft is not None:
            check_same_tokens(loaded, self.draft.loaded, min(vocab_size, self.draft.info.vocab_size))
        on_gpu = auto_backend_name() == "metal"
        self._sizes = load = ArenaDemand.from_options(config.max_rows, config.prefill_budget, config.block_size, on_gpu)
        context = loaded.context_length
        max_row_tokens = context if config.keep is None else min(context, config.keep.max_row_tokens)
        paged_on_gpu = on_gpu and mode.max_rows is None
        self._long_tail_rows = max_long_tail_rows(mode.groups, loaded.weight_bytes) if paged_on_gpu else 0
        reserved_memory = reserved_bytes(mode.groups, load.rows, vocab_size, loaded.weight_bytes, self._long_tail_rows)
        reserved_memory += config.adapter_limits.bytes if config.adapters is not None else 0
        reserved_memory += 0 if self.head is None else self.head.nbytes
        reserved_memory += self._sight_bytes
        self.reserved_bytes = reserved_memory
        """Bytes that it takes beside the KV memory."""
        notes, groups, draft = self._draft_notes(), mode.groups, self.draft
        if draft is not None:
            reserved_memory += draft.reserved_bytes
            groups += draft.groups
        memory_warnings = kv_memory_warning(config.kv_bytes or 0, max(working_set_bytes() - reserved_memory, 0))
        memory = config.kv_bytes or default_kv_bytes(groups, load, max_row_tokens, working_set_bytes(), reserved_memory)
        if draft is not None:
            memory -= draft.limit_to_draft_share(memory, mode.groups, max_row_tokens)
        self.disk = self._open_store(wake)
        self.blocks = mode.count_blocks(memory, load, max_row_tokens)
        """How many blocks each layer group may have at most."""
        self.runner = mode.make_runner(config.block_size, vocab_size, self.backend)
        self._warm_up.add(mode.tail_write_checks(self.backend))
        notes = (
            (
                loaded.notes
                if self.sight is None
                else tuple(note for note in loaded.notes if note not in note_unread_inputs(loaded.config))
            )
            + self._notes
            + memory_warnings
            + mode.notes
            + notes
            + (kv_store_notes(mode) if config.kv_store else ())
        )
        self.embedding = detect_support(
            loaded, self.runner, mode.groups, self.blocks, config.block_size, config.max_request_tokens
        )
        draft_info = None if draft is None else draft.info
        self.info: ModelInfo = model_info(
            loaded, vocab_size, bytes_per_token(mode.groups), notes, draft_info, self.embedding.info
        )

    def _add_sight(self, mode: ExecutionMode) -> Sight | None:
        """Read the model's vision tower, and have its tokenizer read images."""
        loaded, config = self.loaded, self._config
        family = FAMILIES.get(str(loaded.config.get("model_type")))
        if family is None or not isinstance(mode, PagedMode) or not loaded.path.is_dir():
            return None
        try:
            dtype = loaded.model.layers[0].input_layernorm.weight.dtype
            tower = family.read_tower(loaded.path, loaded.config, dtype, keep_packed=weights.is_quantized(loaded.model))
            if tower is None:
                return None
            if config.keep is not None:
                raise ModelUnsupported("with keep_last, an image could be dropped in part")
            images = family.make_reader(loaded, tower, config.prefill_budget or PREFILL_BUDGET)
            self._sight_bytes, self.images = predict_sight_bytes(tower, loaded.path).total, images
        except CortexError as error:  # its text part does not need it
            self._notes += (f"images are not seen: {error}",)
            return None
        mode.sight = Sight(tower, loaded.model)
        self._notes += (f"images are seen ({format_bytes(tower.nbytes)} of weights)",)
        return mode.sight

    def _add_head(self, mode: ExecutionMode) -> DraftHead | Assistant | None:
        """Read the assistant or the draft head that the config names, or else the draft head of the model's own folder.
        Have it run with the model.
        """
        config, path, model = self._config, self.loaded.path, self.loaded.model
        head: DraftHead | Assistant | None
        if self._head_folder is not None:
            stated, label = read_config(self._head_folder), f"the draft head of {config.draft}"
            if stated["model_type"] == ASSISTANT:
                head, label = read_assistant(self._head_folder, model), f"the assistant {config.draft}"
            else:
                head = read_draft_head(self._head_folder, stated, model)
            if head is None:
                raise ModelUnsupported(
                    f"{config.draft} is another checkpoint of {self.loaded.name}, but has no draft head for it (no "
                    "tensors mtp.*): choose the original, or leave --draft out"
                )
        else:
            if not config.speculate or config.reproducible or not isinstance(mode, PagedMode) or not path.is_dir():
                return None
            label = "the model's own draft head"
            try:
                head = read_draft_head(path, self.loaded.config, model)
            except (ModelCorrupt, ModelUnsupported) as error:  # the model does not need it
                self._notes += (f"{label} is not used: {error}",)
                return None
        if head is None:
            return None
        if not isinstance(mode, PagedMode) or not mode.add_head(head):
            self._notes += (f"{label} is not used: it does not fit the way in which {self.loaded.name} runs",)
            return None
        self._warm_up.add(mode.head_checks(self.backend, config.block_size))
        self._notes += (f"{label} drafts tokens ({format_bytes(head.nbytes)} of weights)",)
        return head

    def _draft_notes(self) -> tuple[str, ...]:
        """Return notes on the draft model. Release it if this model cannot use it."""
        config = self._config
        if config.active_draft != config.draft:
            reason = "reproducible=True" if config.reproducible else "speculate=False"
            return (f"the draft model {config.draft} is not used, because nothing is to be drafted ({reason})",)
        if self.draft is None:
            return ()
        name = self.draft.loaded.name
        if self._mode.max_rows is None:
            return tuple(f"draft model {name}: {note}" for note in self.draft.loaded.notes)
        self.draft.release()
        self.draft = None
        return (
            f"the draft model {name} is not used: {self.loaded.name} runs on mlx-lm's own caches, and no token can be "
            "taken back there",
        )

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups: which layers share block tables, and what they keep."""
        return self._mode.groups

    @property
    def can_cut_back(self) -> bool:
        """Whether a sequence can be cut back to any length, since all layers keep keys and values, in blocks."""
        return self._mode.max_rows is None and not row_state_bytes(self._mode.groups)

    def make_head_drafter(self, scheduler: Scheduler) -> HeadDrafter | None:
        """Return the drafter that uses the model's own draft head or its assistant; None if it has neither."""
        if self.head is None or not isinstance(self.runner, ModelRunner):
            return None
        name = "assistant" if isinstance(self.head, Assistant) else "head"
        return HeadDrafter(self.runner.propose, scheduler.locate_rows, name)

    def limit_to_draft_share(self, memory: int, groups: Sequence[LayerGroup], tokens: int) -> int:
        """Limit this draft model's arena to its share of the KV `memory`; the target model keeps `groups` for rows of
        up to `tokens` tokens. Return the share. Raises InvalidRequest if no block fits into it.
        """
        share = draft_kv_bytes(memory, groups, self.groups, tokens)
        self.blocks = self._mode.count_blocks(share, self._sizes, min(tokens, self.loaded.context_length))
        return share

    def _choose_attention_at_opening(self, has_waiters: Callable[[], bool]) -> None:
        """Time the ways to compute attention and choose, unless fixed rules choose. The kernels have been compiled."""
        if self.backend.selectable is not None:
            self.backend.selectable.choices.reproducible = self._config.reproducible
        if self._config.reproducible or not should_time(self.backend):
            use_mlx_matmuls(self.runner)
        if self._config.reproducible or should_time(self.backend):
            self.choose_attention(has_waiters=has_waiters)

    def choose_attention(
        self, *, seconds: float = SECONDS, ignore_table: bool = False, has_waiters: Callable[[], bool] = lambda: False
    ) -> None:
        """Choose what computes attention and quantized matmuls: by timing the candidates, or by fixed rules if the
        engine is reproducible. See `execution/autotuning.py`.
        """
        config, context = self._config, self.loaded.context_length
        self.choices = choose_kernels(
            self.runner,
            self.backend,
            config.max_rows,
            context if config.keep is None else min(context, config.keep.max_row_tokens),
            reproducible=config.reproducible,
            seconds=seconds,
            ignore_table=ignore_table,
            has_waiters=has_waiters,
        )

    def _open_store(self, wake: Callable[[Call], None]) -> StoreConnector | None:
        """Open the disk store and return its connector; None if no store is asked for, or if it cannot be used."""
        setup = self._store
        if setup is None:
            return None
        if kv_store_notes(self._mode):
            setup.cancel()
            return None
        attention = auto_backend_name() if self._config.attention == "auto" else self._config.attention
        attention += ", reproducible" if self._config.reproducible else ""
        identity_parts = (self._config.block_size, attention)
        store = setup.start(self.loaded, self._mode.groups, identity_parts, lambda: wake(lambda core: None))
        if isinstance(store, str):
            self._notes += (f"kv_store cannot be used: {store}",)
            return None
        return StoreConnector(
            store,
            setup.identity,
            lambda: setup.progress,
            lambda load, found: wake(lambda core: core.scheduler.accept_load(load, found)),
            setup,
        )

    def make_cache(self, blocks: GroupCounts, from_scratch: bool = False) -> KVCache:
        """Make an empty KV cache and arena of at most `blocks` blocks in each group. Raises MemoryRefused, unless
        `from_scratch`: then the next step makes the arena.
        """
        cache = self._mode.begin_arena(blocks, PrefixCache(self._config.block_size), from_scratch)
        cache.pools.spare = self.embedding.spare_blocks_per_group(cache.pools.configured_blocks)
        if self.disk is not None:
            self.disk.attach(cache)
        return cache

    def make_scheduler(self, cache: KVCache) -> Scheduler:
        """Return a scheduler for this model, without requests."""
        max_rows = self._mode.max_rows
        settings = scheduler_config(self._config, self._sizes, self.loaded.context_length, self.info.vocab_size)
        settings = replace(
            settings,
            max_rows=min(settings.max_rows, max_rows or settings.max_rows),
            pipeline=settings.pipeline and self._mode.can_pipeline,
            long_tail_rows=self._long_tail_rows,
            has_draft_head=self.head is not None,
        )
        return Scheduler(cache, settings)

    def restart_workers(self) -> None:
        """Do nothing: this model has no workers."""

    def reset(self) -> None:
        """Drop everything in flight. `make_cache` must follow, which makes the arena anew."""
        self.runner.forget()

    def start_store(self) -> None:
        """Let the store read and write, once the first cache exists."""
        if self.disk is not None and self._store is not None:
            assert isinstance(self.runner, ModelRunner)  # else `kv_store_notes` has said why there is no store
            self.disk.set_runner(self.runner)
            if self.disk.state is StoreState.HASHING:
                self._store.when_hashed(self.loaded.model, lambda: self._wake(lambda core: self._resolve_store()))

    def _resolve_store(self) -> None:
        """Now that the weights' hash is known, let the store read and write, or stop using it."""
        if self.disk is not None and self._store is not None:
            identity_or_reason = self._store.resolve_identity(self.loaded.model)
            if isinstance(identity_or_reason, bytes):
                self.disk.enable(identity_or_reason)
            else:
                self.disk.disable(identity_or_reason)

    def adapter_set(self) -> AdapterSet:
        """Return the tables of the model's adapters. Raises AdapterRefused if it runs one request at a time."""
        if not isinstance(self.runner, ModelRunner):
            raise AdapterRefused(
                f"{self.loaded.name} runs one request at a time, and no adapters are served per request then: open an "
                "engine with one adapter (adapter=, --adapter)"
            )
        raise_if_refused(return_refusals(self.runner.adapters.find_layers)(self.loaded.dtype))
        return self.runner.adapters

    def check_pins(self) -> None:
        """Raise InvalidRequest if this model cannot keep pinned texts."""
        if self._mode.max_rows is not None:
            name = self.loaded.name
            raise InvalidRequest(
                f"{name} runs on mlx-lm's own caches, which keep the last text alone: none can be pinned"
            )
        check_prefix_cache(self._config)

    def release(self) -> None:
        """Free all memory at once, even if an app still refers to a closed engine, its handles, or an error with a
        traceback: the parts are emptied, not only dropped. Nothing can be used afterwards. Safe to call again.
        """
        parts = vars(self)
        self._warm_up.stop()
        with ExitStack() as exit_stack:  # the last one comes first, and all of them come whatever one raises
            exit_stack.callback(release_freed_memory)
            exit_stack.callback(mx.clear_cache)
            if self.draft is not None:
                exit_stack.callback(self.draft.release)
            exit_stack.callback(self._drop_parts)
            if "loaded" in parts:
                exit_stack.callback(weights.release_arrays, self.loaded.model)
            if parts.get("head") is not None:
                exit_stack.callback(weights.release_arrays, self.head)
            if (sight := parts.get("sight")) is not None:
                exit_stack.callback(weights.release_arrays, sight.tower)
            if "runner" in parts:
                exit_stack.callback(self.runner.close)
            if self.disk is not None:
                exit_stack.callback(self.disk.close)
            if self._store is not None:
                exit_stack.callback(self._store.cancel)

    def _drop_parts(self) -> None:
        """Drop all parts, also those that could not be emptied, so that a second `release` does not wait for them."""
        self.disk = self.draft = None
        for name in ("runner", "loaded", "_mode"):
            vars(self).pop(name, None)


# KernelWarmUp: compiles and checks attention kernels on threads of their own, while the model is loaded.


log = logging.getLogger("cortexmlx")

THREADS = 2
"""How many kernels are worked on at a time.

MLX's Metal device keeps compiled kernels in two maps for all threads. It builds a library, from the text, while it
holds `library_mtx_` (`Device::get_library`), and then a pipeline while it holds `kernel_mtx_` (`Device::get_kernel_`).
So two kernels can be in work at a time, one in each, and a third thread would wait. Every launch takes `kernel_mtx_`
shared: the thread that loads waits while a pipeline is made, but not for a library.
"""

_LOOK_SECONDS = 0.1
"""How often the waiting thread reports, so that it notices when the engine is closed."""


class KernelWarmUp:
    """Compiles and checks attention kernels on threads of its own, while the engine's thread loads the model. Each
    check runs on one thread from its arrays to its result, because a lazy array can only be evaluated on the thread
    that made it. A check that raises is made again at the kernel's first use.
    """

    def __init__(self, checks: Sequence[KernelCheck] = ()) -> None:
        self._pending_checks: deque[KernelCheck] = deque()
        self._total = 0
        self._end_signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._tasks: list[MlxTask] = []
        self.add(checks)

    def add(self, checks: Sequence[KernelCheck]) -> None:
        """Start more kernel checks, on new threads, since those at work may be about to end."""
        self._pending_checks.extend(checks)
        self._total += len(checks)
        for _ in range(min(THREADS, len(checks))):
            task = MlxTask(self._run)
            try:
                task.start()
            except RuntimeError as error:  # the system starts no more threads
                log.warning("attention kernels are compiled at their first use: %s", error)
                return
            self._tasks.append(task)

    def finish(self, report: OnProgress) -> None:
        """Wait until all checks have ended, and report the progress. Raises what `report` raises."""
        done_count = 0
        while done_count < self._total and any(task.running for task in self._tasks):
            report(Progress("compiling", done_count, self._total))
            with suppress(queue.Empty):
                self._end_signals.get(timeout=_LOOK_SECONDS)
                done_count += 1
        if self._total:
            report(Progress("compiling", self._total, self._total))

    def stop(self) -> None:
        """Begin no further check. Those that run end on their threads: nobody can interrupt a compiler."""
        self._pending_checks.clear()

    def _run(self, previous_error: BaseException | None) -> None:
        """Carry out checks until none is left; each thread runs this. `previous_error`: raised by an earlier call."""
        if previous_error is not None:
            log.warning("a thread that compiles attention kernels was interrupted by %r", previous_error)
        while self._pending_checks:
            try:
                check = self._pending_checks.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                check.run()
            except Exception:
                log.exception("attention (%s) could not be checked, and is checked at its first use", check.label)
            finally:
                self._end_signals.put(None)


# Whether two models mean the same by a token, so that one can draft for the other.


def check_same_tokens(model: LoadedModel, draft: LoadedModel, size: int) -> None:
    """Raise InvalidRequest unless a model and its draft model have the same tokens. The first `size` ids must stand for
    the same texts, and be special or end an answer in both or in neither.

    Only ids that stand for something in both count: the rest pads embeddings, or is a special token that only one
    tokenizer has.
    """
    model_table, draft_table = (_token_table(each, size) for each in (model, draft))
    shared_ids = [i for i in range(size) if model_table.pieces[i] and draft_table.pieces[i]]
    differing_ids = [i for i in shared_ids if model_table.pieces[i] != draft_table.pieces[i]]
    if differing_ids or not shared_ids:
        example = "".join(
            f", such as {i}: {_quoted_token(model_table, i)} and {_quoted_token(draft_table, i)}"
            for i in differing_ids[:1]
        )
        raise _draft_mismatch_error(
            model, draft, f"{len(differing_ids):,} of {len(shared_ids):,} ids stand for other texts{example}"
        )
    for predicate, model_ids, draft_ids in (
        ("are special", model_table.special, draft_table.special),
        ("end an answer", model_table.end_ids, draft_table.end_ids),
    ):
        if mismatched_ids := sorted((model_ids ^ draft_ids).intersection(shared_ids)):
            name = model.name if mismatched_ids[0] in model_ids else draft.name
            raise _draft_mismatch_error(
                model,
                draft,
                f"{len(mismatched_ids):,} ids {predicate} in one of them only, such as {mismatched_ids[0]} in {name}",
            )


def _token_table(model: LoadedModel, size: int) -> TokenTable:
    """Return the texts of the first `size` tokens of a model, each as if no token came before it."""
    tokenizer = SharedTokenizer(model.tokenizer)
    table = tokenizer.token_table(size)
    if table is not None:
        return table
    special = frozenset(getattr(model.tokenizer, "all_special_ids", ()))
    token_bytes = tuple(tokenizer.token_bytes(i) for i in range(size))
    return TokenTable(token_bytes, special, tokenizer.eos_token_ids, drops_space=False)


def _quoted_token(table: TokenTable, token: int) -> str:
    return repr(table.pieces[token].decode("utf-8", "backslashreplace")[:40])


def _draft_mismatch_error(model: LoadedModel, draft: LoadedModel, reason: str) -> InvalidRequest:
    """Return the error for a draft model whose tokens differ from the model's."""
    return InvalidRequest(
        f"{draft.name} cannot draft for {model.name}, whose tokens are others: {reason}. Choose a draft model with the "
        "same tokenizer, or none (--draft)"
    )
