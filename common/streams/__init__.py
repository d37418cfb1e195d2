"""The streams protocol: which process may write what, and which writes are atomic.

`tasks` -> generators -> `samples` -> sampler -> `batches` -> learner -> `steps` -> all; `dead` keeps what could not be
processed.
Every change that must happen exactly once and as a whole is one Lua script in this folder.
"""
