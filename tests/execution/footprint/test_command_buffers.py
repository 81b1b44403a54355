"""Command buffers by the numbers of MLX's source, beside a model of its encoder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.start import MLX_ENVIRONMENT
from cortexmlx.execution.footprint.command_buffers import Limits, command_buffers, limits_of

MI = 1 << 20


@pytest.mark.parametrize(
    ("architecture", "limits"),
    [
        ("applegpu_g13g", (40, 40)),
        ("applegpu_g14s", (50, 50)),
        ("applegpu_g15d", (50, 50)),
        ("applegpu_g17p", (20, 40)),
        ("applegpu_g16x", (40, 40)),
        ("", (40, 40)),
    ],
)
def test_a_chip_has_the_limits_of_its_kind(architecture: str, limits: tuple[int, int]) -> None:
    assert limits_of(architecture, {}) == Limits(*limits)


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), (" 1000000", 1000000), ("12abc", 12), ("abc", 0), ("", 0), ("-3", -3)]
)
def test_a_variable_is_read_as_c_reads_it(text: str, number: int) -> None:
    assert limits_of("applegpu_g13g", {"MLX_MAX_OPS_PER_BUFFER": text}) == Limits(number, 40)
    assert limits_of("applegpu_g13g", {"MLX_MAX_MB_PER_BUFFER": text}) == Limits(40, number)


class Encoder:
    """MLX's `CommandEncoder`, as far as commits go: `set_input_array`, `dispatch`, `needs_commit`, `commit`."""

    def __init__(self, limits: Limits) -> None:
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


LIMITS = st.builds(Limits, st.integers(0, 60), st.integers(0, 60))


@given(st.lists(st.integers(0, 90 * MI), max_size=300), LIMITS)
def test_commits_are_those_of_the_encoder(bound: list[int], limits: Limits) -> None:
    encoder = Encoder(limits)
    for number, elements in enumerate(bound):
        encoder.evaluate([(number, elements), ("activations", 0)])
    made = command_buffers(bound, limits)
    assert made.per_step == encoder.committed + (encoder.ops > 0)
    assert made.cut == (encoder.committed > 10)
    assert made.run_ahead == (10 / encoder.committed if made.cut else 1)
    assert (made.max_operations, made.max_elements) == (limits.operations, limits.elements)


@given(st.lists(st.integers(1, 90 * MI), min_size=1, max_size=60), st.integers(1, 5), LIMITS)
def test_an_arena_that_is_split_counts_as_much(slabs: list[int], parts: int, limits: Limits) -> None:
    whole, split = Encoder(limits), Encoder(limits)
    for layer, size in enumerate(slabs):
        whole.evaluate([(layer, size)])
        split.evaluate([((layer, part), size // parts + (part < size % parts)) for part in range(parts)])
    assert whole.committed == split.committed


def test_a_view_counts_with_its_own_elements_only_if_it_is_bound_first() -> None:
    first, after = Encoder(Limits(40, 40)), Encoder(Limits(40, 40))
    first.evaluate([("slab", 128), ("slab", 64 * MI)])
    after.evaluate([("slab", 64 * MI), ("slab", 128)])
    assert (first.committed, after.committed) == (0, 1)


SLAB = 2 * 8 * 32_768 * 128
"""Elements of the keys and values of 32,768 tokens in one layer: 8 heads of 128."""


def test_a_large_arena_ends_a_command_buffer_at_each_layer_and_the_command_line_prevents_that() -> None:
    """A model of 28 small layers, on a Max. Without an arena, its 560 operations are 10 full command buffers."""
    chip = "applegpu_g14s"
    layer = [MI // 2] * 9 + [SLAB] + [0] * 10
    without = command_buffers([*[MI // 2] * 9, *[0] * 11] * 28, limits_of(chip, {}))
    assert (without.per_step, without.cut) == (11, False)
    plain = command_buffers(layer * 28, limits_of(chip, {}))
    assert plain.per_step == 29 and plain.cut and plain.run_ahead == 10 / 28
    raised = command_buffers(layer * 28, limits_of(chip, MLX_ENVIRONMENT))
    assert raised.per_step == 6 and not raised.cut
    deep = command_buffers(layer * 50, limits_of(chip, MLX_ENVIRONMENT))
    assert not deep.cut, "as the comment at the variable says"


def test_no_step_is_no_command_buffer() -> None:
    assert command_buffers([], Limits(40, 40)).per_step == 0
