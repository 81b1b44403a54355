"""Bytes of plain data, and data of bytes, as a type says. Without pickles and mlx.

`codec(type)` makes a codec from type annotations: numbers, texts, enums, tuples, lists, maps, ranges, NumPy arrays,
optional values, frozen dataclasses and unions of them. Both sides have the same types (the handshake compares their
versions), so nothing of a type is sent.

Reading trusts no byte. A value that its type does not allow, a size that is larger than what is left of the message, or
a byte too much raises HostLost. Sizes are compared before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from cortexmlx import errors
from cortexmlx.errors import CortexError, HostLost, InvalidRequest

T = TypeVar("T")

_FLOAT = struct.Struct("<d")
_MOST_BYTES_OF_INT = 10
"""So an integer is in -2**69 .. 2**69 - 1, which includes all seeds."""

_MOST_DIMS = 4
_MOST_DIM = 1 << 31


def broken(why: str) -> NoReturn:
    """Raise HostLost for a message that cannot be read."""
    raise HostLost(f"a message cannot be read ({why}): start the hosts again, with one version of cortexmlx on all")


class Reader:
    """Reads one message from its beginning to its end. Raises HostLost for what cannot be there."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def natural(self) -> int:
        """Read a number of 0 or more: 7 bits a byte, the lowest first, the eighth bit set if there are more."""
        data, at = self.data, self.at
        try:
            byte = data[at]
            if byte < 128:
                self.at = at + 1
                return byte
            number, shift = byte & 127, 7
            while byte >= 128:
                at += 1
                byte = data[at]
                number |= (byte & 127) << shift
                shift += 7
                if shift > 7 * _MOST_BYTES_OF_INT:
                    broken(f"a number has more than {_MOST_BYTES_OF_INT} bytes")
        except IndexError:
            broken("it ends within a number")
        self.at = at + 1
        return number

    def take(self, count: int) -> bytes:
        """Read `count` bytes."""
        at, end = self.at, self.at + count
        if end > len(self.data):
            broken(f"{count} bytes are announced, and {len(self.data) - at} are left")
        self.at = end
        return self.data[at:end]

    def count(self) -> int:
        """Read the number of the elements that follow. Each has a byte or more, so there are no more than bytes."""
        count = self.natural()
        if count > len(self.data) - self.at:
            broken(f"{count} elements are announced in {len(self.data) - self.at} bytes")
        return count

    def end(self) -> None:
        """Check that the message ends here."""
        if self.at != len(self.data):
            broken(f"{len(self.data) - self.at} bytes follow after its end")


class Codec(NamedTuple, Generic[T]):
    """How values of one type become bytes, and come back."""

    write: Callable[[bytearray, T], None]
    """Append a value's bytes. Raises TypeError or ValueError for a value of another type."""
    read: Callable[[Reader], T]
    """Read a value. Raises HostLost."""

    def encode(self, value: T) -> bytearray:
        """Return a value as a message."""
        out = bytearray()
        self.write(out, value)
        return out

    def decode(self, message: bytes) -> T:
        """Return the value of a whole message. Raises HostLost."""
        reader = Reader(message)
        try:
            value = self.read(reader)
        except (ValueError, OverflowError) as error:  # also what a dataclass refuses
            broken(str(error))
        reader.end()
        return value


_special: dict[Any, Codec[Any]] = {}


def register(kind: type[T], codec: Codec[T]) -> None:
    """Use a codec for a type and, unless they have one, its subclasses, wherever annotations name it."""
    _special[kind] = codec


