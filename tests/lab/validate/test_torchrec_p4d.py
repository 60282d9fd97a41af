"""TorchRec's published rows on p4d hosts."""

from __future__ import annotations

from pathlib import Path

from lab.validate.torchrec_p4d import FILE, validate_torchrec_p4d, workload_of
from predictor.model.workload import DcnV2

HEADER = "source,n_gpus,local_batch,interaction_optimizer,iter_ms_derived\n"


def test_settings_choose_model_and_ids() -> None:
    plain = workload_of("mlcommons/training", "dot, SGD", 2048)
    cross = workload_of("facebookresearch/dlrm", "DCNv2, Adagrad", 2048)
    assert plain.dense.interaction == "dot"
    assert isinstance(cross.dense.interaction, DcnV2)
    assert plain.tables[20].lookups_per_sample == 1
    assert cross.tables[20].lookups_per_sample == 100
    assert plain.tables[0].num_embeddings > cross.tables[0].num_embeddings == 40_000_000


def test_a_machine_too_small_is_said(tmp_path: Path) -> None:
    row = 'mlcommons,1,99999999,"dot, SGD",10\n'
    (tmp_path / FILE).write_text(HEADER + row + "mlcommons,8,x,dot,1\n")
    report = validate_torchrec_p4d(tmp_path)
    assert not report.rows
    assert len(report.skipped) == 2
