"""The tools of `/v1/responses`: namespaces and custom tools become plain functions for the model, and calls are mapped
back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import prefix_error_field, require_type
from cortexmlx.protocols.history import pick_known_fields, sanitize_tool
from cortexmlx.protocols.request import Body
from cortexmlx.structured.tools import CHOICES, MAX_TOOLS, Tool

IGNORED_TOOL_TYPES = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""The types of tools that the API's own server runs, or that its models were trained on. Agents send them always, so
they are left out instead of refused, unless `tool_choice` forces one.
"""

MAX_NAME_LENGTH = 64
"""Characters of the name that a function of a group gets, at most."""

INPUT_ARGUMENT = "input"
"""The only argument of a custom tool."""

_IGNORED_FIELDS = ("allowed_callers", "async", "defer_loading", "output_schema")
_FUNCTION_FIELDS = ("type", "name", "description", "parameters", "strict", *_IGNORED_FIELDS)
_CUSTOM_FIELDS = ("type", "name", "description", "format", *_IGNORED_FIELDS)
_NAMESPACE_FIELDS = ("type", "name", "description", "tools", *_IGNORED_FIELDS)


@dataclass(frozen=True)
class ClientTool:
    """A tool as the client names it: its name, its namespace, and whether it is a custom tool."""

    name: str
    namespace: str | None = None
    """The group of the tool."""
    custom: bool = False
    """Whether it takes a text, not arguments."""


@dataclass(frozen=True)
class OfferedTools:
    """The tools that the model is offered, as functions, each with the name that the client gave it."""

    tools: tuple[Tool, ...] = ()
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict)
    """By function name."""
    reply_tools: tuple[Body, ...] = ()
    """The tools as the reply lists them."""
    notes: tuple[str, ...] = ()
    """What of them is not enforced."""

    def client_tool(self, name: str) -> ClientTool:
        """Return the client's tool for the name of a function that the model called."""
        return self.client_tools.get(name) or ClientTool(name)

    def function_name(self, namespace: str | None, name: str) -> str:
        """Return the function name by which the model knows a client's tool, also one that is no longer offered."""
        function_name = self._function_names.get((namespace, name))
        return function_name or (name if namespace is None else _qualified_name(namespace, name))

    @cached_property
    def _function_names(self) -> dict[tuple[str | None, str], str]:
        """The function name of each tool, by the client's namespace and name."""
        return {(callee.namespace, callee.name): function_name for function_name, callee in self.client_tools.items()}


def read_offered_tools(fields: Mapping[str, Any]) -> tuple[OfferedTools, dict[str, Any]]:
    """Return the offered tools and sampling parameters of `tools` and `tool_choice`. Raises InvalidRequest."""
    tool_list = require_type("tools", fields.get("tools", []), list, "a list of tools")
    entries = list(_tool_entries(tool_list))
    top_level_names = {entry.client_tool.name for entry in entries if entry.client_tool.namespace is None}
    entries_by_name: dict[str, _ToolEntry] = {}
    for entry in entries:
        name = entry.client_tool.name
        if entry.client_tool.namespace is not None:
            name = _qualified_name(entry.client_tool.namespace, name)
            if name in entries_by_name or name in top_level_names:
                name = _qualified_name(entry.client_tool.namespace, entry.client_tool.name, shorten=True)
        with prefix_error_field(entry.path):
            if name in entries_by_name:
                raise InvalidRequest(f"two tools are called {name!r:.80}", field="name")
            entries_by_name[name] = entry
    choice = fields.get("tool_choice", "auto")
    with prefix_error_field("tool_choice"):
        choice, allowed_names = _read_tool_choice(
            choice, {name: entry.client_tool for name, entry in entries_by_name.items()}
        )
    if allowed_names is not None:
        entries_by_name = {name: entry for name, entry in entries_by_name.items() if name in allowed_names}
    values: dict[str, Any] = {}
    if "tools" in fields:
        values["tools"] = [_build_tool(entry, name) for name, entry in entries_by_name.items()]
    if "tool_choice" in fields:
        values["tool_choice"] = choice
    if "parallel_tool_calls" in fields:
        values["parallel_tool_calls"] = fields["parallel_tool_calls"]
    offered_tools = OfferedTools(
        tuple(values.get("tools", ())),
        {name: entry.client_tool for name, entry in entries_by_name.items()},
        tuple(_reply_tools(entries_by_name.values())),
        tuple(note for entry in entries_by_name.values() for note in entry.notes()),
    )
    return offered_tools, values


