"""A profile says on which machine it was measured."""

from predictor.hardware.loader import load_hardware
from shardopt.calibrate.profile.source import (
    measured_on,
    other_machine_note,
    other_runtime_note,
    source_on,
)

CPU = load_hardware("cpu-gloo")


def test_a_measured_profile_names_its_machine() -> None:
    (machine,) = measured_on(CPU)
    assert CPU.embedding.provenance.source.startswith(source_on(machine))
    assert other_machine_note(CPU, machine) is None


def test_another_machine_is_said() -> None:
    said = other_machine_note(CPU, "a toaster, 1 cores, 2 GiB, Linux")
    assert said is not None
    assert "and this is a toaster" in said
    assert measured_on(CPU)[0] in said
    assert "shardopt calibrate" in said


def test_published_constants_are_of_no_machine() -> None:
    assert measured_on(load_hardware("h100-sxm")) == ()
    assert other_machine_note(load_hardware("h100-sxm"), "this machine") is None


def test_another_runtime_is_said_where_the_profile_names_one() -> None:
    assert other_runtime_note(CPU, "tuned") is None
    assert other_runtime_note(load_hardware("h100-sxm"), "plain") is None
    said = other_runtime_note(CPU, "plain")
    assert said is not None
    assert "cpu-gloo was measured in the tuned runtime" in said
    assert "calibrate in the plain runtime" in said
