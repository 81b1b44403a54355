"""Adapters of a whole model: which modules change in a step, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model

from cortexmlx.errors import AdapterRefused
from cortexmlx.execution.adapters import ServedAdapters, SlotTable
from cortexmlx.execution.boundary import Refusal
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.matmul.served import QuantizedMatmuls
from support.adapters.kinds import content, write_four_bits
from support.engine.core_driver import Driver
from support.models.adapters import write_adapter
from support.models.tiny import write_tiny


@pytest.fixture
def served(tiny: Any) -> Iterator[ServedAdapters]:
    driver = Driver(tiny("llama"))
    assert isinstance(driver.core.runner, ModelRunner)
    found = driver.core.model.adapter_set()
    assert isinstance(found, ServedAdapters)
    yield found
    driver.core.release()


def plan(adapters: tuple[int, ...] | None, counts: tuple[int, ...]) -> Any:
    """What a step's plan says about adapters."""
    return SimpleNamespace(adapters=adapters, segments=[SimpleNamespace(count=count) for count in counts])


def written(root: Path, tiny: Any, **options: Any) -> Any:
    return content(write_adapter(root, tiny("llama"), **options))


def test_only_the_targets_change_and_only_in_a_step_with_their_adapter(
    served: ServedAdapters, tiny: Any, tmp_path: Path
) -> None:
    served.add(1, written(tmp_path / "a", tiny, keys=("self_attn.q_proj",), num_layers=2))
    served.add(2, written(tmp_path / "b", tiny, keys=("mlp.up_proj",), num_layers=1))
    layers = dict(served._model.named_modules())

    def changed() -> set[str]:
        return {name for name, module in layers.items() if type(module).__name__.startswith("Adapted")}

    queries = {f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)}
    for adapters, names in (
        ((1, 0), queries),
        ((2, 0), {"model.layers.1.mlp.up_proj"}),
        ((1, 2), queries | {"model.layers.1.mlp.up_proj"}),
    ):
        with served.apply_to_step(plan(adapters, (1, 3)), None):
            assert changed() == names
        assert changed() == set()


def test_a_step_that_names_what_is_not_there_is_an_error_and_never_the_base_model(
    served: ServedAdapters, tiny: Any, tmp_path: Path
) -> None:
    served.add(1, written(tmp_path / "a", tiny))
    served.remove(1)
    with pytest.raises(RuntimeError, match="not loaded"), served.apply_to_step(plan((1,), (1,)), None):
        pass


def test_a_layer_that_gets_other_tokens_than_the_step_has_is_an_error(
    served: ServedAdapters, tiny: Any, tmp_path: Path
) -> None:
    served.add(1, written(tmp_path / "a", tiny, keys=("self_attn.q_proj",)))
    layer = served._model.model.layers[1].self_attn.q_proj
    with served.apply_to_step(plan((1, 0), (1, 1)), None), pytest.raises(RuntimeError, match="2 tokens"):
        layer(mx.zeros((3, 1, 32)))


def test_adapters_that_go_leave_the_others_theirs(served: ServedAdapters, tiny: Any, tmp_path: Path) -> None:
    keys = ("self_attn.q_proj",)
    adapters = {n: written(tmp_path / str(n), tiny, keys=keys, seed=n, rank=n + 2, scale=1.0) for n in (1, 2, 3)}
    layer, x = served._model.model.layers[1].self_attn.q_proj, mx.random.normal((3, 1, 32))
    plain = np.array(layer(x))

    def judged(numbers: tuple[int, ...]) -> None:
        with served.apply_to_step(plan(numbers, (1, 1, 1)), None):
            got = np.array(layer(x))
        for row, number in enumerate(numbers):
            a, b = adapters[number].pairs["model.layers.1.self_attn.q_proj"] if number else (np.zeros((32, 1)),) * 2
            add = np.array(x[row]) @ a @ b if number else 0.0
            assert np.allclose(got[row], plain[row] + add, atol=1e-4), f"row {row} has not adapter {number}"

    for number, adapter in adapters.items():
        assert served.bytes_with(adapter) - served.nbytes == served.bytes_of(adapter) * (2 if number == 1 else 1)
        served.add(number, adapter)
    judged((1, 2, 3))
    judged((0, 3, 3))
    judged((1, 0, 3))
    served.remove(2)
    judged((1, 0, 3))
    served.add(2, adapters[2])
    judged((3, 1, 2))
    for number in adapters:
        served.remove(number)
    assert served.nbytes == 0
    judged_plain = np.array(layer(x))
    assert np.array_equal(judged_plain, plain)


