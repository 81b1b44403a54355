"""Each class that keeps latents, beside itself on mlx-lm's own cache: rows and prefill pieces of any lengths in one
step, scattered over the arena, and then rows with a tail. Whole engines are in tests/engine/test_latent.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache

from cortexmlx.attention import latent, model_patches, reference
from cortexmlx.attention.mlx_lm_hook import LayerCache, ProbeKV, install_attention_hook
from cortexmlx.attention.paged import PagedKV
from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import TAIL_COLUMNS, AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece

HIDDEN, HEADS, RANK, ROPE, NOPE, VALUE, BLOCK = 24, 4, 16, 4, 8, 6, 8

ARGS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": RANK,
    "q_lora_rank": 12,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0},
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "mla_use_output_gate": True,
    "mla_use_nope": True,
}
CLASSES = [*model_patches._LATENT_CLASSES]


def module_of(owner: tuple[str, str], **changes: Any) -> nn.Module:
    """A class of mlx-lm's with random weights, prepared for both caches."""
    mx.random.seed(0)
    install_attention_hook()
    made = getattr(import_module(f"mlx_lm.models.{owner[0]}"), owner[1])(SimpleNamespace(**ARGS | changes))
    made.update(tree_map(lambda a: mx.random.normal(a.shape) * (a.shape[-1] ** -0.5 if a.ndim > 1 else 1), made))
    install_attention_hook()
    model_patches.install_model_patches(made)
    return made


def called(module: nn.Module, hidden: mx.array, cache: Any) -> mx.array:
    """The module on `[rows, tokens, hidden]`, with the masks that mlx-lm's models give it."""
    mask = None
    if hidden.shape[1] > 1 and isinstance(cache, KVCache):
        mask = cache.make_mask(hidden.shape[1], return_array=True, window_size=None)
    if type(module).__name__ == "Mistral4Attention":
        return module(hidden, mx.array(1.25), mask, cache)
    return module(hidden, mask=mask, cache=cache)


