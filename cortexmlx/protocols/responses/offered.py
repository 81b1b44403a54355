"""The tools of a response. Models know functions only: groups and custom tools become functions, and the calls are
named back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import checked, inside
from cortexmlx.protocols.history import known_fields, mend_tool
from cortexmlx.protocols.request import Body
from cortexmlx.structured.tools import CHOICES, MOST_TOOLS, Tool

LEFT_OUT = frozenset(
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

LONGEST_NAME = 64
"""Characters of the name that a function of a group gets, at most."""

INPUT = "input"
"""The only argument of a custom tool."""

_HINTS = ("allowed_callers", "async", "defer_loading", "output_schema")
_FUNCTION = ("type", "name", "description", "parameters", "strict", *_HINTS)
_CUSTOM = ("type", "name", "description", "format", *_HINTS)
_NAMESPACE = ("type", "name", "description", "tools", *_HINTS)


@dataclass(frozen=True)
class Callee:
    """What the client calls a tool."""

    name: str
    namespace: str | None = None
    """The group of the tool."""
    custom: bool = False
    """Whether it takes a text, not arguments."""


@dataclass(frozen=True)
class Offered:
    """The tools that the model is offered."""

    tools: tuple[Tool, ...] = ()
    callees: Mapping[str, Callee] = field(default_factory=dict)
    """By the name that the model knows."""
    shown: tuple[Body, ...] = ()
    """The tools as the reply lists them."""
    notes: tuple[str, ...] = ()
    """What of them is not enforced."""

    def callee(self, name: str) -> Callee:
        """Return what the client calls a tool."""
        return self.callees.get(name) or Callee(name)

    def known_as(self, namespace: str | None, name: str) -> str:
        """Return what the model calls a tool, also one that is offered no more."""
        known = self._known.get((namespace, name))
        return known or (name if namespace is None else _joined(namespace, name))

    @cached_property
    def _known(self) -> dict[tuple[str | None, str], str]:
        return {(callee.namespace, callee.name): known for known, callee in self.callees.items()}


def offered_tools(said: Mapping[str, Any]) -> tuple[Offered, dict[str, Any]]:
    """Return the tools of a body, and the sampling parameters that it sets with them. Raises InvalidRequest."""
    listed = checked("tools", said.get("tools", []), list, "a list of tools")
    entries = list(_entries(listed))
    own = {entry.callee.name for entry in entries if entry.callee.namespace is None}
    known: dict[str, _Entry] = {}
    for entry in entries:
        name = entry.callee.name
        if entry.callee.namespace is not None:
            name = _joined(entry.callee.namespace, name)
            if name in known or name in own:
                name = _joined(entry.callee.namespace, entry.callee.name, short=True)
        with inside(entry.path):
            if name in known:
                raise InvalidRequest(f"two tools are called {name!r:.80}", field="name")
            known[name] = entry
    choice = said.get("tool_choice", "auto")
    with inside("tool_choice"):
        choice, allowed = _choice(choice, {name: entry.callee for name, entry in known.items()})
    if allowed is not None:
        known = {name: entry for name, entry in known.items() if name in allowed}
    values: dict[str, Any] = {}
    if "tools" in said:
        values["tools"] = [_tool(entry, name) for name, entry in known.items()]
    if "tool_choice" in said:
        values["tool_choice"] = choice
    if "parallel_tool_calls" in said:
        values["parallel_tool_calls"] = said["parallel_tool_calls"]
    offered = Offered(
        tuple(values.get("tools", ())),
        {name: entry.callee for name, entry in known.items()},
        tuple(_shown(known.values())),
        tuple(note for entry in known.values() for note in entry.notes()),
    )
    return offered, values


@dataclass(frozen=True)
class _Entry:
    """A tool in a body, with its path there. `group` is the one that it is in."""

    path: str
    said: Mapping[str, Any]
    callee: Callee
    group: Mapping[str, Any] | None = None

    def notes(self) -> Iterator[str]:
        if self.callee.custom and _grammar(self.said):
            yield f"the grammar of the custom tool {self.callee.name!r:.80} is told to the model, but not enforced"


def _entries(listed: Sequence[Any]) -> Iterator[_Entry]:
    """Yield the functions and custom tools of a list, those of groups, too."""
    count = 0
    for place, tool in enumerate(listed):
        path = f"tools[{place}]"
        with inside(path):
            said = _plain(tool)
            inner = [(path, said)]
            if said.get("type") == "namespace":
                said = known_fields(said, _NAMESPACE, "a group of tools", _NAMESPACE[1:4])
                checked("name", said.get("name"), str, "a text")
                group = checked("tools", said.get("tools", []), list, "a list of tools")
                inner = [(f"{path}.tools[{number}]", _plain(each)) for number, each in enumerate(group)]
        for inner_path, each in inner:
            entry = _entry(inner_path, each, said if inner_path != path else None)
            count += entry is not None
            if count > MOST_TOOLS:
                raise InvalidRequest(f"there are more than {MOST_TOOLS} tools", field="tools")
            if entry is not None:
                yield entry


def _entry(path: str, said: Mapping[str, Any], group: Mapping[str, Any] | None) -> _Entry | None:
    """Return a tool, or None if it is left out."""
    with inside(path):
        kind = said.get("type")
        if kind in ("function", "custom"):
            parts = _FUNCTION if kind == "function" else _CUSTOM
            said = known_fields(said, parts, f"a tool of type {kind!r}", parts[1:5])
            name = checked("name", said.get("name"), str, "a text")
            return _Entry(path, said, Callee(name, None if group is None else group["name"], kind == "custom"), group)
        if isinstance(kind, str) and kind in LEFT_OUT and group is None:
            return None
        raise InvalidRequest(
            f"a tool has the type {kind!r:.80}, but must be a function, a custom tool, or a namespace of these",
            field="type",
        )


def _plain(tool: object) -> dict[str, Any]:
    """Return the parts of a tool that are not null."""
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"a tool is {tool!r:.80}, but must be an object with a `type`")
    return {name: mend_tool({name: part})[name] for name, part in tool.items() if part is not None}


def _tool(entry: _Entry, name: str) -> Tool:
    """Return the function that the model is offered for a tool."""
    said = entry.said
    with inside(entry.path):
        description = checked("description", said.get("description", ""), str, "a text")
        parameters = said.get("parameters")
        if entry.callee.custom:
            if definition := _grammar(said):
                description = f"{description}\n\nThe input must follow this grammar:\n{definition}".strip()
            parameters = {"properties": {INPUT: {"type": "string"}}, "required": [INPUT], "additionalProperties": False}
        try:
            return Tool.named(name, description, parameters, said.get("strict", False))
        except InvalidRequest as error:
            error.field = None
            raise


def _grammar(said: Mapping[str, Any]) -> str:
    """Return the grammar of a custom tool's text; empty if any text will do. Raises InvalidRequest."""
    form = checked("format", said.get("format", {"type": "text"}), dict, "an object")
    if form.get("type") == "text":
        return ""
    with inside("format"):
        if form.get("type") != "grammar":
            raise InvalidRequest(f"type is {form.get('type')!r:.80}, but must be text or grammar", field="type")
        return checked("definition", form.get("definition"), str, "a text")


