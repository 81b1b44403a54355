"""A model hub on this machine that speaks as much of the protocol as the hub's own library needs: what is in a
repository, and its files. It can be slow, break, refuse and lie.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import random
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMIT = "1" * 40
CHUNK = 1 << 14


@dataclass
class Hub:
    """Repositories by name, each a folder of files, and how they are served. `asked`: the method, path and range of
    each request for a file.
    """

    repos: dict[str, Path] = field(default_factory=dict)
    bytes_per_second: float = 0.0
    """Of weights; 0: as fast as they go."""
    most: int | None = None
    """Of weights, in bytes: no more is sent until it is None."""
    break_after: list[int] = field(default_factory=list)
    """The connections of so many next answers with weights close after these bytes."""
    refuse: dict[str, list[int]] = field(default_factory=dict)
    """What is answered, one after the other, to paths with this in them; the last one for ever."""
    headers: dict[str, str] = field(default_factory=dict)
    """What a refusal says besides."""
    ranges: bool = True
    """Whether parts of files can be asked for."""
    elsewhere: bool = False
    """Whether weights are fetched from another host, to which the hub sends whoever asks."""
    tokens: list[str | None] = field(default_factory=list)
    """Who asked for a file there, by what was shown."""
    wrong: dict[str, bytes] = field(default_factory=dict)
    """Other bytes for a file than those that the repository's list describes."""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    sent: int = 0
    """Bytes of weights that were sent."""
    url: str = ""

    def entry(self, file: Path) -> dict[str, Any]:
        """What the list of a repository says of a file."""
        content = file.read_bytes()
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, Any] = {"type": "file", "path": file.name, "size": len(content), "oid": oid}
        if file.suffix == ".safetensors":
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry


def large_model(folder: Path, sizes: tuple[int, ...] = (600_000, 300_000)) -> Path:
    """A folder of weight files of so many random bytes, one tensor each, with a config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for number, size in enumerate(sizes, 1):
        header = {f"tensor{number}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        packed = json.dumps(header).encode()
        content = struct.pack("<Q", len(packed)) + packed + random.Random(number).randbytes(size)
        (folder / f"model-{number:05}-of-{len(sizes):05}.safetensors").write_bytes(content)
    return folder


@contextmanager
def serving(**repos: Path) -> Iterator[Hub]:
    """A hub with these models of the organisation `org`."""
    hub = Hub({f"org/{name}": folder for name, folder in repos.items()})
    handler = type("Handler", (_Handler,), {"hub": hub})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield hub
        server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        for part, statuses in hub.refuse.items():
            if part in path:
                status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
                if status != 200:
                    self.answer(b"", hub.headers, status)
                    return
        if path.startswith("/elsewhere/"):
            hub.tokens.append(self.headers.get("Authorization"))
            path = path.removeprefix("/elsewhere")
        elif hub.elsewhere and path.endswith(".safetensors"):
            entry = hub.entry(hub.repos["/".join(path.split("/")[1:3])] / path.rpartition("/")[2])
            headers = {"X-Repo-Commit": COMMIT, "X-Linked-ETag": f'"{entry["lfs"]["oid"]}"'}
            headers |= {"X-Linked-Size": str(entry["size"])}
            other = hub.url.replace("127.0.0.1", "localhost")
            self.answer(b"", headers | {"Location": f"{other}/elsewhere{path}"}, 302)
            return
        repo = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        if repo not in hub.repos:
            self.answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)
        elif path.startswith("/api/"):
            files = [hub.entry(file) for file in sorted(hub.repos[repo].iterdir())]
            about = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": each["path"]} for each in files]}
            self.answer(json.dumps(files if "/tree/" in path else about).encode(), {})
        else:
            self.file(hub.repos[repo] / path.rpartition("/")[2])

    do_HEAD = do_GET

    def file(self, file: Path) -> None:
        """A file, or the part of it that is asked for."""
        hub, entry = self.hub, self.hub.entry(file)
        asked = self.headers.get("Range", "")
        hub.asked.append((self.command, file.name, asked))
        content = hub.wrong.get(file.name, file.read_bytes())
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{entry["oid"]}"'}
        large = "lfs" in entry
        if large:
            headers |= {"X-Linked-ETag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(entry["size"])}
        begin = int(asked.removeprefix("bytes=").partition("-")[0]) if asked and hub.ranges else 0
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self.answer(content[begin:], headers, 206 if begin else 200, slowly=large)

    def answer(self, content: bytes, headers: dict[str, str], status: int = 200, slowly: bool = False) -> None:
        hub = self.hub
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "GET":
            return
        if not slowly:
            self.wfile.write(content)
            return
        most = hub.break_after.pop(0) if hub.break_after else len(content)
        try:
            for start in range(0, min(most, len(content)), CHUNK):
                piece = content[start : min(start + CHUNK, most)]
                while hub.most is not None and hub.sent >= hub.most:
                    time.sleep(0.002)
                self.wfile.write(piece)
                hub.sent += len(piece)
                if hub.bytes_per_second:
                    time.sleep(len(piece) / hub.bytes_per_second)
        except OSError:  # whoever asked has gone
            self.close_connection = True
        if most < len(content):
            self.close_connection = True
            time.sleep(0.05)  # what was sent is read before the connection is gone

    def log_message(self, *args: object) -> None:
        """Nothing on the test's output."""
