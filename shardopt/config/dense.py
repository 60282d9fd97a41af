"""The ``dense`` section of model.yaml: the layers of a DLRM, the ops of a module, or times."""

from __future__ import annotations

from pathlib import Path

from predictor.document import KeyPath, Problems, shown
from predictor.errors import InputError
from predictor.model.captured.dense import CapturedDense
from predictor.model.measured_dense import MeasuredDense
from predictor.model.workload import DcnV2, DenseArch
from predictor.units import gib, mib
from shardopt.config.ops_file import read_ops
from shardopt.config.schema import (
    DcnSection,
    DenseSection,
    MeasuredDenseSection,
    MeasuredSection,
    OpsSection,
    check,
)
from shardopt.config.values import nearest
from shardopt.files import refuse_streams

INTERACTIONS = ("dot", "concat", "dcn_v2")
PATH: KeyPath = ("dense",)


Dense = DenseArch | CapturedDense | MeasuredDense


def read_dense(raw: object, directory: Path, problems: Problems) -> tuple[Dense | None, bytes]:
    """The dense part in the form that its keys show, None when it has problems; and the content
    of the file that it names.

    Args:
        directory: that of the model file.
    """
    if isinstance(raw, dict) and "ops" in raw:
        return _captured(raw, directory, problems)
    return _inline(raw, problems), b""


def _captured(
    raw: dict[str, object], directory: Path, problems: Problems
) -> tuple[CapturedDense | None, bytes]:
    section = check(OpsSection, raw, PATH, problems)
    if section is None:
        return None, b""
    try:
        refuse_streams(directory / section.ops, "ops file")
        captured, content = read_ops(directory / section.ops)
    except InputError as error:
        problems.add((*PATH, "ops"), str(error))
        return None, b""
    if section.optimizer not in (None, captured.optimizer_name):
        problems.add(
            (*PATH, "optimizer"),
            f"got {shown(section.optimizer)}, but the ops in {section.ops} are those of "
            f"{captured.optimizer_name}; run to_yaml with dense_optimizer={section.optimizer!r}",
        )
    return (
        CapturedDense(
            captured,
            section.data_type,
            section.bucket_cap_mb,
            section.ops,
            section.compiled,
            section.cuda_graphs,
        ),
        content,
    )


def _inline(raw: object, problems: Problems) -> DenseArch | MeasuredDense | None:
    if isinstance(raw, dict) and "measured" in raw:
        return _measured(raw, problems)
    if isinstance(raw, dict) and "linears" in raw:
        problems.add(
            (*PATH, "linears"),
            "is no longer read: it counted each linear layer once a sample and nothing else; run "
            "to_yaml on the module again, which writes 'ops', or give in_features, bottom_mlp and "
            "top_mlp",
        )
        return None
    return _layers(raw, problems)


def _measured(raw: dict[str, object], problems: Problems) -> MeasuredDense | None:
    form = check(MeasuredDenseSection, raw, PATH, problems)
    section = check(MeasuredSection, raw["measured"], (*PATH, "measured"), problems)
    if form is None or section is None:
        return None
    activations = section.activation_gib
    return MeasuredDense(
        batch_size=section.batch_size,
        forward_ms=section.forward_ms,
        backward_ms=section.backward_ms,
        optimizer_ms=section.optimizer_ms,
        gradient_bytes=mib(section.gradient_mib),
        activation_bytes=None if activations is None else gib(activations),
        optimizer=form.optimizer,
        bucket_cap_mb=form.bucket_cap_mb,
        in_features=form.in_features,
    )


def _layers(raw: object, problems: Problems) -> DenseArch | None:
    section = check(DenseSection, raw, PATH, problems)
    interaction = None
    if isinstance(raw, dict):
        interaction = _interaction(raw.get("interaction"), (*PATH, "interaction"), problems)
    if section is None or interaction is None:
        return None
    return DenseArch(
        in_features=section.in_features,
        bottom_mlp=tuple(section.bottom_mlp),
        top_mlp=tuple(section.top_mlp),
        interaction=interaction,
        data_type=section.data_type,
        optimizer=section.optimizer,
        bucket_cap_mb=section.bucket_cap_mb,
        compiled=section.compiled,
        cuda_graphs=section.cuda_graphs,
    )


def _interaction(raw: object, path: KeyPath, problems: Problems) -> str | DcnV2 | None:
    if raw is None:
        return "dot"
    if isinstance(raw, str) and raw in ("dot", "concat"):
        return raw
    if isinstance(raw, dict) and list(raw) == ["dcn_v2"]:
        section = check(DcnSection, raw["dcn_v2"], (*path, "dcn_v2"), problems)
        return DcnV2(section.layers, section.low_rank_dim) if section else None
    word = raw if isinstance(raw, str) else next(iter(raw), "") if isinstance(raw, dict) else ""
    problems.add(
        path,
        f"got {shown(raw)}; allowed: dot, concat, {{dcn_v2: {{layers: 3, low_rank_dim: 512}}}}"
        f"{nearest(str(word), INTERACTIONS)}",
    )
    return None
