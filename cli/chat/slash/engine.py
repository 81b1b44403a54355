"""/stats and /blocks: what the engine says of itself, in figures and in a picture."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.terminal.blockmap import draw
from cortexmlx.cli.terminal.console import print_indented, print_rows
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.stats import BlockState, StoreState, StoreStats

LIVE = "live"


def stats(chat: ChatSession, argument: str, console: Console) -> None:
    """/stats: every block and token is counted in one place."""
    figures, arena = chat.engine.stats(), chat.engine.blocks()
    free, private, shared, cached, stored = map(arena.count, BlockState)
    kept = sum((g.count(BlockState.CACHED) + g.count(BlockState.STORED)) * g.block_bytes for g in arena.groups)
    used = [moment.used_blocks for moment in figures.timeline]
    first, between = figures.time_to_first_token, figures.inter_token
    rate = 1 / between.mean if between.mean else 0.0  # as the line below each answer has it
    lines = {
        "KV memory": f"{format_bytes(figures.kv_bytes_in_use)} in use and {format_bytes(kept)} cached, of "
        f"{format_bytes(figures.kv_bytes)}; it may grow to {format_bytes(figures.kv_bytes_limit)}",
        "blocks": f"{private + shared:,} in use ({shared:,} shared), {cached + stored:,} cached ({stored:,} on disk, "
        f"too), {free:,} free: {arena.total:,} of {arena.block_size} tokens; fragmentation {figures.fragmentation:.0%}",
        "over time": f"{sparkline(used)} blocks in use, {max(used, default=0):,} at most",
        "prompts": f"{figures.prompt_tokens:,} tokens, of which {figures.cached_tokens:,} were found in the prefix "
        f"cache ({figures.hit_rate:.0%})",
        "answers": f"{figures.generated_tokens:,} tokens in {figures.steps:,} steps, {rate:.1f} tok/s while written",
        "latency": f"first token {first.p50:.2f} s, longest {first.longest:.2f} s; between tokens "
        f"{between.p50 * 1000:.0f} ms, longest {between.longest * 1000:.0f} ms (medians)",
        "step time": f"plan {figures.plan_seconds:.2f} s, build {figures.build_seconds:.2f} s, "
        f"wait {figures.wait_seconds:.2f} s, commit {figures.commit_seconds:.2f} s",
        "attention": figures.attention_backend,
        "memory": f"{format_bytes(figures.active_memory)} now, {format_bytes(figures.peak_memory)} at most",
    }
    if (store := figures.kv_store) is not None:
        lines["on disk"] = on_disk(store)
    if figures.keep_last:
        newest = f"the first {figures.keep_first:,} and the newest {figures.keep_last:,} tokens of a text"
        lines["kept"] = f"{newest}; {figures.dropped_tokens:,} dropped"
    if figures.state_bytes:
        count = f"{figures.state_snapshots:,} beginnings to use again"
        lines["states"] = f"{format_bytes(figures.state_bytes)}, for {count}"
    print_rows(console, ((f"  {label}", figure) for label, figure in lines.items()), 16)


def on_disk(store: StoreStats) -> str:
    """What the store does, in words."""
    if store.state is StoreState.OFF:
        return f"nothing, since the weights have no hash: see the warning; {store.path} is not used"
    if store.state is StoreState.HASHING:
        return f"nothing yet: the weights are being hashed ({store.hashed:.0%}), for {store.path}"
    return (
        f"{store.stored_blocks:,} blocks written ({format_bytes(store.stored_bytes)}), {store.read_blocks:,} read, "
        f"since the chat began; {store.path} has room for {format_bytes(store.bytes_limit)}"
    )


def sparkline(values: Sequence[int], width: int = 40) -> str:
    """Values as one line of bars, each that of the greatest in its part of them; the greatest of all is full height."""
    bars, most = " ▁▂▃▄▅▆▇█", max(values, default=0)
    if not most:
        return "-"
    parts = min(width, len(values))
    highest = [max(values[i * len(values) // parts : (i + 1) * len(values) // parts]) for i in range(parts)]
    return "".join(bars[-(-v * (len(bars) - 1) // most)] for v in highest)


def blocks(chat: ChatSession, argument: str, console: Console) -> None:
    """/blocks: the arena as it is now. With `live`, below answers while they are written, until it is asked again."""
    if argument not in ("", LIVE):
        raise InvalidRequest(f"/blocks takes nothing, or {LIVE}: not {argument!r}")
    if argument and chat.arena is None:
        raise InvalidRequest(f"/blocks {LIVE} needs a terminal")
    if chat.arena is not None and (argument or chat.arena.shown):
        chat.arena.toggle()
        now = "drawn below answers from now on; /blocks ends it" if chat.arena.shown else "not drawn any more"
        print_indented(console, f"the blocks are {now}")
    if not argument:
        size = console.size
        for line in draw(chat.engine.blocks(), size.width, max(size.height - 4, 4), plain=console.options.ascii_only):
            console.print(line)
