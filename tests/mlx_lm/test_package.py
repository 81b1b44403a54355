"""mlx-lm as a guest in this process: only what is needed is imported, and nothing else of the process changes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cortexmlx.mlx_lm.package import import_mlx_lm_utils, missing_package_message
from support.folders import write_folder
from support.gguf.models import write_model
from support.patience import PATIENCE


def run(code: str, *arguments: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("TRANSFORMERS_", "MLX"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    return done.stdout


BEFORE = """
import os, resource, sys
environment, limit = dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE)
from cortexmlx.models import load_model
assert "mlx" not in sys.modules and "mlx_lm" not in sys.modules
loaded = load_model(sys.argv[1])
"""
AFTER = """
assert dict(os.environ) == environment
assert resource.getrlimit(resource.RLIMIT_NOFILE) == limit
assert resource.setrlimit.__module__ == "resource"
"""


def test_a_folder_and_a_rendered_template_leave_the_process_as_it_was(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ask = f"loaded.tokenizer.chat_template = {template!r}\n"
    ask += "print(loaded.tokenizer.apply_chat_template([{'role': 'user', 'content': 'hello'}], tokenize=False))"
    whole = """
assert "mlx_lm.utils" in sys.modules
import transformers.models as models, transformers.utils.import_utils as tools
reads = lambda: tools.create_import_structure_from_path.cache_info().misses
once = reads()
again = tools._LazyModule("models", models.__file__, tools.define_import_structure(models.__file__))
assert again.__all__ == models.__all__ and again._class_to_module == models._class_to_module
assert reads() - once > 0.9 * once, "transformers' folders are read once; or its cache is large enough now"
"""
    assert run(BEFORE + ask + AFTER + whole, str(write_folder(tmp_path / "m"))) == "hello\n"


def test_a_part_of_a_model_is_loaded_without_what_tokenizes(tmp_path: Path) -> None:
    code = """
import sys
from cortexmlx.mlx_lm.package import load_without_tokenizers
load_without_tokenizers()
from cortexmlx.models.load import load_model
loaded = load_model(sys.argv[1], evaluate_part=lambda model: None)
assert loaded.tokenizer is None and loaded.config["model_type"] == "llama"
assert "mlx_lm.utils" in sys.modules and "transformers" not in sys.modules
"""
    run(code, str(write_folder(tmp_path / "m")))


def test_a_gguf_model_needs_nothing_of_mlx_lm_but_its_model_class(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    run(BEFORE + AFTER + 'assert "transformers" not in sys.modules and "mlx_lm.utils" not in sys.modules', str(path))


def test_mlx_lm_is_whole_as_soon_as_somebody_asks_for_it() -> None:
    """Whoever asks first, and from whichever thread. (The threads do not end: mlx does not survive the end of a process
    in which a thread that imported mlx-lm has ended before.)
    """
    out = run(
        """
import queue, sys, threading
from cortexmlx.mlx_lm.package import enter_mlx_lm
enter_mlx_lm()
import mlx_lm, mlx_lm.models.llama as before
assert "transformers" not in sys.modules
found, never = queue.Queue(), threading.Event()
def ask():
    from mlx_lm import stream_generate, load
    found.put((stream_generate, load))
    never.wait()
for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
answers = [found.get() for _ in range(4)]
import mlx_lm.models.llama as after
assert answers == [(sys.modules["mlx_lm.generate"].stream_generate, sys.modules["mlx_lm.utils"].load)] * 4
assert before is after and mlx_lm.__version__ and type(mlx_lm) is type(sys)
try:
    mlx_lm.no_such_thing
except AttributeError:
    print("missing")
"""
    )
    assert out == "missing\n"


def test_an_imported_mlx_lm_is_left_alone() -> None:
    run("import mlx_lm; from cortexmlx.mlx_lm.package import enter_mlx_lm; enter_mlx_lm(); assert mlx_lm.load")


def test_what_other_threads_print_while_a_module_is_imported_is_not_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def imported(_: str) -> None:
        other = threading.Thread(target=print, args=("of another thread",))
        other.start()
        other.join()
        print("install it")
        raise SystemExit

    import_mlx_lm_utils()
    monkeypatch.setattr("cortexmlx.mlx_lm.package.importlib.import_module", imported)
    assert missing_package_message("no_such_thing") == "install it"
    assert capsys.readouterr().out == "of another thread\n"
