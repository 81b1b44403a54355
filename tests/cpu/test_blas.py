"""The fast BLAS under MLX's CPU build: in place when it can be had, said plainly when not; a process for each case."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.cpu import blas
from support.patience import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU build needs another BLAS")
built = pytest.mark.skipif(
    importlib.util.find_spec("cortexmlx.cpu._blas_shim") is None, reason="the shim was not built: no C compiler"
)


def run(code: str, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("CORTEXMLX_BLAS", "OPENBLAS_NUM_THREADS")} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


MULTIPLY = "import mlx.core as mx; mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))"


@built
def test_mlx_binds_its_matrix_products_to_the_shim(tmp_path: Path) -> None:
    run(
        f"from cortexmlx.cpu import blas; assert blas.preload().state is blas.BlasState.FAST; {MULTIPLY}",
        LD_DEBUG="bindings",
        LD_DEBUG_OUTPUT=str(tmp_path / "bindings"),
    )
    bindings = "".join(file.read_text() for file in tmp_path.iterdir()).splitlines()
    for symbol in ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm"):
        bound = [line for line in bindings if "libmlx.so" in line.split(" to ")[0] and f"`{symbol}'" in line]
        assert bound and all("_blas_shim" in line for line in bound), bound
    forwarded = [line for line in bindings if "_blas_shim" in line.split(" to ")[0] and "scipy_cblas_sgemm" in line]
    assert forwarded and all("scipy_openblas" in line.split(" to ")[1] for line in forwarded)


@built
def test_products_are_right_in_every_layout_and_type() -> None:
    run(
        """
from cortexmlx.cpu import blas
blas.preload()
import mlx.core as mx, numpy as np
rng = np.random.default_rng(0)
for m, k, n in ((1, 1, 1), (1, 5, 7), (1, 1, 9), (1, 576, 1536), (3, 5, 7), (64, 1, 9), (33, 65, 17), (128, 576, 1536)):
    for kind in (np.float32, np.complex64):
        a, b = (rng.normal(size=s).astype(kind) for s in ((m, k), (k, n)))
        if kind is np.complex64:
            a, b = a + 1j * a[::-1], b - 1j * b[::-1]
            a, b = a.astype(kind), b.astype(kind)
        wanted = a.astype(np.complex128) @ b.astype(np.complex128)
        x, y = mx.array(a), mx.array(b)
        for x, y in ((x, y), (mx.array(a.T.copy()).T, y), (x, mx.array(b.T.copy()).T)):
            assert np.abs(np.array(x @ y) - wanted).max() <= 1e-5 * np.abs(wanted).max() * k ** 0.5
for m, k, n in ((1, 576, 192), (5, 64, 3)):
    a, b, c = (rng.normal(size=s).astype(np.float32) for s in ((m, k), (n, k), (m, n)))
    found = mx.addmm(mx.array(c), mx.array(np.repeat(a, 2, axis=1))[:, ::2], mx.array(b).T, alpha=0.5, beta=-2.0)
    assert np.allclose(np.array(found), 0.5 * a.astype(np.float64) @ b.T - 2.0 * c, atol=1e-4)
with mx.stream(mx.cpu):
    a, b = rng.normal(size=(33, 65)), rng.normal(size=(65, 17))
    found = mx.array(a, dtype=mx.float64) @ mx.array(b, dtype=mx.float64)
    assert np.abs(np.array(found) - a @ b).max() < 1e-12
"""
    )


@built
def test_preload_is_idempotent_and_touches_nothing_else() -> None:
    out = run(
        """
import os, sys
before = dict(os.environ)
from cortexmlx.cpu import blas
assert blas.status() == "not loaded yet"
first = blas.preload()
assert blas.preload() is first and blas.status() == first.line
assert dict(os.environ) == before and "mlx" not in sys.modules and "numpy" not in sys.modules
print(first.threads, blas.usable_cpus(), first.line)
"""
    )
    threads, cpus, line = out.split(maxsplit=2)
    assert 1 <= int(threads) <= int(cpus) and "OpenBLAS from scipy-openblas32" in line


@built
def test_a_thread_count_that_the_user_chose_is_kept() -> None:
    assert run("from cortexmlx.cpu import blas; print(blas.preload().threads)", OPENBLAS_NUM_THREADS="1").strip() == "1"


@built
def test_the_look_at_who_else_runs_comes_before_the_librarys_own_threads_spin() -> None:
    """OpenBLAS starts its threads when it is loaded, and for a while they wait for work by spinning."""
    out = run(
        """
