"""Every bad input: one clear message on stderr, the exit code of the contract, no traceback."""

from pathlib import Path

import pytest

PLAN = ("--gpus", "2", "--effort", "0.005", "-o", "plan.json")


def refused(done, code: int, *words: str) -> None:
    assert done.code == code, done.err
    assert done.out == ""
    assert done.err.startswith("shardopt: error: ")
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("embedding_dim: 64", "embeding_dim: 64", ["embeding_dim", "did you mean"]),
        ("num_embeddings: 7", "num_embeddings: 0", ["num_embeddings", "got 0"]),
        ("num_embeddings: 7", "num_embeddings: -7", ["num_embeddings", "got -7"]),
        ("batch_size: 32768", "batch_size: 0", ["batch_size", "got 0"]),
        ("pooling_factor: 20, ", "", ["pooling_factor", "missing"]),
        ("pooling_factor: 20", "pooling_factor: -1", ["pooling_factor", "got -1"]),
        ("name: items", "name: users", ["users"]),
        ("schema: 1", "schema: [", ["model.yaml:"]),
        ("schema: 1", "schema: 9", ["schema", "9"]),
    ],
)
def test_model_file(run, model: Path, tmp_path: Path, old: str, new: str, words) -> None:
    (tmp_path / "plan.json").write_text("old")
    text = model.read_text()
    assert old in text
    model.write_text(text.replace(old, new, 1))
    refused(run("plan", model, *PLAN), 2, "model.yaml:", *words)
    assert (tmp_path / "plan.json").read_text() == "old"


def test_missing_model_names_the_nearest(run, model: Path) -> None:
    refused(run("plan", "modle.yaml", *PLAN), 2, "modle.yaml: no such model file", "model.yaml")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ["how many GPUs", "--cluster"]),
        (("--gpus", 0), ["gpus is 0", "at least 1", "flags: --gpus\n"]),
        (("--gpus", -8), ["gpus is -8"]),
        (("--gpus", 10**9), ["at most"]),
        (("--gpus", "two"), ["--gpus", "shardopt plan --help"]),
        (("--gpus", 12), ["hosts of 8", "use 8 or 16", "--gpus-per-node"]),
        (("--gpus", 9, "--gpus-per-node", 4), ["hosts of 4", "use 8 or 12"]),
        (("--gpus", 2, "--gpus-per-node", 4), ["use 4 GPUs", "divides 2"]),
        (("--gpus", 2, "--gpus-per-node", 0), ["gpus_per_node is 0", "--gpus-per-node"]),
        (("--gpus", 2, "--reserve", 1), ["reserve is 1", "below 1"]),
        (("--gpus", 2, "--reserve", -0.1), ["reserve is -0.1"]),
        (("--gpus", 2, "--reserve", "nan"), ["reserve is nan"]),
        (("--gpus", 2, "--hbm-gib", -1), ["hbm_gib is -1", "--hbm-gib"]),
        (("--gpus", 2, "--ddr-gib", "inf"), ["ddr_gib is inf"]),
        (("--gpus", 2, "--batch-size", 0), ["batch_size is 0"]),
        (("--gpus", 2, "--effort", 0), ["effort is 0", "flags: --effort"]),
        (("--gpus", 2, "--effort", "inf"), ["effort is inf", "at most"]),
        (("--gpus", 2, "--time-limit", 0), ["time_limit is 0", "--time-limit"]),
        (("--gpus", 2, "--effort", "1e308"), ["effort is 1e+308", "at most"]),
        (("--gpus", 2, "--time-limit", "1e300"), ["time_limit is 1e+300", "at most"]),
        (("--gpus", 2, "--time-limit", "nan"), ["time_limit is nan"]),
        (("--gpus", 2, "--seed", -1), ["seed is -1"]),
        (("--gpus", 2, "--top-k", 0), ["top_k is 0"]),
        (("--gpus", 2, "--search", "tpe"), ["cpsat", "optuna", "all"]),
        (("--gpus", 2, "--cluster", "c.yaml"), ["gpus cannot be given too"]),
        (("--cluster", "c.yaml"), ["c.yaml: no such cluster file"]),
        (("--gpus", 2, "-o", "no/plan.json"), ["no directory no"]),
        (("--gpus", 2, "-o", "."), ["is a directory"]),
        (("--gpus", 2, "-o", "model.yaml"), ["is an input"]),
        (("--gpu", 2), ["--gpus", "shardopt plan --help"]),
    ],
)
def test_flags(run, model: Path, flags: tuple[object, ...], words: list[str]) -> None:
    before = model.read_text()
    refused(run("plan", model, *flags), 2, *words)
    assert model.read_text() == before


