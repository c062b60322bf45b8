"""Whom a Host header means. Pure; asks no name server."""

import ipaddress


def host_of(header: str) -> str:
    """A Host header without its port, brackets and case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if header.count(":") == 1 else header.lower()


def is_loopback(address: str) -> bool:
    """Whether a name or an address is this machine itself, whatever any name server says."""
    if address == "localhost":
        return True
    return is_address(address) and ipaddress.ip_address(address).is_loopback


def is_loopback_host(header: str) -> bool:
    return is_loopback(host_of(header))


def is_address(name: str) -> bool:
    """Whether this is an IP address and no name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
