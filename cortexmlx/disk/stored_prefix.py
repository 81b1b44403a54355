"""Stored prefixes: named beginnings of prompts in a store's folder, and files that carry them to another one.

A store's keys and proofs hold for its folder only, since they are made with its secret. A file is a ZIP archive,
without compression, of a manifest and of segments (`disk/segments.py`). Their keys are made with the model's
fingerprint in the place of an identity, and their proofs without a secret: they find damage, not forgery. So a file is
worth as much trust as whoever made it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.segments import Record, check_record, parse_header, printable_name, write_records
from cortexmlx.disk.store import SEGMENT_BYTES
from cortexmlx.disk.tier import STATE, model_identity, piece_key
from cortexmlx.errors import InvalidRequest, PrefixRefused
from cortexmlx.kv.prefix import AdapterSalt, Key, PrefixCache
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.system.files import write_atomically

_MANIFEST = "prefix.json"
_FORMAT = "cortexmlx-prefix-1"
_MAX_MANIFEST = 16 << 20
_MAX_SEGMENT = 1 << 30  # it is read whole: ours have `SEGMENT_BYTES` and one more record, at most


@dataclass(frozen=True)
class StoredPrefix:
    """A named prefix of prompts whose keys and values are on disk, and what these depend on."""

    name: str
    model: str
    """The model's name, for people."""
    fingerprint: str
    """Names everything that keys and values depend on, except the tokens, the same on every machine."""
    parts: Mapping[str, str]
    """What the fingerprint is made of, to say in what two differ."""
    block_size: int
    tokens: tuple[int, ...]
    """Whole blocks of them."""
    first_blocks: tuple[int, ...]
    """For each layer group, the first block that the token after the prefix sees."""
    states: bool
    """Whether a recurrent state at the end is needed, too."""
    adapter: str = ""
    """The hash of the adapter's content, in hexadecimal; empty: none."""
    client: str | None = None
    """Whose prompts find it. A file does not say it."""

    def entry_keys(self, client: str | None) -> list[Key]:
        """Return the keys of the prefix's blocks in the prefix cache, for prompts of a client."""
        salt = AdapterSalt(bytes.fromhex(self.adapter), client) if self.adapter else client
        return PrefixCache(self.block_size).keys(self.tokens, salt)

    def pieces(self, identity: bytes, client: str | None) -> dict[Key, tuple[int, ...]]:
        """Return the tokens of each needed piece by its key, in order, for the model of this identity."""
        size, pieces, entries = self.block_size, dict[Key, tuple[int, ...]](), self.entry_keys(client)
        for block, entry in enumerate(entries):
            groups = [group for group, first in enumerate(self.first_blocks) if block >= first]
            for group in [*groups, STATE] if self.states and block == len(entries) - 1 else groups:
                pieces[piece_key(identity, entry, group)] = self.tokens[block * size : (block + 1) * size]
        return pieces

    def pieces_in(self, store: SegmentStore) -> dict[Key, tuple[int, ...]]:
        """Return the tokens of each needed piece by its key in a store."""
        return self.pieces(model_identity(self.fingerprint, store.secret), self.client)

    def check_model(self, fingerprint: str, parts: Mapping[str, str], model: str) -> None:
        """Raise PrefixRefused, with the differences, unless the prefix was made by the model with this fingerprint."""
        if fingerprint == self.fingerprint:
            return
        differences = [name for name in parts if parts[name] != self.parts.get(name)]
        details = [
            f"{name} ({self.parts.get(name, 'unknown')}, here {parts[name]})" if len(parts[name]) < 60 else name
            for name in differences
            if name not in ("weights", "model")
        ]
        subject = f"the prefix {self.name!r} does not fit this engine"
        if "weights" in differences or "model" in differences:
            details.insert(0, "weights or configuration (another model, or another adapter in it)")
            if model != self.model:
                subject = f"the prefix {self.name!r} was computed by {self.model}, and this engine has {model}"
        options = {"block size": f"block_size {self.block_size} (--block-size {self.block_size})"}
        bits, here = (re.findall(r"(\d+) bits", each.get("keys and values", "")) for each in (self.parts, parts))
        if bits or here:
            options["keys and values"] = (
                f"kv_bits {bits[0]} (--kv-bits {bits[0]})" if bits else "no kv_bits (--kv-bits)"
            )
        fits = differences and options.keys() >= set(differences)
        advice = f"use {' and '.join(options[name] for name in differences)}, or " if fits else ""
        raise PrefixRefused(
            f"{subject}: other {' and other '.join(details) or 'layers'}. Its keys and values would be wrong here: "
            f"{advice}export it anew"
        )


