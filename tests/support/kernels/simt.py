"""A GPU's simdgroup in NumPy: structured programs run by all lanes at once under a mask; lanes that part meet again
where their ways join. The same programs as Metal text. Values are uint32, one a lane.

An expression is a number, `("v", n)`, `("lane",)` or `(operator, a, b)`. A statement is one of the classes below.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

LANES = 32
VARIABLES = 3
LANE = np.arange(LANES, dtype=np.uint32)
OPERATORS = {
    "+": np.add,
    "*": np.multiply,
    "^": np.bitwise_xor,
    "&": np.bitwise_and,
    "<": np.less,
    "==": np.equal,
}


@dataclass(frozen=True)
class Assign:
    variable: int
    value: tuple


@dataclass(frozen=True)
class Meet:
    """`v = operation(value)` among the lanes that are there."""

    variable: int
    operation: str
    value: tuple


@dataclass(frozen=True)
class Call:
    """`v = helper(value)`."""

    variable: int
    helper: int
    value: tuple


@dataclass(frozen=True)
class If:
    condition: tuple
    then: tuple
    otherwise: tuple


@dataclass(frozen=True)
class Loop:
    """At most `most` times: `for` as often as `value` says, `while` and `do` as long as it is not 0, `any` as long as
    it is not 0 in any lane of those that are there.
    """

    kind: str
    value: tuple
    most: int
    body: tuple


@dataclass(frozen=True)
class Leave:
    """`break`, `continue` or `return`, of the lanes where the condition holds."""

    way: str
    condition: tuple


MEETINGS = {
    "simd_sum({})": lambda x, m: np.sum(x[m], dtype=np.uint32),
    "simd_max({})": lambda x, m: x[m].max(),
    "simd_xor({})": lambda x, m: np.bitwise_xor.reduce(x[m]),
    "simd_prefix_exclusive_sum({})": lambda x, m: np.cumsum(np.where(m, x, 0), dtype=np.uint32) - x,
    "simd_broadcast_first({})": lambda x, m: x[m][0],
    "uint((ulong)simd_ballot(({}) & 1u))": lambda x, m: _bits((x & 1 == 1) & m),
    "uint(simd_all(({}) & 1u))": lambda x, m: np.uint32((x[m] & 1).all()),
    "(({}) ^ uint((ulong)simd_active_threads_mask()))": lambda x, m: x ^ _bits(m),
    "simd_shuffle({}, ushort(ctz(uint((ulong)simd_active_threads_mask()))))": lambda x, m: x[m][0],
}


def _bits(mask: np.ndarray) -> np.uint32:
    return np.uint32(sum(1 << int(i) for i in np.flatnonzero(mask)))


# ---- run -----------------------------------------------------------------------------------------------


class _Left:
    """Who has left: masks by the way they went."""

    def __init__(self) -> None:
        self.masks = {way: np.zeros(LANES, bool) for way in ("break", "continue", "return")}

    def take(self, way: str) -> np.ndarray:
        mask, self.masks[way] = self.masks[way], np.zeros(LANES, bool)
        return mask


class Simdgroup:
    """32 lanes that run `helpers` and programs."""

    def __init__(self, helpers: tuple) -> None:
        self.helpers = helpers

    def call(self, body: tuple, argument: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Variable 0 when the lanes in the mask have returned from a function with variables `argument`, 1, 2."""
        variables = [argument.astype(np.uint32), *(np.full(LANES, n, np.uint32) for n in range(1, VARIABLES))]
        self._block(body, mask, variables, _Left())
        return variables[0]

    def _value(self, e: tuple | int, v: list[np.ndarray]) -> np.ndarray:
        if isinstance(e, int):
            return np.full(LANES, e, np.uint32)
        if e[0] == "v":
            return v[e[1]]
        if e[0] == "lane":
            return LANE
        return OPERATORS[e[0]](self._value(e[1], v), self._value(e[2], v)).astype(np.uint32)

    def _block(self, body: tuple, mask: np.ndarray, v: list[np.ndarray], left: _Left) -> np.ndarray:
        """The lanes that come to the end of the block."""
        for statement in body:
            if mask.any():
                mask = self._statement(statement, mask, v, left)
        return mask

    def _statement(self, s: object, mask: np.ndarray, v: list[np.ndarray], left: _Left) -> np.ndarray:
        if isinstance(s, If):
            holds = self._value(s.condition, v) != 0
            then = self._block(s.then, mask & holds, v, left)
            return then | self._block(s.otherwise, mask & ~holds, v, left)
        if isinstance(s, Loop):
            return self._loop(s, mask, v, left)
        if isinstance(s, Leave):
            goes = mask & (self._value(s.condition, v) != 0)
            left.masks[s.way] |= goes
            return mask & ~goes
        value = self._value(s.value, v)
        if isinstance(s, Meet):
            value = MEETINGS[s.operation](value, mask)
        elif isinstance(s, Call):
            value = self.call(self.helpers[s.helper], value, mask)
        v[s.variable] = np.where(mask, value, v[s.variable]).astype(np.uint32)
        return mask

    def _loop(self, s: Loop, mask: np.ndarray, v: list[np.ndarray], left: _Left) -> np.ndarray:
        outer = left.masks["break"], left.masks["continue"]
        left.take("break"), left.take("continue")
        behind = np.zeros(LANES, bool)
        times = self._value(s.value, v) % (s.most + 1)
        for turn in range(s.most + (s.kind == "do")):
            if s.kind != "do" or turn:
                value = times > turn if s.kind == "for" else self._value(s.value, v) != 0
                if s.kind == "any":
                    value = np.full(LANES, value[mask].any())
                behind |= mask & ~value
                mask = mask & value
            if not mask.any():
                break
            mask = self._block(s.body, mask, v, left) | left.take("continue")
        behind |= mask | left.take("break")
        left.masks["break"], left.masks["continue"] = outer
        return behind