@cache
def codec(kind: Any) -> Codec[Any]:
    """Return the codec of a type. Raises TypeError if values of the type cannot be sent."""
    if kind in _special:
        return _special[kind]
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    origin, args = get_origin(kind), get_args(kind)
    if hasattr(kind, "__supertype__"):  # a NewType
        return codec(kind.__supertype__)
    if origin in (Union, UnionType):
        return _union(args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _sequence(codec(args[0]), tuple)
    if origin is tuple:
        return _fixed([codec(arg) for arg in args])
    if origin is list:
        return _sequence(codec(args[0]), list)
    if origin is Sequence:
        return _sequence(codec(args[0]), tuple)
    if origin is Mapping or origin is dict:
        return _mapping(codec(args[0]), codec(args[1]))
    if origin is np.ndarray:
        (number,) = get_args(args[1])
        return _array(np.dtype(number))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return _dataclass(kind, {field.name: codec(hints[field.name]) for field in fields(kind)})
    raise TypeError(f"values of {kind} cannot be sent to a host")


# -- numbers and texts ------------------------------------------------------------------------------------------------


def write_natural(out: bytearray, number: int) -> None:
    """Append a number of 0 or more: see `Reader.natural`."""
    if number < 128:
        out.append(number)  # raises ValueError below 0
        return
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)


def _write_int(out: bytearray, number: int) -> None:
    write_natural(out, number << 1 if number >= 0 else ~number << 1 | 1)


def _read_int(reader: Reader) -> int:
    number = reader.natural()
    return ~(number >> 1) if number & 1 else number >> 1


def _read_bool(reader: Reader) -> bool:
    byte = reader.natural()
    if byte > 1:
        broken(f"{byte} is neither true nor false")
    return byte == 1


def _write_bytes(out: bytearray, value: bytes) -> None:
    write_natural(out, len(value))
    out += value


def _read_text(reader: Reader) -> str:
    return reader.take(reader.natural()).decode("utf-8", "surrogatepass")


def _write_float(out: bytearray, value: float) -> None:
    out += _FLOAT.pack(value)


def _read_float(reader: Reader) -> float:
    number: float = _FLOAT.unpack(reader.take(8))[0]
    return number


def _write_range(out: bytearray, value: range) -> None:
    if value.step != 1:
        raise ValueError(f"{value} has steps of {value.step}: only ranges with steps of 1 can be sent")
    _write_int(out, value.start)
    _write_int(out, value.stop)


_SIMPLE: dict[Any, Codec[Any]] = {
    bool: Codec(lambda out, value: out.append(value), _read_bool),
    int: Codec(_write_int, _read_int),
    float: Codec(_write_float, _read_float),
    str: Codec(lambda out, value: _write_bytes(out, value.encode("utf-8", "surrogatepass")), _read_text),
    bytes: Codec(_write_bytes, lambda reader: reader.take(reader.natural())),
    range: Codec(_write_range, lambda reader: range(_read_int(reader), _read_int(reader))),
    NoneType: Codec(lambda out, value: None, lambda reader: None),
}


# -- what is made of others -------------------------------------------------------------------------------------------


def _sequence(element: Codec[Any], made: Callable[[list[Any]], Any]) -> Codec[Any]:
    write_one, read_one = element

    def write(out: bytearray, value: Sequence[Any]) -> None:
        write_natural(out, len(value))
        for each in value:
            write_one(out, each)

    return Codec(write, lambda reader: made([read_one(reader) for _ in range(reader.count())]))


def _fixed(elements: list[Codec[Any]]) -> Codec[Any]:
    def write(out: bytearray, value: Sequence[Any]) -> None:
        for element, each in zip(elements, value, strict=True):
            element.write(out, each)

    return Codec(write, lambda reader: tuple([element.read(reader) for element in elements]))


def _mapping(key: Codec[Any], value: Codec[Any]) -> Codec[Any]:
    pairs = _sequence(_fixed([key, value]), dict)
    return Codec(lambda out, mapping: pairs.write(out, list(mapping.items())), pairs.read)


def _enum(kind: type[Enum]) -> Codec[Any]:
    members = list(kind)
    index = {member: number for number, member in enumerate(members)}

    def read(reader: Reader) -> Enum:
        number = reader.natural()
        if number >= len(members):
            broken(f"there is no {kind.__name__} number {number}")
        return members[number]

    return Codec(lambda out, value: out.append(index[value]), read)


def _dataclass(kind: type[Any], parts: Mapping[str, Codec[Any]]) -> Codec[Any]:
    writers = [(name, part.write) for name, part in parts.items()]
    readers = [part.read for part in parts.values()]

    def write(out: bytearray, value: Any) -> None:
        for name, write_part in writers:
            write_part(out, getattr(value, name))

    return Codec(write, lambda reader: kind(*[read_part(reader) for read_part in readers]))


