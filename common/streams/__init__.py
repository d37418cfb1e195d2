"""The streams protocol: which process may write what, and which writes happen together.

`tasks` -> generators -> `samples` -> sampler -> `batches` -> learner -> `steps` -> all; `dead` for the rest.
Every change that must happen exactly once and as a whole is one Lua script in this folder.
"""