@dataclass(frozen=True)
class _ToolEntry:
    """One tool of a body's `tools`, with its JSON path. `group` is the namespace that contains it."""

    path: str
    fields: Mapping[str, Any]
    client_tool: ClientTool
    group: Mapping[str, Any] | None = None

    def notes(self) -> Iterator[str]:
        """Yield a note if the tool has a grammar, which is not enforced."""
        if self.client_tool.custom and _custom_grammar(self.fields):
            yield f"the grammar of the custom tool {self.client_tool.name!r:.80} is told to the model, but not enforced"


def _tool_entries(tool_list: Sequence[Any]) -> Iterator[_ToolEntry]:
    """Yield the functions and custom tools of a list, also those inside namespaces. Raises InvalidRequest."""
    count = 0
    for index, tool in enumerate(tool_list):
        path = f"tools[{index}]"
        with prefix_error_field(path):
            fields = _tool_fields(tool)
            inner_tools = [(path, fields)]
            if fields.get("type") == "namespace":
                fields = pick_known_fields(fields, _NAMESPACE_FIELDS, "a group of tools", _NAMESPACE_FIELDS[1:4])
                require_type("name", fields.get("name"), str, "a text")
                group = require_type("tools", fields.get("tools", []), list, "a list of tools")
                inner_tools = [(f"{path}.tools[{number}]", _tool_fields(each)) for number, each in enumerate(group)]
        for inner_path, each in inner_tools:
            entry = _read_entry(inner_path, each, fields if inner_path != path else None)
            count += entry is not None
            if count > MAX_TOOLS:
                raise InvalidRequest(f"there are more than {MAX_TOOLS} tools", field="tools")
            if entry is not None:
                yield entry


def _read_entry(path: str, fields: Mapping[str, Any], group: Mapping[str, Any] | None) -> _ToolEntry | None:
    """Return one tool of the body, or None if its type is ignored. `group` is its namespace. Raises InvalidRequest."""
    with prefix_error_field(path):
        kind = fields.get("type")
        if kind in ("function", "custom"):
            parts = _FUNCTION_FIELDS if kind == "function" else _CUSTOM_FIELDS
            fields = pick_known_fields(fields, parts, f"a tool of type {kind!r}", parts[1:5])
            name = require_type("name", fields.get("name"), str, "a text")
            return _ToolEntry(
                path, fields, ClientTool(name, None if group is None else group["name"], kind == "custom"), group
            )
        if isinstance(kind, str) and kind in IGNORED_TOOL_TYPES and group is None:
            return None
        raise InvalidRequest(
            f"a tool has the type {kind!r:.80}, but must be a function, a custom tool, or a namespace of these",
            field="type",
        )


def _tool_fields(tool: object) -> dict[str, Any]:
    """Return a tool's fields that are not null, with sanitized descriptions and examples. Raises InvalidRequest."""
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"a tool is {tool!r:.80}, but must be an object with a `type`")
    return {name: sanitize_tool({name: part})[name] for name, part in tool.items() if part is not None}


def _build_tool(entry: _ToolEntry, name: str) -> Tool:
    """Return the function, called `name`, that the model is offered for a client's tool."""
    fields = entry.fields
    with prefix_error_field(entry.path):
        description = require_type("description", fields.get("description", ""), str, "a text")
        parameters = fields.get("parameters")
        if entry.client_tool.custom:
            if definition := _custom_grammar(fields):
                description = f"{description}\n\nThe input must follow this grammar:\n{definition}".strip()
            parameters = {
                "properties": {INPUT_ARGUMENT: {"type": "string"}},
                "required": [INPUT_ARGUMENT],
                "additionalProperties": False,
            }
        try:
            return Tool.named(name, description, parameters, fields.get("strict", False))
        except InvalidRequest as error:
            error.field = None
            raise


def _custom_grammar(fields: Mapping[str, Any]) -> str:
    """Return the grammar of a custom tool's input; empty if any text will do. Raises InvalidRequest."""
    form = require_type("format", fields.get("format", {"type": "text"}), dict, "an object")
    if form.get("type") == "text":
        return ""
    with prefix_error_field("format"):
        if form.get("type") != "grammar":
            raise InvalidRequest(f"type is {form.get('type')!r:.80}, but must be text or grammar", field="type")
        return require_type("definition", form.get("definition"), str, "a text")


