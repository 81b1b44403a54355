"""Kernel text as tokens: brackets, calls, and where statements end."""

import pytest

from cortexmlx.metal.lab.sim.paths import KernelTokens


def index(tokens, word):
    return next(i for i in range(len(tokens)) if tokens[i] == word)


@pytest.mark.parametrize(
    "statement",
    [
        "x = f(1, {2; 3});",
        "{ a; { b; } c; }",
        "for (int i = 0; i < 3; i++) x[i] = 1;",
        "for (;;) { if (a) break; }",
        "if (a) b; else if (c) { d; } else e;",
        "if constexpr (a) while (b) c;",
        "do x++; while (x < 3);",
        "do { while (a) b; } while (c);",
        "while (a) do b; while (c);",
        "switch (a) { case 1: b; default: c; }",
        "SOME_UNROLL for (;;) if (a) b; else c;",
        'x = "}; for (";',
    ],
)
def test_a_statement_ends_where_it_ends(statement):
    tokens = KernelTokens(f"{statement} after();")
    assert tokens.after_statement(0) == index(tokens, "after")


def test_a_call_may_have_template_arguments_and_a_comparison_is_none():
    tokens = KernelTokens("a(1); b<float, 4>(2); c < d && (e); g < h; vec<T, sizeof(U)>(1);")
    assert [tokens[i] for i in range(len(tokens)) if tokens.is_word(i) and tokens.call_opens(i)] == [
        "a",
        "b",
        "vec",
        "sizeof",
    ]


def test_brackets_that_conditional_compilation_doubles_have_no_partner_and_the_others_do():
    tokens = KernelTokens("void f() {\n#if A\n  for (;;) {\n#else\n  while (1) {\n#endif\n  } }\nvoid g() { h(); }")
    opens = index(tokens, "h") - 1
    assert tokens[tokens.match[opens]] == "}" and tokens.match[tokens.match[opens]] == opens
    with pytest.raises(KeyError):
        tokens.after_statement(4)


def test_directives_are_no_tokens_even_over_several_lines():
    tokens = KernelTokens("a;\n#define M(x) { \\\n  x\nb;\n#pragma unroll\nfor (;;) c;")
    assert [tokens[i] for i in range(4)] == ["a", ";", "b", ";"]
    assert tokens.pragma_before(4).group() == "#pragma unroll"
    assert tokens.pragma_before(2) is None
