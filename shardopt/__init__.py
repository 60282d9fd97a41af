"""shardopt: predicts TorchRec sharding plans and finds the best one, before anything runs.

Users import only this package. The names below load on first use, so that `import shardopt` and
`shardopt --help` stay fast and planning from a YAML file never imports torch.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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


def _where(package: str) -> list[Path]:
    """The files or directories that `import package` would use now, without importing it."""
    try:
        spec = find_spec(package)
    except ValueError:  # already imported, by something that set no spec
        return [Path(getattr(sys.modules[package], "__file__", None) or package).resolve()]
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [Path(spec.origin or package).resolve()]
    return [Path(location).resolve() for location in spec.submodule_search_locations]


def _shadow_message(package: str, root: Path) -> str | None:
    """What is wrong if `package` is not the one that was installed beside `shardopt`."""
    found = _where(package)
    if root / package in found[:1]:
        return None
    if not found:
        return (
            f"shardopt needs its own package '{package}', which is missing from {root}: "
            "install shardopt again"
        )
    return (
        f"{found[0]} shadows shardopt's own package '{package}' (in {root}): "
        "rename that file or directory, or run from another directory"
    )


def _runs_as_command() -> bool:
    """True under the `shardopt` script and `python -m shardopt...`."""
    script = sys.argv[0] if sys.argv else ""
    if script == "-m":  # what Python puts there while it imports the parents of the module to run
        return any(arg.split(".")[0] == "shardopt" for arg in sys.orig_argv)
    return Path(script).stem == "shardopt"


def _refuse_shadows() -> None:
    """Stop at a user's `predictor.py`: its failures would otherwise look like ours, and be odd.

    `predictor` and `search` are names that others use too, and a script's own directory comes
    before installed packages.
    """
    root = Path(__file__).resolve().parent.parent
    for package in ("predictor", "search"):
        message = _shadow_message(package, root)
        if message and _runs_as_command():
            print(f"shardopt: {message}", file=sys.stderr)
            raise SystemExit(2)
        if message:
            raise ImportError(message)


_refuse_shadows()