def _reply_tools(entries: Any) -> Iterator[Body]:
    """Yield the tools as a reply lists them: each namespace with those of its tools that were offered."""
    groups: dict[int, Body] = {}
    for entry in entries:
        fields = entry.fields
        tool_body: Body = {"type": fields["type"], "name": fields["name"], "description": fields.get("description")}
        if entry.client_tool.custom:
            form = fields.get("format", {"type": "text"})
            tool_body["format"] = {name: part for name, part in form.items() if isinstance(part, str)}
        else:
            tool_body |= {"parameters": fields.get("parameters"), "strict": fields.get("strict", False)}
        if entry.group is None:
            yield tool_body
        elif id(entry.group) in groups:
            groups[id(entry.group)]["tools"].append(tool_body)
        else:
            group = entry.group
            description = group.get("description") or ""
            group_body = {"type": "namespace", "name": group["name"], "description": description, "tools": [tool_body]}
            groups[id(group)] = group_body
            yield group_body


def _read_tool_choice(choice: Any, callees: Mapping[str, ClientTool]) -> tuple[Any, frozenset[str] | None]:
    """Return a `tool_choice`'s mode or forced function, and the names of the allowed functions (None: all)."""
    if not isinstance(choice, Mapping):
        is_tool_name = isinstance(choice, str) and choice not in CHOICES
        return (_find_function_name({"name": choice}, callees) if is_tool_name else choice), None
    kind = choice.get("type")
    if kind != "allowed_tools":
        return _find_function_name(choice, callees), None
    mode = choice.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"mode is {mode!r:.80}, but must be auto or required", field="mode")
    allowed_names = set()
    for index, each in enumerate(require_type("tools", choice.get("tools"), list, "a list of tools")):
        with prefix_error_field(f"tools[{index}]"):
            tool = _tool_fields(each)
            tool_type = tool.get("type")
            if isinstance(tool_type, str) and tool_type in IGNORED_TOOL_TYPES:
                continue
            if tool.get("type") == "namespace":
                allowed_names |= {name for name, callee in callees.items() if callee.namespace == tool.get("name")}
            else:
                allowed_names.add(_find_function_name(tool, callees))
    return mode, frozenset(allowed_names)


def reply_tool_choice(choice: Any) -> Any:
    """Return a checked `tool_choice` as a reply repeats it, without fields that have no effect here."""
    if not isinstance(choice, Mapping):
        return choice or "auto"
    reply_choice: Body = {name: part for name, part in choice.items() if isinstance(part, str)}
    if choice.get("type") == "allowed_tools":
        reply_choice["tools"] = [reply_tool_choice(tool) for tool in choice["tools"]]
    return reply_choice


def _find_function_name(choice: Mapping[str, Any], callees: Mapping[str, ClientTool]) -> str:
    """Return the function name of the tool that a `tool_choice` names. Raises InvalidRequest unless one tool fits."""
    kind, name = choice.get("type", "function"), choice.get("name")
    if isinstance(kind, str) and kind in IGNORED_TOOL_TYPES:
        raise InvalidRequest(
            f"it forces a tool of type {kind!r}, which is not served: only functions and custom tools are"
        )
    if kind not in ("function", "custom") or not isinstance(name, str):
        example = '{"type": "function", "name": ...}'
        raise InvalidRequest(f"it is {dict(choice)!r:.80}, but must be auto, none, required or {example}")
    matches = [
        function_name
        for function_name, callee in callees.items()
        if callee.name == name and choice.get("namespace") in (None, callee.namespace)
    ]
    top_level = [known for known in matches if callees[known].namespace is None]
    if len(top_level or matches) != 1:
        reason = "there is no such tool" if not matches else f"{len(matches)} groups have one: name the `namespace`"
        raise InvalidRequest(f"it names {name!r:.80}, but {reason}")
    return (top_level or matches)[0]


def _qualified_name(namespace: str, name: str, shorten: bool = False) -> str:
    """Return one function name for a tool of a namespace; if it is too long or `shorten`, it ends with a hash. It is
    the same in every turn, since the model sees its earlier calls.
    """
    full_name = namespace + name if namespace.endswith("_") else f"{namespace}__{name}"
    if len(full_name) <= MAX_NAME_LENGTH and not shorten:
        return full_name
    hash_suffix = hashlib.sha256(f"{len(namespace)} {namespace}{name}".encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{full_name[: MAX_NAME_LENGTH - 9]}_{hash_suffix}"
