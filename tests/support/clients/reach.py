"""Programs of a page reach the server of a test."""

from __future__ import annotations

import openai
import pytest

from support.patience import PATIENCE


def reach_by_openai(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let OpenAI's clients of `http://localhost:8000/v1` reach a server that listens elsewhere."""
    real = openai.OpenAI

    def here(base_url: str, api_key: str) -> openai.OpenAI:
        assert base_url == "http://localhost:8000/v1"
        web = openai.DefaultHttpxClient(trust_env=False, timeout=PATIENCE)
        return real(base_url=f"{url}/v1", api_key=api_key, http_client=web)

    monkeypatch.setattr(openai, "OpenAI", here)
