"""The streams protocol: which process may write what, and which writes happen together.

`tasks` -> generators -> `samples` -> sampler -> `batches` -> learner -> `steps` -> all; `dead` for the rest.
Every change that must not happen twice or by halves is one Lua script beside this file.
"""
