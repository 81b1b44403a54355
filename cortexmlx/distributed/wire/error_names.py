"""Errors as bytes: the name of a class of `cortexmlx.errors`, and its message. Without mlx."""

from __future__ import annotations

from cortexmlx import errors
from cortexmlx.distributed.wire.codec import Codec, Reader, broken, codec, register
from cortexmlx.errors import CortexError, HostLost, InvalidRequest

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
