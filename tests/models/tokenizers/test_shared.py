"""A tokenizer that many threads use at once gives what it gives to one; a short text waits for no long one."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.models import load_model
from cortexmlx.models.tokenizers import bytelevel
from cortexmlx.models.tokenizers.shared import LONG_TEXT as LONG_FROM
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from support.gguf.models import write_model
from support.models.sentencepieces import CORPUS
from support.models.tiny import write_tiny
from support.patience import soon

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "and the end"}]
LONG = "".join(CORPUS) * 100


def folder(path: Path) -> Any:
    """A folder whose tokenizer.json cuts texts short, which transformers does not."""
    write_tiny(path / "m")
    file = path / "m" / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(settings))
    return load_model(path / "m").tokenizer


def gguf(path: Path) -> Any:
    path.mkdir(exist_ok=True)
    return load_model(write_model(path / "m.gguf")).tokenizer


@pytest.mark.parametrize("make", [folder, gguf])
def test_many_threads_get_what_one_gets(make: Any, tmp_path: Path) -> None:
    shared, alone = SharedTokenizer(make(tmp_path / "a")), make(tmp_path / "b")
    texts = [text * times for times in (1, 50) for text in sorted(set(CORPUS))]
    expected = [alone.encode(text, add_special_tokens=False) for text in texts]
    assert max(map(len, expected)) > 1000
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(lambda text: shared.encode(text, False), texts)) == expected
    assert shared.encode("and the", True) == list(alone.encode("and the", add_special_tokens=True))


@pytest.mark.parametrize("make", [folder, gguf])
def test_the_bytes_of_tokens_are_those_of_the_text(make: Any, tmp_path: Path) -> None:
    shared = SharedTokenizer(make(tmp_path / "a"))
    for text in sorted(set(CORPUS)):
        ids = shared.encode(text, False)
        assert b"".join(map(shared.token_bytes, ids)).decode().strip() == text.strip()
    assert shared.token_bytes(10**6) == b""


def test_messages_are_rendered_to_the_text_of_the_same_tokens(tmp_path: Path) -> None:
    shared, alone = SharedTokenizer(folder(tmp_path / "a")), folder(tmp_path / "b")
    rendered = shared.render(MESSAGES)
    assert isinstance(rendered, str)
    assert shared.encode(rendered, False) == list(alone.apply_chat_template(MESSAGES, add_generation_prompt=True))


@pytest.mark.parametrize("make", [folder, gguf])
def test_a_short_text_does_not_wait_for_a_long_one(make: Any, tmp_path: Path) -> None:
    """Nor does Python: the long text is cut outside of the interpreter's lock."""
    shared = SharedTokenizer(make(tmp_path))
    enough = threading.Event()
    begun, ended = [0], [0]

    def tokenize_long() -> None:
        while not enough.is_set():
            begun[0] += 1
            shared.encode(LONG)
            ended[0] += 1

    def five_within_one() -> bool:
        number = begun[0]
        for _ in range(5):
            shared.encode("the")
            time.sleep(0.001)  # in which the other thread would take a lock
        return ended[0] == number - 1

    thread = threading.Thread(target=tokenize_long)
    thread.start()
    try:
        assert soon(five_within_one)
    finally:
        enough.set()
        thread.join()


@pytest.mark.parametrize("make", [folder, gguf])
def test_tokens_become_the_text_that_the_tokenizer_itself_decodes(make: Any, tmp_path: Path) -> None:
    shared, alone = SharedTokenizer(make(tmp_path / "a")), make(tmp_path / "b")
    eos = sorted(shared.eos_token_ids)
    for text in CORPUS:
        tokens = [*eos, *alone.encode(text, add_special_tokens=False), *eos]
        for shown in (False, True):
            assert shared.decode(tokens, shown) == alone.decode(tokens, skip_special_tokens=not shown)
    assert shared.decode(eos) == "" != shared.decode(eos, True)
    assert shared.decode([]) == ""


class Unknown:
    """A tokenizer of which nothing is known."""

    bos_token = None

    def __init__(self) -> None:
        self.at_once = self.most = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        time.sleep(0.002)
        self.at_once -= 1
        return [len(text)]

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool) -> list[int]:
        return self.encode("")


def test_threads_take_turns_at_a_tokenizer_that_is_not_known_to_be_safe() -> None:
    unknown = Unknown()
    shared = SharedTokenizer(unknown)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(shared.encode, ["a"] * 10)) == [[1]] * 10
        assert list(pool.map(shared.render, [MESSAGES] * 10)) == [[0]] * 10
    assert unknown.most == 1
    assert shared.token_lower_bound.compute("a" * 1000) == 0


def test_long_texts_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 15 MiB takes gigabytes while it is tokenized."""
    tokenizer, at_once, most = SharedTokenizer(gguf(tmp_path)), 0, 0

    def encode(core: Any, text: str, special: bool) -> list[int]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.01)  # where another thread would come in
        at_once -= 1
        return [len(text)]

    monkeypatch.setattr(
        bytelevel, "encode_without_gil", lambda core, text, add_special_tokens: encode(core, text, False)
    )
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, ["x" * LONG_FROM] * 4)) == [[LONG_FROM]] * 4
    assert most == 1