def _union(kinds: Sequence[Any]) -> Codec[Any]:
    """A byte says which of the types follows."""
    bases = [get_origin(kind) or kind for kind in kinds]
    each = [codec(kind) for kind in kinds]
    number_of: dict[type, int] = {}

    def number(value: Any) -> int:
        kind = type(value)
        if kind not in number_of:
            found = next((n for n, base in enumerate(bases) if isinstance(value, base)), None)
            if found is None:
                raise TypeError(f"a value of {kind} cannot be sent as one of {kinds}")
            number_of[kind] = found
        return number_of[kind]

    def write(out: bytearray, value: Any) -> None:
        chosen = number(value)
        out.append(chosen)
        each[chosen].write(out, value)

    def read(reader: Reader) -> Any:
        chosen = reader.natural()
        if chosen >= len(each):
            broken(f"there is no type number {chosen} of {len(each)}")
        return each[chosen].read(reader)

    return Codec(write, read)


def _array(dtype: np.dtype[Any]) -> Codec[Any]:
    """Dimensions, then the numbers in order of memory. Another dtype is refused, since numbers might not fit."""

    def write(out: bytearray, value: np.ndarray) -> None:
        if value.dtype != dtype:
            raise TypeError(f"an array of {value.dtype} cannot be sent as one of {dtype}")
        out.append(value.ndim)
        for dim in value.shape:
            write_natural(out, dim)
        out += value.tobytes()

    return Codec(write, lambda reader: read_array(reader, dtype))


def read_array(reader: Reader, dtype: np.dtype[Any]) -> np.ndarray:
    """Read an array's dimensions and numbers."""
    dims = reader.natural()
    if dims > _MOST_DIMS:
        broken(f"an array has {dims} dimensions")
    shape = [reader.natural() for _ in range(dims)]
    if max(shape, default=0) >= _MOST_DIM:
        broken(f"an array has the shape {shape}")
    return np.frombuffer(reader.take(math.prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()


# Errors as bytes: the name of a class of `cortexmlx.errors`, and its message.


_CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, CortexError)
}
_text: Codec[str] = codec(str)
_maybe_text: Codec[str | None] = codec(str | None)


def _write(out: bytearray, error: CortexError) -> None:
    _text.write(out, _class_of(error).__name__)
    _text.write(out, str(error))
    _maybe_text.write(out, _detail(error))


def _read(reader: Reader) -> CortexError:
    name, message, detail = _text.read(reader), _text.read(reader), _maybe_text.read(reader)
    kind = _CLASSES.get(name)
    if kind is None:
        broken(f"there is no error {name!r}")
    return _made(kind, message, detail)


def named(error: Exception, host: str | None = None) -> CortexError:
    """Return a copy of an error without its traceback, whose frames may hold arrays. The name of `host` is in front of
    the message, unless the message names a host already. An error that is not ours becomes HostLost.
    """
    names = (host, error.host if isinstance(error, HostLost) else None)
    prefix = "" if host is None or any(name in str(error) for name in names if name) else f"{host}: "
    if not isinstance(error, CortexError):
        return HostLost(f"{prefix}{type(error).__name__}: {error}", host=host)
    if isinstance(error, HostLost):
        return HostLost(f"{prefix}{error}", host=error.host or host)
    return _made(_class_of(error), f"{prefix}{error}", _detail(error))


def _class_of(error: CortexError) -> type[CortexError]:
    """Return the class of `cortexmlx.errors` that an error has, or that is nearest above its own."""
    return next(base for base in type(error).__mro__ if base in _CLASSES.values())


def _detail(error: CortexError) -> str | None:
    """Return what an error has beside its message."""
    return error.host if isinstance(error, HostLost) else error.field if isinstance(error, InvalidRequest) else None


def _made(kind: type[CortexError], message: str, detail: str | None) -> CortexError:
    if issubclass(kind, HostLost):
        return kind(message, host=detail)
    return kind(message, field=detail) if issubclass(kind, InvalidRequest) else kind(message)


register(CortexError, Codec(_write, _read))
