"""Command buffers by the numbers of MLX's source, beside a model of its encoder; what a step binds, judged by MLX's own
graph of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten

from cortexmlx.cli.start import MLX_ENVIRONMENT
from cortexmlx.execution.command_buffers import (
    OTHER_KERNELS,
    CommandBufferLimits,
    command_buffer_limits,
    count_bound_elements,
    count_command_buffers,
)
from cortexmlx.execution.execution_modes import choose_execution_mode
from cortexmlx.execution.graph_memory import Graph, trace_graph
from cortexmlx.execution.largest_steps import plan_largest_steps
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.kv.sizing import ArenaDemand
from cortexmlx.kv.spec import TAIL_COLUMNS, paged_groups
from cortexmlx.models import load_model
from support.models.tiny import write_tiny

MI = 1 << 20


def test_a_chip_has_the_limits_of_its_kind_and_a_variable_is_read_as_c_reads_it() -> None:
    for letter, limits in {"g": (40, 40), "s": (50, 50), "d": (50, 50), "p": (20, 40), "x": (40, 40)}.items():
        assert command_buffer_limits(f"applegpu_g14{letter}", {}) == CommandBufferLimits(*limits)
    assert command_buffer_limits("", {}) == CommandBufferLimits(40, 40)
    for text, number in {"7": 7, " 1000000": 1000000, "12abc": 12, "abc": 0, "": 0, "-3": -3}.items():
        assert command_buffer_limits("applegpu_g13g", {"MLX_MAX_OPS_PER_BUFFER": text}) == CommandBufferLimits(
            number, 40
        )
        assert command_buffer_limits("applegpu_g13g", {"MLX_MAX_MB_PER_BUFFER": text}) == CommandBufferLimits(
            40, number
        )


class Encoder:
    """MLX's `CommandEncoder`, as far as commits go: `set_input_array`, `dispatch`, `needs_commit`, `commit`."""

    def __init__(self, limits: CommandBufferLimits) -> None:
        self.limits, self.committed = limits, 0
        self.begin()

    def begin(self) -> None:
        self.inputs: set[object] = set()
        self.ops = self.sizes = 0

    def evaluate(self, arrays: list[tuple[object, int]]) -> None:
        for buffer, data_size in arrays:
            if buffer not in self.inputs:
                self.inputs.add(buffer)
                self.sizes += data_size
        self.ops += 1
        if self.ops > self.limits.operations or (self.sizes >> 20) > self.limits.elements:
            self.committed += 1
            self.begin()


LIMITS = st.builds(CommandBufferLimits, st.integers(0, 60), st.integers(0, 60))


@given(st.lists(st.integers(0, 90 * MI), max_size=300), LIMITS)
def test_commits_are_those_of_the_encoder(bound: list[int], limits: CommandBufferLimits) -> None:
    encoder = Encoder(limits)
    for number, elements in enumerate(bound):
        encoder.evaluate([(number, elements), ("activations", 0)])
    made = count_command_buffers(bound, limits)
    assert made.per_step == encoder.committed + (encoder.ops > 0)
    assert made.may_idle == (encoder.committed > 10)
    assert made.run_ahead == (10 / encoder.committed if made.may_idle else 1)
    assert (made.max_operations, made.max_elements) == (limits.operations, limits.elements)