from pathlib import Path
from cortexmlx.cpu import blas
threads = []
blas.count_busy_threads = lambda: threads.append(len(list(Path("/proc/self/task").iterdir()))) or 0
print(blas.preload().threads, blas.usable_cpus(), *threads)
"""
    )
    used, usable, *threads = map(int, out.split())
    assert used == usable and threads == [1], "other threads of this process were counted, too"


def test_it_can_be_switched_off() -> None:
    out = run(
        "from cortexmlx.cpu import blas; s = blas.preload(); "
        "assert s.state is blas.BlasState.SWITCHED_OFF; print(s.line)",
        CORTEXMLX_BLAS="0",
    )
    assert "CORTEXMLX_BLAS=0" in out


@built
def test_a_program_that_uses_mlx_first_gets_the_fast_products(tmp_path: Path) -> None:
    """The loader has bound mlx's calls to its own BLAS by the time of the first product."""
    out = run(
        """
import ctypes
import mlx.core as mx
mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
from cortexmlx.cpu import blas
print(blas.preload().state.value)

calls = []
sgemm = ctypes.CFUNCTYPE(None, *[ctypes.c_int] * 6, ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p,
                         ctypes.c_int, ctypes.c_float, ctypes.c_void_p, ctypes.c_int)
noted = sgemm(lambda *arguments: calls.append(arguments[3:6]))
shim = blas._held[-1]
original = ctypes.cast(shim.cblas_sgemm, ctypes.c_void_p).value
mx.eval(mx.ones((32, 48)) @ mx.ones((48, 64)))
assert (mx.ones((32, 48)) @ mx.ones((48, 64)) == 48).all().item()
addresses = [ctypes.cast(f, ctypes.c_void_p) for f in (noted, shim.cblas_dgemm, shim.cblas_cgemm)]
assert shim.cortexmlx_rebind((ctypes.c_void_p * 3)(*addresses)) == 3
mx.eval(mx.ones((32, 48)) @ mx.ones((48, 64)))
print(calls)
assert shim.cortexmlx_take_over() == 3
assert (mx.ones((32, 48)) @ mx.ones((48, 64)) == 48).all().item() and len(calls) == 1
""",
        LD_DEBUG="bindings",
        LD_DEBUG_OUTPUT=str(tmp_path / "bindings"),
    )
    assert out.splitlines() == ["fast", "[(32, 64, 48)]"]
    bindings = "".join(file.read_text() for file in tmp_path.iterdir()).splitlines()
    assert any("_blas_shim" in line.split(" to ")[0] and "scipy_cblas_sgemm" in line for line in bindings)


@built
def test_products_of_other_threads_are_right_while_the_calls_are_changed() -> None:
    run(
        """
import threading
import mlx.core as mx
wrong, done = [], threading.Event()

def multiply(size):
    with mx.stream(mx.new_stream(mx.cpu)):
        while not done.is_set():
            if not (mx.ones((size, size)) @ mx.ones((size, size)) == size).all().item():
                wrong.append(size)

threads = [threading.Thread(target=multiply, args=[size]) for size in (8, 33, 70)]
for thread in threads:
    thread.start()
from cortexmlx.cpu import blas
assert blas.preload().state is blas.BlasState.FAST
assert all(blas._held[-1].cortexmlx_take_over() == 3 for _ in range(300))
done.set()
for thread in threads:
    thread.join()
assert not wrong
"""
    )


def test_threads_that_ask_at_once_get_one_outcome() -> None:
    """Each would load the libraries and choose a number of threads, the later ones while the first computes."""
    run(
        """
import threading
from cortexmlx.cpu import blas
began, outcomes = [], []
first, everyone = blas._load_blas, threading.Barrier(4)

def preload():
    began.append(1)
    return first()

def ask():
    everyone.wait()
    outcomes.append(blas.preload())

blas._load_blas = preload
threads = [threading.Thread(target=ask) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(began) == 1 and len(outcomes) == 4 and all(each is outcomes[0] for each in outcomes)
"""
    )


