"""Programs with assertions that hold for them in plain Python."""

from __future__ import annotations

# Each text: a program, then assertions that hold, separated by lines of dashes; single lines are one test each.
MEANINGS = {
    "values": r"""
import datetime, enum
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

class Point(NamedTuple):
    x: int

class Level(enum.IntEnum):
    LOW = 1

class Text(str): pass

def same(x): return x
def plain(): return [1, (2.5, {"k": None}), {True}, frozenset({2}), b"a", bytearray(b"b"), 1j, range(3), "\ud800\x00"]
def power(n): return 7 ** n
def exact(): return Fraction(1, 3), Decimal("0.1")
def later(d): return d + datetime.timedelta(1), d.isoformat()
def named(): return Point(1), Level.LOW, Text("t")
---
assert plain() == [1, (2.5, {"k": None}), {True}, frozenset({2}), b"a", bytearray(b"b"), 1j, range(3), "\ud800\x00"]
assert power(20000) == 7 ** 20000 and same(-(7 ** 20000)) == -(7 ** 20000)
from fractions import Fraction as F; from decimal import Decimal; assert exact() == (F(1, 3), Decimal("0.1"))
import datetime; assert later(datetime.date(2020, 2, 28)) == (datetime.date(2020, 2, 29), "2020-02-28")
assert named() == ((1,), 1, "t") and type(named()[2]) is str
""",
    "arguments": r"""
def sort(a): a.sort()
def fill(d, s, b, q): d["k"] = 1; s.add(2); b[0] = 65; q.append(3)
def each(g, xs): return [g(x) for x in xs]
def named(a, *b, c=1, **d): return [a, b, c, d]
def total(node):
    total = 0
    while node:
        total += node.value
        node = node.next
    return total
---
a = [3, 1, 2]; assert sort(a) is None; assert a == [1, 2, 3]
from collections import deque
d, s, b, q = {}, set(), bytearray(b"a"), deque()
fill(d, s=s, b=b, q=q); assert (d, s, b, list(q)) == ({"k": 1}, {2}, b"A", [3])
k = 3; assert each(lambda i: i * k, [1, 2]) == [3, 6]
assert named(1, 2, c=3, d=4) == [1, (2,), 3, {"d": 4}]
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
...
assert total(Node(1, Node(2))) == 3
""",
    "objects": r"""
import enum

class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def __len__(self): return len(self.items)

class V:
    def __init__(self, x): self.x = x
    def __add__(self, o): return V(self.x + o.x)
    def __eq__(self, o): return self.x == o.x
    def __lt__(self, o): return self.x < o.x
    def __repr__(self): return f"V({self.x})"
    def __hash__(self): return hash(self.x)

class Color(enum.Enum):
    RED = 1

class Solution:
    def two_sum(self, nums, target): return [0, 1]

def squares(n):
    for i in range(n): yield i * i
def red(): return Color.RED
if __name__ == "__main__":
    print(input())
---
s = Stack(); s.push(1); s.push(2); assert len(s) == 2 and s.items == [1, 2] and isinstance(s, Stack)
assert V(1) + V(2) == V(3) and V(1) < V(2) and V(2) != V(3) and repr(V(3)) == "V(3)"
assert sorted([V(2), V(1)]) == [V(1), V(2)] and len({V(1), V(1)}) == 1
assert red() == Color.RED and red().value == 1 and red() != 1
assert Solution().two_sum(nums=[2, 7], target=9) == [0, 1]
assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(3)) == 5
""",
    "errors": r"""
import sys
sys.setrecursionlimit(10 ** 6)
class Mine(KeyError): pass
def refuse(x): raise ValueError(f"negative: {x}")
def mine(): raise Mine("x")
def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
---
try:
    refuse(-1)
except ValueError as error:
    assert str(error) == "negative: -1"
else:
    raise AssertionError
...
try:
    mine()
    assert False
except Mine:
    pass
...
assert deep(5000) == 5000
""",
}


def parts(text: str) -> tuple[str, list[str]]:
    """(program, assertions); a line of three dots ends a statement of several lines."""
    program, tests = text.split("---\n")
    statements: list[str] = []
    block: list[str] = []
    for line in tests.strip("\n").split("\n"):
        if block or line.endswith(":"):
            if line == "...":
                statements.append("\n".join(block))
                block = []
            else:
                block.append(line)
        else:
            statements.append(line)
    return program, statements
