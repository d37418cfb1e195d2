"""One list of checks (`list.py`) for everything that keeps a process from starting, or makes it slow.

A check is a short function of a `Context` that returns its findings. The list says which processes it is for, what it
needs and when it runs: when a process starts, before `spo run` starts its processes, in `spo doctor` or in `spo run
--dry-run`. Checks at a start take milliseconds, and replace what would otherwise be a traceback, a signal, or a hang.
"""
