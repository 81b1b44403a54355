"""Faults of drafts from earlier texts: another client's texts, places beside the right ones, texts without bound."""

from __future__ import annotations

from tests.faults.planted import Fault

DRAFTER, PLACES = "cortexmlx/speculation/suffix.py", "cortexmlx/speculation/suffix.py"
TEXTS = "cortexmlx/speculation/suffix.py"

TESTS = ("speculation/test_suffix.py", "speculation/test_places.py", "speculation/test_texts.py")
"""The tests that judge these faults."""

FAULTS = (
    Fault("drafts look at no salt", DRAFTER, "self.texts.client_texts(job.salt)", "self.texts.client_texts(None)"),
    Fault("all clients have one hash", TEXTS, "self.hash_key = new_hash_key()", "self.hash_key = (3, 5)"),
    Fault("a request that shares nothing shares its text", DRAFTER, " and job.request.cache", ""),
    Fault(
        "what shares nothing reads texts",
        DRAFTER,
        "if self._shares_text(job):\n            client_texts",
        "if True:\n            client_texts",
    ),
    Fault(
        "a place is one too far", PLACES, "way] = number << _OFFSET_BITS | offset", "way] = (number << 24) + offset + 1"
    ),
    Fault(
        "places of a range are one too far", PLACES, "+ begin + order[newest_mask]", "+ begin + 1 + order[newest_mask]"
    ),
    Fault("the oldest place comes first", PLACES, "[*places[way - 1 :: -1], *places[: way - 1 : -1]]", "places"),
    Fault("a range writes the oldest places", PLACES, "ranks >= np.repeat(counts, counts) - WAYS", "ranks < WAYS"),
    Fault(
        "tokens with the same hash are the same",
        DRAFTER,
        "    length = 0\n    end =",
        "    length = KEY_TOKENS\n    end =",
    ),
    Fault("any match is the longest", DRAFTER, "            if length > best_length:", "            if length:"),
    Fault(
        "a guess that was wrong is followed", DRAFTER, "        if same_count < count:", "        if same_count < 0:"
    ),
    Fault(
        "an edit is resumed before its break",
        DRAFTER,
        "source.tokens, break_offset, break_offset + RESUME_DISTANCE",
        "source.tokens, KEY_TOKENS, break_offset + RESUME_DISTANCE",
    ),
    Fault("an edit is resumed for ever", DRAFTER, "len(row_tokens) <= row.resumes_until", "len(row_tokens)"),
    Fault("new tokens wait for a long prompt", DRAFTER, "max(remaining, ONE_BY_ONE)", "remaining"),
    Fault("a long prompt is indexed at once", DRAFTER, "begin + max_places)", "begin + 10**6)"),
    Fault(
        "tokens dropped meanwhile are not read",
        DRAFTER,
        "job.keep is not None and count >",
        "job.keep is not None and 0 >",
    ),
    Fault("what a prompt begins with is stored again", TEXTS, "self._walk_tree(0, 0, tokens, 0)", "dict[int, int]()"),
    Fault(
        "a branch's first place is not found",
        TEXTS,
        "self.indexed_end = branch - self.start",
        "self.indexed_end = LONGEST_MATCH + 1",
    ),
    Fault("the text used last goes first", TEXTS, "in self.texts.values() if", "in reversed(self.texts.values()) if"),
    Fault("a client has no bound", TEXTS, "client_texts.size > self._max_client_tokens", "client_texts.size > 10**9"),
    Fault("all clients have no bound", TEXTS, "while self.size > self._max_tokens and", "while False and"),
    Fault("branches outlive their texts", TEXTS, "            del self._branches[text.key]", "            pass"),
    Fault(
        "a text goes before those that branch off it",
        TEXTS,
        "            number = text.parent\n",
        "            break\n",
    ),
)
