"""Faults of tools: calls that no schema allows, text that is lost, pieces that do not make the whole."""

from __future__ import annotations

from tests.faults.planted import Fault

FORMAT, READER = "cortexmlx/structured/calls/format.py", "cortexmlx/structured/calls/reader.py"
FITTING = "cortexmlx/models/tokenizers/fitting.py"
ROUNDS, DISPLAY = "cortexmlx/sessions/tool_rounds.py", "cli/chat/talk.py"
STREAM, TAGGED = "cortexmlx/core/text.py", "cortexmlx/structured/calls/tagged.py"
LITERALS = "cortexmlx/structured/calls/literals.py"

TESTS = (
    "structured",
    "structured/calls",
    "structured/test_lark.py",
    "core/text/test_stream.py",
    "structured/test_compiler.py",
    "protocols/openai/test_parameters.py",
    "engine/test_tools.py",
    "models/tokenizers/test_fitting.py",
    "sessions/test_tool_rounds.py",
    "cli/chat/tools",
    "cli/chat/test_talk_tools.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault("other tools than the chosen one", FORMAT, 'self.choice in ("auto", "required", tool.name)', "True"),
    Fault("a required call is not required", FORMAT, 'return self.choice not in ("auto", "none")', "return False"),
    Fault("several calls where one is allowed", FORMAT, "self.parallel and calls.allows_several", "self.parallel"),
    Fault("text may hold the trigger", FORMAT, "lark.text_without(self.trigger, thoughts_tag)", "'/' + lark.ANY + '/'"),
    Fault("arguments have names that the schema does not have", FORMAT, "schema.keys().isdisjoint(_COMPOSED)", "False"),
    Fault("strict tools are lenient", FORMAT, "    if not strict:\n", "    if True:\n"),
    Fault("all calls have one id", FORMAT, "        number += 1\n", "        number += 0\n"),
    Fault(
        "what is no call is lost",
        READER,
        'self._add_text("".join(self._pending_pieces) + (self._consume_rest() if is_truncated else ""))',
        "pass",
    ),
    Fault("a cut call that was told is text, too", READER, "not (is_truncated and self.streaming)", "True"),
    Fault("a call that does not fit has no note", FORMAT, "self.notes += filter(", "_ = filter("),
    Fault(
        "Gemma's strings of JSON are words", LITERALS, "            JSON_STRING,\n            word", "            word"
    ),
    Fault("one unknown call hides those after it", READER, "                self.in_section = True\n", ""),
    Fault(
        "an escaped quote ends a text",
        READER,
        'in_string, is_escaped = char != \'"\', char == "\\\\"',
        "in_string = char != '\"'",
    ),
    Fault(
        "brackets in texts count",
        READER,
        "                elif in_string:\n",
        "                elif in_string and char == '\"':\n",
    ),
    Fault("broken arguments are a call", READER, "if not isinstance(values, dict):", "if False:"),
    Fault("not a number is JSON", READER, "parse_constant=_reject_constant", "parse_constant=float"),
    Fault(
        "a half tag is told as text",
        READER,
        "end = len(self._buffer) if match is None else match.start()\n            if end > self._position + num_clear:",
        "end = len(self._buffer)\n            if end > self._position + num_clear:",
    ),
    Fault(
        "blanks before a call stay",
        READER,
        "self._add_text(strip_blanks(self._buffer[self._position : match.start()]), consume=True)",
        "self._add_text(self._buffer[self._position : match.start()], consume=True)",
    ),
    Fault(
        "pieces come late",
        READER,
        "            if self.streaming:\n                self.deltas",
        "            if False:\n                self.deltas",
    ),
    Fault(
        "stop strings end calls",
        STREAM,
        "        if self._calls is not None:\n",
        "        if self._in_answer is not None:\n            new = self._cut_at_stop(self._in_answer, new, final)\n"
        "        if self._calls is not None:\n",
    ),
    Fault(
        "the end of an answer ends no call",
        STREAM,
        "                rest, rest_calls = self._calls.finish()\n",
        '                rest, rest_calls = "", ()\n',
    ),
    Fault("an answer with calls just stops", "cortexmlx/core/answers.py", "reason = FinishReason.TOOL_CALLS", "pass"),
    Fault(
        "the grammars of all tools are one",
        "cortexmlx/structured/compiler.py",
        "key = output, thoughts, calls",
        "key = output, thoughts, None",
    ),
    Fault("raw texts are JSON", TAGGED, "add_arguments(escape_json(piece))", "add_arguments(piece)"),
    Fault(
        "every text is a number if it can be",
        "cortexmlx/structured/calls/argument.py",
        'return "string" in self.types and not self.listed_values',
        'return self.value_types == {"string"}',
    ),
    Fault(
        "a text without quotes is a number",
        "cortexmlx/structured/calls/argument.py",
        "return to_json_text(raw_text)\n        return literal",
        "return literal\n        return literal",
    ),
    Fault(
        "calls in thoughts run though text follows",
        STREAM,
        "if closed or text.strip() else certain",
        "if closed else certain",
    ),
    Fault("thoughts must be closed", "cortexmlx/structured/compiler.py", "and not calls.is_required:", "and False:"),
    Fault(
        "thoughts end in the final channel only",
        "cortexmlx/structured/calls/json_formats.py",
        'close=f"{END}{START}", skip_text=""',
        'skip_text=""',
    ),
    Fault(
        "a later call of Llama is text",
        "cortexmlx/structured/calls/json_formats.py",
        '                sign = yield from reader.peek_one_of(";")\n',
        '                sign = ""\n',
    ),
    Fault(
        "the template is told of no tools",
        "cortexmlx/core/prompt.py",
        "[tool.as_mapping() for tool in calls.tools]",
        "[]",
    ),
    Fault(
        "chunks have no calls",
        "cortexmlx/protocols/openai/chat_completions.py",
        "logprobs, event.tool_calls, ids)",
        "logprobs, (), ids)",
    ),
    Fault(
        "calls of responses are lost",
        "cortexmlx/protocols/responses/reply.py",
        "*_call_items(answer, details, info),",
        "*_call_items(answer, details, info)[:1],",
    ),
    Fault(
        "a conversation forgets calls",
        "cortexmlx/sessions/turn.py",
        "} if answer.tool_calls else {}",
        "} if answer.others else {}",
    ),
    Fault(
        "calls run that were not allowed",
        ROUNDS,
        "result = call_function(self._find_function(call), call.arguments) if is_allowed",
        "result = call_function(self._find_function(call), call.arguments) if True",
    ),
    Fault("rounds have no end", ROUNDS, '"auto" if self._rounds_left and', '"auto" if'),
    Fault("a call is required in every round", ROUNDS, "tool_choice=choice)", "tool_choice=self.params.tool_choice)"),
    Fault(
        "a turn that failed stays",
        "cortexmlx/sessions/conversation.py",
        "self._messages, self._transcript, self._finished_turn, self.unsent = previous_state",
        "pass",
    ),
    Fault(
        "a reminder ends a loop",
        FITTING,
        'if _has_role(new_messages[-1], "user", "tool") and',
        'if _has_role(new_messages[-1], "user") and',
    ),
    Fault("a late refusal changes early turns", FITTING, "dict.fromkeys((turns[last], 0))", "(0,)"),
    Fault("two calls of Kimi have one id", FITTING, ".isdecimal()) or id in used_ids:", ".isdecimal()):"),
    Fault("a template loses messages in silence", FITTING, "if index < 0 else", "if False else"),
    Fault("undo takes the last round only", "cortexmlx/sessions/turn.py", " and not calls:", ":"),
    Fault("calls run unasked", DISPLAY, "if not self._ask_first or call.name in self._allowed_functions:", "if True:"),
    Fault(
        "one consent is for all functions", DISPLAY, "self._allowed_functions.add(call.name)", "self._ask_first = False"
    ),
    Fault(
        "a call hides characters", DISPLAY, "char if strip_controls(char) == char else json.dumps(char)[1:-1]", "char"
    ),
    Fault("private functions are tools", "cli/chat/tools/functions_file.py", ' and not name.startswith("_")', ""),
    Fault("unknown arguments are dropped", "cortexmlx/structured/functions.py", 'extra="forbid"', 'extra="ignore"'),
)
