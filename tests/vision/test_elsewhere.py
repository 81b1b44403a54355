"""Images elsewhere: only what was listed is read, from the address that was checked, in bounded time and memory."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.cli.start import run
from cortexmlx.errors import InvalidRequest
from cortexmlx.vision import elsewhere
from cortexmlx.vision.elsewhere import NamedImageReader
from support.models.sighted import picture, write_sighted
from support.models.tiny import write_tiny

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


class Web:
    """A server on this machine that answers each path as a test says, and knows what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, Answer] = {}
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(self.path)
                web.answers[self.path](self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def say(self, path: str, body: bytes, status: int = 200, **headers: str) -> str:
        def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
            handler.send_response(status)
            for name, value in headers.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body)

        self.answers[path] = answer
        return self.url + path

    def drip(self, path: str, first: bytes) -> str:
        def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
            handler.wfile.write(first)
            for _ in range(200):
                try:
                    handler.wfile.write(b"x")
                except OSError:
                    return
                time.sleep(0.02)

        self.answers[path] = answer
        return self.url + path

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.close()


def refuses(source: NamedImageReader, name: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        source.read(name)


def test_a_listed_host_is_asked_and_no_other(web: Web) -> None:
    url, other = web.say("/a.png?b=1", b"picture"), Web()
    source = NamedImageReader([web.url])
    assert source.read(url) == source.read(url.replace("http", "HTTP")) == b"picture"
    for name in (
        other.say("/a", b"x"),
        f"https://127.0.0.1:{web.port}/a",
        f"http://localhost:{web.port}/a",
        f"http://127.0.0.1:{web.port + 1}/a",
        "http://2130706433/",
        f"http://{web.port}/",
    ):
        refuses(source, name, "not listed.*--fetch-images")
    with pytest.raises(InvalidRequest) as long:
        source.read(f"http://a\x1b7\x07{'c' * 9999}/")
    assert str(long.value).isprintable() and len(str(long.value)) < 400
    for name in (f"http://a@127.0.0.1:{web.port}/", "http://127.0.0.1:x/", "http:///", "http://[/"):
        refuses(source, name, "cannot be read")
    for name in ("ftp://127.0.0.1/a", "file:///etc/passwd", "/etc/passwd", "a.png", "gopher://x"):
        refuses(source, name, "files are not opened")
    assert web.asked == ["/a.png?b=1"] * 2 and not other.asked
    refuses(NamedImageReader([f"127.0.0.1:{web.port}"]), url.replace("http", "https"), "was not fetched")
    other.close()
    for host in ("", "ftp://a", "a@b", "http://", "a:b"):
        with pytest.raises(InvalidRequest, match="no host"):
            NamedImageReader([host])


def test_nobody_is_sent_elsewhere(web: Web) -> None:
    web.say("/b", b"secret")
    for status in (301, 302, 303, 307, 308):
        url = web.say(f"/{status}", b"", status, Location=f"{web.url}/b")
        refuses(NamedImageReader([web.url]), url, f"says {status}.*not followed")
    refuses(NamedImageReader([web.url]), web.say("/404", b"", 404), "says 404")
    refuses(NamedImageReader([web.url]), web.say("/x", b"")[:-1] + "a\r\nX: y", "not fetched|cannot|says")
    assert "/b" not in web.asked


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "192.168.0.1",
            "172.16.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *(
            "::1",
            "fe80::1",
            "fe80::1%1",
            "fc00::1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "::ffff:0:10.0.0.1",
            "2002:a00:1::",
            "::10.0.0.1",
            "fec0::1",
            "ff02::1",
            "::",
        ),
    ],
)
def test_a_name_that_stands_for_a_private_address_is_not_asked(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 443))])
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was asked"))
    refuses(NamedImageReader(["pictures.example"]), "https://pictures.example/a", "not on the internet")


