"""Writes the synthetic models beside this script: ``python configs/models/generate_synthetic.py``.

`lab.planners.instances` has the law that their tables are drawn from.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from lab.planners.instances import draw_table

HEADER = "name,num_embeddings,embedding_dim,feature,pooling_factor,zipf_alpha"


@dataclass(frozen=True)
class Model:
    """Parameters of a model; ``gpus`` is the number of 80 GiB GPUs that it is made for."""

    tables: int
    seed: int
    gpus: int
    batch_size: int
    top_mlp: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the model and of its files."""
        return f"synthetic_{self.tables}"


MODELS = (
    Model(tables=100, seed=100, gpus=8, batch_size=8192, top_mlp=(1024, 512, 256, 1)),
    Model(tables=1000, seed=1000, gpus=128, batch_size=512, top_mlp=(1024, 512, 256, 1)),
)


def csv_text(model: Model) -> str:
    """The tables, one line each."""
    rng = random.Random(model.seed)
    lines = [HEADER]
    for index in range(model.tables):
        rows, dim, pooling, alpha = draw_table(rng)
        lines.append(f"t_{index},{rows},{dim},f_{index},{pooling},{alpha}")
    return "\n".join(lines) + "\n"


def yaml_text(model: Model) -> str:
    """The model file that reads those tables."""
    return f"""\
# {model.tables} random tables, made for {model.gpus} GPUs of 80 GiB.
# Written by generate_synthetic.py with seed {model.seed}: change that script, not this file.
schema: 1
name: {model.name}
batch_size: {model.batch_size}
optimizer: exact_row_wise_adagrad
train_pipeline: sparse_dist
tables: {{csv: {model.name}.csv}}
dense:
  in_features: 128
  bottom_mlp: [512, 256, 128]
  interaction: concat
  top_mlp: [{", ".join(map(str, model.top_mlp))}]
  data_type: tf32
  optimizer: sgd
"""


def main() -> None:
    """Write both models into a directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent)
    directory = parser.parse_args().output
    for model in MODELS:
        for suffix, text in ((".csv", csv_text(model)), (".yaml", yaml_text(model))):
            path = directory / f"{model.name}{suffix}"
            path.write_text(text, encoding="utf-8", newline="\n")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
