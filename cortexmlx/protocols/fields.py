"""The fields of a body: served fields, fields without effect, fields that are refused by name, and those of `peers`.

Any other field is refused, too. It may be misspelt, and an answer without it would answer another question.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols import peers
from cortexmlx.protocols.notes import tell_once
from cortexmlx.types.messages import meant

_MOST_NAMED = 10
_MOST_SHOWN = 100
"""Characters of unknown names that an error repeats."""

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Unserved:
    """A field that would change the answer."""

    why: str
    harmless: tuple[Any, ...] = ()
    """Values that do not change the answer. A field with one of them is accepted."""

    def check(self, name: str, value: Any) -> None:
        """Raise InvalidRequest unless the value is harmless."""
        flag = isinstance(value, bool)
        if not any(isinstance(harmless, bool) is flag and value == harmless for harmless in self.harmless):
            raise InvalidRequest(f"{name!r} is not served: {self.why}", field=name)


@dataclass(frozen=True)
class Fields:
    """The fields that one kind of body has."""

    what: str
    """The kind of body, as errors name it."""
    served: frozenset[str]
    no_effect: frozenset[str]
    unserved: Mapping[str, Unserved]

    def without(self, unserved: Mapping[str, Unserved]) -> Fields:
        """Return a copy that does not serve these fields."""
        return replace(self, served=self.served - unserved.keys(), unserved={**self.unserved, **unserved})

    def given(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the served fields of a body. Null fields are left out: null means the same as a missing field. Raises
        InvalidRequest for the first unserved field, and for all unknown fields together.
        """
        return self.known(self.accepted(body))

    def accepted(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a body that are not null, without the unserved ones. Raises InvalidRequest for the first
        unserved field whose value is not harmless.
        """
        said = {name: value for name, value in body.items() if value is not None}
        for name in sorted(said.keys() & self.unserved.keys()):
            self.unserved[name].check(name, said.pop(name))
        for name in sorted(said.keys() & peers.HARMLESS.keys() - self.served):
            Unserved("only its usual value is", peers.HARMLESS[name]).check(name, said.pop(name))
        return said

    def known(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the accepted fields that have an effect. Raises InvalidRequest for unknown fields."""
        ignored = said.keys() & peers.IGNORED - self.served - self.no_effect
        for name in sorted(ignored):
            tell_once(f"field {name}", f"{name!r} in the body of a request is ignored: it changes no answer here")
        effective = {name: value for name, value in said.items() if name not in self.no_effect | ignored}
        check_fields(effective, self.served, self.what)
        return effective


def check_fields(names: Collection[str], known: Collection[str], what: str) -> None:
    """Raise InvalidRequest if `what` does not have one of the fields. The message suggests known names for it."""
    strange = [name for name in names if name not in known]
    if strange:
        most = max(1, min(_MOST_NAMED, _MOST_SHOWN // max(1, *map(len, strange))))
        shown = ", ".join(f"{name!r:.80}" + meant(name[:80], known) for name in strange[:most])
        if len(strange) > most:
            shown += f" and {len(strange) - most} more"
        raise InvalidRequest(f"unknown field{'s' * (len(strange) > 1)} of {what}: {shown}", field=strange[0])


def checked(name: str, value: object, kind: type[Kind], must_be: str) -> Kind:
    """Return the value of a field. Raises InvalidRequest if it is not of this kind."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} is {value!r:.80}, but must be {must_be}", field=name)
    return value


@contextmanager
def inside(path: str) -> Iterator[None]:
    """Put `path` before the field that an InvalidRequest names: `messages[0]` and `role` give `messages[0].role`."""
    try:
        yield
    except InvalidRequest as error:
        dot = "" if error.field is None or error.field.startswith("[") else "."
        error.field = path + dot + (error.field or "")
        raise
