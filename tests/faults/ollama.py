"""Faults of Ollama's API: what its clients would read wrongly, and what they say that would be lost."""

from __future__ import annotations

from tests.faults.planted import Fault

CHAT, GENERATE = "cortexmlx/protocols/ollama/chat.py", "cortexmlx/protocols/ollama/generate.py"
PROTOCOL = "cortexmlx/protocols/ollama/models.py"
MODELS, HTTP, ENDPOINTS = "cortexmlx/server/models.py", "cortexmlx/server/http.py", "cortexmlx/server/generation.py"

TESTS = ("protocols/ollama", "server/test_ollama.py", "server/test_hostile_bodies.py")
"""The tests that judge these faults."""

FAULTS = (
    Fault("a body streams only if it says so", CHAT, 'fields.get("stream", True)', 'fields.get("stream", False)'),
    Fault("num_predict is a limit also below 1", CHAT, '_is_at_most(values.get("max_tokens"), 0)', "False"),
    Fault("a look back of 0 penalizes", CHAT, 'if values["repetition_context"] == 0:', "if False:"),
    Fault("seed -1 is a seed", CHAT, '_is_at_most(values.get("seed"), -1)', "False"),
    Fault("a level is told to templates without levels", CHAT, "EFFORT in defaults.known_vars", "True"),
    Fault("the name of a result's tool is lost", CHAT, 'fields["name"] = fields.pop("tool_name")', "pass"),
    Fault("several answers are computed", CHAT, '"n": 1}', '"n": defaults.params.n}'),
    Fault("calls are in no stream", CHAT, "is_rest = text or thinking or calls or logprobs", "is_rest = text"),
    Fault("durations are microseconds", CHAT, "round(seconds * 1e9)", "round(seconds * 1e6)"),
    Fault("the wait for the model is not told", ENDPOINTS, "load_seconds=waited_seconds", "load_seconds=0.0"),
    Fault("a cut answer has ended by itself", CHAT, "answer.finish_reason is FinishReason.LENGTH", "False"),
    Fault("an unload loads", CHAT, 'body.get("keep_alive") in _AT_ONCE', "False"),
    Fault("a context forgets the answer", GENERATE, '[*turns, ("assistant", answer)]', "turns"),
    Fault("a second system message stands before the first", GENERATE, 'if message["role"] != "system"', "if True"),
    Fault("lines break at Unicode's signs", HTTP, 'for sign in "\\u2028\\u2029\\x85":', 'for sign in "":'),
    Fault("a silent stream says what is no JSON", ENDPOINTS, "encode_body(chunks.ping())", "b': here\\n'"),
    Fault("anybody may pull", "cortexmlx/server/ollama.py", "if fetch is None and not is_served:", "if False:"),
    Fault("any name is served, so nothing is pulled", MODELS, "if any_name and self._settings", "if self._settings"),
    Fault("a path is pulled", PROTOCOL, "if not _HUB_ID.fullmatch(plain_name):", "if False:"),
    Fault("an empty name is a name", PROTOCOL, 'name = fields.get("model") or', 'name = fields.get("model", "") and'),
    Fault("whoever logs in may not pull", PROTOCOL, '"insecure", "password", "username"', '"insecure"'),
    Fault("a tag is a part of the name", MODELS, "if name.endswith(TAG):", "if False:"),
    Fault("what was unloaded is unknown", MODELS, "self._remember(model, lease.engine)", "pass"),
)
