"""Faults of what a new user meets: launched agents, saved chats, long pastes, answers in a loop, and failed lines."""

from __future__ import annotations

from tests.faults.planted import Fault

LAUNCH, CHATS = "cli/launch.py", "cli/chats/saved_chats.py"
INPUT, SAMPLING, BATCH = "cli/chat/input.py", "cli/chat/sampling.py", "cli/batch/run.py"
TESTS = ("cli/chat/test_sampling.py", "cli/batch", "cli/chats", "cli/chat/test_talk_pasted.py", "cli/test_launch.py")

FAULTS = (
    Fault("an agent keeps the key of another service", LAUNCH, 'removed=("ANTHROPIC_API_KEY",)', "removed=()"),
    Fault("the server's log is on the agent's screen", LAUNCH, "if log else sys", "if False else sys"),
    Fault("a proxy reads along", LAUNCH, '(kept.get(name), "127.0.0.1")', "(kept.get(name),)"),
    Fault("an agent compacts too late", LAUNCH, '("CLAUDE_CODE_AUTO_COMPACT_WINDOW", context)', '("", 0)'),
    Fault("an agent that fails has succeeded", LAUNCH, "return code if code >= 0", "return 0 if code >= 0"),
    Fault("an agent that is killed has no code", LAUNCH, "else 128 - code", "else code"),
    Fault("whatever listens there is ours", LAUNCH, 'if each["owned_by"] == "cortexmlx"', "if True"),
    Fault("codex gets the key as an argument", LAUNCH, 'env_key": KEY_VARIABLE', 'bearer_token": server.key'),
    Fault("the newest of several chats is meant", CHATS, "by_words=by_words)) == 1:", "by_words=by_words)) >= 1:"),
    Fault("one of the words is enough", CHATS, "if all(word in", "if any(word in"),
    Fault("a word deletes a chat", "cli/chats/command.py", "by_words=not delete", "by_words=True"),
    Fault("a second paste takes the place of the first", INPUT, "len(self._texts) + 1", "1"),
    Fault("quotes in a paste begin a block", INPUT, "if begins_with_paste else", "if False else"),
    Fault("what the model has ended is a loop", SAMPLING, "if is_open and ends_in_loop", "if ends_in_loop"),
    Fault("the same penalty is advised", SAMPLING, "repetition_penalty + 0.05", "repetition_penalty"),
    Fault("the first to fail are named, not the first lines", BATCH, "sorted(failures)[", "failures["),
)
