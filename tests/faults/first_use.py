"""Faults of what a new user meets: launched agents, kept chats, long pastes, answers in a loop, and failed lines."""

from __future__ import annotations

from tests.faults.planted import Fault

LAUNCH, CHATS = "cli/launch.py", "cli/chats/saved_chats.py"
INPUT, SAMPLING, BATCH = "cli/chat/input.py", "cli/chat/sampling.py", "cli/batch/run.py"
TESTS = (
    "cli/chat/test_sampling.py",
    "cli/chat/test_input.py",
    "cli/batch/test_run.py",
    "cli/chats",
    "cli/chat/test_talk_pasted.py",
    "cli/batch/test_command.py",
    "cli/test_launch.py",
)

FAULTS = (
    Fault("an agent keeps the key of another service", LAUNCH, 'removed=("ANTHROPIC_API_KEY",)', "removed=()"),
    Fault("the server's log is on the agent's screen", LAUNCH, "if is_ours else sys", "if False else sys"),
    Fault("others may read the log", LAUNCH, "mode=0o600", "mode=0o644"),
    Fault(
        "a proxy reads along", LAUNCH, 'filter(None, (kept.get(name), "127.0.0.1"))', "filter(None, (kept.get(name),))"
    ),
    Fault(
        "an agent compacts too late",
        LAUNCH,
        '"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(context)',
        '"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(2 * context)',
    ),
    Fault("an answer may take all of a small context", LAUNCH, "return min(MAX_OUTPUT", "return max(MAX_OUTPUT"),
    Fault("an agent that fails has succeeded", LAUNCH, "return code if code >= 0", "return 0 if code >= 0"),
    Fault("an agent that is killed has no code", LAUNCH, "else 128 - code", "else code"),
    Fault("whatever listens there is ours", LAUNCH, 'if each["owned_by"] == "cortexmlx"', "if True"),
    Fault("a server with another model is used", LAUNCH, 'model is None or each["id"] in names', "True"),
    Fault("codex gets the key as an argument", LAUNCH, '"env_key": KEY_VARIABLE', '"bearer_token": server.key'),
    Fault("a context that is too small is not told", LAUNCH, "server.context_length < (least", "0 > (least"),
    Fault("the newest of several chats is meant", CHATS, "by_words=by_words)) == 1:", "by_words=by_words)) >= 1:"),
    Fault("one of the words is enough", CHATS, "if all(word in", "if any(word in"),
    Fault("words are found as they are typed", CHATS, "name.lower().split()", "name.split()"),
    Fault("a word deletes a chat", "cli/chats/command.py", "by_words=not delete", "by_words=True"),
    Fault("a label is sent in a paste's place", INPUT, "self._texts.get(label[0], label[0])", "label[0]"),
    Fault("a second paste takes the place of the first", INPUT, "len(self._texts) + 1", "1"),
    Fault("quotes in a paste begin a block", INPUT, "if begins_with_paste else", "if False else"),
    Fault("what the model has ended is a loop", SAMPLING, "if is_open and ends_in_loop", "if ends_in_loop"),
    Fault("twice the same is a loop", SAMPLING, "max(2 * period, _LOOP", "max(period, _LOOP"),
    Fault(
        "the penalty that there is, is advised",
        SAMPLING,
        "round(params.repetition_penalty + 0.05",
        "round(params.repetition_penalty",
    ),
    Fault("the first to fail are named, not the first lines", BATCH, "sorted(failures)[", "failures["),
    Fault(
        "an error writes to the terminal what it likes",
        "cli/batch/command.py",
        "line {line}: {to_single_line(message)}",
        "line {line}: {message}",
    ),
    Fault(
        "failures beyond the named ones are not counted",
        "cli/batch/command.py",
        "if run.failed_count > len(run.first_failures):",
        "if False:",
    ),
)
