"""How many ranks NVLink joins, where nobody says it."""

from __future__ import annotations

from collections.abc import Sequence

from predictor.hardware.loader import HardwareProfile


def nvlink_domain(hardware: HardwareProfile, ranks: int, local: int) -> int:
    """Ranks joined by NVLink, when no cluster file says it.

    Inside a host: the largest group of at most the profile's domain that divides the host. Where
    the platform joins hosts by NVLink: the largest number of whole hosts that it allows and that
    divides all ranks.
    """
    domain = min(hardware.nvlink_domain, ranks)
    if hardware.nvlink_domain > hardware.gpus_per_host and domain >= local:
        hosts = ranks // local
        return local * max(n for n in _divisors(hosts) if n * local <= domain)
    return max(n for n in _divisors(local) if n <= domain)


def _divisors(number: int) -> Sequence[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