def test_unknown_hardware_lists_what_is_known(run, model: Path) -> None:
    done = run("plan", model, "--gpus", 2, "--hardware", "h100")
    refused(done, 4, "'h100'", "did you mean 'h100-sxm'", "a100-80gb", "path of a profile")


def test_strict_refuses_ranks_outside_the_measured_range(run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("schema: 1\nhosts: 1\nranks_per_host: 16\n")
    flags = ("--cluster", "c.yaml", "--effort", 0.005, "--search", "optuna")
    done = run("plan", model, *flags, "--strict")
    refused(done, 4, "collectives.intra of h100-sxm: 16 ranks (fitted for 2 to 8)", "--strict")
    assert "Extrapolated: collectives.intra of h100-sxm: 16 ranks" in " ".join(
        run("plan", model, *flags).out.split()
    )


def test_model_larger_than_all_memory(run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("old")
    text = model.read_text().replace("num_embeddings: 200000", "num_embeddings: 20000000000")
    model.write_text(text)
    refused(run("plan", model, *PLAN), 3, "users", "bytes", "makes a plan possible", "--gpus")
    assert (tmp_path / "plan.json").read_text() == "old"


def test_tables_that_fit_alone_but_not_together(run, model: Path) -> None:
    """Each fits a rank, all do not: the message says what is missing where."""
    rows = "num_embeddings: 200000", "num_embeddings: 50000"
    text = model.read_text()
    for old in rows:
        text = text.replace(old, "num_embeddings: 3000000", 1)
    model.write_text(text)
    flags = ("--hbm-gib", 3.03, "--ddr-gib", 0.0, "--reserve", 0, "--batch-size", 8)
    done = run("plan", model, "--gpus", 1, "--effort", 0.005, *flags)
    refused(done, 3, "bytes", "rank 0", "--gpus")


def test_reserve_that_leaves_nothing(run, model: Path) -> None:
    done = run("plan", model, *PLAN, "--hbm-gib", 0.001, "--reserve", 0.9)
    refused(done, 3, "rank 0", "bytes", "--reserve")


def test_constraints_that_nothing_satisfies(run, model: Path) -> None:
    text = model.read_text().replace(
        "    num_embeddings: 7\n",
        "    num_embeddings: 7\n    constraints: {sharding_types: [row_wise], ranks: [0]}\n",
    )
    model.write_text(text)
    refused(run("plan", model, *PLAN), 3, "days", "constraints")


def test_rank_of_a_constraint_outside_the_topology(run, model: Path) -> None:
    text = model.read_text().replace(
        "    num_embeddings: 7\n", "    num_embeddings: 7\n    constraints: {ranks: [5]}\n"
    )
    model.write_text(text)
    refused(run("plan", model, *PLAN), 2, "days", "ranks 0 to 1")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("plam",), "Did you mean 'plan'"),
        (("plan",), "MODEL"),
        (("predict", "model.yaml"), "PLAN"),
        (("hardware", "h100", "extra"), "extra"),
    ],
)
def test_usage(run, words: tuple[str, ...], text: str) -> None:
    refused(run(*words), 2, text, "--help")
