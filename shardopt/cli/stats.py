"""``shardopt stats``: how the ids of a data sample spread over the rows of the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from predictor.errors import InputError
from shardopt.report.blocks import View

if TYPE_CHECKING:
    from shardopt.stats.collect import ReadOptions, Windows
    from shardopt.stats.result import FeatureStats


def stats(
    data: list[Path],
    data_format: Literal["tsv", "npy", "npz", "parquet", "torch", "inter", "csv"] | None = None,
    features: str | None = None,
    table_rows: str | None = None,
    model: Path | None = None,
    modulo: bool = False,
    max_ids: int = 2**20,
    chunk_rows: int = 65536,
    window: str | None = None,
    hot: int = 10,
    output: Path | None = None,
    write_model: Path | None = None,
    checkpoint: Path | None = None,
    quiet: bool = False,
) -> View:
    """Measure pooling factors, distinct rows, skew and hot rows of a data sample.

    Arguments:
        data (DATA...): Criteo TSV (also .gz), .npy, multi-hot .npz, Parquet, files of torch.save
            (KeyedJaggedTensors, dlrm_datasets), RecBole's .inter, or .csv with a header line, such
            as KuaiRand's logs. Several files are read as one data set.

    Data:
        data_format (--format NAME): tsv, npy, npz, parquet, torch, inter or csv; by default the
            file name decides.
        features (--features --columns A,B,...): Features to read, separated by commas; all by
            default.
        table_rows (N|FILE): Number of rows of every table, or a YAML or JSON file with 'feature:
            rows'; by default the largest id plus one.
        model (FILE): Model file: only its features are read, and its tables give the numbers of
            rows.
        modulo: Take every id modulo the number of rows of its table.
        max_ids (N): Number of distinct ids per feature that are counted exactly; beyond it, only a
            sample of the ids is counted.
        chunk_rows (N): Samples to read at once.
        window (COLUMN=1d): Split the data by this column of times into windows of an hour, a day or
            a week (h, d, w), write a file for each, and print how fast the features change.

    Output:
        hot (N): Number of hottest rows to list per feature.
        output (-o FILE): Write the statistics to this .npz file, for `index_distribution: {file,
            feature}`.
        write_model (FILE): Write a copy of the model file with the measured pooling factors and
            distributions; needs --model and -o.
        checkpoint (FILE): Save progress in this file and continue from it; it is removed at the
            end.
    """
    from shardopt.api.request import check_number
    from shardopt.cli.output import check_writable
    from shardopt.report.progress import LineProgress
    from shardopt.stats.collect import WHOLE, ReadOptions, TimeWindow, collect
    from shardopt.stats.readers import DataFormat

    check_writable(output, data)
    _check_copy(write_model, model, output, data)
    check_writable(checkpoint, [*data, *([output] if output else [])])
    check_number("max_ids", max_ids, 1, 2**40)
    check_number("chunk_rows", chunk_rows, 1, 2**24)
    check_number("hot", hot, 0, 10**6)
    if window is not None and write_model is not None:
        raise InputError("--write-model describes all of the data; leave --window out")
    names = None if features is None else tuple(name.strip() for name in features.split(","))
    if names is not None and not all(names):
        raise InputError(f"--features: got '{features}'; give names with commas between them")
    reading = ReadOptions(
        names,
        _rows(table_rows, model, modulo),
        modulo,
        max_ids,
        chunk_rows,
        data_format and DataFormat(data_format),
        None if window is None else TimeWindow.parse(window),
    )
    for path in (output, checkpoint, write_model):
        check_writable(path)
    with LineProgress("reading", on=not quiet) as status:
        counts = collect(data, reading, checkpoint=checkpoint, on_chunk=status.reading)
    if reading.window is not None:
        view = _windows(counts, reading, hot, output)
    else:
        from shardopt.report.stats import stats_view
        from shardopt.stats.result import summarise, write_stats

        result = list(summarise(counts[WHOLE], reading, hot))
        notes = [
            f"feature '{f.name}' has no ids; no file describes it" for f in result if not f.seen
        ]
        notes += _lacking(reading, [f.name for f in result])
        if output is not None:
            write_stats(output, result)
            notes.append(f"wrote {output}")
        if write_model is not None and model is not None and output is not None:
            _write_model(write_model, model, output, result)
            notes.append(f"wrote {write_model}")
        view = stats_view(result, output, notes)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return view


def _windows(counts: Windows, reading: ReadOptions, hot: int, output: Path | None) -> View:
    """Show how the features move, and write a file for each window."""
    from shardopt.report.stats import WindowStats, windows_view
    from shardopt.stats.result import measure_drift, summarise, write_stats

    assert reading.window is not None
    window_stats, notes = [], _lacking(reading, list(next(iter(counts.values()))))
    for start, features in counts.items():
        name = reading.window.name(start)
        statistics = list(summarise(features, reading, hot))
        file = None
        if output is not None:
            file = output.with_suffix(f".{name}{output.suffix}")
            write_stats(file, statistics)
        window_stats.append(WindowStats(name, start, statistics, file))
    if output is not None:
        notes.append(
            f"wrote {len(window_stats)} files, {window_stats[0].file} to {window_stats[-1].file}"
        )
    return windows_view(window_stats, measure_drift(counts), notes)


def _check_copy(
    copy: Path | None, model: Path | None, output: Path | None, data: Sequence[Path]
) -> None:
    from shardopt.cli.output import check_writable

    if copy is None:
        return
    if model is None or output is None:
        raise InputError(
            "--write-model copies the file of --model, and names that of --output; give both"
        )
    check_writable(copy, [*data, model, output])
    if copy.resolve() == output.resolve():
        raise InputError(f"{copy}: --write-model and --output name the same file")


def _lacking(reading: ReadOptions, names: Sequence[str]) -> list[str]:
    if reading.features is not None or not isinstance(reading.rows, Mapping):
        return []
    lacking = [name for name in reading.rows if name not in names]
    if not lacking:
        return []
    return [
        f"the data lacks {len(lacking)} of the {len(reading.rows)} features whose rows are given: "
        f"{', '.join(lacking)}"
    ]


def _write_model(copy: Path, model: Path, output: Path, statistics: Sequence[FeatureStats]) -> None:
    from shardopt.config.write import fill_model, relative
    from shardopt.files import atomic_write_text, decode, read_bytes
    from shardopt.stats.result import model_values

    file = relative(output, copy)
    values = {f.name: model_values(f, file) for f in statistics if f.seen is not None}
    text = decode(read_bytes(model, "model file"), model)
    atomic_write_text(copy, fill_model(text, values, model, copy))


def _rows(
    table_rows: str | None, model: Path | None, modulo: bool
) -> Mapping[str, int] | int | None:
    from predictor.model.workload import MAX_ROWS
    from shardopt.api.request import check_number
    from shardopt.files import read_numbers

    if table_rows is not None and model is not None:
        raise InputError("--table-rows and --model both give the rows; give one of them")
    if model is not None:
        from shardopt.config.model import load_model

        tables = load_model(model).tables
        return {f.name: table.num_embeddings for table in tables for f in table.features}
    if table_rows is None:
        if modulo:
            raise InputError("--modulo needs the rows of the tables: --table-rows or --model")
        return None
    if table_rows.isascii() and table_rows.isdigit():
        # Python reads no number of some thousand digits
        check_number("table_rows", int(table_rows[:30]), 1, MAX_ROWS)
        return int(table_rows)
    return read_numbers(table_rows, "file of table rows", "feature: rows", 1, MAX_ROWS)
