"""What a process needs of its machine and of the services around it, looked at before anything is loaded.

Each check is a short function that returns a `Finding`. They are run by `spo doctor`, by `python -m common.doctor ROLE`
in a container, and, where the end would otherwise be a traceback or a hang, by each process itself when it starts.
"""
