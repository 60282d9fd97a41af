"""Where shardopt meets TorchRec; the names below load on first use.

Begin with `hook`: the planner. It reads the user's module (`read_module`, over `tables` and
`capture`) and machine (`machine`), asks what TorchRec offers and would do itself (`offered`), and
searches. `options` and `convert` turn plans into TorchRec's and back; with `collective` one rank
plans for all. `costs` and `provider` are smaller doors into TorchRec's own planning, `model_file`
writes what was read, `running` changes the plan of a running job, and `private` is all that is not
public. `confirming` runs plans in a training script.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from predictor.model.topology import ReplicaGroups
    from shardopt.torchrec.confirming import Confirm, confirm
    from shardopt.torchrec.costs import ShardoptPerfEstimator, ShardoptPerfModel
    from shardopt.torchrec.hook import ShardoptPlanner
    from shardopt.torchrec.model_file import to_yaml
    from shardopt.torchrec.provider import ShardoptPlannerExecutor, ShardoptPlannerProvider
    from shardopt.torchrec.report import ShardoptPlanReporter, ShardoptStats
    from shardopt.torchrec.running import (
        check_resume,
        load_training_state,
        load_under_plan,
        save_for_plan,
        training_state,
    )

__all__ = [
    "Confirm",
    "ReplicaGroups",
    "ShardoptPerfEstimator",
    "ShardoptPerfModel",
    "ShardoptPlanReporter",
    "ShardoptPlanner",
    "ShardoptPlannerExecutor",
    "ShardoptPlannerProvider",
    "ShardoptStats",
    "check_resume",
    "confirm",
    "load_training_state",
    "load_under_plan",
    "save_for_plan",
    "to_yaml",
    "training_state",
]

_HOME_OF = {
    "Confirm": "shardopt.torchrec.confirming",
    "ReplicaGroups": "predictor.model.topology",
    "ShardoptPerfEstimator": "shardopt.torchrec.costs",
    "ShardoptPerfModel": "shardopt.torchrec.costs",
    "ShardoptPlanner": "shardopt.torchrec.hook",
    "ShardoptPlannerExecutor": "shardopt.torchrec.provider",
    "ShardoptPlannerProvider": "shardopt.torchrec.provider",
    "ShardoptPlanReporter": "shardopt.torchrec.report",
    "ShardoptStats": "shardopt.torchrec.report",
    "check_resume": "shardopt.torchrec.running",
    "confirm": "shardopt.torchrec.confirming",
    "load_training_state": "shardopt.torchrec.running",
    "load_under_plan": "shardopt.torchrec.running",
    "save_for_plan": "shardopt.torchrec.running",
    "to_yaml": "shardopt.torchrec.model_file",
    "training_state": "shardopt.torchrec.running",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, and keep it (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
