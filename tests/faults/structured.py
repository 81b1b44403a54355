"""Faults of structured output: masks for the wrong rows, tokens that are not followed, forms that are not enforced."""

from __future__ import annotations

from tests.faults.planted import Fault

CORE, REQUESTS = "cortexmlx/core/core.py", "cortexmlx/core/open_requests.py"
MATCHER, COMPILER = "cortexmlx/structured/matcher.py", "cortexmlx/structured/compiler.py"
ANSWERS, BUDGET = "cortexmlx/core/answers.py", "cortexmlx/core/text.py"
SOURCES, FORM = "cortexmlx/structured/compiler.py", "cortexmlx/structured/output.py"
CLOSED, BODIES = "cortexmlx/structured/schemas.py", "cortexmlx/protocols/openai/parameters.py"

TESTS = (
    "structured",
    "structured/test_matcher.py",
    "structured/test_compiler.py",
    "structured/test_schemas.py",
    "protocols/openai/test_parameters.py",
    "engine/test_structured.py",
    "core/text/test_budget.py",
    "engine/test_thinking_budget.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault(
        "masks are made before the step before is followed",
        CORE,
        "                    self._collect_due(plan)\n                    if to_choose is not None:\n"
        "                        self._choose_tokens(to_choose)\n",
        "                    if to_choose is not None:\n                        self._choose_tokens(to_choose)\n"
        "                    self._collect_due(plan)\n",
    ),
    Fault(
        "a mask for the row beside",
        REQUESTS,
        "            rows += row_indices[: len(answer_masks)]\n",
        "            rows += [p and p - 1 for p in row_indices[: len(answer_masks)]]\n",
    ),
    Fault("masks in another order than rows", REQUESTS, "np.stack(allowed_masks)", "np.stack(allowed_masks[::-1])"),
    Fault(
        "tokens are not followed", REQUESTS, "is not None and answer.matcher.accept(token):", "is not None and False:"
    ),
    Fault(
        "any end of an answer will do",
        REQUESTS,
        "and answer.matcher.accept(token):",
        "and not stop_token and answer.matcher.accept(token):",
    ),
    Fault(
        "a matcher's copy that fails allows the end",
        MATCHER,
        "            if draft_matcher.is_error():\n",
        "            if False:\n",
    ),
    Fault("an interrupt in the tokenizer is lost", COMPILER, "self._tokenizer_failure.error = error", "pass"),
    Fault(
        "llguidance keeps the vocabulary for ever",
        COMPILER,
        "_TokenizerWrapper(table, encode, self.tokenizer_failure)",
        "_TokenizerWrapper(table, lambda *text, **how: (self, encode(*text, **how))[1], self.tokenizer_failure)",
    ),
    Fault("the trace of a panic is told", MATCHER, 'if error.startswith("panic"):', "if False:"),
    Fault("a complete form does not end its answer", MATCHER, " or bool(self.ll_matcher.is_stopped())", ""),
    Fault(
        "a refused token is no error",
        REQUESTS,
        "        if answer.matcher is not None and answer.matcher.error:\n",
        "        if answer.matcher is None:\n",
    ),
    Fault(
        "answers share one matcher",
        MATCHER,
        "Matcher(self, self._matcher.deep_copy(), forced_tokens)",
        "Matcher(self, self._matcher, forced_tokens)",
    ),
    Fault(
        "a forced run is not followed", MATCHER, "run[1:] if run and run[0] == token and len(run) > 1 else None", "run"
    ),
    Fault("a forced token is one of several", MATCHER, "    mask[:] = 0\n", ""),
    Fault("the last token of a forced run comes first", MATCHER, "_only(row, run[0])", "_only(row, run[-1])"),
    Fault("the first mask is used twice", MATCHER, "        self.is_fresh = False\n", ""),
    Fault(
        "thoughts have no limit",
        ANSWERS,
        "            self.budget.count_token(token)\n",
        "",
    ),
    Fault("tags of thoughts count", BUDGET, "        elif was_inside and inside:\n", "        elif inside:\n"),
    Fault("a half tag is written twice", BUDGET, "self._limit.close[written_chars:]", "self._limit.close"),
    Fault(
        "a special token is forced in halves",
        BUDGET,
        "written_chars >= self._limit.first_token_chars",
        "written_chars > 0",
    ),
    Fault(
        "a special token that is spelled out closes thoughts",
        "cortexmlx/structured/lark.py",
        "{terminal}: {text_without(close_special, not_first)}",
        "{terminal}: /{ANY}/",
    ),
    Fault(
        "an ignored end token is a part of a form",
        "cortexmlx/core/submitter.py",
        "stops.token_ids | eos_token_ids",
        "stops.token_ids",
    ),
    Fault("characters are torn", BUDGET, "not 0 < self._silent <= _MAX_SILENT", "True"),
    Fault(
        "the last free token is one too many", BUDGET, "self._remaining_tokens <= 1)", "self._remaining_tokens <= 0)"
    ),
    Fault(
        "the tag is forced for ever",
        BUDGET,
        "            self._is_over = not self._forced_tokens\n",
        "            pass\n",
    ),
    Fault("drafts count for no row", MATCHER, "        row += 1 + len(drafts)\n", "        row += 1\n"),
    Fault(
        "lenient and strict grammars are one",
        COMPILER,
        "key = output, thoughts, calls",
        "key = output and output.definition, thoughts, calls",
    ),
    Fault("thoughts are not part of what is kept", COMPILER, "key = output, thoughts,", "key = output, None,"),
    Fault(
        "special tokens are text",
        COMPILER,
        "self.special_token_ids = sorted(",
        "self.special_token_ids = [] and sorted(",
    ),
    Fault("a refused schema is ignored", COMPILER, "        if grammar.error:\n", "        if False:\n"),
    Fault("endless blanks", SOURCES, "{0,40})", "*)"),
    Fault(
        "the tag that closes thoughts is a word's end",
        "cortexmlx/structured/lark.py",
        r'''.+*?()|[]{}^$/#&-~"''',
        r'''.+*?()|[]{}^$/#&-~<>"''',
    ),
    Fault("no limit of parser items", MATCHER, "step_max_items=MAX_ITEMS, ", ""),
    Fault(
        "a form that cannot begin is taken",
        MATCHER,
        "            probe_matcher.consume_token(self.first_forced_tokens[0])\n",
        "",
    ),
    Fault("choices are rules", "cortexmlx/structured/lark.py", 'f"{name.upper()}_CHOICE"', 'f"{name}_choice"'),
    Fault("escaped names are other names", SOURCES, "allowed_escapes(schema)) is not None", "None) is not None"),
    Fault(
        "a pattern alone closes an object",
        "cortexmlx/structured/schemas.py",
        'part.get("properties") or part.get("patternProperties")',
        'part.get("properties")',
    ),
    Fault("a dropped space is no part of the grammar", SOURCES, "    if drops_space:\n", "    if False:\n"),
    Fault(
        "objects of types are open",
        "cortexmlx/structured/schemas.py",
        "close_objects(type_adapter(kind).json_schema())",
        "type_adapter(kind).json_schema()",
    ),
    Fault("compact forms have blanks", SOURCES, "        if output.compact:\n", "        if False:\n"),
    Fault("closed forms are open", FORM, "        if closed:\n", "        if False:\n"),
    Fault(
        "alternatives are closed",
        CLOSED,
        "if any(not self._are_disjoint(*pair) for pair in",
        "if any(False for pair in",
    ),
    Fault(
        "parts of allOf are closed",
        CLOSED,
        "if _names_properties(node) or len(naming_groups) > 1:",
        "if _names_properties(node):",
    ),
    Fault(
        "what is required is forbidden",
        CLOSED,
        "all_names = _required_properties(node).union(",
        "all_names = set().union(",
    ),
    Fault(
        "a strict schema is lenient", "cortexmlx/protocols/openai/parameters.py", "lenient=not strict", "lenient=strict"
    ),
    Fault(
        "the types of callers are in plans",
        "cortexmlx/scheduling/job.py",
        '("structured", None), ',
        "",
    ),
)
