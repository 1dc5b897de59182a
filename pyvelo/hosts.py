"""Names and addresses of machines."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

__all__ = ["address_of", "is_loopback"]


def address_of(name: str) -> IPv4Address | IPv6Address | None:
    """Return an address, also one in brackets; None for anything else."""
    try:
        return ip_address(name.strip("[]"))
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Return whether a name or an address is of this machine alone."""
    if name.lower().rstrip(".") == "localhost":
        return True
    address = address_of(name)
    return address is not None and address.is_loopback
