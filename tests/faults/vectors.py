"""Faults of the ways in for embeddings, reranking and adapters: rows out of order, vectors of other texts, names."""

from __future__ import annotations

from tests.faults.planted import Fault

EMBEDDINGS = "cortexmlx/protocols/openai/embeddings.py"
RERANK = "cortexmlx/protocols/rerank.py"
PATHS = "cortexmlx/server/embeddings.py"
MODELS = "cortexmlx/server/models.py"
BATCH = "cortexmlx/protocols/batch.py"

TESTS = (
    "protocols/openai/test_embeddings.py",
    "protocols/test_rerank.py",
    "server/test_embeddings.py",
    "server/test_models_adapters.py",
    "server/test_models_adapters_engine.py",
    "cli/batch/test_command_adapters.py",
)
"""The tests that judge these faults."""

FAULTS = (
    # what is read and written
    Fault("base64 of big-endian numbers", EMBEDDINGS, 'vector.astype("<f4")', 'vector.astype(">f4")'),
    Fault("a number loses digits", EMBEDDINGS, ":.9g}", ":.7g}"),
    Fault("the first token id too many is taken", EMBEDDINGS, "token >= vocab_size", "token > vocab_size"),
    Fault("a dimension too many is taken", EMBEDDINGS, "count > info.dimensions", "count > info.dimensions + 1"),
    Fault("true is a token id", EMBEDDINGS, "if type(token) is not int:", "if not isinstance(token, int):"),
    Fault(
        "a prompt before token ids", EMBEDDINGS, "if prompt is not None and not all(", "if prompt is None and not all("
    ),
    Fault("what was cut off is not told", EMBEDDINGS, "if is_truncated else item", "if False else item"),
    Fault("the worst documents come first", RERANK, "key=lambda place: -reranking", "key=lambda place: reranking"),
    Fault("documents by their ranks", RERANK, "request.documents[index]", "request.documents[-1 - index]"),
    # the server
    Fault("a client that went away is computed for", PATHS, "await run_until_disconnect(request, work)", "await work"),
    Fault(
        "requests of all clients are one client's",
        PATHS,
        'truncate=embedding_request.truncate,\n            client=request.scope.get(SCOPE_CLIENT, "")',
        'truncate=embedding_request.truncate, client=""',
    ),
    Fault(
        "the texts are asked without their prompt", PATHS, '{"prompt": embedding_request.prompt,', '{"prompt": None,'
    ),
    Fault("an adapter's name is not that of its model", MODELS, 'f"{self.model}:{self.adapter}"', "self.model"),
    Fault("any name hides a mistyped adapter", MODELS, "self._may_name_adapter(name)):", "False):"),
    Fault("the adapter is forgotten on the way", "cortexmlx/server/generation.py", "self._adapter}", "None}"),
    Fault(
        "the adapter of a line is forgotten",
        "cli/batch/run.py",
        "yield prompt, request.params, request.adapter",
        "yield prompt, request.params, None",
    ),
    Fault("a mistyped adapter of a line is the model", BATCH, "if adapter_name != requested_model:", "if False:"),
)
