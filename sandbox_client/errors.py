"""What goes wrong with a sandbox that is not the program's fault."""

from __future__ import annotations


class SandboxUnavailable(Exception):
    """The sandbox gave no result. It says nothing about the program: the task is tried again, never scored."""


class RequestRefused(SandboxUnavailable):
    """This sandbox does not run such a request: its language, a path of its files, its token. No use to ask again."""


class SandboxUnreachable(SandboxUnavailable):
    """There is no connection to the server to be had."""
