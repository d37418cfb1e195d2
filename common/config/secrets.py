"""Secrets that stand in the configuration itself: they go to no file, to no Redis and into no message."""

from __future__ import annotations

from typing import Any

from common.config.sections import Config

# The settings that can hold one: an address with a password in it, or the secret alone.
ADDRESSES = (("broker", "url"), ("sandbox", "url"))
PLAIN = (("sandbox", "token"),)
PASSWORD_OPTIONS = ("password", "ssl_password")


def without_secrets(config: Config) -> Config:
    """The same configuration as others may read it: addresses without their passwords, no token."""
    for section_name, name in ADDRESSES + PLAIN:
        section = getattr(config, section_name)
        value = getattr(section, name)
        public = address_without_password(value) if value and (section_name, name) in ADDRESSES else None
        config = config.model_copy(update={section_name: section.model_copy(update={name: public})})
    return config


def secrets(config: Config) -> dict[str, Any]:
    """The settings that hold a secret, by their key (`broker.url`), as they are."""
    public = without_secrets(config)
    return {
        f"{section}.{name}": value
        for section, name in ADDRESSES + PLAIN
        if (value := getattr(getattr(config, section), name)) != getattr(getattr(public, section), name)
    }


def address_without_password(url: str) -> str:
    """An address that still leads there, for whoever knows the password; the user's name stays."""
    before, mark, query = url.partition("?")
    scheme, _, rest = before.partition("://")
    authority, slash, path = rest.partition("/")
    login, at, hosts = authority.rpartition("@")
    user = login.partition(":")[0]
    options = "&".join(option for option in query.split("&") if option.partition("=")[0] not in PASSWORD_OPTIONS)
    return f"{scheme}://{user}{at * bool(user)}{hosts}{slash}{path}{mark * bool(options)}{options}"
