"""Faults of the draft model: rows that are cut back wrongly, guesses that others find, tokens that are mixed up."""

from __future__ import annotations

from tests.faults.planted import Fault

ROWS, MODEL = "cortexmlx/speculation/draft_rows.py", "cortexmlx/core/draft_model.py"
CONFIG = "cortexmlx/core/config.py"
VOCABULARY, OPENED = "cortexmlx/core/in_process_model.py", "cortexmlx/core/in_process_model.py"

TESTS = ("speculation/test_draft_rows.py", "core/test_begin.py", "core/test_draft_model.py", "core/test_vocabulary.py")
"""The tests that judge these faults."""

FAULTS = (
    Fault(
        "wrong guesses stay computed",
        ROWS,
        "min(row.num_computed_tokens, num_job_tokens + common_length)",
        "row.num_computed_tokens",
    ),
    Fault(
        "a row is cut back by one token too few",
        ROWS,
        "num_job_tokens + common_length)\n",
        "num_job_tokens + common_length + 1)\n",
    ),
    Fault("a row is cut back to the text before", ROWS, "num_job_tokens + common_length)\n", "num_job_tokens)\n"),
    Fault(
        "the sequence keeps its length",
        ROWS,
        "num_job_tokens + common_length)\n        self.cache.truncate(row.id, row.num_computed_tokens)\n",
        "num_job_tokens + common_length)\n",
    ),
    Fault(
        "wrong guesses stay in the text",
        ROWS,
        "row.tokens[num_job_tokens:] = new_tokens + (",
        "row.tokens[num_job_tokens:] = guessed_tokens[:1] + (",
    ),
    Fault("the flush comes before the cut", ROWS, "        flush = self._window.close()\n", "        flush = None\n"),
    Fault("rows of the same beginning do not wait", ROWS, "if key in computing_keys:", "if key in ():"),
    Fault("all clients share", ROWS, "salt=job.salt)", "salt=None)"),
    Fault(
        "guesses are those of the text before",
        ROWS,
        "row.tokens[len(job.tokens) :][:count]",
        "row.tokens[len(job.tokens) - 1 :][:count]",
    ),
    Fault("dropped tokens go unnoticed", ROWS, "draft_row.drops != job.drops:\n", "False:\n"),
    Fault("unknown tokens are followed", ROWS, "max(new_tokens) >= self._vocabulary or", "max(new_tokens) < 0 or"),
    Fault("rows are never given up", MODEL, "        self.rows.end_job(job.id)\n", "        pass\n"),
    Fault(
        "a refusal is not noticed",
        MODEL,
        "        if refusal is not None:\n            self._pause_after_refusal(refusal)\n            return False\n",
        "",
    ),
    Fault(
        "the arena stays when memory is short",
        MODEL,
        "        self._release_arena()\n        self.runner.trim()\n",
        "        self.runner.trim()\n",
    ),
    Fault("a pause has no end", MODEL, "now + self._pause\n", "now + math.inf\n"),
    Fault("books that are half changed stay", MODEL, "        self.reset()\n", "        pass\n"),
    Fault("rows share whatever is asked", MODEL, "vocabulary, self._share_prefixes)", "vocabulary, True)"),
    Fault(
        "a draft model that is of no use is loaded",
        CONFIG,
        "self.speculate and not self.reproducible else",
        "True else",
    ),
    Fault("other pieces are accepted", VOCABULARY, "if model_table.pieces[i] != draft_table.pieces[i]]", "if False]"),
    Fault(
        "other ends are accepted",
        VOCABULARY,
        '        ("end an answer", model_table.end_ids, draft_table.end_ids),\n',
        "",
    ),
    Fault(
        "the draft model's arena has no bound",
        OPENED,
        "            memory -= draft.limit_to_draft_share(memory, mode.groups, max_row_tokens)\n",
        "            memory -= 0\n",
    ),
)
