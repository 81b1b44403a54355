"""A program of a user who has read docs/python.md and uses all of it. mypy --strict reads it, and the tests run it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import assert_type

import cortexmlx
from cortexmlx import (
    AdapterInfo,
    AsCompleted,
    AsyncReply,
    AsyncTokenStream,
    CacheReport,
    CallDelta,
    ChatPrompt,
    Completion,
    Conversation,
    CortexError,
    EmbeddingInfo,
    Embeddings,
    Engine,
    EngineStats,
    FinishReason,
    KVBlockAllocator,
    KVHandle,
    LogitsProcessor,
    Message,
    ModelInfo,
    Perplexity,
    Pin,
    Progress,
    Prompt,
    PromptLogprobs,
    Question,
    RecomputeReason,
    Reply,
    RequestHandle,
    RequestState,
    Reranking,
    SamplingParams,
    StructuredOutput,
    Timings,
    TokenEvent,
    TokenLogprob,
    TokenStream,
    Tool,
    ToolCall,
    ToolEvent,
    Usage,
)
from cortexmlx.errors import (
    AdapterRefused,
    ConversationFileError,
    DownloadFailed,
    EmbeddingRefused,
    EngineClosed,
    ForkedProcess,
    FormRefused,
    HostLost,
    HostRefused,
    InvalidRequest,
    KernelCompileError,
    KernelFault,
    KVBlockError,
    KVCacheFull,
    LogitsProcessorError,
    MemoryRefused,
    ModelCorrupt,
    ModelNotFound,
    ModelUnsupported,
    NoTokenToChoose,
    OutOfMemory,
    PinRefused,
    PrefixRefused,
    PromptTooLong,
    RequestTimeout,
    StructuredOutputError,
    ToolchainMissing,
    UnknownAdapter,
)
from cortexmlx.stats import (
    ArenaWrites,
    BlockMap,
    BlockState,
    ChoiceSource,
    CommandBuffers,
    DraftStats,
    GroupBlocks,
    HostStats,
    Latency,
    MemoryPressure,
    RequestStats,
    SpeculationStats,
    StoreState,
    StoreStats,
    TimedChoice,
    UsageSample,
)

SHORT = SamplingParams(max_tokens=8, temperature=0.7, seed=1, stop="never so", ignore_eos=True)
MESSAGES: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


def show(completion: Completion) -> str:
    usage: Usage = completion.usage
    timings: Timings = completion.timings
    rates = f"{timings.prefill_tokens_per_second:.0f} and {timings.decode_tokens_per_second:.0f} tok/s"
    waited = f"{timings.queued:.3f} {timings.ttft:.3f} {timings.total:.3f}"
    tokens = f"{usage.prompt_tokens} {usage.completion_tokens} {usage.cached_tokens} {usage.dropped_tokens}"
    logprobs: tuple[TokenLogprob, ...] = completion.logprobs or ()
    likeliest = [(one.token_id, one.logprob, one.top) for one in logprobs]
    others = [other.index for other in completion.others]
    whole = f"{completion.text} {completion.token_ids} {likeliest} {completion.cumulative_logprob} {others}"
    stopped = completion.finish_reason is FinishReason.LENGTH
    return f"{whole} {tokens} {usage.total_tokens} {rates} {waited} {stopped} {completion.prompt_logprobs is None}"


def far(progress: Progress) -> None:
    print(f"{progress.what}: {progress.fraction:.0%}, {progress.done} of {progress.total} {progress.unit}")


def repeated(word: str, times: int = 2) -> str:
    """Repeat a word."""
    return word * times


def asks(engine: Engine) -> None:
    prompt: Prompt = "the cat"
    answer = engine.generate(prompt, SHORT, cache=False, timeout=600.0)
    assert_type(answer, Completion)
    show(answer)
    chat = ChatPrompt(MESSAGES, {})
    show(engine.generate(chat, SHORT, on_progress=far))
    several = SamplingParams(max_tokens=4, temperature=1.0, n=2, best_of=3, logprobs=2, stop=["a", "b"])
    show(engine.generate(MESSAGES, several))
    form = StructuredOutput.choice(["yes", "no"])
    forms = [form, StructuredOutput.regex("a+"), StructuredOutput.grammar('start: "a"'), StructuredOutput.json({})]
    print([StructuredOutput.named(each.as_mapping()) == StructuredOutput.of(each) for each in forms])
    said = engine.generate(prompt, structured=form, max_tokens=64)
    print(said.parsed == form.parse(said.text), SamplingParams(structured=dict[str, int]).form)
    weather = Tool.of({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}})
    offered = SamplingParams(tools=[weather, repeated], tool_choice="auto", parallel_tool_calls=False)
    calls: tuple[ToolCall, ...] = said.tool_calls
    print([tool.as_mapping() for tool in offered.offered], [(call.id, call.name, call.values) for call in calls])
    assert_type(engine.generate_batch([prompt, [1, 2, 3]], SHORT), list[Completion])

    with engine.stream(prompt, SHORT) as stream:
        assert_type(stream, TokenStream)
        for event in stream:
            assert_type(event, TokenEvent)
            pieces: tuple[CallDelta, ...] = event.tool_calls
            print([(piece.index, piece.id, piece.name, piece.arguments) for piece in pieces])
            print(event.text, event.token_id, event.logprob, event.index, event.dropped, event.finish_reason)

    done = threading.Event()

    def listen(event: TokenEvent) -> None:
        if event.completion is not None or event.error is not None:
            done.set()

    handle = engine.submit(prompt, SHORT, on_event=listen, client="one", background=True)
    assert_type(handle, RequestHandle)
    assert_type(handle.result(timeout=600), Completion)
    assert handle.state is RequestState.FINISHED and handle.ended and handle.id > 0 and done.wait(600)
    print(handle.cancelling, handle.progress, handle.prompt_logprobs)
    heard: list[TokenEvent] = []
    engine.submit(prompt, listener=heard.append).cancel()

    def prompts() -> Iterator[Prompt]:
        yield prompt
        yield []

    completed = engine.as_completed(prompts(), SHORT, window=4, timeout=600, adapter=None)
    assert_type(completed, AsCompleted)
    for index, result in completed:
        print(index, result if isinstance(result, CortexError) else result.text)
    completed.close()
    assert list(completed.finished()) == []

    processors: list[LogitsProcessor] = []
    scored = engine.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=1, logits_processors=processors))
    known: PromptLogprobs | None = scored.prompt_logprobs
    assert known is not None and known[0] is None and len(known.tokens) == len(known.logprobs)
    foretold: Perplexity = engine.perplexity("the cat and the hat", context=16, stride=8, on_window=print)
    print(foretold.perplexity, foretold.bits_per_token, foretold.bits_per_byte, foretold.tokens_per_second)


def embeds(model: Path, folder: Path) -> None:
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "pooling", "type": "a.Pooling"}]
    pooling: dict[str, object] = {"embedding_dimension": 32, "pooling_mode": "mean"}
    shutil.copytree(model, folder / "embedding")
    (folder / "embedding" / "modules.json").write_text(json.dumps(modules))
    (folder / "embedding" / "pooling").mkdir()
    (folder / "embedding" / "pooling" / "config.json").write_text(json.dumps(pooling))
    with Engine(folder / "embedding", kv_memory="256KB", block_size=8) as engine:
        info: EmbeddingInfo | None = engine.info.embedding
        assert info is not None
        print(info.dimensions, info.max_tokens, info.pooling, info.normalized, info.prompts, info.default_prompt)
        vectors: Embeddings = engine.embed(["the cat", [1, 2, 3]], dimensions=8, truncate=True, client="one")
        print(vectors.vectors.shape, vectors.prompt_tokens, vectors.cached_tokens, vectors.truncated)
        assert_type(asyncio.run(engine.aembed(["the cat"])), Embeddings)
        try:
            judged: Reranking = engine.rerank("hat?", ["the cat"], instruction="Find hats.", truncate=True)
            print(judged.scores, judged.prompt_tokens, judged.cached_tokens)
            judged = asyncio.run(engine.arerank("hat?", ["the cat"]))
        except EmbeddingRefused as error:
            print(error)


def hear(event: ToolEvent) -> None:
    print(event.call.name, event.result, event.seconds)


def talks(engine: Engine, folder: Path) -> None:
    talk: Conversation = engine.conversation(system="Be brief.", params=SHORT, client="one")
    question: Question = {"role": "user", "content": "Hello?"}
    assert_type(talk.ask(question, timeout=600), Completion)
    assert_type(engine.generate(ChatPrompt(MESSAGES, {}), SHORT).raw_text, str)
    print(talk.thinking, talk.template_vars, engine.info.template_vars)
    with talk.stream("And then?", top_k=5) as reply:
        assert_type(reply, Reply)
        for event in reply:
            print(event.thinking, event.text, end="")
        print(reply.result().text, len(reply.prompt), reply.opened)
        reply.cancel()
    print(talk.regenerate().text, talk.undo(), talk.tokens, talk.context_left, talk.messages, talk.system, talk.params)
    print(talk.adapter, talk.template_vars, talk.unsent, talk.count("And now?"), talk.make_room(8), talk.markdown())
    talk.choose(talk.ask("Which one?", max_tokens=4, temperature=1.0, n=2, ignore_eos=True).others[0])
    try:  # the tiny model cannot call
        talk.ask("And?", tools=[repeated], approve=lambda call: bool(call.name), on_event=hear, max_rounds=2)
    except InvalidRequest as error:
        print(error.field)
    talk.edit(0, "Hello!")
    talk.save(folder / "talk.json")
    other = talk.so_far().fork()
    other.clear()
    other.load(folder / "talk.json")
    print(other.notes)


async def waits(model: Path) -> None:
    engine = await Engine.open(model, kv_memory="256KB", block_size=8)
    assert_type(engine, Engine)
    await engine.aclose()
    async with Engine.open(model, kv_memory="256KB", block_size=8, on_progress=far) as engine:
        assert_type(engine, Engine)
        assert_type(await engine.agenerate("the cat", SHORT, timeout=600), Completion)
        async with engine.astream(MESSAGES, SHORT, timeout=600) as stream:
            assert_type(stream, AsyncTokenStream)
            async for event in stream:
                print(event.text, end="")
        talk = engine.conversation(params=SHORT)
        assert_type(await talk.aask("Hello?"), Completion)
        async with talk.astream("And then?") as reply:
            assert_type(reply, AsyncReply)
            async for event in reply:
                print(event.text, end="")
            assert_type(await reply.result(), Completion)


def looks(engine: Engine) -> None:
    info: ModelInfo = engine.info
    print(info.name, info.architecture, info.context_length, engine.longest_request)
    tokens: list[int] = engine.encode("the cat")
    assert engine.count_tokens("the cat") == len(tokens) and engine.decode(tokens, special_tokens=False) == "the cat"
    assert b"".join(map(engine.token_bytes, tokens)).endswith(b"the cat")
    reports: list[CacheReport] = engine.cache_reports("one")
    reasons = {report.reason for report in reports}
    assert reasons <= {None, *RecomputeReason}
    engine.share_history(engine)
    with engine.pin(list(range(1, 40)), name="rules", lifetime=60.0, tools=(), client="one", adapter=None) as pin:
        assert_type(pin, Pin)
        with suppress(PrefixRefused):
            print(
                pin.name, pin.export("rules.kv"), engine.import_pin("rules.kv", name=None, lifetime=None, client=None)
            )
        print(pin.tokens)
    pin.unpin()
    try:
        shown: int = engine.check_image(b"")
        print(engine.sees_images, shown, engine.calls_tools, engine.thinks)
    except InvalidRequest as error:
        print(error)
    try:
        known: AdapterInfo = engine.load_adapter("sql", "a folder that is not there")
        print(known.name, known.rank, known.targets, known.bytes, known.digest, known.path, known.base)
    except ModelNotFound as error:
        print(error, dict(engine.adapters))
    try:
        engine.unload_adapter("sql")
    except UnknownAdapter as error:
        print(error)
    stats: EngineStats = engine.stats()
    print(stats.adapters, stats.adapter_bytes, stats.adapter_bytes_limit)
    drafts: SpeculationStats = stats.speculation
    sources: Mapping[str, DraftStats] = drafts.sources
    print(drafts.tokens_per_step, drafts.drafted >= drafts.accepted, [each.accepted for each in sources.values()])
    latency: Latency = stats.time_to_first_token
    moments: tuple[UsageSample, ...] = stats.timeline
    choices: tuple[TimedChoice, ...] = stats.choices
    print(*(c.job for c in choices if c.source is ChoiceSource.TIMED and c.seconds[c.chosen] < 1e-3))
    writes: ArenaWrites = stats.arena_writes
    buffers: CommandBuffers | None = stats.command_buffers
    print(writes.measured, writes.copied_bytes, buffers is not None and buffers.may_idle, engine.closed)
    requests: tuple[RequestStats, ...] = stats.requests
    print([(each.state, each.computed_tokens) for each in requests])
    workers: tuple[HostStats, ...] = stats.hosts
    print([(each.name, each.kv_bytes) for each in workers], stats.host_losses)
    store: StoreStats | None = stats.kv_store
    print(store is not None and store.state is StoreState.HASHING and store.hashed)
    print(latency.p99, stats.hit_rate, len(moments), moments[-1].used_blocks, store.path if store else "no disk")
    blocks: BlockMap = engine.blocks()
    groups: tuple[GroupBlocks, ...] = blocks.groups
    print(blocks.count(BlockState.FREE), blocks.total, [group.count(BlockState.CACHED) for group in groups])
    assert_type(engine.inspect(lambda core: 1), int)
    engine.on_memory_pressure(MemoryPressure.WARNING)
    engine.on_memory_pressure("critical")
    engine.check_invariants()


def fails(engine: Engine) -> None:
    for prompt, kind in (([], InvalidRequest), ([1] * 10**6, PromptTooLong)):
        try:
            engine.generate(prompt)
        except (InvalidRequest, PromptTooLong) as error:
            assert isinstance(error, kind) and (isinstance(error, InvalidRequest) or error.tokens > error.limit)
    try:
        engine.generate("the cat", SamplingParams(max_tokens=2000, ignore_eos=True), timeout=0.001)
    except RequestTimeout as error:
        print(isinstance(error, TimeoutError))
    rest = (
        AdapterRefused,
        ForkedProcess,
        HostLost,
        HostRefused,
        KVCacheFull,
        MemoryRefused,
        OutOfMemory,
        PinRefused,
        LogitsProcessorError,
        NoTokenToChoose,
        FormRefused,
        StructuredOutputError,
        EmbeddingRefused,
    )
    loading = (ModelNotFound, DownloadFailed, ModelCorrupt, ModelUnsupported)
    kernels = (KernelCompileError, KernelFault, ToolchainMissing)
    assert all(issubclass(kind, CortexError) for kind in (*rest, *loading, *kernels, ConversationFileError))


def allocates() -> None:
    blocks = KVBlockAllocator(16)
    handle: KVHandle | None = blocks.allocate(4)
    assert handle is not None
    blocks.free(handle)
    try:
        blocks.free(handle)
    except KVBlockError as error:
        print(error)


def main(model: Path, folder: Path) -> None:
    with Engine(model, kv_memory="256KB", block_size=8, max_rows=4) as engine:
        asks(engine)
        talks(engine, folder)
        looks(engine)
        fails(engine)
    try:
        engine.stats()
    except EngineClosed as error:
        print(error)
    asyncio.run(waits(model))
    embeds(model, folder)
    allocates()
    print(cortexmlx.__version__)


if __name__ == "__main__":
    with TemporaryDirectory() as empty:
        main(Path(sys.argv[1]), Path(empty))
