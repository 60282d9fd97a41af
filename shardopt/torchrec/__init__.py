"""shardopt inside TorchRec; the names below load on first use.

Begin with `hook`: the planner. One call of it is a `planning`, which reads the user's module
(`read_module`, over `tables` and `capture`), asks what TorchRec offers and would do itself
(`offered`), and searches on the ranks of a `machine`. `options` and `convert` turn plans into
TorchRec's and back; with `collective` one rank plans for all. `costs` and `provider` are smaller
doors into TorchRec's own planning, `model_file` writes what was read, `running` changes the plan of
a running job, and `private` is all that is not public. `confirming` runs plans in a training
script.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from predictor.model.topology import ReplicaGroups as ReplicaGroups
    from shardopt.ranks.record import record as record
    from shardopt.torchrec.confirming import Confirm as Confirm
    from shardopt.torchrec.confirming import confirm as confirm
    from shardopt.torchrec.costs import ShardoptPerfEstimator as ShardoptPerfEstimator
    from shardopt.torchrec.costs import ShardoptPerfModel as ShardoptPerfModel
    from shardopt.torchrec.hook import ShardoptPlanner as ShardoptPlanner
    from shardopt.torchrec.model_file import to_yaml as to_yaml
    from shardopt.torchrec.provider import ShardoptPlannerExecutor as ShardoptPlannerExecutor
    from shardopt.torchrec.provider import ShardoptPlannerProvider as ShardoptPlannerProvider
    from shardopt.torchrec.provider import plan_machines as plan_machines
    from shardopt.torchrec.report import ShardoptPlanReporter as ShardoptPlanReporter
    from shardopt.torchrec.report import ShardoptStats as ShardoptStats
    from shardopt.torchrec.running import check_resume as check_resume
    from shardopt.torchrec.running import load_training_state as load_training_state
    from shardopt.torchrec.running import load_under_plan as load_under_plan
    from shardopt.torchrec.running import save_for_plan as save_for_plan
    from shardopt.torchrec.running import training_state as training_state

_HOMES = {
    "predictor.model.topology": "ReplicaGroups",
    "shardopt.ranks.record": "record",
    "shardopt.torchrec.confirming": "Confirm confirm",
    "shardopt.torchrec.costs": "ShardoptPerfEstimator ShardoptPerfModel",
    "shardopt.torchrec.hook": "ShardoptPlanner",
    "shardopt.torchrec.model_file": "to_yaml",
    "shardopt.torchrec.provider": "ShardoptPlannerExecutor ShardoptPlannerProvider plan_machines",
    "shardopt.torchrec.report": "ShardoptPlanReporter ShardoptStats",
    "shardopt.torchrec.running": "check_resume load_training_state load_under_plan save_for_plan "
    "training_state",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, and keep it (PEP 562)."""
    for home, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
