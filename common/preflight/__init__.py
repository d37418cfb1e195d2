"""Checks that a process makes at its own start, before it loads or waits for anything.

Each check is a short function that returns a `Finding`, or None where it does not apply. They take milliseconds, and
replace what would otherwise be a traceback, a signal, or a hang. `spo doctor` (`launcher/doctor/`) makes them too, and
more.
"""
