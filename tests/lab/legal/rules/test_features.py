"""C++ that Metal leaves out."""

import pytest

from cortexmlx.metal.lab.legal import Language
from support.kernels.legal_tools import assert_told_apart, kernel, said

PAIRS = {
    "goto": ("for (;;) break;", "goto end; //!\nend:;", "no goto"),
    "long long": ("long v = 1l;", "long long v = 1; //!", "no long long"),
    "a literal of long long": ("long v = 1l;", "long v = 1ll; //!", "no long long"),
    "asm": ("", 'asm("nop"); //!', "no asm"),
    "double": ("float d = 1.0;", "double d = 1.0; //!", "no double"),
    "a literal of long double": ("float v = 1.0f;", "float v = 1.0l; //!", "no long double"),
    "register": ("int r = 1;", "register int r = 1; //!", "no `register`"),
    "thread_local": ("int t = 1;", "thread_local int t = 1; //!", "no thread_local"),
    "new": ("int v = 1;", "auto p = new int; //!", "no new"),
    "delete": ("float v = x[0];", "delete x; //!", "no new and delete"),
    "throw": ("if (i > 3) return;", "throw 1; //!", "no exceptions"),
    "try": ("", "try { x[0] = 1; } catch (...) {} //!", "no exceptions"),
    "typeid": ("int s = sizeof(int);", "auto& t = typeid(int); //!", "no run-time type"),
    "printf": ("x[0] = 1;", 'printf("%d", n); //!', "no printf"),
    "std::": ("float m = metal::max(1.0f, x[0]);", "float m = std::max(1.0f, x[0]); //!", "no std"),
    "a variable named kernel": (
        "int kernels = 3; x[0] = kernels;",
        "int kernel = 3; x[0] = kernel; //!",
        "word of the language",
    ),
    "a variable named vertex": ("int vertices[2];", "int vertex[2]; //!", "word of the language"),
    "a variable named fragment": ("float fragments = 1;", "float fragment = 1; //!", "word of the language"),
}
DECLARED = {
    "virtual": ("struct S { int f() { return 1; } };", "struct S { virtual int f() { return 1; } }; //!", "no virtual"),
    "dynamic_cast": (
        "struct A {}; struct B : A {}; inline thread A* f(thread B* b) { return static_cast<thread A*>(b); }",
        "struct A {}; struct B : A {}; inline thread B* f(thread A* a) { return dynamic_cast<thread B*>(a); } //!",
        "no run-time type",
    ),
    "a variable number of arguments": (
        "template <typename... A> inline void f(A... a) {}",
        "inline void f(int a, ...) {} //!",
        "variable number of arguments",
    ),
    "a function named main": ("inline void entry() {}", "inline int main() { return 0; } //!", "main"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_metal_has_no(name: str) -> None:
    right, wrong, reason = PAIRS[name]
    assert_told_apart(kernel(right), kernel(wrong), reason)


@pytest.mark.parametrize("name", DECLARED)
def test_metal_declares_no(name: str) -> None:
    right, wrong, reason = DECLARED[name]
    assert_told_apart(kernel("", right), kernel("", wrong), reason)


def test_metal_3_1_has_no_lambdas_and_metal_4_has() -> None:
    text = kernel("auto twice = [](float v) { return 2 * v; }; //!\nx[0] = twice(1);")
    assert_told_apart(kernel("x[0] = 2;"), text, "Metal 3.1 has no lambdas")
    assert said(text, Language.METAL_4_0) == []


def test_words_in_comments_and_longer_names_are_not_meant() -> None:
    body = (
        "/* a new double: goto the vertex */ float new_max = 1; int renew = 2; // try to delete long long\n"
        "x[0] = new_max + renew;"
    )
    assert said(kernel(body, "struct S { S() = default; S(int) = delete; };")) == []
