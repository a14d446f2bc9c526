"""Where the page listens and by which names it is asked for."""

import pytest

from syncd.errors import UsageError
from syncd.parts.page.server import address_of, is_loopback, may_ask, url


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("0.0.0.0", "0.0.0.0"),
    ],
)
def test_hosts_are_parsed_as_addresses(host, address):
    assert address_of(host) == address


@pytest.mark.parametrize("host", ["", "gpu01", "127.1", "1.2.3.4.5", "http://127.0.0.1"])
def test_host_names_are_refused_without_a_lookup(host):
    with pytest.raises(UsageError):
        address_of(host)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_loopback_addresses_are_recognized(address, loopback):
    assert is_loopback(address) is loopback


@pytest.mark.parametrize(
    "header",
    [
        "localhost",
        "LOCALHOST:8420",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:9000",
        "[::1]",
        "[::1]:8420",
        "gpu01:80",
    ],
)
def test_requests_for_this_host_are_allowed(header):
    assert may_ask(header, loopback=True, names={"gpu01"})


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "evil.example",
        "evil.example:8420",
        "localhost.evil.example",
        "gpu01.evil.example",
        "10.0.0.1",
        "127.0.0.1.evil.example",
        "localhost:80:80",
        "localhost:",
        "localhost evil",
        "user@localhost",
        "[::1",
        "a\nb",
    ],
)
def test_a_foreign_host_name_that_resolves_here_is_refused(header):
    assert not may_ask(header, loopback=True, names={"gpu01"})


def test_beyond_loopback_any_address_is_allowed_but_no_foreign_host_name():
    assert may_ask("10.0.0.1:8420", loopback=False, names=())
    assert may_ask("gpu01", loopback=False, names={"gpu01"})
    assert not may_ask("evil.example", loopback=False, names={"gpu01"})


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("127.0.0.1", "http://127.0.0.1:1/"),
        ("::1", "http://[::1]:1/"),
        ("0.0.0.0", "http://h:1/"),
        ("::", "http://h:1/"),
    ],
)
def test_urls_show_the_address_and_port(address, shown):
    assert url(address, 1, "h") == shown
