"""Where shardopt meets TorchRec; the names below load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardopt.torchrec.hook import ShardoptPlanner
    from shardopt.torchrec.model_file import to_yaml
    from shardopt.torchrec.perf_model import ShardoptPerfModel

__all__ = ["ShardoptPerfModel", "ShardoptPlanner", "to_yaml"]

_HOME_OF = {
    "ShardoptPerfModel": "shardopt.torchrec.perf_model",
    "ShardoptPlanner": "shardopt.torchrec.hook",
    "to_yaml": "shardopt.torchrec.model_file",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, and keep it (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
