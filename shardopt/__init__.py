"""shardopt: predicts TorchRec sharding plans and finds the best one, before anything runs.

Users import only this package. The names below load on first use, so that `import shardopt` and
`shardopt --help` stay fast and planning from a YAML file never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardopt.version import __version__

if TYPE_CHECKING:
    from predictor.hardware.loader import load_hardware
    from predictor.hardware.schema import HardwareProfile
    from predictor.model.plan import ShardingPlan
    from predictor.model.topology import Topology
    from predictor.model.workload import Workload
    from predictor.predict import Prediction, predict
    from search.solve import solve
    from shardopt.config import load_model
    from shardopt.plan import load_plan
    from shardopt.torchrec.convert import from_torchrec, to_torchrec

__all__ = [
    "HardwareProfile",
    "Prediction",
    "ShardingPlan",
    "Topology",
    "Workload",
    "__version__",
    "from_torchrec",
    "load_hardware",
    "load_model",
    "load_plan",
    "predict",
    "solve",
    "to_torchrec",
]

_HOME_OF = {
    "HardwareProfile": "predictor.hardware.loader",
    "Prediction": "predictor.predict",
    "ShardingPlan": "predictor.model.plan",
    "Topology": "predictor.model.topology",
    "Workload": "predictor.model.workload",
    "from_torchrec": "shardopt.torchrec.convert",
    "load_hardware": "predictor.hardware.loader",
    "load_model": "shardopt.config",
    "load_plan": "shardopt.plan",
    "predict": "predictor.predict",
    "solve": "search.solve",
    "to_torchrec": "shardopt.torchrec.convert",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, and keep it (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
