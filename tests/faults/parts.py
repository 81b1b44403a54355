"""Faults of ranks and their parts of a model: a choice that is not shared, heads that do not divide, memory."""

from __future__ import annotations

from tests.faults.planted import Fault

CHOICE, WAYS = "cortexmlx/execution/shared_choice.py", "cortexmlx/models/sharding.py"
PART, RANK = "cortexmlx/models/sharding.py", "cortexmlx/distributed/rank.py"
HOOK = "cortexmlx/attention/mlx_lm_hook.py"

TESTS = (
    "execution/test_shared_choice.py",
    "models/sharding",
    "attention/test_mlx_lm_hook_pipeline.py",
    "distributed/test_rank.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault(
        "a part tells its own size for that of the model",
        PART,
        "        model_sizes.append((weights.weight_bytes(model), weights.parameter_count(model)))\n"
        "        cut_model(model, group=group, modes=modes, name=str(name))\n",
        "        cut_model(model, group=group, modes=modes, name=str(name))\n"
        "        model_sizes.append((weights.weight_bytes(model), weights.parameter_count(model)))\n",
    ),
    Fault(
        "ranks without a choice do not compute their logits",
        CHOICE,
        "mx.depends(mx.zeros(logits.shape[:1], mx.int32), logits)",
        "mx.zeros(logits.shape[:1], mx.int32)",
    ),
    Fault(
        "rank 0 keeps its choice", CHOICE, "mx.distributed.all_sum(sampled.tokens, group=self._group)", "sampled.tokens"
    ),
    Fault("every rank chooses", CHOICE, "group.rank() == 0 else", "group.rank() >= 0 else"),
    Fault("what is asked of a copy changes the model", WAYS, "mx.stop_gradient(array)", "array"),
    Fault("heads are divided without the rest", WAYS, "new_count * hosts == count", "new_count == count // hosts"),
    Fault(
        "a pipeline may have ranks without layers",
        WAYS,
        "if len(pipeline_module.layers) < hosts:",
        "if len(pipeline_module.layers) < 1:",
    ),
    Fault(
        "a pipeline leaves its caches undivided",
        WAYS,
        "- len(find_pipeline_module(model_copy).pipeline_layers)",
        "- len(pipeline_module.layers)",
    ),
    Fault(
        "a part holds what it was cut from", PART, "mx.contiguous(module[name], allow_col_major=True)", "module[name]"
    ),
    Fault("all of a part is read at once", PART, "                mx.eval(module[name])\n", ""),
    Fault(
        "freed tensors stay in MLX's cache",
        PART,
        "previous_limit = mx.set_cache_limit(0)",
        "previous_limit = mx.set_cache_limit(1 << 40)",
    ),
    Fault("what was sent is sent again", HOOK, "        leaf.pending_send = None\n", "        pass\n"),
    Fault(
        "every cache has keys",
        HOOK,
        '        if not self.sends:\n            raise AttributeError("keys")\n        return',
        "        return",
    ),
    Fault("NaN logits are served", RANK, "        check_logits(loaded)\n", ""),
)
