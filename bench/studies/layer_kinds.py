"""Compares with mlx-lm on a random model of each kind of layer: attention with windows, experts, recurrent, and so on.

`python -m cortexmlx.bench.studies.layer_kinds [KIND ...] [--pairs N]`

The models have random weights, hidden size 512 and 8 layers, so that a step is neither all overhead nor all matrix
products. The cases of each model are decode with 8 and 16 rows, prefill of a long prompt, and the second turn of a
chat. In the second turn, mlx-lm computes the whole conversation again. mlx-lm serves the same weights with its batch
generator, in the same process and in turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from cortexmlx.cpu import blas

blas.preload()  # before mlx is imported

from cortexmlx.bench.measure.engines import BenchPlan  # noqa: E402
from cortexmlx.bench.measure.pairs import MINIMUM_PAIRS, ComparisonCase  # noqa: E402
from cortexmlx.bench.measure.random_model import write_random_model  # noqa: E402
from cortexmlx.bench.report.report import Report  # noqa: E402
from cortexmlx.bench.report.text import as_markdown  # noqa: E402
from cortexmlx.bench.session import compare_sections  # noqa: E402
from cortexmlx.bench.suites.against import CaseSection, ComparisonSizes, Contest, decode_cases, prefill_cases  # noqa: E402
from cortexmlx.bench.suites.serving import second_turn  # noqa: E402
from cortexmlx.kv.spec import DEFAULT_BLOCK_SIZE  # noqa: E402

_SHAPE = ComparisonSizes((512,), 128, (64,))

COMMON: dict[str, Any] = {
    "vocab_size": 4_096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1_024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
_MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "num_heads": 16,
    "state_size": 64,
    "conv_kernel": 4,
    "n_groups": 1,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.0, 100.0],
    "time_step_rank": 32,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}

KINDS: dict[str, dict[str, Any]] = {
    "full": {"model_type": "llama"},
    "windows": {"model_type": "gemma3_text", "query_pre_attn_scalar": 64, "sliding_window": 64},
    "experts and sinks": {
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "latent": {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 256,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        **_EXPERTS,
    },
    "hybrid": {
        "model_type": "qwen3_next",
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 256,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        **_EXPERTS,
    },
    "hybrid of convolutions": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 512,
        "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [2, 5, 7],
    },
    "recurrent": {**_MAMBA2},
}
"""The entries of a configuration that make it a model of each kind. Chunks (Llama 4) are missing: mlx-lm's batch
generator does not accept its own caches for them.
"""


def comparison_sections() -> list[CaseSection]:
    """Return the cases that are run for every kind of layer."""

    def turns(contest: Contest) -> list[ComparisonCase]:
        return [*prefill_cases(contest, _SHAPE)[:1], second_turn(contest, prompt_cache=False, target=0.15)]

    return [CaseSection(turns), CaseSection(lambda contest: decode_cases(contest, _SHAPE)[1:], token_target=False)]


def compare_kind(kind: str, pairs: int = MINIMUM_PAIRS, config: dict[str, Any] | None = None) -> Report:
    """Compare with mlx-lm on a random model of one kind. `config` replaces entries of its configuration."""
    with tempfile.TemporaryDirectory(prefix="cortexmlx-bench-") as folder:
        path = write_random_model(Path(folder), {**COMMON, **KINDS[kind], **(config or {})})
        plan = BenchPlan(str(path), (f"random weights, kind: {kind}",), None, "auto", pairs, 0, None)
        return compare_sections(plan, comparison_sections(), _SHAPE, (), DEFAULT_BLOCK_SIZE)


def main() -> None:
    """Run the comparison of each kind, and print its table."""
    parser = argparse.ArgumentParser(
        prog="python -m cortexmlx.bench.studies.layer_kinds", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of: {', '.join(KINDS)}; none: all")
    parser.add_argument("--pairs", type=int, default=MINIMUM_PAIRS)
    options = parser.parse_args()
    unknown_kinds = [kind for kind in options.kinds if kind not in KINDS]
    if unknown_kinds:
        parser.error(f"{unknown_kinds[0]!r} is no kind; there are: {', '.join(KINDS)}")
    for kind in options.kinds or KINDS:
        print(f"## {kind}\n\n{as_markdown(compare_kind(kind, options.pairs))}\n", flush=True)


if __name__ == "__main__":
    main()