# ---- write ---------------------------------------------------------------------------------------------


def _text_of(e: tuple | int) -> str:
    if isinstance(e, int):
        return f"{e}u"
    if e[0] == "v":
        return f"v{e[1]}"
    if e[0] == "lane":
        return "lane"
    return f"uint({_text_of(e[1])} {e[0]} {_text_of(e[2])})"


def _lines(body: tuple, names: count, nested: str = "  ") -> str:
    return "".join(nested + line + "\n" for s in body for line in _statement_text(s, names).splitlines())


def _statement_text(s: object, names: count) -> str:
    if isinstance(s, Assign):
        return f"v{s.variable} = {_text_of(s.value)};"
    if isinstance(s, Meet):
        return f"v{s.variable} = {s.operation.format(_text_of(s.value))};"
    if isinstance(s, Call):
        return f"v{s.variable} = helper{s.helper}({_text_of(s.value)}, lane);"
    if isinstance(s, Leave):
        return f"if ({_text_of(s.condition)}) {'return v0' if s.way == 'return' else s.way};"
    if isinstance(s, If):
        text = f"if ({_text_of(s.condition)}) {{\n{_lines(s.then, names)}}}"
        return text + (f" else {{\n{_lines(s.otherwise, names)}}}" if s.otherwise else "")
    k, value, body = f"k{next(names)}", _text_of(s.value), _lines(s.body, names)
    if s.kind == "for":
        return f"for (uint {k} = 0, n{k} = {value} % {s.most + 1}u; {k} < n{k}; {k}++) {{\n{body}}}"
    if s.kind == "do":
        return f"uint {k} = 0;\ndo {{\n  {k}++;\n{body}}} while ({k} <= {s.most}u && {value});"
    value = f"simd_any({value} != 0)" if s.kind == "any" else value
    return f"uint {k} = 0;\nwhile ({k}++ < {s.most}u && {value}) {{\n{body}}}"


def function_text(name: str, body: tuple) -> str:
    """A Metal function of an argument and the lane that does what `Simdgroup.call` does."""
    rest = " ".join(f"uint v{n} = {n}u;" for n in range(1, VARIABLES))
    return f"uint {name}(uint v0, uint lane) {{\n  {rest}\n{_lines(body, count())}  return v0;\n}}\n"
