"""Runs assertions about a program in a process other than the program's. Sent into the sandbox as text.

The *judge* runs the assertions; what they take from the program are `RemoteObject`s, and operations on
those run in the *program's* process, requested over a pipe. Plain values come back as copies, so that the judge's
`==` compares plain data and the program is never told what it is compared with. docs/rewards.md says what this
protects from. Needs only Python 3.8 and its standard library.

The judge reads one JSON object from stdin: `nonce`, `code`, `tests` (a list of [source, counts]), `timeout` and
`seconds` (for one test, for all), `entry_point` (a name, or null). Lines of its stdout that start with the nonce
are the verdict.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import os
import signal
import subprocess
import symtable
import sys
import time
import types
from collections import Counter
from typing import Any

from generator.rewards.code.peer import Over, Peer

MAX_REASON = 160  # characters
START = "import sys; TEXT = sys.argv.pop(); exec(TEXT)"
PROGRAM = "solution"  # the module from which tests import the program's names


class ProgramPeer(Peer):
    """The program's end of the pipe."""

    def do(self, operation: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        if operation == "start":
            return None
        if operation == "load":
            self.module = sys.modules[PROGRAM] = types.ModuleType(PROGRAM)
            exec(compile(arguments[0], "<program>", "exec", dont_inherit=True), vars(self.module))
            return None
        if operation == "names":
            return {name: vars(self.module)[name] for name in arguments[0] if name in vars(self.module)}
        return super().do(operation, arguments, named)


class Examiner:
    """Runs the tests and writes the verdict."""

    def __init__(self, job: dict[str, Any], peer: Peer, out: int) -> None:
        self.job, self.peer, self.out = job, peer, out
        self.stop_at = 0.0
        signal.signal(signal.SIGALRM, self.expire)

    def expire(self, *_: Any) -> None:
        self.peer.over = "time limit"
        raise Over(self.peer.over)

    def limited(self, task: Any, *arguments: Any) -> tuple[bool, str]:
        """Run a task within the time of one test; returns whether it passed, and if not, why.

        Only a task that reaches its end passes. The reason is for people only: the program chooses its exceptions.
        """
        seconds = min(self.job["timeout"], self.stop_at - time.monotonic())
        passed, reason = False, ""
        try:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
            task(*arguments)
            passed = True
        except Over:
            pass
        except BaseException as error:
            reason = _described(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return passed and not self.peer.over, self.peer.over or reason

    def run(self) -> None:
        tests = self.job["tests"]
        trees = [ast.parse(source) for source, _ in tests]
        namespace: dict[str, Any] = {"__name__": "tests"}
        names = self.prepare(trees, namespace)
        self.peer.ask("start", [])  # time until here does not count against the program
        self.stop_at = time.monotonic() + self.job["seconds"]
        self.report("ready")
        usable, why_not = self.limited(self.load, names, namespace)
        programs = {name: namespace[name] for name in names if name in namespace}
        for number, (source, counts) in enumerate(tests):
            passed, reason = False, why_not
            if usable:
                test = compile(source, "<test>", "exec", dont_inherit=True)
                passed, reason = self.limited(exec, test, namespace)
                if not passed:
                    _unbind(source, namespace, programs)
                if self.peer.over:
                    usable, why_not = False, f"not run: {self.peer.over}"
            if counts:
                reason = "".join(c if c.isprintable() else " " for c in reason[:MAX_REASON])
                self.report(f"{number} {'passed' if passed else 'failed'} {reason}")

    def prepare(self, trees: list[ast.Module], namespace: dict[str, Any]) -> list[str]:
        """Import what tests need, before the program runs; returns the names that they take from the program."""
        nodes = [node for tree in trees for node in ast.walk(tree)]
        names = [node.id for node in nodes if isinstance(node, ast.Name)]
        dotted = Counter(
            node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        )
        standard = getattr(sys, "stdlib_module_names", ())
        program_names = [
            alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == PROGRAM
            for alias in node.names
        ]
        for name, uses in Counter(names).items():
            if name != self.job["entry_point"] and hasattr(builtins, name):
                continue
            if name != self.job["entry_point"] and name in standard and dotted[name] == uses:
                namespace[name] = _imported(name)
            else:
                program_names.append(name)
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    _imported(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                _imported(node.module)
        return program_names

    def load(self, names: list[str], namespace: dict[str, Any]) -> None:
        self.peer.ask("load", [self.job["code"]])
        answer = self.peer.ask("names", [tuple(names)])
        values = {name: answer[name] for name in names if name in answer}
        namespace.update(values)
        module = sys.modules[PROGRAM] = types.ModuleType(PROGRAM)
        vars(module).update(values)
        if self.job["entry_point"]:
            # Otherwise a test would call a builtin of this name.
            namespace.setdefault(self.job["entry_point"], None)

    def report(self, line: str) -> None:
        os.write(self.out, f"\n{self.job['nonce']} {line}\n".encode("utf-8", "replace"))


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except BaseException:  # the test that needs it will fail and name it
        return None


def _described(error: BaseException) -> str:
    """An exception as text, for which the program may have to be asked."""
    name = type(error).__name__
    if isinstance(error, AssertionError):
        return name
    try:
        return f"{name}: {error}"
    except BaseException:  # the program can no longer be asked, or its __str__ fails
        return name


def _unbind(source: str, namespace: dict[str, Any], programs: dict[str, Any]) -> None:
    """Remove the program's values of names that a failed test would have bound: later tests mean that test's."""
    for symbol in symtable.symtable(source, "<test>", "exec").get_symbols():
        name = symbol.get_name()
        bound = symbol.is_assigned() or symbol.is_imported()
        if bound and name in programs and namespace.get(name) is programs[name]:
            del namespace[name]


def _hide() -> None:
    """Keep other processes of the same user out of this one's memory and files (prctl PR_SET_DUMPABLE, 0)."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    except Exception:  # not Linux
        pass


def main(text: str) -> None:
    """Run as the judge, or with the argument `program` as the program; `text` is the text sent into the sandbox."""
    if sys.argv[1:2] == ["program"]:
        receiving, sending = int(sys.argv[2]), int(sys.argv[3])
        sys.argv[:] = ["solution.py"]
        program = ProgramPeer(receiving, sending, judge=False)
        try:
            while True:
                program.serve(program.receive())
        except (OSError, EOFError):
            os._exit(0)
    for_program, to_program = os.pipe()
    from_program, for_judge = os.pipe()
    child = subprocess.Popen(
        [sys.executable or "python3", "-c", START, "program", str(for_program), str(for_judge), text],
        pass_fds=(for_program, for_judge),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(for_program)
    os.close(for_judge)
    # From here on this process holds secrets, and imports only from where the program cannot put modules.
    _hide()
    homes = (sys.prefix, sys.base_prefix)
    sys.path[:] = [path for path in sys.path if path.startswith(tuple(home + os.sep for home in homes))]
    job = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    sys.stdout = io.StringIO()  # what tests print is not the verdict
    try:
        Examiner(job, Peer(from_program, to_program, judge=True), out).run()
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    os._exit(0)
