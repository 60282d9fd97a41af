"""shardopt: predicts TorchRec sharding plans and finds the best one, before anything runs.

Users import only this package. The names below load on first use, so that `import shardopt` and
`shardopt --help` stay fast and planning from a YAML file never imports torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardopt.version import __version__

if TYPE_CHECKING:
    from predictor.hardware.loader import load_hardware
    from shardopt.calls import explain, plan, predict
    from shardopt.config import load_model
    from shardopt.plan import load_plan, save_plan
    from shardopt.torchrec.convert import from_torchrec, to_torchrec
    from shardopt.torchrec.hook import ShardoptPlanner
    from shardopt.torchrec.model_file import to_yaml

__all__ = [
    "ShardoptPlanner",
    "__version__",
    "explain",
    "from_torchrec",
    "load_hardware",
    "load_model",
    "load_plan",
    "plan",
    "predict",
    "save_plan",
    "to_torchrec",
    "to_yaml",
]

_HOME_OF = {
    "ShardoptPlanner": "shardopt.torchrec.hook",
    "explain": "shardopt.calls",
    "from_torchrec": "shardopt.torchrec.convert",
    "load_hardware": "predictor.hardware.loader",
    "load_model": "shardopt.config",
    "load_plan": "shardopt.plan",
    "plan": "shardopt.calls",
    "predict": "shardopt.calls",
    "save_plan": "shardopt.plan",
    "to_torchrec": "shardopt.torchrec.convert",
    "to_yaml": "shardopt.torchrec.model_file",
}


class _Package(ModuleType):
    """Keeps `plan` and `explain` the functions, though modules of these names are imported, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, and keep it (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
