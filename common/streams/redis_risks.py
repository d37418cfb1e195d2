"""What others can do with a Redis that is reached without a password or without TLS."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

from common.config import BrokerConfig
from common.config.redis_url import SentinelUrl, names_sentinels
from common.network import is_loopback, without_password


def risks(config: BrokerConfig, *, on_this_machine: bool = True) -> Iterator[str]:
    """One line for each risk of the way to Redis that a configuration describes.

    Args:
        on_this_machine: whether to name those of a server on a loopback address too.
    """
    if config.url.startswith("unix://"):
        return
    parts, options = urlsplit(config.url), parse_qs(urlsplit(config.url).query)
    url = without_password(config.url)
    if names_sentinels(config.url):
        local = all(is_loopback(host) for host, _ in SentinelUrl.parse(config.url).sentinels)
        password = False
    else:
        local, password = is_loopback(parts.hostname or "localhost"), bool(parts.password or "password" in options)
    if local and not on_this_machine:
        return
    # A server that asks for a certificate of the client's needs no password.
    if not (password or config.password_file or "ssl_certfile" in options):
        who = "every account of this machine" if local else "whoever reaches it over the network"
        yield (
            f"Redis at {url} asks for no password: {who} can read prompts and answers, inject samples, end the run and "
            "make Redis write files; give it one (requirepass, or an ACL user) and name it by broker.password_file"
        )
    if not local and not parts.scheme.startswith("rediss"):
        yield (
            f"Redis at {url} is reached without TLS: whoever is on the way can read prompts, answers and the password, "
            "and change samples; use rediss:// (rediss+sentinel://), or keep it on a network that others cannot reach"
        )
