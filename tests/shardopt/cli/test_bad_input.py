"""Every bad input: one clear message on stderr, the exit code of the contract, no traceback."""

from pathlib import Path

import pytest

PLAN = ("--gpus", "2", "--effort", "0.005", "-o", "plan.json")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("embedding_dim: 64", "embeding_dim: 64", ["embeding_dim", "did you mean"]),
        ("num_embeddings: 7", "num_embeddings: 0", ["num_embeddings", "got 0"]),
        ("schema: 1", "schema: [", []),
    ],
)
def test_model_file(refused, model: Path, tmp_path: Path, old: str, new: str, words) -> None:
    """`tests/shardopt/config` has all that can be wrong with it."""
    (tmp_path / "plan.json").write_text("old")
    model.write_text(model.read_text().replace(old, new, 1))
    refused("plan", model, *PLAN, says=("model.yaml:", *words))
    assert (tmp_path / "plan.json").read_text() == "old"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ["how many GPUs", "--cluster"]),
        (("--gpus", 0), ["gpus is 0", "at least 1", "flags: --gpus\n"]),
        (("--gpus", 10**9), ["at most"]),
        (("--gpus", "two"), ["--gpus", "shardopt plan --help"]),
        (("--gpus", 12), ["hosts of 8", "8 or 16", "--gpus-per-node"]),
        (("--gpus", 2, "--gpus-per-node", 4), ["4 GPUs", "divides 2"]),
        (("--gpus", 2, "--gpus-per-node", 0), ["gpus_per_node is 0", "--gpus-per-node"]),
        (("--gpus", 2, "--reserve", 1), ["reserve is 1", "below 1"]),
        (("--gpus", 2, "--reserve", "nan"), ["reserve is nan"]),
        (("--gpus", 2, "--hbm-gib", -1), ["hbm_gib is -1", "--hbm-gib"]),
        (("--gpus", 2, "--ddr-gib", "inf"), ["ddr_gib is inf"]),
        (("--gpus", 2, "--batch-size", 0), ["batch_size is 0"]),
        (("--gpus", 2, "--effort", 0), ["effort is 0", "flags: --effort"]),
        (("--gpus", 2, "--effort", "1e308"), ["effort is 1e+308", "at most"]),
        (("--gpus", 2, "--time-limit", 0), ["time_limit is 0", "--time-limit"]),
        (("--gpus", 2, "--time-limit", "1e300"), ["time_limit is 1e+300", "at most"]),
        (("--gpus", 2, "--time-limit", "nan"), ["time_limit is nan"]),
        (("--gpus", 2, "--seed", -1), ["seed is -1"]),
        (("--gpus", 2, "--top-k", 0), ["top_k is 0"]),
        (("--gpus", 2, "--search", "tpe"), ["cpsat", "optuna", "all"]),
        (("--gpus", 2, "--cluster", "c.yaml"), ["gpus"]),
        (("--cluster", "c.yaml"), ["c.yaml"]),
        (("--gpus", 2, "-o", "no/plan.json"), ["no directory no"]),
        (("--gpus", 2, "-o", "."), ["is a directory"]),
        (("--gpus", 2, "-o", "model.yaml"), ["is an input"]),
        (("--gpu", 2), ["--gpus", "shardopt plan --help"]),
    ],
)
def test_flags(refused, model: Path, flags: tuple[object, ...], words: list[str]) -> None:
    before = model.read_text()
    refused("plan", model, *flags, says=words)
    assert model.read_text() == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plam",), "Did you mean 'plan'"),
        (("plan",), "MODEL"),
        (("plan", "modle.yaml", *PLAN), ("modle.yaml", "model.yaml")),
        (("predict", "model.yaml"), "PLAN"),
        (("hardware", "h100", "extra"), "extra"),
    ],
)
def test_words(refused, model: Path, words: tuple[str, ...], says: str | tuple[str, ...]) -> None:
    refused(*words, says=says)


def test_unknown_hardware_lists_what_is_known(refused, model: Path) -> None:
    says = ("'h100-sx'", "did you mean 'h100-sxm'", "a100-80gb")
    refused("plan", model, "--gpus", 2, "--hardware", "h100-sx", code=4, says=says)


def test_strict_refuses_ranks_outside_the_measured_range(
    run, refused, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("schema: 1\nhosts: 1\nranks_per_host: 16\n")
    words = ("plan", model, "--cluster", "c.yaml", "--effort", 0.005, "--search", "optuna")
    beyond = "collectives.intra of h100-sxm: 16 ranks (fitted for 2 to 8)"
    refused(*words, "--strict", code=4, says=(beyond, "--strict"))
    assert f"Extrapolated: {beyond}" in " ".join(run(*words).out.split())


def test_model_larger_than_all_memory(refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("old")
    model.write_text(model.read_text().replace("200000", "20000000000"))
    refused("plan", model, *PLAN, code=3, says=("users", " TiB", "--gpus"))
    assert (tmp_path / "plan.json").read_text() == "old"


def test_tables_that_fit_alone_but_not_together(refused, model: Path) -> None:
    """Each fits a rank, all do not: the message says what is missing where."""
    text = model.read_text()
    for rows in ("200000", "50000"):
        text = text.replace(f"num_embeddings: {rows}", "num_embeddings: 3000000", 1)
    model.write_text(text)
    flags = ("--hbm-gib", 3.03, "--ddr-gib", 0.0, "--reserve", 0, "--batch-size", 8)
    words = ("plan", model, "--gpus", 1, "--effort", 0.005, *flags)
    refused(*words, code=3, says=("522.1 MiB", "rank 0", "--gpus"))


def test_reserve_that_leaves_nothing(refused, model: Path) -> None:
    flags = ("--hbm-gib", 0.001, "--reserve", 0.9)
    refused("plan", model, *PLAN, *flags, code=3, says=("rank 0", " GiB", "--reserve"))


@pytest.mark.parametrize(
    ("constraints", "code", "says"),
    [
        ("{sharding_types: [row_wise], ranks: [0]}", 3, "constraints"),
        ("{ranks: [5]}", 2, "ranks 0 to 1"),
    ],
)
def test_constraints_that_nothing_satisfies(
    refused, model: Path, constraints: str, code: int, says: str
) -> None:
    rows = "    num_embeddings: 7\n"
    text = model.read_text().replace(rows, f"{rows}    constraints: {constraints}\n")
    model.write_text(text)
    refused("plan", model, *PLAN, code=code, says=("days", says))