def test_the_address_that_was_checked_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = ["93.184.216.34", "127.0.0.1"], []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (answers.pop(0), 443))])

    def connect(address: tuple[str, int], **_: Any) -> Any:
        asked.append(address)
        raise ConnectionRefusedError("nobody")

    monkeypatch.setattr(socket, "create_connection", connect)
    refuses(NamedImageReader(["pictures.example"]), "https://PICTURES.example./a", "nobody")
    assert asked == [("93.184.216.34", 443)] and answers == ["127.0.0.1"]


def test_size_and_time_are_bounded(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "FETCH_SECONDS", 0.3)
    monkeypatch.setattr(elsewhere, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(elsewhere, "MAX_FETCHES", 1)
    source = NamedImageReader([web.url])
    assert len(source.read(web.say("/large", bytes(5000)))) == 1001, "whoever decodes it refuses it"
    begin = time.monotonic()
    for path, first in (("/s", b""), ("/h", b"HTTP/1.1 200 OK\r\nX: "), ("/b", b"HTTP/1.1 200 OK\r\n\r\n")):
        refuses(source, web.drip(path, first), "was not fetched")
    assert time.monotonic() - begin < 3
    waits = threading.Thread(target=lambda: refuses(source, web.drip("/w", b""), "was not"))
    waits.start()
    while "/w" not in web.asked:
        time.sleep(0.001)
    monkeypatch.setattr(elsewhere, "FETCH_SECONDS", 0.01)
    refuses(source, web.say("/free", b""), "others are")
    waits.join()


def test_a_slow_connection_leaves_less_time_for_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _theirs = socket.socketpair()
    ours.settimeout(10)
    monkeypatch.setattr(elsewhere, "FETCH_SECONDS", 0.2)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: time.sleep(0.3) or ours)
    begin = time.monotonic()
    refuses(NamedImageReader(["127.0.0.1"]), "https://127.0.0.1/a", "timed out")
    assert time.monotonic() - begin < 8


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(elsewhere, "FETCH_SECONDS", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: hangs.wait(60) and [])
    refuses(NamedImageReader(["pictures.example"]), "https://pictures.example/a", "its name was not looked up in 0.1 s")
    assert not hangs.is_set()
    hangs.set()


def test_files_of_a_folder_and_no_others(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "a.png").write_bytes(b"picture")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "out").symlink_to(tmp_path)
    (root / "in.png").symlink_to(root / "sub" / "a.png")
    os.mkfifo(root / "pipe")
    source = NamedImageReader(root=root)
    for name in ("sub/a.png", "./sub/../sub/a.png", str(root / "sub/a.png"), "in.png"):
        assert source.read(name) == b"picture"
    for name in ("../secret.png", str(tmp_path / "secret.png"), "link.png", "out/secret.png", "none", "\0", "a" * 9999):
        refuses(source, name, "there is no file")
    refuses(source, "pipe", "a pipe")
    refuses(source, "sub", "a folder")
    refuses(source, "http://a.example/b", "not listed")


def test_images_that_lines_name_are_read_in_the_folder_that_is_stated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL")
    picture(24, 32).save(tmp_path / "a.png")
    model, source = write_sighted(tmp_path / "model"), tmp_path / "in.jsonl"
    (tmp_path / "root").mkdir()
    picture(24, 32).save(tmp_path / "root" / "a.png")
    lines = []
    for url in ("a.png", "../a.png"):
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
        lines.append(json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2}))
    source.write_text("\n".join(lines))
    root = str(tmp_path / "root")
    assert run(["batch", str(model), str(source), "-o", str(tmp_path / "out"), "--images-from", root]) == 1
    first, second = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert first["usage"]["prompt_tokens"] > 10 and "there is no file '../a.png'" in str(second["error"])
    assert run(["batch", str(model), str(source), "--images-from", str(tmp_path / "none")]) == 2
    blind = write_tiny(tmp_path / "blind")
    assert run(["batch", str(blind), str(source), "--images-from", root]) == 1
    assert "(--images-from, --fetch-images), but" in capsys.readouterr().err, "instead of answers without the images"
