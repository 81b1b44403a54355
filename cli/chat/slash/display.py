"""/tokens, /stats, /blocks and /thoughts: what the engine does, and what the model thought."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chat.slash.command import SlashCommand
from cortexmlx.cli.chat.view import MAX_WIDTH
from cortexmlx.cli.limits import describe_limit
from cortexmlx.cli.markdown.stream import render_markdown
from cortexmlx.cli.markdown.styles import THOUGHT
from cortexmlx.cli.terminal.blockmap import draw_blocks
from cortexmlx.cli.terminal.console import print_indented, print_rows
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.stats import BlockState, StoreState, StoreStats

LIVE = "live"


@partial(SlashCommand, "/tokens", "", "how much of the context is used")
def show_tokens(chat: ChatSession, argument: str, console: Console) -> None:
    """/tokens: print how much of the context is used."""
    used_tokens, token_limit = chat.conversation.tokens, chat.engine.longest_request
    if (stats := chat.engine.stats()).keep_last:
        window_text = f"the model sees the first {stats.keep_first:,} and at least the newest {stats.keep_last:,}"
        print_indented(console, f"{used_tokens:,} tokens, of which {window_text}")
        return
    print_indented(
        console, f"{used_tokens:,} tokens ({used_tokens / token_limit:.0%}) of {describe_limit(chat.engine)}"
    )
    if chat.conversation.unsent:
        left_out = f"the {chat.conversation.unsent} oldest messages are not sent any more, and not counted"
        print_indented(console, left_out)


@partial(SlashCommand, "/stats", "", "memory, steps and times of the engine")
def show_stats(chat: ChatSession, argument: str, console: Console) -> None:
    """/stats: print the engine's memory, steps and times. Every block and token is counted in one place only."""
    figures, arena = chat.engine.stats(), chat.engine.blocks()
    free, private, shared, cached, stored = map(arena.count, BlockState)
    cached_bytes = sum((g.count(BlockState.CACHED) + g.count(BlockState.STORED)) * g.block_bytes for g in arena.groups)
    used_blocks = [moment.used_blocks for moment in figures.timeline]
    first_token, inter_token = figures.time_to_first_token, figures.inter_token
    rate = 1 / inter_token.mean if inter_token.mean else 0.0  # as in the line below each answer
    lines = {
        "KV memory": f"{format_bytes(figures.kv_bytes_in_use)} in use and {format_bytes(cached_bytes)} cached, of "
        f"{format_bytes(figures.kv_bytes)}; it may grow to {format_bytes(figures.kv_bytes_limit)}",
        "blocks": f"{private + shared:,} in use ({shared:,} shared), {cached + stored:,} cached ({stored:,} on disk, "
        f"too), {free:,} free: {arena.total:,} of {arena.block_size} tokens; fragmentation {figures.fragmentation:.0%}",
        "over time": f"{sparkline(used_blocks)} blocks in use, {max(used_blocks, default=0):,} at most",
        "prompts": f"{figures.prompt_tokens:,} tokens, of which {figures.cached_tokens:,} were found in the prefix "
        f"cache ({figures.hit_rate:.0%})",
        "answers": f"{figures.generated_tokens:,} tokens in {figures.steps:,} steps, {rate:.1f} tok/s while written",
        "latency": f"first token {first_token.p50:.2f} s, longest {first_token.longest:.2f} s; between tokens "
        f"{inter_token.p50 * 1000:.0f} ms, longest {inter_token.longest * 1000:.0f} ms (medians)",
        "step time": f"plan {figures.plan_seconds:.2f} s, build {figures.build_seconds:.2f} s, "
        f"wait {figures.wait_seconds:.2f} s, commit {figures.commit_seconds:.2f} s",
        "attention": figures.attention_backend,
        "memory": f"{format_bytes(figures.active_memory)} now, {format_bytes(figures.peak_memory)} at most",
    }
    if (store := figures.kv_store) is not None:
        lines["on disk"] = disk_tier_summary(store)
    if figures.keep_last:
        window_text = f"the first {figures.keep_first:,} and the newest {figures.keep_last:,} tokens of a text"
        lines["kept"] = f"{window_text}; {figures.dropped_tokens:,} dropped"
    if figures.state_bytes:
        count = f"{figures.state_snapshots:,} beginnings to use again"
        lines["states"] = f"{format_bytes(figures.state_bytes)}, for {count}"
    print_rows(console, ((f"  {label}", figure) for label, figure in lines.items()), 16)


