"""What keeps a process from starting, or makes it slow: one list of checks (`list.py`), used before each start.

A check is a short function of a `Context` that returns what it finds. The list says for which processes it is, what it
needs and when it runs: when a process starts, before `spo run` starts its processes, in `spo doctor` or in `spo run
--dry-run`. Checks at a start take milliseconds, and replace what would otherwise be a traceback, a signal, or a hang.
"""