# In a store's folder: a file for each name.


def save_prefix(folder: Path, prefix: StoredPrefix) -> None:
    """Save a prefix's description, without its keys and values, in a store's folder. Raises OSError."""
    with write_atomically(_prefix_path(folder, prefix.name), private=True) as file:
        file.write(_to_json(prefix))


def find_prefix(folder: Path, name: str) -> StoredPrefix:
    """Return the prefix with a name. If there is none, raises PrefixRefused with the names that exist."""
    with contextlib.suppress(FileNotFoundError):
        return _from_json(_prefix_path(folder, name).read_bytes())
    names = ", ".join(repr(each.name) for each in list_prefixes(folder)) or "none"
    raise PrefixRefused(
        f"{folder} has no prefix {name!r}: it has {names}. `cortexmlx cache export NAME FILE --messages JSON` "
        "computes one, and so does `engine.pin(..., name=)`"
    )


def remove_prefix(folder: Path, name: str) -> None:
    """Remove a prefix's name. Its keys and values stay until evicted. Raises what `find_prefix` raises, and OSError."""
    find_prefix(folder, name)
    _prefix_path(folder, name).unlink(missing_ok=True)


def list_prefixes(folder: Path) -> list[StoredPrefix]:
    """Return the prefixes that are saved in a folder, sorted by name."""
    prefixes = []
    for path in folder.glob("*.prefix"):
        with contextlib.suppress(OSError, PrefixRefused):
            prefixes.append(_from_json(path.read_bytes()))
    return sorted(prefixes, key=lambda each: each.name)


def _prefix_path(folder: Path, name: str) -> Path:
    return folder / f"{hashlib.blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}.prefix"


# From a store into a file, and back.


def export_prefix(store: SegmentStore, prefix: StoredPrefix, path: Path) -> int:
    """Write a prefix with its keys and values to a file, which appears complete or not at all. Return the file's size.

    Raises PrefixRefused if a piece is not in the store, OSError if the file cannot be written.
    """
    pieces = prefix.pieces_in(store)
    carried_keys = list(prefix.pieces(bytes.fromhex(prefix.fingerprint), None))
    locations = store.find(list(pieces))
    if missing := len(pieces) - len(locations):
        raise PrefixRefused(
            f"{missing:,} of {len(pieces):,} pieces of {prefix.name!r} are not on disk (any more): they are written "
            "soon after they are computed, and the least recently used go when the store is full. Compute it again "
            "(--messages, or `engine.pin`)"
        )
    with write_atomically(path, private=True) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_MANIFEST, _to_json(replace(prefix, client=None)))
        records, size = list[Record](), 0
        for (key, tokens), carried_key in zip(pieces.items(), carried_keys, strict=True):
            record = store.read(locations[key], tokens)
            if record is None:
                raise PrefixRefused(f"a piece of {prefix.name!r} is damaged: compute it again (--messages)")
            records.append(replace(record, key=carried_key))
            size += record.nbytes
            if size >= SEGMENT_BYTES or carried_key == carried_keys[-1]:
                segment = io.BytesIO()
                write_records(segment, "", b"", prefix.model, records)
                archive.writestr(f"{len(archive.namelist()):05}.safetensors", segment.getbuffer())
                records, size = [], 0
    return path.stat().st_size


