"""Messages about optional packages that are missing."""

import pytest

from shardopt.extras import MissingPackageError, missing_package, require_packages


def test_what_is_installed_is_no_problem() -> None:
    require_packages("json", "numpy")


def test_a_missing_package_is_told_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardopt.extras.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"needs scipy.*shardopt\[calibrate\]"):
        require_packages("scipy")
    with pytest.raises(ImportError, match=r"(?s)No module named 'torch'.*shardopt\[cuda\]"):
        require_packages("torch", "scipy")


def test_other_modules_have_no_extra() -> None:
    assert missing_package(ModuleNotFoundError(name="nonsense")) is None
    assert missing_package(ModuleNotFoundError()) is None
