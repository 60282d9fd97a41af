"""What a planner searches with: costs, ranks, budget, aim, and the answers that are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from predictor.hardware.schema import HardwareProfile
from predictor.model.workload import Workload
from search.problem import Problem, Result
from search.solve import solve
from search.stop import Stop
from shardopt.api.cache import ResultCache, is_final
from shardopt.api.scenarios import ScenarioSource
from shardopt.config.cluster import ClusterConfig
from shardopt.extras import needs_torchrec
from shardopt.torchrec.planning.replicas import Replicas, problem_of

with needs_torchrec():
    from torchrec.distributed.planner import Topology as TorchRecTopology


@dataclass(frozen=True)
class SearchSetting:
    """Of one planner, whatever modules it plans.

    Args:
        replicas: how ranks form groups; None for one copy of the tables.
        scenarios: without the windows of a module.
        cache: None to search every time.
    """

    hardware: HardwareProfile
    cluster: ClusterConfig | None
    replicas: Replicas | None
    effort: float
    seed: int
    objective: str
    scenarios: ScenarioSource
    cache: ResultCache | None

    def problem(self, workload: Workload, left: TorchRecTopology) -> Problem:
        """What there is to search for a module's tables.

        Args:
            left: ranks with the memory that the reservation left.
        """
        return problem_of(workload, left, self.hardware, self.cluster, self.replicas)

    def solve(
        self, problem: Problem, windows: Mapping[str, Workload], ceiling_s: float | None
    ) -> Result:
        """The answer that is kept for the same input, or that of a search.

        Args:
            windows: the problem's workload in each window of data.
            ceiling_s: on the search; None for none.
        """
        source = replace(self.scenarios, windows=windows)

        def search() -> Result:
            stop, wanted = Stop(self.effort, ceiling_s), source.of(problem)
            return solve(problem, stop, self.seed, aim=self.objective, scenarios=wanted)

        if self.cache is None:
            return search()
        given = problem, self.effort, self.seed, self.objective, source
        return self.cache.recall(given, Result, search, is_final)