def import_prefix(
    store: SegmentStore,
    path: Path,
    name: str | None = None,
    client: str | None = None,
    check: Callable[[StoredPrefix], None] = lambda prefix: None,
) -> StoredPrefix:
    """Write the keys and values of a file into a store, for prompts of `client`, and keep the prefix under its name, or
    `name`. Return it. `check` raises for an unwanted prefix. Nothing is written before all of the file is checked.

    Raises PrefixRefused for a file that is damaged, or larger than the store, InvalidRequest for an empty name, OSError
    if the store takes no more.
    """
    if name == "":
        raise InvalidRequest("the name is empty: give one, or leave it out for the name in the file", field="name")
    with _open_archive(path) as archive:
        manifest = archive.getinfo(_MANIFEST)
        if manifest.file_size > _MAX_MANIFEST:
            raise ValueError(f"its manifest has {manifest.file_size:,} bytes")
        prefix = _from_json(archive.read(manifest))
        check(prefix)
        prefix = replace(prefix, name=prefix.name if name is None else name, client=client)
        size = sum(info.file_size for info in archive.infolist())
        if size > store.limit:
            raise PrefixRefused(
                f"{path} has {format_bytes(size)}, and the store may have {format_bytes(store.limit)}: raise "
                "kv_store_bytes (--kv-store-bytes)"
            )
        if len(prefix.tokens) // prefix.block_size * len(prefix.first_blocks) > size - manifest.file_size:
            raise ValueError("it has fewer bytes than pieces")
        carried = prefix.pieces(bytes.fromhex(prefix.fingerprint), None)
        local_keys = dict(zip(carried, prefix.pieces_in(store), strict=True))
        present = {each.key: each.tokens for records in _read_segments(archive, prefix.block_size) for each in records}
        if missing := sum(present.get(key) != tokens for key, tokens in carried.items()):
            raise PrefixRefused(f"{path} is damaged: it lacks {missing:,} of {len(carried):,} pieces")
        found = store.find(list(local_keys.values()))
        store.mark_used([found[key] for key in local_keys.values() if key in found])  # or they make room for the rest
        for records in _read_segments(archive, prefix.block_size):
            known = [record for record in records if carried.get(record.key) == record.tokens]
            store.write(prefix.model, [replace(record, key=local_keys[record.key]) for record in known])
        save_prefix(store.path, prefix)
        return prefix


def _read_segments(archive: zipfile.ZipFile, block_size: int) -> Iterator[Sequence[Record]]:
    """Yield the records of each segment of an exported file. Raises ValueError if a record's digest is wrong."""
    for info in archive.infolist()[1:]:  # after the manifest
        if info.file_size > _MAX_SEGMENT:
            raise ValueError(f"{printable_name(info.filename):.40} has {info.file_size:,} bytes")
        with archive.open(info) as file:  # piece by piece: a header may say that all of them are in one place
            _, locations = parse_header(file, info.filename, info.file_size)
            if any(each.layout[0][1] != (block_size,) for each in locations):
                raise ValueError("a piece has more or fewer tokens than a block")
            yield [check_record(b"", each, file.read(each.size)) for each in locations]


@contextlib.contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an exported prefix as a ZIP archive in this context. Raises PrefixRefused for anything wrong with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("it is compressed")  # and could be larger than any memory
            yield archive
    except FileNotFoundError:
        raise PrefixRefused(f"there is no file {path}") from None
    except (ValueError, zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        with path.open("rb") as file:
            is_export = _MANIFEST.encode() in file.read(64)  # the first entry's name, also of a file that was cut
        fault = f"damaged: {error}" if is_export else "no file of `cortexmlx cache export`"
        raise PrefixRefused(f"{path} is {fault}") from error


def _to_json(prefix: StoredPrefix) -> bytes:
    return json.dumps({"format": _FORMAT, **asdict(prefix)}, default=dict).encode()


def _from_json(data: bytes) -> StoredPrefix:
    """Return the prefix that a manifest describes. Raises PrefixRefused."""
    try:
        fields: dict[str, Any] = json.loads(data)
        if fields.pop("format") != _FORMAT:
            raise PrefixRefused("a prefix has the format of another version")
        prefix = StoredPrefix(**fields)
        numbers = (*prefix.tokens, *prefix.first_blocks, prefix.block_size)
        if not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers):
            raise ValueError("it has no numbers")
        if not prefix.block_size or not prefix.tokens or len(prefix.tokens) % prefix.block_size:
            raise ValueError("its tokens are no whole blocks")
        bytes.fromhex(prefix.fingerprint + prefix.adapter)
        parts = {printable_name(str(key)): printable_name(str(value)) for key, value in dict(prefix.parts).items()}
        names = printable_name(prefix.name), printable_name(prefix.model)
        return replace(
            prefix,
            name=names[0],
            model=names[1],
            parts=parts,
            tokens=tuple(prefix.tokens),
            first_blocks=tuple(prefix.first_blocks),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PrefixRefused(f"the manifest of a prefix is damaged: {error}") from error
