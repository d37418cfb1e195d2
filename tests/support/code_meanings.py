"""Programs with assertions that hold for them in plain Python."""

from __future__ import annotations

# Each text: a program, then assertions that hold, separated by lines of dashes; single lines are one test each.
MEANINGS = {
    "values": r"""
import datetime
from collections import *
from decimal import Decimal
from fractions import Fraction

def same(x): return x
def plain(): return [1, (2.5, {"k": None}), {True}, frozenset({2}), b"a", bytearray(b"b"), 1j, range(3), "\ud800\x00"]
def power(n): return 7 ** n
def floats(): return float("inf"), float("-inf"), -0.0, 0.1 + 0.2
def counted(): return Counter("aab"), OrderedDict(a=1), deque([1]), defaultdict(int, b=2)
def exact(): return Fraction(1, 3), Decimal("0.1")
three = 3
items = [1]
---
assert plain() == [1, (2.5, {"k": None}), {True}, frozenset({2}), b"a", bytearray(b"b"), 1j, range(3), "\ud800\x00"]
assert same([(1, [2]), {"a": {3}}]) == [(1, [2]), {"a": {3}}]
assert power(20000) == 7 ** 20000 and same(-(7 ** 20000)) == -(7 ** 20000)
assert floats() == (float("inf"), float("-inf"), 0.0, 0.30000000000000004)
x = same(float("nan")); assert x != x
from collections import deque; assert counted() == ({"a": 2, "b": 1}, {"a": 1}, deque([1]), {"b": 2})
from fractions import Fraction as F; from decimal import Decimal; assert exact() == (F(1, 3), Decimal("0.1"))
now = datetime.datetime(2020, 1, 2, 3); assert same(now) == now and same(now - now) == datetime.timedelta()
assert three == 3 and items == [1]
print("noise " * 10000); assert same(None) is None and same(True) is True
""",
    "arguments": r"""
def sort(a): a.sort()
def corner(m): m[0][0] = 9
def fill(d, s, b, q): d["k"] = 1; s.add(2); b[0] = 65; q.append(3)
def each(g, xs): return [g(x) for x in xs]
def twice(g): return lambda x: g(g(x))
def named(a, *b, c=1, **d): return [a, b, c, d]
def total(node):
    total = 0
    while node:
        total += node.value
        node = node.next
    return total
---
a = [3, 1, 2]; assert sort(a) is None; assert a == [1, 2, 3]
m = [[1], [2]]; corner(m); assert m == [[9], [2]]
from collections import deque
d, s, b, q = {}, set(), bytearray(b"a"), deque()
fill(d, s=s, b=b, q=q); assert (d, s, b, list(q)) == ({"k": 1}, {2}, b"A", [3])
k = 3; assert each(lambda i: i * k, [1, 2]) == [3, 6]
assert each(len, ["a", "bc"]) == [1, 2] and each(int, ["1"]) == [1]
assert twice(lambda x: x + 1)(1) == 3
assert named(1, 2, c=3, d=4) == [1, (2,), 3, {"d": 4}]
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
...
assert total(Node(1, Node(2))) == 3
""",
    "objects": r"""
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

class Table:
    def __init__(self): self.d = {}
    def __getitem__(self, i): return self.d[i]
    def __setitem__(self, i, x): self.d[i] = x
    def __delitem__(self, i): del self.d[i]
    def __iter__(self): return iter(self.d)
    def __call__(self, x): return x

class Solution:
    def two_sum(self, nums, target): return [0, 1]

def squares(n):
    for i in range(n): yield i * i
if __name__ == "__main__":
    print(input())
---
s = Stack(); s.push(1); s.push(2); assert len(s) == 2 and s.items == [1, 2] and isinstance(s, Stack)
assert V(1) + V(2) == V(3) and V(1) < V(2) and V(2) != V(3) and repr(V(3)) == "V(3)"
assert sorted([V(2), V(1)]) == [V(1), V(2)] and len({V(1), V(1)}) == 1
v = V(1); v.x = 5; assert v.x == 5 and v.__class__ is not int
t = Table(); t["a"] = 1; t["b"] = 2; del t["a"]; assert t["b"] == 2 and list(t) == ["b"] and "b" in t and t("y") == "y"
assert Solution().two_sum(nums=[2, 7], target=9) == [0, 1]
assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(3)) == 5
g = squares(2); assert next(g) == 0 and next(g) == 1 and next(g, None) is None
assert not hasattr(v, "y") and hasattr(v, "x") and bool(Stack()) is False
""",
    "errors": r"""
import sys
sys.setrecursionlimit(10 ** 6)
class Mine(KeyError): pass
def refuse(x): raise ValueError(f"negative: {x}")
def mine(): raise Mine("x")
def leave(): sys.exit(0)
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
try:
    leave()
    assert False
except Exception:
    pass
...
assert deep(5000) == 5000
""",
    "names": r"""
import math
def sorted(x): return "mine"
def f(x): return math.sqrt(x)
---
assert sorted([2, 1]) == [1, 2]
assert math.isclose(f(4), 2)
def verify(candidate):
    assert candidate(9) == 3
...
verify(f)
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