def test_a_child_forked_while_another_thread_loads_can_load_for_itself() -> None:
    run(
        """
import os, threading
from cortexmlx.cpu import blas
loading, forked, load = threading.Event(), threading.Event(), blas._load_blas

def slow():
    loading.set()
    forked.wait()
    return load()

blas._load_blas = slow
thread = threading.Thread(target=blas.preload)
thread.start()
loading.wait()
child = os.fork()
blas._load_blas = load
if child == 0:
    blas.preload()
    os._exit(0)
forked.set()
thread.join()
assert os.waitpid(child, 0)[1] == 0
"""
    )


SHIMLESS = """
import logging
logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
from cortexmlx.cpu import blas
blas._shim_path, blas.SYSTEM_LIBRARIES = (lambda: None), ("libnone.so",)
from cortexmlx.models import load_model
for _ in range(2):
    print(load_model({path!r}).notes)
"""


def test_slow_products_are_a_note_of_the_model_and_too_late_a_warning(tiny: Any) -> None:
    """Once in the log: it is the program's fault, whatever engine it opens. The command line shows the notes."""
    command = [sys.executable, "-c", f"import mlx.core\n{SHIMLESS.format(path=str(tiny('one layer')))}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING cortexmlx: reference BLAS") == 1
    first, second = done.stdout.splitlines()
    assert first == second and "about 70 times slower" in first and "the shim was not built" in first
    assert "blas.preload()" in first


def test_an_older_shim_that_cannot_take_over_is_too_late() -> None:
    out = run(
        """
import mlx.core
from cortexmlx.cpu import blas
blas._load_packaged = lambda missing, threads: blas._held.append(object()) or blas.BlasStatus(blas.BlasState.FAST,
"fast")
print(blas.preload().state.value, blas.status())
"""
    )
    assert out.startswith("too late") and "install cortexmlx again" in out


def test_without_a_compiler_the_loss_is_said_and_mlx_still_works() -> None:
    out = run(
        "from cortexmlx.cpu import blas; blas._shim_path = lambda: None; blas.SYSTEM_LIBRARIES = ('libnone.so',); "
        f"s = blas.preload(); assert s.state is blas.BlasState.SLOW; {MULTIPLY}; print(s.line)"
    )
    assert "slower" in out and "C compiler" in out and len(out.splitlines()) == 1


@built
def test_a_system_library_with_cblas_is_taken_where_the_shim_is_missing() -> None:
    """The shim itself, behind a loaded OpenBLAS, has what is looked for in a system library."""
    out = run(
        """
import ctypes, importlib.util
from pathlib import Path
folder = Path(importlib.util.find_spec("scipy_openblas32").submodule_search_locations[0])
ctypes.CDLL(str(next(folder.glob("lib/libscipy_openblas*.so"))), mode=ctypes.RTLD_GLOBAL)
from cortexmlx.cpu import blas
shim = blas._shim_path()
blas._shim_path, blas.SYSTEM_LIBRARIES = (lambda: None), ("libnone.so", "libc.so.6", str(shim))
print(blas.preload().state.value, blas.status())
"""
    )
    assert out.startswith("fast") and "_blas_shim" in out


def test_other_systems_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from cortexmlx.cpu import blas

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(blas, "_status", None)
    assert blas.preload().state is blas.BlasState.NOT_NEEDED


def test_threads_leave_room_for_what_else_runs() -> None:
    assert [blas.idle_cpus(4, 4, others) for others in (0, 1, 2, 4, 50)] == [4, 3, 2, 1, 1]
    assert (blas.idle_cpus(1, 8, 0), blas.idle_cpus(8, 64, 20), blas.idle_cpus(8, 64, 60)) == (1, 8, 4)


def test_who_runs_now_counts_and_not_who_ran_a_minute_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "LOADAVG", tmp_path / "loadavg")
    for text, others in (("7.90 3.20 1.10 1/345 6789", 0), ("0.00 0.00 0.00 4/345 6789", 3)):
        blas.LOADAVG.write_text(text + "\n")
        assert blas.count_busy_threads() == others
    monkeypatch.setattr(os, "getloadavg", lambda: (2.4, 0.0, 0.0))
    blas.LOADAVG.write_text("nonsense")
    assert blas.count_busy_threads() == 2
    monkeypatch.setattr(blas, "LOADAVG", tmp_path / "missing")
    assert blas.count_busy_threads() == 2
