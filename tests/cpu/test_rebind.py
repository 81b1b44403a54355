"""Every call of an MLX that is loaded already goes to the shim, or none does; and all else in its memory stays as it
was. Libraries of many layouts, named libmlx.so, take the part of MLX; each test has a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PATIENCE

pytestmark = pytest.mark.skipif(
    sys.platform != "linux"
    or struct.calcsize("P") != 8
    or shutil.which("cc") is None
    or importlib.util.find_spec("cortexmlx.cpu._blas_shim") is None,
    reason="needs a C compiler, the shim and Linux",
)

REFERENCE = """
int calls;
void cblas_sgemm(void) { calls++; }
void cblas_dgemm(void) { calls++; }
void cblas_cgemm(void) { calls++; }
"""
MLX = """
extern void cblas_sgemm(void), cblas_dgemm(void), cblas_cgemm(void);
int writable = 5;
void call(void) { cblas_sgemm(); cblas_dgemm(); cblas_cgemm(); writable++; }
#ifdef TAKEN
void *taken(void) { return (void *)cblas_sgemm; }
#endif
"""
WITHOUT_COMPLEX = "extern void cblas_sgemm(void), cblas_dgemm(void);\nvoid call(void) { cblas_sgemm(); cblas_dgemm(); }"
REFUSING = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
int mprotect(void *page, size_t size, int protection) {
    static int writes;
    if (protection & PROT_WRITE && writes++ == atoi(getenv("REFUSED"))) return -1;
    return syscall(SYS_mprotect, page, size, protection);
}
"""
PROGRAM = """
import ctypes, sys
reference = ctypes.CDLL(sys.argv[1])
libraries = [ctypes.CDLL(path) for path in sys.argv[2:]]

def writable():
    lines = open("/proc/self/maps").read().splitlines()
    return [line.split()[1] for line in lines if line.endswith("/libmlx.so")]

def call():
    for library in libraries:
        library.call()

heard = []
function = ctypes.CFUNCTYPE(None)
functions = [function(lambda number=number: heard.append(number)) for number in range(3)]
call()
from cortexmlx.cpu import blas
assert blas.preload().state is blas.BlasState.FAST
before, called = writable(), ctypes.c_int.in_dll(reference, "calls").value
addresses = (ctypes.c_void_p * 3)(*[ctypes.cast(each, ctypes.c_void_p) for each in functions])
replaced = blas._held[-1].cortexmlx_rebind(addresses)
assert writable() == before
call()
left = ctypes.c_int.in_dll(reference, "calls").value - called
print(replaced, len(heard), left)
"""


def compiled(folder: Path, name: str, code: str, *options: str) -> Path:
    folder.mkdir(exist_ok=True)
    source, library = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library), *options], check=True)
    return library


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """Its functions count their calls."""
    return compiled(tmp_path, "libreference", REFERENCE)


def mlx(folder: Path, reference: Path, *options: str, code: str = MLX) -> Path:
    return compiled(folder, "libmlx", code, str(reference), f"-Wl,-rpath,{reference.parent}", *options)


def rebound(reference: Path, *libraries: Path, **environment: str) -> list[int]:
    """How many functions were replaced, as the shim says; how many calls then go to the new ones and to the old."""
    command = [sys.executable, "-c", PROGRAM, *map(str, (reference, *libraries))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=PATIENCE)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return [int(number) for number in done.stdout.split()]


LAYOUTS = {
    "bound at the first call": ["-Wl,-z,lazy,-z,relro"],
    "nothing read-only": ["-Wl,-z,now,-z,norelro"],
    "without sections": ["-Wl,-z,now", "-s"],
    "without a procedure table": ["-fno-plt"],
    "an address taken, too": ["-DTAKEN", "-Wl,-z,lazy"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_calls_are_changed_in_every_layout(layout: str, tmp_path: Path, reference: Path) -> None:
    assert rebound(reference, mlx(tmp_path / "mlx", reference, *LAYOUTS[layout])) == [3, 3, 0]


def test_all_calls_of_two_copies_are_changed(tmp_path: Path, reference: Path) -> None:
    copies = [mlx(tmp_path / name, reference, "-Wl,-z,now") for name in ("one", "two")]
    assert rebound(reference, *copies) == [3, 6, 0]


def test_an_mlx_that_lacks_a_call_is_left_alone(tmp_path: Path, reference: Path) -> None:
    replaced, heard, _ = rebound(reference, mlx(tmp_path / "mlx", reference, code=WITHOUT_COMPLEX))
    assert (replaced, heard) == (0, 0)


@pytest.mark.parametrize("refused", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_page_that_stays_read_only_leaves_all_calls_as_they_were(
    refused: int, tmp_path: Path, reference: Path
) -> None:
    refusing = compiled(tmp_path, "refusing", REFUSING)
    library = mlx(tmp_path / "mlx", reference, "-Wl,-z,now,-z,relro")
    replaced, heard, _ = rebound(reference, library, LD_PRELOAD=str(refusing), REFUSED=str(refused))
    assert (replaced, heard) == (0, 0)


def test_a_page_that_is_read_only_in_part_stays_writable(tmp_path: Path, reference: Path) -> None:
    """Where the machine's pages are larger than the linker took them to be, the read-only part ends within one: the
    loader leaves that page writable, for it holds variables, too.
    """
    library = mlx(tmp_path / "mlx", reference, "-Wl,-z,lazy,-z,relro")
    read_only_to_within_a_page(library)
    assert rebound(reference, library) == [3, 3, 0]


def read_only_to_within_a_page(library: Path) -> None:
    """Have the read-only part of an ELF file end behind the addresses of its calls."""
    file, relro = bytearray(library.read_bytes()), 0x6474E552
    (headers,) = struct.unpack_from("<Q", file, 32)
    size, count = struct.unpack_from("<HH", file, 54)
    found = [at for i in range(count) if struct.unpack_from("<I", file, at := headers + i * size)[0] == relro]
    (memory,) = struct.unpack_from("<Q", file, found[0] + 40)
    struct.pack_into("<Q", file, found[0] + 40, memory + 64)
    library.write_bytes(file)