@given(st.lists(st.integers(1, 90 * MI), min_size=1, max_size=60), st.integers(1, 5), LIMITS)
def test_an_arena_that_is_split_counts_as_much(slabs: list[int], parts: int, limits: CommandBufferLimits) -> None:
    whole, split = Encoder(limits), Encoder(limits)
    for layer, size in enumerate(slabs):
        whole.evaluate([(layer, size)])
        split.evaluate([((layer, part), size // parts + (part < size % parts)) for part in range(parts)])
    assert whole.committed == split.committed


def test_a_view_counts_with_its_own_elements_only_if_it_is_bound_first() -> None:
    first, after = Encoder(CommandBufferLimits(40, 40)), Encoder(CommandBufferLimits(40, 40))
    first.evaluate([("slab", 128), ("slab", 64 * MI)])
    after.evaluate([("slab", 64 * MI), ("slab", 128)])
    assert (first.committed, after.committed) == (0, 1)


SLAB = 2 * 8 * 32_768 * 128
"""Elements of the keys and values of 32,768 tokens in one layer: 8 heads of 128."""


def test_a_large_arena_ends_a_command_buffer_at_each_layer_and_the_command_line_prevents_that() -> None:
    """A model of 28 small layers, on a Max. Without an arena, its 560 operations are 10 full command buffers."""
    chip = "applegpu_g14s"
    layer = [MI // 2] * 9 + [SLAB] + [0] * 10
    without = count_command_buffers([*[MI // 2] * 9, *[0] * 11] * 28, command_buffer_limits(chip, {}))
    assert (without.per_step, without.may_idle) == (11, False)
    plain = count_command_buffers(layer * 28, command_buffer_limits(chip, {}))
    assert plain.per_step == 29 and plain.may_idle and plain.run_ahead == 10 / 28
    raised = count_command_buffers(layer * 28, command_buffer_limits(chip, MLX_ENVIRONMENT))
    assert raised.per_step == 6 and not raised.may_idle
    deep = count_command_buffers(layer * 50, command_buffer_limits(chip, MLX_ENVIRONMENT))
    assert not deep.may_idle, "as the comment at the variable says"


def test_no_step_is_no_command_buffer() -> None:
    assert count_command_buffers([], CommandBufferLimits(40, 40)).per_step == 0


LAYERS = (2, 6)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """MLX exports no compiled function. A SwiGLU, one kernel on a GPU, is three operations then."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def one_kernel_and_its_reduce(queries: mx.array, kv: Any, params: Any) -> mx.array:
    """Attention as two operations, which take the queries and the tail."""
    keys, values = (array[:1, :1, :1, :1] for array in kv.tail)
    return queries[..., : kv.arena.spec(kv.layer).value_dim] * keys * values


def graph_of_a_step(model: Any) -> Graph:
    """The graph of a decode step in the middle of a window."""
    groups = paged_groups(choose_execution_mode(model).groups)
    _, plan = plan_largest_steps(groups, ArenaDemand(1, 32, 8), 100)
    runner = ModelRunner(model, groups, 8, 64, one_kernel_and_its_reduce)
    runner.begin(plan.blocks)
    runner.build_pass(plan)
    inner = replace(plan, column=TAIL_COLUMNS // 2, groups=None)
    arena = runner.arena
    shapes = {layer: [(1, a.shape[0], TAIL_COLUMNS, a.shape[2]) for a in arena.slab(layer)] for layer in arena.group_of}

    weights = tree_flatten(model.parameters())
    runner._feed.hand_over = lambda arrays: None

    def step(*given: mx.array) -> list[mx.array]:
        rest = iter(given)
        model.update(tree_unflatten([(name, next(rest)) for name, _ in weights]))
        runner.memory.tail = {layer: tuple(next(rest) for _ in each) for layer, each in shapes.items()}
        runner.build_pass(inner)
        assert runner._logits is not None
        return [runner._logits]

    tails = (mx.zeros(shape) for each in shapes.values() for shape in each)
    return trace_graph(step, *(array for _, array in weights), *tails)


FUSED = 6
"""Kernels of a layer that MLX exports in parts: two rotations, attention and its reduce, two sums."""


def kernels(graph: Graph) -> Counter[str]:
    """Launches by what they do: a norm has one root, a SwiGLU one sigmoid, and an update of what others hold copies."""
    kinds = Counter(operation.kind for operation in graph.operations)
    return Counter({"Matmul": kinds["Matmul"], "Sqrt": kinds["Sqrt"], "Sigmoid": kinds["Sigmoid"]}) + Counter(
        {"SliceUpdate": 2 * kinds["SliceUpdate"]}
    )


@pytest.mark.parametrize(("kind", "modules"), [("llama", 9), ("qwen3", 11)])
def test_a_layer_has_as_many_kernels_as_its_graph(kind: str, modules: int, tmp_path: Path, uncompiled: None) -> None:
    few, many = (load_model(str(write_tiny(tmp_path / str(n), kind, num_hidden_layers=n))).model for n in LAYERS)
    more = LAYERS[1] - LAYERS[0]
    launched = (kernels(graph_of_a_step(many)).total() - kernels(graph_of_a_step(few)).total()) / more + FUSED
    counted = (len(count_bound_elements(many, {})) - len(count_bound_elements(few, {}))) / more
    assert counted == launched == modules + OTHER_KERNELS


def test_every_weight_is_bound_once_and_each_slab_in_its_layer(tmp_path: Path) -> None:
    model = load_model(str(write_tiny(tmp_path / "model", "llama", num_hidden_layers=3))).model
    slabs = {0: 10**6, 2: 10**7}
    bound = count_bound_elements(model, slabs)
    weights = sum(array.size for _, array in tree_flatten(model.parameters()))
    tied = 0 if hasattr(model, "lm_head") else model.model.embed_tokens.weight.size
    assert sum(bound) == weights + tied + sum(slabs.values())
    assert bound.index(10**7) - bound.index(10**6) == 2 * (9 + OTHER_KERNELS), "two norms and seven products"
    assert len(bound) == 3 * (9 + OTHER_KERNELS) + 3
