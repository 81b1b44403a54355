"""What a step binds, judged by MLX's own graph of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from cortexmlx.execution.footprint.bindings import OTHERS, bound_elements
from cortexmlx.execution.footprint.graph import Graph, trace
from cortexmlx.execution.footprint.steps import largest_steps
from cortexmlx.execution.mode import execution_mode
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.kv.sizing import Load
from cortexmlx.kv.spec import TAIL_COLUMNS, paged
from cortexmlx.models import load_model
from support.models.tiny import write_tiny

LAYERS = (2, 6)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """MLX exports no compiled function. A SwiGLU, one kernel on a GPU, is three operations then."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def one_kernel_and_its_reduce(queries: mx.array, kv: Any, **_: Any) -> mx.array:
    """Attention as two operations, which take the queries and the tail."""
    keys, values = (array[:1, :1, :1, :1] for array in kv.tail)
    return queries[..., : kv.arena.spec(kv.layer).value_dim] * keys * values


def graph_of_a_step(model: Any) -> Graph:
    """The graph of a decode step in the middle of a window."""
    groups = paged(execution_mode(model).groups)
    _, plan = largest_steps(groups, Load(1, 32, 8), 100)
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
    return trace(step, *(array for _, array in weights), *tails)


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
    counted = (len(bound_elements(many, {})) - len(bound_elements(few, {}))) / more
    assert counted == launched == modules + OTHERS


def test_every_weight_is_bound_once_and_each_slab_in_its_layer(tmp_path: Path) -> None:
    model = load_model(str(write_tiny(tmp_path / "model", "llama", num_hidden_layers=3))).model
    slabs = {0: 10**6, 2: 10**7}
    bound = bound_elements(model, slabs)
    weights = sum(array.size for _, array in tree_flatten(model.parameters()))
    tied = 0 if hasattr(model, "lm_head") else model.model.embed_tokens.weight.size
    assert sum(bound) == weights + tied + sum(slabs.values())
    assert bound.index(10**7) - bound.index(10**6) == 2 * (9 + OTHERS), "two norms and seven products"
    assert len(bound) == 3 * (9 + OTHERS) + 3
