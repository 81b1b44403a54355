"""Folders that are shaped like Qwen3-Embedding and Qwen3-Reranker, or like other models that sentence-transformers
wrote, with tiny random weights. No network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.models.tiny import write_tiny

INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
PROMPTS = {"query": INSTRUCTION, "document": ""}

POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}

RERANKER_TOKENS = ("<|im_start|>", "<|im_end|>", "yes", "no")


def write_embedding(
    folder: Path,
    name: str = "qwen3",
    *,
    pooling: str = "lasttoken",
    include_prompt: bool = True,
    dense: tuple[int, ...] = (),
    activation: str = "Tanh",
    normalize: bool = True,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
    max_seq_length: int | None = None,
    lowercase: bool = False,
    flat: bool = True,
    end_token: bool = True,
    **changes: Any,
) -> Path:
    """Write an embedding model. `flat` tensors have no "model." before their names, as Qwen's have none. `dense` are
    the widths of dense layers after pooling. With `end_token`, the tokenizer puts an end token after each text.
    """
    architecture = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaModel"}.get(name)
    settings = {"tie_word_embeddings": True} if name in ("qwen3", "llama") else {}
    named = {} if architecture is None else {"architectures": [architecture]}
    write_tiny(folder, name, **{**settings, **named, **changes})
    if flat:
        flatten(folder)
    if end_token:
        put_end_token(folder)
    config = json.loads((folder / "config.json").read_text())
    width = config.get("hidden_size", config.get("n_embd", 32))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [(f"{2 + i}_Dense", "Dense") for i in range(len(dense))]
    modules += [(f"{2 + len(dense)}_Normalize", "Normalize")] if normalize else []
    write_modules(folder, modules)
    flags = {flag: mode == pooling for mode, flag in POOLING_FLAGS.items()}
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": width, **flags, "include_prompt": include_prompt},
    )
    for number, out in enumerate(dense):
        write_dense(folder / f"{2 + number}_Dense", width, out, activation, seed=number)
        width = out
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": PROMPTS if prompts is None else prompts,
            "default_prompt_name": default_prompt,
            "similarity_fn_name": "cosine",
        },
    )
    if max_seq_length is not None or lowercase:
        said = {"do_lower_case": lowercase} | ({} if max_seq_length is None else {"max_seq_length": max_seq_length})
        write_json(folder / "sentence_bert_config.json", said)
    return folder


def write_reranker(folder: Path, *, logit_score: bool = False, **changes: Any) -> Path:
    """Write a model like Qwen3-Reranker; `folder` should have its name. With `logit_score`, it has the files of newer
    versions of sentence-transformers, too.
    """
    write_tiny(folder, "qwen3", **{"tie_word_embeddings": True, "architectures": ["Qwen3ForCausalLM"], **changes})
    give_reranker_tokens(folder)
    if logit_score:
        write_modules(folder, [("", "Transformer"), ("1_LogitScore", "LogitScore")])
        vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        write_json(
            folder / "1_LogitScore" / "config.json", {"true_token_id": vocab["yes"], "false_token_id": vocab["no"]}
        )
    return folder


def write_modules(folder: Path, modules: list[tuple[str, str]]) -> None:
    """Write modules.json for pairs of a path and a class."""
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)


def write_dense(
    folder: Path, width: int, out: int, activation: str = "Tanh", *, bias: bool = True, seed: int = 0
) -> None:
    """Write a dense layer of sentence-transformers."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    part = "linear" if activation == "Identity" else "activation"
    write_json(
        folder / "config.json",
        {
            "in_features": width,
            "out_features": out,
            "bias": bias,
            "activation_function": f"torch.nn.modules.{part}.{activation}",
        },
    )
    tensors = {"linear.weight": rng.standard_normal((out, width)).astype(np.float32) / np.float32(width**0.5)}
    if bias:
        tensors["linear.bias"] = rng.standard_normal(out).astype(np.float32)
    save_file(tensors, str(folder / "model.safetensors"))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def flatten(folder: Path) -> None:
    """Take "model." off the names of the tensors, and leave the output matrix out: so AutoModel saves a model."""
    import mlx.core as mx

    tensors = dict(mx.load(str(folder / "model.safetensors")))
    plain = {key.removeprefix("model."): value for key, value in tensors.items() if not key.startswith("lm_head")}
    mx.eval(list(plain.values()))
    mx.save_safetensors(str(folder / "model.safetensors"), plain, metadata={"format": "pt"})


def put_end_token(folder: Path, token: str = "</s>") -> None:
    """Have the tokenizer put an end token after each text, as Qwen3-Embedding's does with <|endoftext|>."""
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    number = said["model"]["vocab"][token]
    said["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": token, "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
    path.write_text(json.dumps(said))


def give_reranker_tokens(folder: Path) -> None:
    """Give the tokenizer single tokens for the tags of Qwen3-Reranker's prompt, and for its two answers."""
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    vocab, merges = said["model"]["vocab"], said["model"]["merges"]
    unused = [token for token in vocab if token.startswith("<unused")]
    for number, token in enumerate(("ye", "yes", "no")):
        vocab[token] = vocab.pop(unused[number])
    merges += [["y", "e"], ["ye", "s"], ["n", "o"]]
    for number, token in enumerate(RERANKER_TOKENS[:2]):
        place = vocab.pop(unused[3 + number])
        vocab[token] = place
        said["added_tokens"].append(
            {
                "id": place,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    path.write_text(json.dumps(said))
