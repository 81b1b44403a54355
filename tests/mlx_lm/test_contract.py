"""One test for each place that reaches into mlx-lm: which breaks first names the place. docs/mlx-lm.md lists them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text

from cortexmlx.attention import model_patches
from cortexmlx.mlx_lm.package import enter_mlx_lm, import_mlx_lm_utils
from support.gguf.export import tiny
from support.models.assistants import MODEL, TEXT
from support.models.draft_heads import LAST_LAYERS
from support.models.recurrent import RECURRENT
from support.models.tiny import CONFIGS, write_tiny

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "mlx-lm.md"
LLAMA = CONFIGS["llama"]


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def module(name: str) -> Any:
    enter_mlx_lm()
    return importlib.import_module(f"mlx_lm.{name}")


def built(config: dict[str, Any] = LLAMA) -> Any:
    arch = module(f"models.{config['model_type']}")
    return arch.Model(arch.ModelArgs.from_dict(config))


class Recorder:
    """A cache that hands back what it is given, and notes how it was asked."""

    def __init__(self) -> None:
        self.offset = mx.array([3, 5])
        self.asked: list[str] = []

    def make_mask(self, *_: Any, **__: Any) -> None:
        self.asked.append("make_mask")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.asked.append("update_and_fetch")
        return keys, values


def test_an_adapters_layers_are_wrapped_by_name_and_their_parameters_have_three_names() -> None:
    assert parameters(module("tuner.utils").linear_to_lora_layers) == ["model", "num_layers", "config", "use_dora"]
    model = built()
    settings = {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": ["mlp.up_proj", "lm_head"]}
    module("tuner.utils").linear_to_lora_layers(model, 1, settings, use_dora=True)
    wrapped = model.layers[-1].mlp.up_proj
    assert set(wrapped.keys()) >= {"linear", "lora_a", "lora_b", "m"}
    assert isinstance(model.layers[0].mlp.up_proj, nn.Linear)


def test_bitnets_layer_and_scaled_experts_keep_what_they_are_expanded_from() -> None:
    layer = module("models.bitlinear_layers").BitLinear(8, 12, bias=False, invert_weight_scales=True)
    assert (layer.in_features, layer.out_features, layer.invert_weight_scales) == (8, 12, True)
    assert (layer.weight.shape, layer.weight.dtype, layer.weight_scale.shape) == ((3, 8), mx.uint8, (1,))
    experts = module("models.switch_layers").SwitchLinear(32, 8, 4, bias=False)
    packed = experts.to_quantized(16, 4, "nvfp4", global_scale=True)
    assert packed.global_scale.shape == (4,) and "global_scale" not in experts.to_quantized(16, 4, "nvfp4")


def test_a_wrapper_takes_a_chat_template(tmp_path: Path) -> None:
    wrapper = module("tokenizer_utils").load(write_tiny(tmp_path / "m"))
    wrapper.chat_template, wrapper.has_chat_template = "{{ messages[0].content }}", True
    assert wrapper.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    wrapper.has_chat_template = False
    assert not wrapper.has_chat_template


def test_a_model_asks_its_caches_for_a_mask_and_hands_them_keys_and_values_of_flat_tokens() -> None:
    caches = [Recorder(), Recorder()]
    logits = built()(mx.array([[1], [2]]), cache=caches)
    assert logits.shape == (2, 1, LLAMA["vocab_size"])
    assert [c.asked for c in caches] == [["make_mask", "update_and_fetch"], ["update_and_fetch"]]


def test_attention_is_a_function_of_the_base_module_that_models_import_by_name() -> None:
    base, llama = module("models.base"), module("models.llama")
    attention = base.scaled_dot_product_attention
    assert llama.scaled_dot_product_attention is attention
    assert parameters(getattr(attention, "replaced", attention)) == [
        *("queries", "keys", "values", "cache", "scale", "mask", "sinks")
    ]


def test_make_prompt_cache_tells_full_layers_from_windows() -> None:
    cache = module("models.cache")
    kinds = [type(c) for c in cache.make_prompt_cache(built(CONFIGS["windowed llama"]))]
    assert kinds == [cache.RotatingKVCache, cache.KVCache, cache.RotatingKVCache]
    assert (
        cache.make_prompt_cache(built(CONFIGS["windowed llama"]))[0].max_size
        == CONFIGS["windowed llama"]["sliding_window"]
    )
    chunked = cache.make_prompt_cache(built(CONFIGS["llama4"]))
    assert [type(c) for c in chunked] == [cache.ChunkedKVCache] * 3 + [cache.KVCache]
    assert chunked[0].chunk_size == CONFIGS["llama4"]["text_config"]["attention_chunk_size"]


def test_caches_tell_what_they_keep_and_whether_it_can_be_cut() -> None:
    cache = module("models.cache")
    model = built(CONFIGS["windowed llama"])
    window, plain, _ = caches = cache.make_prompt_cache(model)
    model(mx.zeros((1, CONFIGS["windowed llama"]["sliding_window"] - 1), mx.int32), cache=caches)
    for each in (window, plain):
        assert [a.shape[2] >= each.offset for a in each.state[:2]] == [True, True]
        assert each.is_trimmable() and each.trim(3) == 3
    model(mx.zeros((1, 4), mx.int32), cache=caches)
    assert plain.is_trimmable() and not window.is_trimmable()
    states = cache.ArraysCache(2)
    states[0] = mx.zeros((1, 3))
    assert [a.nbytes for _, a in tree_flatten(states.state) if isinstance(a, mx.array)] == [12]
    assert not states.is_trimmable()
    assert list(cache.CacheList(plain, states).caches) == [plain, states]


def test_a_recurrent_layer_keeps_arrays_by_slot_in_a_cache_that_knows_of_no_padding() -> None:
    """It is handed to the layer as an argument, and each call leaves new arrays there."""
    cache = module("models.cache")
    model = built(RECURRENT["qwen3_next"])
    first, second = cache.make_prompt_cache(model)[:2]
    assert (type(first), type(second)) == (cache.ArraysCache, cache.KVCache)
    assert first.cache == [None, None] and first.lengths is None and first.make_mask(3) is None
    layer = model.layers[0].linear_attn
    layer(mx.zeros((1, 5, 32)), None, first)
    before = list(first.cache)
    kept = [np.array(array) for array in before]
    layer(mx.ones((1, 2, 32)), None, first)
    assert [a.shape[0] for a in before] == [1, 1] and all(a is not b for a, b in zip(before, first.cache, strict=True))
    assert all(np.array_equal(np.array(array), was) for array, was in zip(before, kept, strict=True))


def test_swiglu_is_one_function_that_models_import_by_name() -> None:
    activations, llama = module("models.activations"), module("models.llama")
    swiglu = activations.swiglu
    assert llama.swiglu is swiglu and parameters(getattr(swiglu, "replaced", swiglu)) == ["gate", "x"]
    gate, x = (np.random.default_rng(0).normal(size=(2, 5)) for _ in range(2))
    wanted = gate / (1 + np.exp(-gate)) * x
    assert np.abs(np.array(swiglu(mx.array(gate, mx.float32), mx.array(x, mx.float32))) - wanted).max() < 1e-6


def test_plain_rotary_positions_are_mlx_modules_with_their_settings_in_attributes() -> None:
    rope = built().layers[0].self_attn.rope
    assert type(rope) is nn.RoPE
    assert (rope.dims, rope.traditional, rope.base, rope.scale) == (LLAMA["head_dim"], False, LLAMA["rope_theta"], 1.0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "mixtral"])
def test_the_body_of_a_model_ends_in_a_norm(name: str) -> None:
    model = built(CONFIGS[name])
    body = getattr(model, "model", model)
    calls: list[tuple[int, ...]] = []

    class Counting(nn.Module):  # type: ignore[misc]
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __call__(self, x: mx.array) -> mx.array:
            calls.append(x.shape)
            out: mx.array = self.inner(x)
            return out

    assert "Norm" in type(body.norm).__name__
    body.norm = Counting(body.norm)
    model(mx.array([[1], [2], [3]]))
    assert calls == [(3, 1, CONFIGS[name]["hidden_size"])]


def test_utils_offers_what_loads_folders() -> None:
    utils = import_mlx_lm_utils()
    assert parameters(utils.load_model)[0] == "model_path" and "lazy" in parameters(utils.load_model)
    assert {"eos_token_ids"} < set(parameters(utils.load_tokenizer)) and "bits" in parameters(utils.quantize_model)
    assert "get_model_classes(config" in (source := inspect.getsource(utils.load_model)) and "model.sanitize(" in source
    model_class, args_class = utils._get_classes(dict(LLAMA))
    assert model_class(args_class.from_dict(LLAMA)).model(mx.zeros((1, 3), mx.int32)).shape[:2] == (1, 3)
    with pytest.raises(ValueError, match=r"^Model type nonesuch"):
        utils._get_classes({"model_type": "nonesuch"})


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_layer_of_qwens_hybrids_can_be_built_alone_with_full_attention(name: str) -> None:
    model = built(RECURRENT[name])
    part = model if name == "qwen3_next" else model.language_model
    layer = type(model.layers[0])(replace(part.args, full_attention_interval=1), layer_idx=0)
    shapes = [
        {path: array.shape for path, array in tree_flatten(each.parameters())} for each in (layer, model.layers[1])
    ]
    assert shapes[0] == shapes[1] and "self_attn.q_norm.weight" in shapes[0]
    packed = dict(zip(("x.weight", "x.scales", "x.biases"), mx.quantize(mx.ones((4, 64)), 32, 8), strict=True))
    settings = {"group_size": 32, "bits": 8, "mode": "affine"}
    assert import_mlx_lm_utils().infer_quant_config("x", nn.Linear(64, 4), packed) == settings


@pytest.mark.parametrize("name", LAST_LAYERS)
def test_a_layer_of_glm_and_deepseek_can_be_built_alone_and_read_alone(name: str) -> None:
    model = built(LAST_LAYERS[name])
    number = model.args.num_hidden_layers
    layer = type(model.layers[-1])(model.args, number)
    last = {f"model.layers.{number - 1}.{path}": array for path, array in tree_flatten(model.layers[-1].parameters())}
    sanitized = {path.partition(f".{number - 1}.")[2] for path in model.sanitize(last)}
    assert sanitized == {path for path, _ in tree_flatten(layer.parameters())}


def test_a_layer_of_gemma_4_reads_the_keys_that_it_is_given() -> None:
    args = gemma4_text.ModelArgs.from_dict(TEXT | {"num_kv_shared_layers": TEXT["num_hidden_layers"]})
    layer = gemma4_text.DecoderLayer(args, layer_idx=0)
    keys = mx.ones((1, 1, 5, 16))
    out, _, _ = layer(mx.ones((1, 1, 24)), shared_kv=(keys, keys), offset=mx.array([4]))
    assert out.shape == (1, 1, 24) and not {"k_proj", "v_proj"} & layer.self_attn.keys()
    model = built(MODEL)
    assert model.model.embed_scale == 32**0.5 and len(model.make_cache()) == 3


def test_a_tokenizer_wrapper_makes_its_detokenizers_from_one() -> None:
    tokenizers = module("tokenizer_utils")
    assert inspect.isclass(tokenizers.BPEStreamingDetokenizer)
    source = inspect.getsource(tokenizers.TokenizerWrapper.detokenizer.fget)
    assert "self._detokenizer" in source


def test_experts_are_switch_layers_packed_and_plain() -> None:
    layers = module("models.switch_layers")
    plain = layers.SwitchLinear(64, 32, 4, bias=True)
    packed = plain.to_quantized(group_size=32, bits=4)
    assert isinstance(packed, layers.QuantizedSwitchLinear) and "bias" in packed
    assert (packed.group_size, packed.bits, packed.mode) == (32, 4, "affine")
    assert parameters(layers.QuantizedSwitchLinear.__init__)[1:7] == [
        "input_dims",
        "output_dims",
        "num_experts",
        "bias",
        "group_size",
        "bits",
    ]
    assert parameters(layers.QuantizedSwitchLinear.__call__) == ["self", "x", "indices", "sorted_indices"]


@pytest.mark.parametrize("tokens", [3, 40], ids=["as they come", "sorted by expert"])
def test_packed_experts_are_called_with_rows_and_the_experts_of_each(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`[..., 1, inputs]` and experts of the same shape, or of several to a row; biases by the experts' numbers."""
    called = []
    layers = module("models.switch_layers")
    packed = layers.QuantizedSwitchLinear
    theirs = packed.__call__

    def noting(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        called.append((tuple(x.shape), tuple(indices.shape), sorted_indices))
        return theirs(self, x, indices, sorted_indices)

    monkeypatch.setattr(packed, "__call__", noting)
    experts = layers.SwitchGLU(32, 64, 4, bias=True)
    nn.quantize(experts, 32, 4)
    assert experts.up_proj.global_scale is None and experts.up_proj.mode == "affine"
    assert tuple(experts.up_proj["bias"].shape) == (4, 64)
    experts(mx.zeros((tokens, 1, 32)), mx.zeros((tokens, 1, 2), mx.uint32))
    rows, pairs = ((tokens, 1, 1), (tokens, 1, 2)) if tokens == 3 else ((2 * tokens,),) * 2
    assert called == [
        ((*rows, 1, 32), pairs, tokens != 3),
        ((*rows, 1, 32), pairs, tokens != 3),
        ((*pairs, 1, 64), pairs, tokens != 3),
    ]


def test_matrices_of_latent_attention_are_layers_packed_and_plain() -> None:
    layers = module("models.mla")
    packed = layers.MultiLinear(64, 32, 4).to_quantized(group_size=32, bits=4)
    assert isinstance(packed, layers.QuantizedMultiLinear) and packed.weight.shape == (4, 32, 64 * 4 // 32)
    assert (packed.group_size, packed.bits, packed.mode) == (32, 4, "affine")
    assert parameters(layers.MultiLinear.__call__) == parameters(layers.QuantizedMultiLinear.__call__)
    assert parameters(layers.MultiLinear.__call__) == ["self", "x", "transpose"]


def test_scaled_rotary_positions_keep_their_wavelengths_where_they_can_be_set() -> None:
    """And they rotate as MLX does with these wavelengths."""
    ropes, x = module("models.rope_utils"), mx.random.normal((1, 1, 1, 16))
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for rope in (ropes.Llama3RoPE(16, 2048, False, 1e4, factors), ropes.YarnRoPE(16), ropes.ProportionalRoPE(16, 8)):
        for waves in (rope._freqs, rope._freqs * 2):
            rope._freqs = waves
            wanted = mx.fast.rope(
                x, rope.dims, traditional=rope.traditional, base=None, scale=1.0, offset=9, freqs=waves
            )
            assert getattr(rope, "mscale", 1.0) == 1.0 and mx.array_equal(rope(x, offset=9), wanted)


@pytest.mark.parametrize("name", tiny())
def test_architectures_of_gguf_files_build_from_a_mapping(name: str) -> None:
    assert built(tiny()[name].config).layers


def test_the_batch_generator_takes_prompts_and_limits_and_answers_in_steps() -> None:
    generate = module("generate")
    settings = {"completion_batch_size", "prefill_batch_size", "prefill_step_size"}
    assert settings < set(parameters(generate.BatchGenerator.__init__))
    assert parameters(generate.BatchGenerator.insert)[1:3] == ["prompts", "max_tokens"]
    assert {"prompt", "model", "max_tokens", "prompt_cache"} < {*parameters(generate.generate_step), "max_tokens"}
    assert hasattr(generate, "generation_stream")


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "takes", "has"),
    [
        (
            "gemma2.Attention",
            ["self", "x", "mask", "cache"],
            "q_proj k_proj v_proj o_proj rope n_heads n_kv_heads head_dim scale attn_logit_softcapping",
        ),
        (
            "plamo.Attention",
            ["self", "hidden_states", "attention_mask", "cache"],
            "q_proj k_proj v_proj o_proj rotary_emb k_num_heads qk_dim v_dim scale config",
        ),
        ("gpt_bigcode.GPTBigCodeModel", ["self", "inputs", "cache"], "wte wpe h ln_f"),
        (
            "plamo2.Attention",
            ["self", "hidden_states", "mask", "cache"],
            "qkv_proj o_proj q_weight k_weight rope q_proj_dim k_proj_dim qk_dim scale",
        ),
        (
            "baichuan_m1.Attention",
            ["self", "x", "mask", "cache"],
            "W_pack o_proj conv_k conv_v rope hidden_size num_kv_heads head_dim scale",
        ),
        ("llama4.LlamaModel", ["self", "inputs", "cache"], "embed_tokens layers norm"),
        (
            "llama4.Attention",
            ["self", "x", "mask", "cache"],
            "q_proj k_proj v_proj o_proj n_heads n_kv_heads head_dim scale use_rope attn_temperature_tuning "
            "floor_scale attn_scale",
        ),
        ("afm7.AFMModel", ["self", "inputs", "cache"], "embedding layers kv_reuse_layers output_norm"),
        (
            "afm7.KVReuseAttention",
            ["self", "x", "keys", "values", "mask"],
            "q_proj q_norm rope out_proj n_heads head_dim scale",
        ),
        (
            "afm7.KVReuseTransformerBlock",
            ["self", "x", "keys", "values", "mask"],
            "self_attn mlp input_layernorm post_attention_layernorm",
        ),
        ("rope_utils.DynamicNTKScalingRoPE", ["self", "x", "offset"], "dims traditional base"),
    ],
)
def test_the_classes_that_get_a_method_of_ours_have_what_it_uses(owner: str, takes: list[str], has: str) -> None:
    home, _, name = owner.partition(".")
    made = built((CONFIGS | RECURRENT)["dynamic rope" if home == "rope_utils" else home])
    found = next(m for m in made.modules() if type(m).__name__ == name)
    method = type(found).__call__
    assert parameters(getattr(method, "replaced", method)) == takes
    assert [attribute for attribute in has.split() if not hasattr(found, attribute)] == []


