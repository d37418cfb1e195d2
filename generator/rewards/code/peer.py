"""Objects of another process, over a pipe: how assertions use a program that they do not trust.

Sent into the sandbox as text; needs only Python 3.8 and its standard library.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import struct
import types
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_MESSAGE = 16 << 20  # bytes
BINARY = ["eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
BINARY += ["and_", "or_", "xor"]
OPERATIONS: dict[str, Any] = {name: getattr(operator, name) for name in [*BINARY, "getitem", "setitem", "delitem"]}
OPERATIONS.update({f.__name__: f for f in (len, iter, next, bool, str, repr, hash, isinstance)})
SCALARS: dict[type, Any] = {str: str.__str__, float: float.__float__, int: int.__int__}
COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
MUTABLE = (list, dict, set, bytearray, deque)


class Over(BaseException):
    """The program can no longer be asked: it ended, was too slow, or sent an invalid answer."""


class ProgramError(Exception):
    """An exception of the program that has no counterpart here."""


class RemoteObject:
    """An object of the other process.

    The judge's proxies never take part in an operation with a plain value: the program's object would see
    the expected value and could claim to equal it. For the same reason `in` compares the items one by one on the
    judge's side.
    """

    __slots__ = ("_id", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_id", number)

    def __getattr__(self, name: str) -> Any:
        if self._peer.judge and name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)  # otherwise numpy would accept an array's memory address from the program
        return self._peer.ask("get", [self, name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", [self, name, value])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._peer.ask("call", [self, *arguments], named)

    def __instancecheck__(self, instance: Any) -> bool:
        return bool(self._peer.ask("isinstance", [instance, self]))


def _unary(name: str) -> Any:
    return lambda self, *arguments: self._peer.ask(name, [self, *arguments])


def _binary(name: str) -> Any:
    def operation(self: RemoteObject, other: Any) -> Any:
        if self._peer.judge and not isinstance(other, RemoteObject):
            return NotImplemented
        return self._peer.ask(name, [self, other])

    return operation


for _name in ("len", "iter", "next", "bool", "str", "repr", "hash", "getitem", "setitem", "delitem"):
    setattr(RemoteObject, f"__{_name}__", _unary(_name))
for _name in BINARY:
    setattr(RemoteObject, f"__{_name.rstrip('_')}__", _binary(_name))


class Peer:
    """One end of the pipe. Both ends ask and serve, since a test may pass its own functions and objects.

    Messages are a length (4 bytes, big-endian) and JSON: [operation, arguments, named arguments], and answers
    ["answer", value, changes] or ["raise", class, text].
    """

    def __init__(self, receiving: int, sending: int, judge: bool) -> None:
        self.receiving, self.sending, self.judge = receiving, sending, judge
        self.caught = Exception if judge else BaseException
        self.over = ""  # why the other end can no longer be asked
        self.objects: list[Any] = []  # what the other end may refer to, by position
        self.numbers: dict[int, int] = {}
        self.errors: dict[int, type] = {}

    def ask(self, operation: str, arguments: list[Any], named: dict[str, Any] | None = None) -> Any:
        """Have the other end do an operation; its exceptions are raised here."""
        named = named or {}
        message = [operation, [self.encode(x) for x in arguments], {k: self.encode(x) for k, x in named.items()}]
        if self.over:
            raise Over(self.over)
        try:
            self.send(message)
            answer = self.receive()
            while answer[0] not in ("answer", "raise"):
                self.serve(answer)
                answer = self.receive()
            if answer[0] == "answer":
                for place, value in answer[2]:
                    target = arguments[place] if isinstance(place, int) else named[place]
                    _become(target, self.decode(value))
                return self.decode(answer[1])
            kind, text = self.decode(answer[1]), str(answer[2])
            if not issubclass(kind, BaseException):
                raise TypeError(kind)
        except (OSError, EOFError):
            self.over = "the program ended"
            raise Over(self.over) from None
        except Over:
            raise
        except Exception:
            self.over = "the program sent an invalid answer"
            raise Over(self.over) from None
        raise self._raised(operation, kind, text)

    def _raised(self, operation: str, kind: type, text: str) -> BaseException:
        """The exception to raise for one of the other end."""
        # A loop in C, such as `all(map(test, inputs))`, takes a StopIteration of the test for its own end.
        ends_a_loop = self.judge and issubclass(kind, StopIteration) and operation != "next"
        try:
            error = None if ends_a_loop else kind(text)
        except Exception:
            error = None
        return error if isinstance(error, BaseException) else ProgramError(f"{kind.__name__}: {text}")

    def serve(self, message: list[Any]) -> None:
        """Do what the other end asks, and answer."""
        operation, arguments, named = message
        try:
            arguments = [self.decode(x) for x in arguments]
            named = {name: self.decode(x) for name, x in named.items()}
            places = {**dict(enumerate(arguments)), **named}
            before = {place: self.encode(x) for place, x in places.items() if isinstance(x, MUTABLE)}
            value = self.encode(self.do(operation, arguments, named))
            after = {place: self.encode(places[place]) for place in before}
            reply = ["answer", value, [[place, x] for place, x in after.items() if x != before[place]]]
        except self.caught as error:  # the program may call exit; its process continues
            try:
                text = str(error)[:500]
            except BaseException:
                text = ""
            reply = ["raise", self.encode(type(error)), text]
        self.send(reply)

    def do(self, operation: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Do one operation on this end's objects."""
        if operation == "call":
            return arguments[0](*arguments[1:], **named)
        if operation in ("get", "set"):
            # Only what tests define is accessible, not its internals: a generator would expose the tests themselves.
            if self.judge and (arguments[1].startswith("_") or type(arguments[0]).__module__ != "tests"):
                raise AttributeError(arguments[1])
            return (getattr if operation == "get" else setattr)(*arguments)
        return OPERATIONS[operation](*arguments)

    def send(self, message: list[Any]) -> None:
        data = json.dumps(message).encode("ascii")
        if len(data) > MAX_MESSAGE:
            raise EOFError
        data = struct.pack(">I", len(data)) + data
        while data:
            data = data[os.write(self.sending, data) :]

    def receive(self) -> list[Any]:
        (size,) = struct.unpack(">I", self._exactly(4))
        if size > MAX_MESSAGE:
            raise EOFError
        return list(json.loads(self._exactly(size)))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = os.read(self.receiving, size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def encode(self, x: Any) -> Any:
        """A value as JSON: plain data as a copy, anything else as a reference."""
        kind = type(x)
        if x is None or kind in (bool, float, str):
            return x
        if kind.__module__ == "numpy" and getattr(x, "ndim", 1) == 0 and hasattr(x, "item"):
            return self.encode(x.item())
        for plain, convert in SCALARS.items():
            if isinstance(x, plain) and kind is not plain:
                return self.encode(convert(x))  # a subclass
        if kind is int:
            return x if x.bit_length() < 64 else ["int", hex(x)]
        if kind in COLLECTIONS.values():
            return [kind.__name__, [self.encode(i) for i in x]]
        if isinstance(x, tuple) and hasattr(kind, "_fields"):
            return ["tuple", [self.encode(i) for i in x]]
        if kind in (dict, OrderedDict, defaultdict, Counter):
            return ["dict", [[self.encode(key), self.encode(value)] for key, value in x.items()]]
        if kind in (bytes, bytearray):
            return [kind.__name__, x.decode("latin-1")]
        if kind is complex:
            return ["complex", [x.real, x.imag]]
        if kind is range:
            return ["range", [self.encode(i) for i in (x.start, x.stop, x.step)]]
        if kind is Fraction:
            return ["Fraction", [self.encode(x.numerator), self.encode(x.denominator)]]
        if kind is timedelta:
            return ["timedelta", [x.days, x.seconds, x.microseconds]]
        if kind in (Decimal, date, datetime):
            return [kind.__name__, str(x)]
        if kind is RemoteObject:
            return ["yours", x._id]
        return self._reference(x)

    def _reference(self, x: Any) -> Any:
        name = str(getattr(x, "__name__", ""))
        builtin = getattr(builtins, name, None) is x
        if isinstance(x, type) and issubclass(x, BaseException):
            if "_program_id" in vars(x):
                return ["yours", vars(x)["_program_id"]]
            if builtin and issubclass(x, Exception):
                return ["builtin", name]
            parents = [base.__name__ for base in x.__mro__[1:] if getattr(builtins, base.__name__, None) is base]
            return ["error", [self._number(x), name, parents[0]]]
        # The program gets its own `len`; the judge trusts no function because of its name.
        if self.judge and builtin:
            return ["builtin", name]
        if self.judge and isinstance(x, types.ModuleType):
            raise TypeError("a test cannot pass a module to the program")
        return ["mine", self._number(x)]

    def _number(self, x: Any) -> int:
        number = self.numbers.setdefault(id(x), len(self.objects))
        if number == len(self.objects):
            self.objects.append(x)
        return number

    def decode(self, x: Any) -> Any:
        """Decode a value from the other end; raises if it is malformed."""
        if not isinstance(x, list):
            return x
        kind, content = x
        if kind == "dict":
            return {self.decode(key): self.decode(value) for key, value in content}
        if kind in COLLECTIONS:
            return COLLECTIONS[kind]([self.decode(i) for i in content])
        if kind in ("range", "Fraction", "timedelta", "complex"):
            make: Any = {"range": range, "Fraction": Fraction, "timedelta": timedelta, "complex": complex}[kind]
            return make(*map(self.decode, content))
        if kind == "int":
            return int(content, 16)
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray)(content, "latin-1")
        if kind == "Decimal":
            return Decimal(content)
        if kind in ("date", "datetime"):
            return (date if kind == "date" else datetime).fromisoformat(content)
        if kind == "mine":
            return RemoteObject(self, content)
        if kind == "yours":
            return self.objects[content]
        if kind == "builtin" and (not self.judge or issubclass(getattr(builtins, content), Exception)):
            return getattr(builtins, content)
        if kind == "error":
            return self._error(*content)
        raise ValueError(kind)

    def _error(self, number: int, name: str, parent: str) -> type:
        """A stand-in for an exception class of the other end, to raise and to catch."""
        base = getattr(builtins, parent)
        if not issubclass(base, Exception):
            base = ProgramError
        if number not in self.errors:
            self.errors[number] = type(name, (base,), {"_program_id": number})
        return self.errors[number]


def _become(target: Any, value: Any) -> None:
    """Replace a container's content with that of the other end's copy."""
    if isinstance(target, (list, bytearray)):
        target[:] = value
    elif isinstance(target, deque):
        target.clear()
        target.extend(value)
    elif isinstance(target, (dict, set)):
        target.clear()
        target.update(value)
