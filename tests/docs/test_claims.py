"""What the pages claim is what the program has: one table of claims, each with the program's own value."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cortexmlx.cli.app import app
from cortexmlx.cli.chat.input import SHOWN_CHARACTERS, SHOWN_LINES, history_path
from cortexmlx.cli.chat.sampling import FALLBACK_SAMPLING, STARTER_PENALTY
from cortexmlx.cli.chats.saved_chats import chats_folder
from cortexmlx.cli.limits import ANSWER_SHARE
from cortexmlx.cli.serve.keys import secret_folder
from cortexmlx.core.config import EngineConfig
from cortexmlx.disk import segment_store, tier
from cortexmlx.disk.folder import default_folder
from cortexmlx.models.resolve import STARTER_SAMPLING
from cortexmlx.server import application
from cortexmlx.server.settings import SERVER_INSTALL
from cortexmlx.system.files import cache_folder, state_folder
from cortexmlx.vision.images import VISION_INSTALL
from support.pages import PAGES, ROOT, read

HOME = Path("~")

CLAIMS = [
    ("docs/chat.md", f"More than {SHOWN_LINES} lines or {SHOWN_CHARACTERS:,} characters are shown"),
    ("docs/chat.md", f"temperature {STARTER_SAMPLING['temperature']}, top-p {STARTER_SAMPLING['top_p']}"),
    ("docs/chat.md", f"a repetition penalty of {STARTER_PENALTY} that is ours"),
    (
        "docs/chat.md",
        "temperature {temperature}, top-p {top_p} and repetition penalty {repetition_penalty}".format(
            **FALLBACK_SAMPLING
        ),
    ),
    ("docs/chat.md", {8: "less than an eighth of the context"}[ANSWER_SHARE]),
    ("docs/memory.md", f"keeps up to {str(EngineConfig('m').kv_store_bytes).replace('GB', ' GB')} in"),
    ("docs/memory.md", f"Whole blocks ({EngineConfig('m').block_size} tokens) are kept"),
    ("docs/memory.md", f"A prompt reads at most {tier.MAX_READ >> 30} GiB"),
    ("docs/memory.md", f"{segment_store.FREE_BYTES >> 30} GiB of the file system always stays free"),
    ("README.md", "pre-release"),
]
"""Pages and what stands on them, of the program's own values."""


def test_pages_say_what_the_program_has() -> None:
    said = {page: " ".join(read(page).split()) for page in PAGES}
    missing = [claim for claim in CLAIMS if claim[1] not in said[claim[0]]]
    assert missing == []


def test_the_table_of_what_stays_on_disk_has_every_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: HOME)
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "CORTEXMLX_KV_STORE"):
        monkeypatch.delenv(name, raising=False)
    rows = read("docs/quickstart.md").partition("## What stays on disk")[2]
    for path in (chats_folder(), secret_folder()):
        assert f"`{path}`" in rows
    assert history_path() == state_folder() / "chat_history" and "`chat_history` beside it" in rows
    assert str(default_folder()).replace("Library/Caches", ".cache") in rows.replace("`", "")
    assert default_folder().parent == cache_folder() and "| `choices` beside `kv` |" in rows


def test_help_names_what_is_served() -> None:
    serve = re.sub(
        r"\s+", " ", next(c.callback.__doc__ or "" for c in app.registered_commands if c.callback.__name__ == "serve")
    )  # type: ignore[union-attr]
    for word, path in {
        "chat completions": "/v1/chat/completions",
        "completions": "/v1/completions",
        "responses": "/v1/responses",
        "embeddings": "/v1/embeddings",
        "messages": "/v1/messages",
        "rerank": "/v1/rerank",
    }.items():
        assert word in serve and path in application.PATHS


def test_status_has_a_row_for_every_feature_page() -> None:
    rows = [line for line in read("docs/status.md").splitlines() if line.startswith("| ")]
    for page in ("server", "embeddings", "adapters", "structured", "tools", "images", "hosts"):
        assert any(f"({page}.md)" in row for row in rows), page


def test_nobody_is_sent_to_a_package_that_is_not_there() -> None:
    """Somebody else may take the name before us: docs/release.md says what a maintainer does first."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert not any("5 - Prod" in each or "4 - Beta" in each for each in project["classifiers"])
    for extra, install in (("server", SERVER_INSTALL), ("vision", VISION_INSTALL)):
        assert f"pip install {' '.join(map(repr, project['optional-dependencies'][extra]))}" == install
    texts = [
        *PAGES,
        *(path.relative_to(ROOT).as_posix() for top in ("cortexmlx", "cli") for path in (ROOT / top).rglob("*.py")),
    ]
    install = re.compile(r"(?:pip|pipx|uv|uvx) (?:\w+ )*(?:-\S+ )*['\"]?cortexmlx\b(?!-)")
    assert [name for name in texts if install.search(read(name))] == []