@pytest.mark.parametrize(("home", "name"), model_patches._LATENT_CLASSES, ids=lambda each: each)
def test_latent_attention_is_computed_of_what_is_replaced(home: str, name: str) -> None:
    method = getattr(module(f"models.{home}"), name).__call__
    source = inspect.getsource(getattr(method, "replaced", method))
    assert re.search(r"cache\.update_and_fetch\(kv_latent, k_(pe|rope)\)", source)
    assert re.search(r"\(q_(pe|rope) \* self\.scale\) @ k_(pe|rope)\.swapaxes\(-1, -2\)", source)
    assert set(re.findall(r"self\.(embed_q|unembed_out|scale)\b", source)) == {"embed_q", "unembed_out", "scale"}
    assert "cache=cache" in source and "mask=pe_scores" in source


def reaching() -> set[str]:
    """The files of the package that import something of mlx-lm, or name one of its modules to import."""
    found = set()
    for folder in ("cortexmlx", "cli", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "mlx_lm" in text or "replace_" in text else ():
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or "", *(a.name for a in node.names)]
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names = [node.value] if re.fullmatch(r"mlx_lm(\.[\w.]*)?", node.value) else []
                if any(n.startswith("mlx_lm") for n in names) or {"replace_function", "replace_method"} & {*names}:
                    found.add(str(path.relative_to(ROOT)))
    return found


def test_the_page_lists_every_place_and_tests_that_exist() -> None:
    rows = re.findall(r"^\| `([\w/.]+)` \|.*\| `(\w+)` \|$", PAGE.read_text(), re.M)
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_contract*.py"))
    tests = set(re.findall(r"^def (test_\w+)", text, re.M))
    assert {test for _, test in rows} <= tests
    assert reaching() - {file for file, _ in rows} == set(), "these reach into mlx-lm and are not on the page"
    assert all((ROOT / file).is_file() for file, _ in rows)