@pytest.mark.parametrize(
    ("place", "served_before"), [*((place, (1, 2, 3)) for place in (1, 2, 5, 9, 12)), (3, (3, 1, 2)), (8, (3, 1, 2))]
)
def test_memory_that_is_refused_from_some_table_on_changes_no_row(
    place: int,
    served_before: tuple[int, ...],
    served: ServedAdapters,
    tiny: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However little there is, nothing needs memory to be undone."""
    keys = ("self_attn.q_proj", "self_attn.k_proj")
    adapters = {n: written(tmp_path / str(n), tiny, keys=keys, num_layers=2, seed=n) for n in (1, 2, 3)}
    layers = [layer.self_attn[name] for layer in served._model.model.layers for name in ("q_proj", "k_proj")]
    x, own = mx.random.normal((2, 1, 32)), SlotTable._set_matrices

    def outputs() -> list[np.ndarray]:
        with served.apply_to_step(plan((1, 2), (1, 1)), None):
            return [np.array(layer(x)) for layer in layers]

    def with_little(change: Callable[[], Refusal | None]) -> None:
        """Change something while all but the first tables are refused memory, then while none is."""
        left = place

        def refusing(self: SlotTable, *args: Any) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                raise RuntimeError("[malloc] Unable to allocate 5 bytes")
            own(self, *args)

        monkeypatch.setattr(SlotTable, "_set_matrices", refusing)
        answer = change()
        monkeypatch.setattr(SlotTable, "_set_matrices", own)
        assert all(np.array_equal(a, b) for a, b in zip(before, outputs(), strict=True))
        if isinstance(answer, Refusal):
            assert change() is None
        assert all(np.array_equal(a, b) for a, b in zip(before, outputs(), strict=True))

    for number in served_before:
        served.add(number, adapters[number])
    before = outputs()
    with_little(lambda: served.remove(3))
    with_little(lambda: served.add(4, adapters[3]))
    with_little(lambda: served.remove(4))
    assert {table.slots for group in served._groups.values() for table in group.tables.values()} == {3}


def test_ranks_that_are_near_share_a_table(served: ServedAdapters, tiny: Any, tmp_path: Path) -> None:
    for number, rank in enumerate((2, 4, 8, 9, 16, 17, 64), 1):
        served.add(number, written(tmp_path / str(rank), tiny, rank=rank))
    assert sorted(rank for rank, _ in served._groups) == [8, 16, 32, 64]


@pytest.mark.parametrize(
    ("other", "keys", "words"),
    [
        ("qwen3", ("lm_head",), ("lm_head", "gives the logits", "--adapter")),
        ("llama", ("model.embed_tokens",), ("embed_tokens", "no linear layer", "--adapter")),
    ],
)
def test_layers_that_cannot_have_one_are_refused_by_name(
    tiny: Any, tmp_path: Path, other: str, keys: tuple[str, ...], words: tuple[str, ...]
) -> None:
    driver = Driver(tiny(other))
    folder = write_adapter(tmp_path / "a", tiny(other), keys=keys)
    with pytest.raises(AdapterRefused) as caught:
        driver.core.adapters.load("sql", content(folder), driver.core.scheduler.jobs)
    assert all(word in str(caught.value) for word in ("'sql'", *words))
    assert not driver.core.adapters.infos and not driver.core.adapters.loaded_count
    driver.core.release()


def test_an_adapter_of_another_model_is_refused_with_both_sizes(served: ServedAdapters, tmp_path: Path) -> None:
    for changes, words in (
        ({"hidden_size": 64}, ("64 outputs there", "32 here")),
        ({"num_hidden_layers": 5}, ("no layer of this model", "org/base")),
    ):
        model = write_tiny(tmp_path / words[0], **changes)
        adapter = content(write_adapter(tmp_path / f"{words[0]} a", model, num_layers=9))
        with pytest.raises(AdapterRefused) as caught:
            served.check("sql", adapter)
        assert all(word in str(caught.value) for word in words)


def test_one_layer_under_two_names_is_refused_with_both(served: ServedAdapters, tiny: Any, tmp_path: Path) -> None:
    first, second = (layer.self_attn for layer in served._model.model.layers)
    second.q_proj = first.q_proj
    served.find_layers("float32")
    adapter = written(tmp_path / "a", tiny, keys=("self_attn.q_proj",), num_layers=2)
    with pytest.raises(AdapterRefused, match=r"layers\.0\.self_attn\.q_proj and .*layers\.1.*one layer"):
        served.check("sql", adapter)


def test_layers_that_our_products_serve_stay_theirs(tmp_path: Path) -> None:
    """On a GPU, quantized layers are instances of classes of `matmul.served`, which a step with adapters keeps."""
    model: Any = load_model(write_four_bits(tmp_path / "m"))[0]
    products = QuantizedMatmuls(lambda **_: None, lambda shape, rows: False)  # type: ignore[arg-type,return-value]
    assert products.install(model)
    layer, x = model.model.layers[1].self_attn.q_proj, mx.random.normal((2, 1, 64))
    kind, plain = type(layer), np.array(layer(x))
    assert kind is not nn.QuantizedLinear
    served = ServedAdapters(model, lambda tokens, rows: model(tokens))
    served.find_layers("float32")
    folder = write_adapter(tmp_path / "a", tmp_path / "m", keys=("self_attn.q_proj",))
    served.add(1, content(folder))
    with served.apply_to_step(plan((0, 1), (1, 1)), None):
        assert isinstance(layer, kind)
        got = np.array(layer(x))
    a, b = content(folder).pairs["model.layers.1.self_attn.q_proj"]
    assert np.allclose(got, plain + np.array([0, 1])[:, None, None] * (np.array(x) @ a @ b), atol=1e-4)
    assert type(layer) is kind
    served.close()
    products.remove()
    assert type(layer) is nn.QuantizedLinear and np.array_equal(np.array(layer(x)), plain)


def test_layers_that_an_exception_left_changed_are_the_models_own_after_it(
    served: ServedAdapters, tiny: Any, tmp_path: Path
) -> None:
    """It may land between any two statements of the engine's thread, also where the classes are put back."""
    served.add(1, written(tmp_path / "a", tiny, keys=("self_attn.q_proj",), num_layers=2))
    layers = [layer.self_attn.q_proj for layer in served._model.model.layers]
    x = mx.random.normal((2, 1, 32))
    plain = np.array(layers[0](x))
    step = served.apply_to_step(plan((1, 1), (1, 1)), None)
    step.__enter__()  # and it never exits
    assert not np.array_equal(np.array(layers[0](x)), plain)
    served.forget()
    assert [type(layer) for layer in layers] == [nn.Linear] * 2 and np.array_equal(np.array(layers[0](x)), plain)
    with served.apply_to_step(plan((1, 1), (1, 1)), None):
        assert not np.array_equal(np.array(layers[0](x)), plain)
    del step


def test_closing_leaves_the_model_as_it_was(served: ServedAdapters, tiny: Any, tmp_path: Path) -> None:
    served.add(1, written(tmp_path / "a", tiny))
    served.close()
    assert served.nbytes == 0
    assert not any("adapter_hook" in vars(module) for _, module in served._model.named_modules())
    assert type(served._model.model.layers[1].self_attn.q_proj) is nn.Linear