def _shown(entries: Any) -> Iterator[Body]:
    """Yield the tools as a reply lists them: groups with the tools that were offered."""
    groups: dict[int, Body] = {}
    for entry in entries:
        said = entry.said
        shown: Body = {"type": said["type"], "name": said["name"], "description": said.get("description")}
        if entry.callee.custom:
            form = said.get("format", {"type": "text"})
            shown["format"] = {name: part for name, part in form.items() if isinstance(part, str)}
        else:
            shown |= {"parameters": said.get("parameters"), "strict": said.get("strict", False)}
        if entry.group is None:
            yield shown
        elif id(entry.group) in groups:
            groups[id(entry.group)]["tools"].append(shown)
        else:
            group = entry.group
            description = group.get("description") or ""
            own = {"type": "namespace", "name": group["name"], "description": description, "tools": [shown]}
            groups[id(group)] = own
            yield own


def _choice(choice: Any, callees: Mapping[str, Callee]) -> tuple[Any, frozenset[str] | None]:
    """Return a `tool_choice` with the model's name of the tool that it forces, and which tools it allows; None: all."""
    if not isinstance(choice, Mapping):
        named = isinstance(choice, str) and choice not in CHOICES
        return (_named({"name": choice}, callees) if named else choice), None
    kind = choice.get("type")
    if kind != "allowed_tools":
        return _named(choice, callees), None
    mode = choice.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"mode is {mode!r:.80}, but must be auto or required", field="mode")
    allowed = set()
    for place, each in enumerate(checked("tools", choice.get("tools"), list, "a list of tools")):
        with inside(f"tools[{place}]"):
            tool = _plain(each)
            own = tool.get("type")
            if isinstance(own, str) and own in LEFT_OUT:
                continue
            if tool.get("type") == "namespace":
                allowed |= {name for name, callee in callees.items() if callee.namespace == tool.get("name")}
            else:
                allowed.add(_named(tool, callees))
    return mode, frozenset(allowed)


def shown_choice(choice: Any) -> Any:
    """Return a `tool_choice` that was read as a reply repeats it: without parts that nothing knows."""
    if not isinstance(choice, Mapping):
        return choice or "auto"
    shown: Body = {name: part for name, part in choice.items() if isinstance(part, str)}
    if choice.get("type") == "allowed_tools":
        shown["tools"] = [shown_choice(tool) for tool in choice["tools"]]
    return shown


def _named(choice: Mapping[str, Any], callees: Mapping[str, Callee]) -> str:
    """Return the model's name of the tool that a choice names."""
    kind, name = choice.get("type", "function"), choice.get("name")
    if isinstance(kind, str) and kind in LEFT_OUT:
        raise InvalidRequest(
            f"it forces a tool of type {kind!r}, which is not served: only functions and custom tools are"
        )
    if kind not in ("function", "custom") or not isinstance(name, str):
        example = '{"type": "function", "name": ...}'
        raise InvalidRequest(f"it is {dict(choice)!r:.80}, but must be auto, none, required or {example}")
    found = [
        known
        for known, callee in callees.items()
        if callee.name == name and choice.get("namespace") in (None, callee.namespace)
    ]
    own = [known for known in found if callees[known].namespace is None]
    if len(own or found) != 1:
        why = "there is no such tool" if not found else f"{len(found)} groups have one: name the `namespace`"
        raise InvalidRequest(f"it names {name!r:.80}, but {why}")
    return (own or found)[0]


def _joined(namespace: str, name: str, short: bool = False) -> str:
    """Return one name for a tool of a group. It is the same in every turn, since the model sees its earlier calls."""
    whole = namespace + name if namespace.endswith("_") else f"{namespace}__{name}"
    if len(whole) <= LONGEST_NAME and not short:
        return whole
    mark = hashlib.sha256(f"{len(namespace)} {namespace}{name}".encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{whole[: LONGEST_NAME - 9]}_{mark}"
