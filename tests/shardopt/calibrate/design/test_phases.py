"""What a calibration measures, and what of it a single group needs."""

from __future__ import annotations

import pytest

from shardopt.calibrate.design import phases
from shardopt.calibrate.design.cuda import Device
from shardopt.calibrate.design.points import QUICK, TINY
from shardopt.cli.calibrate import MeasuredGroup

GPU = Device(80 * 2**30, 256 * 2**30)


@pytest.mark.parametrize("gpu", [None, GPU])
def test_a_group_takes_its_own_points_and_no_others(gpu: Device | None) -> None:
    every = [*phases.alone(TINY, gpu=gpu), *phases.together(TINY, 2)]
    assert phases.of_group(every, None) == every
    taken = [point for group in phases.Group for point in phases.of_group(every, group)]
    assert len(taken) == len({id(point) for point in taken}) < len(every)
    for group in phases.Group:
        assert phases.of_group(every, group), group


def test_the_host_alone_is_brief() -> None:
    kernels = phases.of_group(phases.alone(phases.BRIEF, gpu=GPU), phases.Group.HOST)
    exchanges = phases.of_group(phases.together(phases.BRIEF, 2), phases.Group.HOST)
    assert {point.family for point in kernels} == {"host"}
    assert {point.family for point in exchanges} == {"iteration"}
    assert phases.BRIEF.iteration_rounds < QUICK.iteration_rounds


def test_the_flag_names_every_group() -> None:
    assert [only.value for only in MeasuredGroup] == [group.value for group in phases.Group]
