"""A cluster file made from what a host and the scheduler say, and a plan for it:

python examples/plan_a_cluster.py MODEL nvidia-smi-topo.txt hosts.txt FOLDER

The second file is the output of `nvidia-smi topo -m` on one host, the third the scheduler's hosts.
"""

import sys
from pathlib import Path

from shardopt import load_model
from shardopt.api.request import Machine
from shardopt.api.setting import resolve
from shardopt.cli.app import main as shardopt


def main(model: str, topology: str, hosts: str, folder: Path) -> None:
    """Write the cluster file, show what shardopt reads in it, plan."""
    cluster = folder / "cluster.yaml"
    words = ["--from-nvidia-smi", topology, "--hosts", hosts, "--hardware", "h100-sxm"]
    if shardopt(["cluster", *words, "-o", str(cluster)]):
        raise SystemExit("no cluster file was written")
    ranks = resolve(model, Machine(cluster=cluster)).topology
    print(
        f"{ranks.world_size} ranks on {ranks.hosts} hosts, NVLink domains of {ranks.nvlink_domain};"
        f" {len(load_model(model).tables)} tables"
    )
    plan = str(folder / "plan.json")
    effort = ["--effort", "0.05", "--quiet", "-o", plan]
    raise SystemExit(shardopt(["plan", model, "--cluster", str(cluster), *effort]))


main(*sys.argv[1:4], Path(sys.argv[4]))
