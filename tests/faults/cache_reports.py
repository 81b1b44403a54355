"""Faults of cache reports: what was computed again, why, where the texts differ, and who is told."""

from __future__ import annotations

from tests.faults.planted import Fault

HISTORY, ADMISSION = "cortexmlx/core/prompt_history.py", "cortexmlx/scheduling/admission.py"
ANSWERS, GENERATION = "cortexmlx/core/answers.py", "cortexmlx/server/generation.py"
TESTS = ("core/test_prompt_history.py", "engine/test_cache_reports.py", "server/test_cache_why.py")

FAULTS = (
    Fault(
        "all clients have one history",
        HISTORY,
        "client = self._clients.get(request.client)",
        "client = next(iter(self._clients.values()), None)",
    ),
    Fault(
        "the server tells every key of the same client",
        GENERATION,
        "self.history.reports(request.scope.get(SCOPE_CLIENT))",
        "self.history.reports(next(iter(self.history._clients), None))",
    ),
    Fault(
        "each engine of a server keeps its own history",
        GENERATION,
        "        lease.engine.share_history(self.history)\n",
        "",
    ),
    Fault(
        "another adapter's path is taken for this one's",
        HISTORY,
        "[each for each in same_model if each.version == version]",
        "same_model",
    ),
    Fault(
        "tools in another order are other tools",
        HISTORY,
        "if sorted(self.path.tools) == sorted(near.tools):",
        "if self.path.tools == near.tools:",
    ),
    Fault("a change of the text is blamed on the tools", HISTORY, "and not is_inside:", "and True:"),
    Fault("a cut is an edit", HISTORY, "in near.messages[index + 1 :]", "in near.messages[index + 99 :]"),
    Fault("variables are no part of a prompt", HISTORY, "hash(repr(sorted(source.variables.items())))", "0"),
    Fault("the message before is named", HISTORY, "message=index + 1,", "message=index,"),
    Fault(
        "blanks before a text shift the character", HISTORY, "return index, offset - start,", "return index, offset,"
    ),
    Fault("each message is written in its place", HISTORY, "if not start <= offset <= end:", "if False:"),
    Fault("what is left out comes after all else", HISTORY, " or rendered == self.source.text:", ":"),
    Fault("texts begin within a character", HISTORY, "                start -= 1\n", "                pass\n"),
    Fault("an image is an edit", HISTORY, "self.path.tokens[shared]) < 0:", "0) < -1 << 60:"),
    Fault("text beside an image is none", HISTORY, 'message, lambda part: "\\0")', "message)"),
    Fault(
        "only the first run that repeats is counted",
        HISTORY,
        "covered = np.convolve(found, np.ones(_RUN, np.int8)) > 0",
        "covered = found",
    ),
    Fault(
        "the newest path is compared, whatever it has",
        HISTORY,
        "if repeat.tokens >= best.tokens + MIN_RECOMPUTED:",
        "if best is _NO_REPEAT:",
    ),
    Fault(
        "the conversation that changed first is compared, though another one was found",
        HISTORY,
        "key=shared.__getitem__, reverse=True)",
        "key=shared.__getitem__)",
    ),
    Fault("what was found counts as computed again", HISTORY, "covered[skipped:]", "covered"),
    Fault(
        "evicted blocks are blamed on states",
        HISTORY,
        "is_there = in_memory >= draft.known_tokens - MIN_RECOMPUTED",
        "is_there = True",
    ),
    Fault("states are forgotten as a reason", ADMISSION, "job.cached_chain = match.chain", "job.cached_chain = 0"),
    Fault(
        "what was read from disk was in memory",
        ADMISSION,
        "job.loaded = 0 if load is None else",
        "job.loaded = 0 if True else",
    ),
    Fault(
        "a prompt without an answer is known",
        HISTORY,
        "keeps_path = request.cache and answer is not None",
        "keeps_path = request.cache",
    ),
    Fault(
        "a request without the cache is known",
        HISTORY,
        "keeps_path = request.cache and answer is not None",
        "keeps_path = answer is not None",
    ),
    Fault("paths are kept beside those that continue them", HISTORY, "if not _continues(path, each)]", "if True]"),
    Fault(
        "nothing bounds all paths together",
        HISTORY,
        "while self._nbytes > self._max_bytes and self._clients:",
        "while False:",
    ),
    Fault(
        "the client that asked last loses its paths",
        HISTORY,
        "            self._clients.move_to_end(client)\n",
        "            self._clients.move_to_end(client, last=False)\n",
    ),
    Fault(
        "the last tokens of an answer are not known",
        ANSWERS,
        "job.output if is_computed else None",
        "() if is_computed else None",
    ),
)
