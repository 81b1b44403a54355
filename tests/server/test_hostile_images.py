"""More than 200 files that nobody should send: each is an image or the sender's error, quickly and in little memory."""

from __future__ import annotations

import base64
import resource
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from cortexmlx import Engine
from cortexmlx.server import app
from support.clients.in_process import in_process
from support.hostile_images import hostile_files
from support.models.sighted import write_sighted

MEDIA = ("image/png", "image/svg+xml", "text/html", "application/octet-stream", "image/heic;q=1", "")


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@pytest.mark.slow
def test_each_is_an_image_or_an_error_of_the_sender(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Engine(str(write_sighted(tmp_path / "tiny")), kv_memory="4MB") as engine, in_process(app(engine)) as http:
        seen: dict[int, int] = {}
        for number, (name, data) in enumerate(hostile_files()):
            url = f"data:{MEDIA[number % len(MEDIA)]};base64,{base64.b64encode(data).decode()}"
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            before, begin = peak_bytes(), time.process_time()
            reply = http.post("/v1/chat/completions", json=body)
            assert reply.status_code in (200, 400), f"{name}: {reply.text}"
            assert reply.status_code == 200 or len(reply.json()["error"]["message"]) > 20
            assert peak_bytes() - before < 200 << 20, name
            assert time.process_time() - begin < 5, name
            seen[reply.status_code] = seen.get(reply.status_code, 0) + 1
        assert sum(seen.values()) > 200 and min(seen.values()) > 40, seen
        assert engine.generate("still here", max_tokens=2).token_ids
    assert capfd.readouterr().err == "", "what libraries print, nobody reads"
