"""What a resume point of a window needs goes together, and superseded points go before those of other texts."""

from __future__ import annotations

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, LayerGroup

ALL, WINDOW = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,)), LayerGroup(KVSpec(1, 4, 4, "float32", 8), (1,))


def computed(cache: KVCache, tokens: list[int], anchor: int = 0, cut: int = 0) -> int:
    """How many tokens of a text were found; the others were computed, in steps, and all of it was cached. There is a
    point before `cut`.
    """
    keys = cache.prefix.keys(tokens)
    match = cache.match(tokens, keys, len(tokens) - 1)
    cache.reorder_resume_points(match, anchor)
    cache.allocate_for(0, len(tokens), match=match)
    cache.release_copy_sources()
    found = length = cache.tables.length(0)
    while length < len(tokens):
        end = min(length + 4, len(tokens))
        cache.reserve(0, end)
        cache.append(0, end - length)
        cache.register(0, tokens, end, keys)
        length = end
    cache.add_resume_point(0, cut)
    cache.cache_and_free(0, tokens, len(tokens), keys)
    cache.check_invariants()
    return found


def test_rounds_of_a_loop_go_before_its_question_and_before_another_text() -> None:
    cache = KVCache(BlockPools([ALL, WINDOW], [400, 16], 4))
    other, question = list(range(1000, 1040)), list(range(40))
    computed(cache, other)
    computed(cache, question)
    for end in range(60, 400, 20):
        assert computed(cache, list(range(end)), anchor=40) == end - 20
    assert computed(cache, [*question, *range(2000, 2020)]) == 40
    assert computed(cache, [*other, 1]) == 40


def test_the_point_before_a_question_that_fills_its_last_block_stays() -> None:
    """A prompt's last token is always computed, so the point is a block before the question's end."""
    cache = KVCache(BlockPools([ALL, WINDOW], [400, 16], 4))
    question = list(range(40))
    computed(cache, list(range(44)), cut=39)
    for end in range(64, 400, 20):
        computed(cache, [*question, *range(1000, 1000 + end)], anchor=40)
    assert computed(cache, [*question, *range(2000, 2020)]) >= 36


def test_one_long_text_leaves_the_others_points_whole_and_critical_pressure_none() -> None:
    cache = KVCache(BlockPools([ALL, WINDOW], [400, 16], 4))
    texts = [list(range(first, first + 40)) for first in (1000, 2000)]
    for text in (*texts, list(range(800))):
        computed(cache, text)
    assert [computed(cache, [*text, 1]) for text in texts] == [40, 40]
    cache.pools.drop_cached()
    assert not len(cache.pools.points) and cache.stats().cached_blocks == 0
