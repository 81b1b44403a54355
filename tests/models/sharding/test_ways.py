"""A class says itself whether it can be cut, and what cannot be is refused in words."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from cortexmlx.errors import HostRefused
from cortexmlx.mlx_lm.package import enter_mlx_lm, import_mlx_lm_utils
from cortexmlx.models.sharding import (
    CutMode,
    StandInGroup,
    choose_cut_mode,
    find_cut_obstacle,
    find_pipeline_module,
    get_model_type,
    possible_host_counts,
)
from support.models.tiny import CONFIGS
from tests.architectures.configurations import TYPES, configuration


def built(config: dict[str, Any]) -> Any:
    enter_mlx_lm()
    model_class, args_class = import_mlx_lm_utils()._get_classes(config)
    return model_class(args_class.from_dict(config))


def llama(**changes: Any) -> Any:
    return built(CONFIGS["llama"] | changes)


def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_would_do() -> None:
    smollm2 = llama(num_attention_heads=9, num_key_value_heads=3, intermediate_size=48)
    with pytest.raises(HostRefused) as refused:
        choose_cut_mode(smollm2, 2, tuple(CutMode), "smollm2")
    assert str(refused.value) == (
        "smollm2 cannot be cut for 2 hosts: 9 attention heads and 3 key-value heads cannot be divided by 2; mlx-lm has "
        "no pipeline for 'llama'. 3 hosts would do."
    )
    assert choose_cut_mode(smollm2, 3, tuple(CutMode), "smollm2") is CutMode.TENSOR


def test_fewer_heads_than_hosts_do_not_become_none() -> None:
    assert find_cut_obstacle(llama(), 4, CutMode.TENSOR) == "2 key-value heads cannot be divided by 4"
    assert find_cut_obstacle(llama(), 2, CutMode.TENSOR) is None


def test_dimensions_that_do_not_divide_are_refused_too() -> None:
    model = llama(intermediate_size=49)
    obstacle = find_cut_obstacle(model, 2, CutMode.TENSOR)
    assert obstacle is not None and "cannot be divided by 2" in obstacle and "49" in obstacle
    assert possible_host_counts(model) == []
    with pytest.raises(HostRefused, match="Run it on one host"):
        choose_cut_mode(model, 2, tuple(CutMode), "it")


def test_groups_of_quantized_numbers_are_not_cut_in_two() -> None:
    import mlx.nn as nn

    model = llama(hidden_size=64, intermediate_size=96)
    assert find_cut_obstacle(model, 2, CutMode.TENSOR) is None
    nn.quantize(model, group_size=32, bits=4)
    obstacle = find_cut_obstacle(model, 2, CutMode.TENSOR)  # 96 are three groups
    assert obstacle is not None and "cannot be divided by 2" in obstacle
    assert find_cut_obstacle(model, 3, CutMode.TENSOR) is not None  # for its heads


def test_a_class_without_either_way_is_refused_by_name() -> None:
    with pytest.raises(HostRefused) as refused:
        choose_cut_mode(built(CONFIGS["gemma2"]), 2, tuple(CutMode), "a/gemma")
    assert str(refused.value) == (
        "a/gemma cannot be cut for 2 hosts: mlx-lm does not cut the tensors of 'gemma2'; mlx-lm has no pipeline for "
        "'gemma2'. Run it on one host."
    )


def test_a_pipeline_needs_a_layer_for_each_host() -> None:
    model = built(configuration("qwen2") | {"num_hidden_layers": 3})
    assert [find_cut_obstacle(model, hosts, CutMode.PIPELINE) for hosts in (2, 3)] == [None, None]
    assert find_cut_obstacle(model, 4, CutMode.PIPELINE) == "a pipeline needs a layer for each host, and there are 3"
    assert choose_cut_mode(model, 3, tuple(CutMode), "it") is CutMode.PIPELINE  # its two key-value heads are no three
    with pytest.raises(HostRefused, match="2 hosts would do"):
        choose_cut_mode(model, 3, (CutMode.TENSOR,), "it")


def test_a_pipeline_within_a_larger_model_that_does_not_know_of_it_is_refused() -> None:
    obstacle = find_cut_obstacle(built(configuration("mistral3")), 2, CutMode.PIPELINE)
    assert obstacle == "mlx-lm's pipeline is not for 'mistral3', whose caches it does not divide"


def cut_types() -> list[str]:
    """The model types with a way to be cut."""
    found = []
    for name in TYPES:
        if name == "olmo":  # needs a package of its own
            continue
        model = built(configuration(name))
        if hasattr(model, "shard") or find_pipeline_module(model) is not None:
            found.append(name)
    return found


def test_every_class_can_be_asked_and_is_as_it_was_before() -> None:
    """mlx-lm's `shard` changes some arrays in place."""
    names = cut_types()
    assert len(names) > 30
    for name in names:
        model = built(configuration(name))
        before = {path: (id(array), array.shape) for path, array in tree_flatten(model.parameters())}
        answers = {(way, hosts): find_cut_obstacle(model, hosts, way) for way in CutMode for hosts in (2, 4)}
        assert any(answer is None for answer in answers.values()) or all(answers.values()), name
        after = {path: (id(array), array.shape) for path, array in tree_flatten(model.parameters())}
        assert after == before, name


def test_what_is_asked_changes_no_number() -> None:
    model = built(CONFIGS["gpt_oss"])
    bias = mx.array(np.linspace(1, 2, model.layers[0].mlp.experts.down_proj.bias.size).reshape(4, 32))
    model.layers[0].mlp.experts.down_proj.bias = bias
    assert find_cut_obstacle(model, 2, CutMode.TENSOR) is None  # the class divides the bias by the ranks
    assert mx.array_equal(model.layers[0].mlp.experts.down_proj.bias, bias)
    assert np.linspace(1, 2, bias.size).max() == bias.max().item()


def test_the_ranks_of_a_planned_group() -> None:
    group = StandInGroup(1, 3)
    assert (group.rank(), group.size()) == (1, 3)
    assert get_model_type(llama()) == "llama"
