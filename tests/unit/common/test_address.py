"""Which addresses are this machine's alone."""

from __future__ import annotations

import pytest

from common.errors import UserError
from common.network import check_bind, is_loopback, is_this_machine


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "example.com", "*", ""])
def test_addresses_that_others_may_reach(host: str) -> None:
    assert not is_loopback(host)


def test_an_address_open_to_the_network_needs_keys() -> None:
    check_bind("tcp://[::1]:*", None, "bind")
    check_bind("tcp://0.0.0.0:5000", "keys", "bind")
    with pytest.raises(UserError, match=r"bind = 'tcp://0.0.0.0:5000' is open to the network without keys"):
        check_bind("tcp://0.0.0.0:5000", None, "bind")
    with pytest.raises(UserError, match=r"bind = '127.0.0.1:5000' must be of the form tcp://host:port"):
        check_bind("127.0.0.1:5000", None, "bind")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.9"])
def test_what_can_be_bound_here_is_this_machine(host):
    assert is_this_machine(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid", ""])
def test_addresses_kept_for_documentation_are_other_machines(host):
    assert not is_this_machine(host)
