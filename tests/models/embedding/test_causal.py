"""Models whose tokens see later ones are refused by what their config.json says."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.errors import EmbeddingRefused
from cortexmlx.models.embedding import check_causal


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        {"model_type": "qwen3", "architectures": ["Qwen3Model"]},
        {"model_type": "mistral", "architectures": ["MistralModel"]},
        {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "llama"},
        {"model_type": "llama", "architectures": None},
        {"model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": False},
        {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]},
        {"model_type": "qwen2", "architectures": ["Qwen2Model"], "is_causal": True},
        {"model_type": "qwen3", "auto_map": {"AutoTokenizer": "tokenization.Own"}},
    ],
)
def test_causal_models_pass(config: dict[str, Any]) -> None:
    check_causal("a model", config)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"model_type": "a", "text_config": {"use_bidirectional_attention": "all"}}, "use_bidirectional_attention"),
        ({"model_type": "qwen2", "is_causal": False}, "is_causal is false"),
        ({"model_type": "bert", "is_decoder": False}, "is_decoder is false"),
        ({"model_type": "llama", "bidirectional": True}, "bidirectional is True"),
        ({"model_type": "qwen2", "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}, "modeling_qwen"),
        ({"model_type": "mistral", "auto_map": {"AutoModelForCausalLM": "gritlm.Model"}}, "gritlm.Model"),
        ({"model_type": "llama", "architectures": ["LlamaBidirectionalModel"]}, "LlamaBidirectionalModel"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClass"),
        ({"model_type": "llama", "architectures": ["BertModel"]}, "BertModel .*causal model of llama"),
        ({"model_type": "qwen3", "architectures": [5]}, "class 5"),
    ],
)
def test_others_are_refused_by_name(config: dict[str, Any], why: str) -> None:
    with pytest.raises(EmbeddingRefused, match=f"a model cannot be embedded with: .*{why}"):
        check_causal("a model", config)
