"""NVLink domains that nobody gave."""

import pytest

from predictor.hardware.loader import load_hardware
from shardopt.config.nvlink import nvlink_domain


@pytest.mark.parametrize(
    ("domain", "host", "ranks", "local", "expected"),
    [
        (8, 8, 8, 8, 8),
        (8, 8, 16, 8, 8),
        (8, 8, 4, 4, 4),  # a world smaller than the domain
        (8, 8, 1, 1, 1),
        (8, 8, 16, 4, 4),  # hosts of four: their NVLink does not leave them
        (8, 8, 16, 16, 8),  # two islands in a host
        (8, 8, 12, 12, 6),  # the largest equal islands
        (2, 8, 8, 8, 2),  # NVLink pairs
        (2, 8, 3, 3, 1),
        (72, 4, 16, 4, 16),  # a rack: all hosts
        (72, 4, 144, 4, 72),
        (72, 4, 80, 4, 40),  # equal groups of whole hosts
        (72, 4, 2, 2, 2),
    ],
)
def test_nvlink_domain(domain: int, host: int, ranks: int, local: int, expected: int) -> None:
    profile = load_hardware("h100-sxm").model_copy(
        update={"nvlink_domain": domain, "gpus_per_host": host}
    )
    assert nvlink_domain(profile, ranks, local) == expected