def disk_tier_summary(store: StoreStats) -> str:
    """Return the state and the counts of the KV store on disk, in words."""
    if store.state is StoreState.OFF:
        return f"nothing, since the weights have no hash: see the warning; {store.path} is not used"
    if store.state is StoreState.HASHING:
        return f"nothing yet: the weights are being hashed ({store.hashed:.0%}), for {store.path}"
    return (
        f"{store.stored_blocks:,} blocks written ({format_bytes(store.stored_bytes)}), {store.read_blocks:,} read, "
        f"since the chat began; {store.path} has room for {format_bytes(store.bytes_limit)}"
    )


def sparkline(values: Sequence[int], width: int = 40) -> str:
    """Return values as one line of bars. Each shows the greatest value of its part, relative to the greatest of all."""
    bars, max_value = " ▁▂▃▄▅▆▇█", max(values, default=0)
    if not max_value:
        return "-"
    parts = min(width, len(values))
    highest = [max(values[i * len(values) // parts : (i + 1) * len(values) // parts]) for i in range(parts)]
    return "".join(bars[-(-v * (len(bars) - 1) // max_value)] for v in highest)


@partial(
    SlashCommand,
    "/blocks",
    "[live]",
    "a picture of the KV blocks, now or below each answer",
    complete_values=lambda: (LIVE,),
)
def show_blocks(chat: ChatSession, argument: str, console: Console) -> None:
    """/blocks: draw the KV arena as it is now. With `live`, draw it below growing answers until the next /blocks."""
    if argument not in ("", LIVE):
        raise InvalidRequest(f"/blocks takes nothing, or {LIVE}: not {argument!r}")
    if argument and chat.arena is None:
        raise InvalidRequest(f"/blocks {LIVE} needs a terminal")
    if chat.arena is not None and (argument or chat.arena.is_shown):
        chat.arena.toggle()
        now = "drawn below answers from now on; /blocks ends it" if chat.arena.is_shown else "not drawn any more"
        print_indented(console, f"the blocks are {now}")
    if not argument:
        size = console.size
        for line in draw_blocks(
            chat.engine.blocks(), size.width, max(size.height - 4, 4), ascii_only=console.options.ascii_only
        ):
            console.print(line)


FOLD, SHOW = "fold", "show"


@partial(
    SlashCommand,
    "/thoughts",
    "[fold|show]",
    "the last thoughts; fold or show those to come",
    complete_values=lambda: (FOLD, SHOW),
)
def show_thoughts(chat: ChatSession, argument: str, console: Console) -> None:
    """/thoughts: print the thoughts of the last answer. `fold` and `show` set how later thoughts are shown."""
    if argument not in ("", FOLD, SHOW):
        raise InvalidRequest(f"/thoughts takes nothing, {FOLD} or {SHOW}: not {argument!r}")
    if argument:
        chat.thought_display.is_folded = argument == FOLD
        now = (
            "folded into one line from now on; /thoughts shows the last"
            if chat.thought_display.is_folded
            else "shown from now on"
        )
        print_indented(console, f"thoughts are {now}")
        return
    thoughts = chat.conversation.thinking
    if not thoughts:
        raise InvalidRequest("the last answer has no thoughts")
    for line in render_markdown(thoughts, min(console.width, MAX_WIDTH)):
        line.stylize(THOUGHT)
        console.print(line, soft_wrap=True)
