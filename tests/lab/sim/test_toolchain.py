"""Which compiler is taken; and libraries that are built once, kept by content and forgotten when long unused."""

import os

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelFault, ToolchainMissing
from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.legal.msl import PREAMBLE
from cortexmlx.metal.lab.sim import Fault, toolchain
from cortexmlx.metal.lab.sim.lines import line_of
from cortexmlx.metal.lab.sim.toolchain import SHIM
from support.kernels.sim_tools import launch

find = toolchain.find_compiler.__wrapped__


def test_without_any_compiler_the_message_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainMissing, match="pip install ziglang"):
        find()


def test_a_compiler_that_is_too_old_is_passed_over(monkeypatch, tmp_path):
    old = tmp_path / "old-compiler"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: str(old) if name == str(old) else None)
    assert find().identity.startswith("ziglang")


def test_cxx_is_taken_first_when_it_is_recent_enough(monkeypatch, tmp_path):
    mine = tmp_path / "my-clang"
    mine.write_text("#!/bin/sh\nexit 0\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert find().compile[0] == str(mine)


# Built libraries, and the cache.


def test_a_kernel_is_compiled_once_and_its_text_is_the_key(monkeypatch, tmp_path):
    monkeypatch.setenv("CORTEXMLX_SIM_CACHE", str(tmp_path))
    source = "uint i = thread_position_in_grid.x; y[i] = x[i] + 41;"
    launch(source)
    libraries = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(toolchain.subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    y, _ = launch(source)
    assert y[1].item() == 42
    assert {path.name for path in tmp_path.iterdir()} == libraries


def test_the_cache_forgets_what_was_not_used_for_longest(tmp_path):
    for age in range(20):
        path = tmp_path / f"{age}.so"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    toolchain.prune(tmp_path, most=20)
    assert len(list(tmp_path.iterdir())) == 20
    toolchain.prune(tmp_path, most=16)
    assert {path.stem for path in tmp_path.iterdir()} == {str(age) for age in range(12)}


def test_what_is_precompiled_is_what_mlx_puts_before_a_kernel():
    assert PREAMBLE in (SHIM / "sim" / "preamble.h").read_text()


# What the compiler's flags are for: loads stay in place, this machine's macros are hidden, arithmetic is watched.


I = "uint i = thread_position_in_grid.x; "  # noqa: E741
HEADER = "float get(const device float* p, uint i) { return p[i]; }\nstruct Pair { float a, b; };\n"

# Each reads past the end of x (64 floats) in some thread, and uses the value only in threads that did not.
EARLY_LOADS = {
    "if": "float v = x[i + 1]; y[i] = 0; if (i < 63) y[i] = v;",
    "return": "float v = x[i + 1]; if (i >= 63) { y[i] = 0; return; } y[i] = v;",
    "conditional operator": "float v = x[i + 1]; y[i] = i < 63 ? v : 0.0f;",
    "inside a loop": "float s = 0; for (uint k = i; k < i + 4; k++) { float v = x[k]; if (k < 64) s += v; } y[i] = s;",
    "function": "float v = get(x, i + 1); y[i] = 1; if (i < 63) y[i] = v;",
    "reduction": "float v = x[i + 1]; y[i] = simd_sum(i < 63 ? v : 0.0f);",
    "struct": "Pair p = ((const device Pair*)x)[i]; y[i] = 0; if (i < 32) y[i] = p.b;",
    "vector": "float4 v = ((const device float4*)x)[i]; y[i] = 0; if (i < 16) y[i] = v.x + v.y;",
    "one of two loads": "float v = x[i + 1], w = x[0]; y[i] = i < 63 ? v : w;",
}


@pytest.mark.parametrize("name", EARLY_LOADS)
def test_a_load_past_the_end_is_seen_though_a_guard_hides_its_value(name):
    with pytest.raises(KernelFault, match=r"reads \d+ bytes outside"):
        launch(I + EARLY_LOADS[name], header=HEADER)


@pytest.mark.parametrize("checked", [True, False])
def test_nothing_tells_a_kernel_which_machine_it_is_on(checked):
    hidden = ["__x86_64__", "__aarch64__", "__linux__", "__APPLE__", "__unix__", "__SSE2__", "__ARM_NEON", "__GNUC__"]
    hidden += ["__LP64__", "__ELF__", "__GLIBC__", "__GLIBC_MINOR__", "_LIBCPP_ABI_VERSION"]
    source = "".join(f"\n#ifdef {name}\ny[{n}] = 1;\n#endif\n" for n, name in enumerate(hidden))
    source += "y[20] = __cplusplus >= 201402L; y[21] = INT_MAX == 2147483647; y[22] = FLT_MAX > 3e38f; "
    source += "y[23] = __METAL_VERSION__;"
    with sim.options(checked=checked):
        y, _ = launch("if (thread_position_in_grid.x == 0) {" + source + "}", init_value=0)
    assert [name for name, seen in zip(hidden, y.tolist(), strict=False) if seen] == []
    assert y[20:23].tolist() == [1, 1, 1] and y[23].item() >= 310


# name -> (right, wrong, what is said)
ARITHMETIC = {
    "shift by the width": ("y[i] = 1u << (i % 32);", "y[i] = 1u << (i % 33);", "shifts 'unsigned int' by 32"),
    "shift of 64 bits": ("y[i] = 1ul >> (i % 64);", "y[i] = 1ul >> (i + 1);", "shifts 'unsigned long' by 64"),
    "shift to the left of nothing": (
        "y[i] = 1 << (int(i) % 31);",
        "y[i] = 1 << (int(i) % 31 - 1);",
        "shifts 'int' by -1",
    ),
    "constant shift": ("y[i] = 1u << 31;", "y[i] = 1u << 32;", "shifts 'unsigned int' by 32"),
    "float too large": ("y[i] = int(x[i] * 1e7f);", "y[i] = int(x[i] * 1e8f);", "does not fit in 'int'"),
    "negative float": ("y[i] = int(x[i] - 1);", "y[i] = uint(x[i] - 1);", "-1 does not fit in 'unsigned int'"),
    "infinity": ("y[i] = int(x[i] / 2);", "y[i] = int(x[i] / (x[i] * 0));", "does not fit in 'int'"),
    "a vector of floats to bytes": (
        "y[i] = uchar4(float4(x[i]) * 4).w;",
        "y[i] = uchar4(float4(x[i]) * float4(1, 1, 1, 5)).w;",
        "300 does not fit in 'unsigned char'",
    ),
    "a vector of halves to integers": (
        "y[i] = short2(half2(x[i]) * 500.0h).x;",
        "y[i] = short2(half2(x[i]) * 1000.0h).x;",
        "does not fit in 'short'",
    ),
    "float to a byte": ("y[i] = uchar(x[i] * 4);", "y[i] = uchar(x[i] * 5);", "300 does not fit in 'unsigned char'"),
}
CUTS = {
    "int": ("long o = i * 100l; int k = o; y[i] = k;", "long o = i * 1000000000l; int k = o; y[i] = k;"),
    "uint": ("ulong o = i * 1000000000ul; y[i] = uint(o);", "ulong o = i * 1000000000ul; uint k = o; y[i] = k;"),
    "argument": ("y[i] = get(x, i * 1ul);", "y[i] = get(x, i * (1ul << 32));"),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_that_no_language_defines_is_reported_with_its_line(name):
    _, wrong, said = ARITHMETIC[name]
    with pytest.raises(KernelFault, match=said) as caught:
        launch(I + "\n" + wrong)
    assert wrong[:40] in str(caught.value)


@pytest.mark.parametrize("name", CUTS)
def test_a_64_bit_value_cut_to_32_bits_without_being_asked_is_reported(name):
    _, wrong = CUTS[name]
    with pytest.raises(KernelFault, match="of 32 bits without being asked"):
        launch(I + wrong, header=HEADER)
    with sim.options(allow=frozenset({Fault.TRUNCATION})):
        launch(I + wrong, header=HEADER)


def test_arithmetic_that_fits_is_no_fault():
    rights = [right for right, *_ in (*ARITHMETIC.values(), *CUTS.values())]
    launch(I + "".join(f"{{ {right} }}\n" for right in rights), header=HEADER)


def test_bytes_of_a_word_may_be_cut_out():
    y, _ = launch(I + "uchar c = i * 100; y[i] = c;")
    assert mx.array_equal(y, (mx.arange(64) * 100 % 256).astype(mx.float32))


def test_a_negative_number_may_be_a_uint_of_the_same_32_bits():
    """Strides are 64 bits wide and may be negative; a uint that takes one wraps, and so does the sum that it is for."""
    y, _ = launch(I + "long stride = -long(i); uint at = stride; y[i] = float(int(at + 64));")
    assert mx.array_equal(y, (64 - mx.arange(64)).astype(mx.float32))


# From an instruction to the line of the kernel's text.


def test_a_fault_names_the_line_that_it_quotes():
    with pytest.raises(KernelFault, match=r'line \d+: "y\[i\] = x\[i \+ 1\];"'):
        launch("uint i = thread_position_in_grid.x;\n\n  y[i] = x[i + 1];\n")


def test_the_line_is_that_of_the_statement_in_a_kernel_of_many():
    for at in (1, 7, 30):
        lines = [f"float v{n} = x[{n}];" for n in range(40)]
        lines[at] = "y[0] = x[1000];"
        with pytest.raises(KernelFault, match=r'line \d+: "y\[0\] = x\[1000\];"'):
            launch("\n".join(lines))


def test_a_file_without_a_line_table_has_no_answer(tmp_path):
    for name, content in {"empty.so": b"", "mach.so": b"\xcf\xfa\xed\xfe" + bytes(100)}.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert line_of(path, 1234) is None
