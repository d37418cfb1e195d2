"""One program out of many cells: the earlier ones run silently, and only the last one's output is shown."""

from __future__ import annotations

_PROGRAM = """\
def _replay(cells):
    import linecache, os, sys, traceback, types

    main = sys.modules["__main__"] = types.ModuleType("__main__")
    speaking = [os.dup(1), os.dup(2)]
    silent = os.open(os.devnull, os.O_WRONLY)
    for number, cell in enumerate(cells, 1):
        last = number == len(cells)
        for stream, there in enumerate(speaking, 1):
            os.dup2(there if last else silent, stream)
        name = f"<program {number}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
        try:
            exec(compile(cell, name, "exec", dont_inherit=True), main.__dict__)
        except SystemExit:
            if last:
                raise
        except BaseException as error:
            if not last:
                os.dup2(speaking[1], 2)
                print(f"program {number} failed when it was run again", file=sys.stderr)
            # The first frame is this function's.
            traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
            sys.exit(1)
        sys.stdout.flush()
        sys.stderr.flush()


_replay(CELLS)
"""


def replay(cells: list[str]) -> str:
    """A Python program that runs the cells in one namespace and prints what the last one prints.

    It fails as the last cell fails, with a traceback of the cells' own lines.
    """
    return _PROGRAM.replace("CELLS", repr(cells))