class Paged:
    """Sequences on blocks of an arena: the last in one run, the others scattered."""

    def __init__(self, module: nn.Module, lengths: Sequence[int], dtype: str = "float32", rank: int = RANK) -> None:
        self.module, self.dtype = module, dtype
        self.arena = KVArena([LayerGroup(KVSpec(1, rank + ROPE, rank, dtype, value_in_key=True), (0,))], 80, BLOCK)
        self.arena.fill(0, np.arange(80 * BLOCK), float("nan"))
        free = np.random.default_rng(1).permutation(60).tolist()
        self.blocks = [[free.pop() for _ in range(-(-n // BLOCK))] for n in lengths]
        self.blocks[-1] = list(range(60, 60 + len(self.blocks[-1])))
        for blocks in self.blocks:
            where = np.concatenate([np.arange(b * BLOCK, b * BLOCK + BLOCK) for b in blocks])
            self.arena.fill(0, where, 0.0)

    def slots(self, sequence: int) -> Any:
        return np.concatenate([np.arange(b * BLOCK, b * BLOCK + BLOCK) for b in self.blocks[sequence]])

    def mixed(self, hidden: Sequence[mx.array], firsts: Sequence[int], rows: int) -> list[Any]:
        """A step: of the first `rows` sequences a token each, pieces of the others, from their `firsts` on."""
        counts = [h.shape[0] for h in hidden]
        ends = np.cumsum(counts)
        where = np.concatenate([self.slots(s)[f : f + n] for s, (f, n) in enumerate(zip(firsts, counts, strict=True))])
        width = max((len(b) for b in self.blocks[:rows]), default=0)
        tables = np.full((rows, width), self.arena.null_block(0), np.int32)
        for row in range(rows):
            tables[row, : len(self.blocks[row])] = self.blocks[row]
        pieces = []
        for s in (s for s in range(rows, len(hidden)) if counts[s]):
            first, end, blocks = firsts[s], int(ends[s]), self.blocks[s]
            run = KVHandle(blocks[0], len(blocks)) if np.all(np.diff(blocks) == 1) else None
            slots = None if run else self.slots(s)[: first + counts[s]].astype(np.int32)
            pieces.append(PrefillPiece(end - counts[s], end, first, run, slots))
        lengths = np.array([f + 1 for f in firsts[:rows]], np.int32)
        step = GroupStep(tables, lengths, (None,) * rows, tuple(pieces), AttentionWindow())

        def fetch(layer: int, keys: mx.array, values: mx.array | None) -> PagedKV:
            assert values is None
            self.arena.write(layer, mx.array(where.astype(np.int32)), keys[:, :, 0].swapaxes(0, 1))
            return PagedKV(self.arena, layer, step, None, 0, keys.dtype, reference.attend)

        cache = LayerCache(0, fetch)
        positions = [np.arange(f, f + n) for f, n in zip(firsts, counts, strict=True)]
        cache.offset = mx.array(np.concatenate(positions).astype(np.int32))
        out = called(self.module, mx.concatenate(list(hidden))[:, None], cache)
        mx.eval(out, self.arena.arrays())
        return [np.array(o[:, 0].astype(mx.float32)) for o in mx.split(out, ends[:-1].tolist())]

    def decode(self, hidden: Sequence[mx.array], lengths: Sequence[int]) -> list[Any]:
        """Steps of all sequences, whose newest tokens are in the tail; `hidden` `[tokens, hidden]` each."""
        rows, steps = len(hidden), hidden[0].shape[0]
        tables = np.full((rows, max(map(len, self.blocks))), self.arena.null_block(0), np.int32)
        for row, blocks in enumerate(self.blocks):
            tables[row, : len(blocks)] = blocks
        alone = KVHandle(self.blocks[0][0], len(self.blocks[0])) if rows == 1 else None
        step = GroupStep(tables, np.array(lengths, np.int32), (alone,) * rows, (), AttentionWindow())
        tail, found = mx.zeros((rows, 1, TAIL_COLUMNS, RANK + ROPE), getattr(mx, self.dtype)), []
        for column in range(steps):

            def fetch(layer: int, keys: mx.array, values: mx.array | None, column: int = column) -> PagedKV:
                tail[:, :, column : column + 1] = keys
                return PagedKV(self.arena, layer, step, (tail,), column + 1, keys.dtype, reference.attend)

            cache = LayerCache(0, fetch)
            cache.offset = mx.array([n + column for n in lengths], mx.int32)
            out = called(self.module, mx.stack([h[column : column + 1] for h in hidden]), cache)
            mx.eval(out)
            found.append(np.array(out[:, 0].astype(mx.float32)))
        return list(np.stack(found, axis=1))


def theirs(module: nn.Module, hidden: mx.array, cuts: Sequence[int]) -> Any:
    """The same of one sequence `[tokens, hidden]` on mlx-lm's cache, in pieces that end at `cuts`."""
    cache = KVCache()
    parts = [called(module, part[None], cache) for part in mx.split(hidden, list(cuts)) if part.shape[0]]
    return np.array(mx.concatenate(parts, axis=1)[0].astype(mx.float32))


def draw(*lengths: int, width: int = HIDDEN) -> list[mx.array]:
    mx.random.seed(3)
    return [mx.random.normal((n, width)) for n in lengths]


@pytest.mark.parametrize(("owner", "gpu"), [*((owner, False) for owner in CLASSES), (CLASSES[0], True)], ids=str)
def test_rows_and_pieces_of_one_step_are_what_the_class_computes_itself(
    owner: tuple[str, str], gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short piece over a long context attends to the latents, a long one to keys and values that are made of them. On
    a GPU pieces go to MLX's attention, as they do on a CPU where that is to round like mlx-lm.
    """
    if gpu:
        monkeypatch.setattr(reference, "rounds_coarsely", lambda queries, kv: True)
    module = module_of(owner)
    firsts, counts = (7, 16, 24, 0, 16, 150, 5), (1, 1, 1, 9, 5, 2, 80)
    lengths = [f + n for f, n in zip(firsts, counts, strict=True)]
    hidden = draw(*lengths)
    paged = Paged(module, lengths)
    paged.mixed([h[:f] for h, f in zip(hidden, firsts, strict=True)], [0] * len(firsts), 0)
    found = paged.mixed([h[f:] for h, f in zip(hidden, firsts, strict=True)], firsts, 3)
    for mine, h, first in zip(found, hidden, firsts, strict=True):
        np.testing.assert_allclose(mine, theirs(module, h, [first])[first:], atol=2e-5)


@pytest.mark.parametrize(("first", "count", "made"), [(0, 9, 9), (150, 2, 0), (5, 80, 85), (16, 1, 0)])
def test_keys_and_values_are_made_of_latents_where_that_is_less_work(
    first: int, count: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(CLASSES[0])
    seen: list[int] = []
    original = latent.LatentKV._expand_latents
    counted = lambda self, latents: seen.append(latents.shape[1]) or original(self, latents)  # noqa: E731
    (hidden,) = draw(first + count)
    paged = Paged(module, [first + count])
    paged.mixed([hidden[:first]], [0], 0) if first else None
    monkeypatch.setattr(latent.LatentKV, "_expand_latents", counted)
    paged.mixed([hidden[first:]], [first], 0)
    assert sum(seen) == made


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_matrices(bits: int) -> None:
    changes = dict.fromkeys(("hidden_size", "qk_nope_head_dim", "kv_lora_rank", "v_head_dim", "q_lora_rank"), 32)
    module = module_of(CLASSES[0], **changes)
    nn.quantize(module, group_size=32, bits=bits)
    assert type(module.embed_q).__name__ == type(module.unembed_out).__name__ == "QuantizedMultiLinear"
    hidden = draw(9, 21, 12, width=32)
    paged = Paged(module, [9, 21, 12], rank=32)
    paged.mixed([h[:f] for h, f in zip(hidden, (8, 0, 0), strict=True)], [0] * 3, 0)
    found = paged.mixed([h[f:] for h, f in zip(hidden, (8, 0, 0), strict=True)], [8, 0, 0], 1)
    for mine, h, first in zip(found, hidden, (8, 0, 0), strict=True):
        np.testing.assert_allclose(mine, theirs(module, h, [first])[first:], atol=2e-5)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's products round differently with the number of rows")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_below_float32_a_row_gives_the_bits_of_the_class_and_a_token_the_same_in_any_piece(dtype: str) -> None:
    module = module_of(CLASSES[0])
    module.set_dtype(getattr(mx, dtype))
    lengths = (9, 17, 30)
    hidden = [h.astype(getattr(mx, dtype)) for h in draw(*lengths)]
    wanted = [theirs(module, h, range(1, h.shape[0])) for h in hidden]
    paged = Paged(module, lengths, dtype)
    pieces = paged.mixed(hidden, [0] * 3, 0)
    paged = Paged(module, lengths, dtype)
    for first, end in ((0, 5), (5, 9)):
        paged.mixed([h[first:end] for h in hidden], [first] * 3, 0)
    later = paged.mixed([h[9:] for h in hidden], [9] * 3, 0)
    for mine, rest, right in zip(pieces, later, wanted, strict=True):
        assert np.array_equal(mine, right) and np.array_equal(rest, right[9:])
    paged = Paged(module, lengths, dtype)
    paged.mixed([h[:-3] for h in hidden], [0] * 3, 0)
    for mine, right in zip(paged.decode([h[-3:] for h in hidden], [n - 3 for n in lengths]), wanted, strict=True):
        assert np.array_equal(mine, right[-3:])


class Deviating(nn.Module):
    """Code like mlx-lm's that does something else with what it is given."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.scale = what, 0.5
        self.embed_q = self.unembed_out = lambda x: x

    def __call__(self, hidden: mx.array, cache: Any) -> mx.array:
        from mlx_lm.models.deepseek_v3 import scaled_dot_product_attention

        queries = mx.zeros((hidden.shape[0], HEADS, 1, RANK))
        latents, rotary = cache.update_and_fetch(hidden[:, None, :, :RANK], hidden[:, None, :, RANK : RANK + ROPE])
        scores = queries[..., :ROPE] @ rotary.swapaxes(-1, -2)
        added = {"bias": scores[:1], "none": None}.get(self.what, scores)
        values = queries if self.what == "values" else latents
        scale = 0.25 if self.what == "scale" else self.scale
        return scaled_dot_product_attention(queries, latents, values, cache=cache, scale=scale, mask=added)


@pytest.mark.parametrize("what", ["bias", "none", "values", "scale"])
def test_a_class_that_deviates_is_refused(what: str) -> None:
    install_attention_hook()
    cache = LayerCache(0, lambda _, keys, values: ProbeKV(keys, values))
    with pytest.raises(ModelUnsupported):
        latent.patch_latent_attention(Deviating.__call__)(Deviating(what), mx.zeros((2, 1, HIDDEN)), cache)
    latent.patch_latent_attention(Deviating.__call__)(Deviating(""), mx.zeros((2, 1, HIDDEN)), cache)


@pytest.mark.parametrize(
    ("owner", "lengths"), [*((owner, (7, 8, 17, 1, 24)) for owner in CLASSES), (CLASSES[0], (23,))], ids=str
)
def test_rows_with_a_tail(owner: tuple[str, str], lengths: tuple[int, ...]) -> None:
    module = module_of(owner)
    hidden = draw(*(n + 3 for n in lengths))
    paged = Paged(module, [n + 3 for n in lengths])
    paged.mixed([h[:-3] for h in hidden], [0] * len(lengths), 0)
    for mine, h, n in zip(paged.decode([h[-3:] for h in hidden], lengths), hidden, lengths, strict=True):
        np.testing.assert_allclose(mine, theirs(module, h, [n, n + 1, n + 2])[n:], atol=2e-5)
