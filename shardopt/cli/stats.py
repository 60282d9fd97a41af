"""``shardopt stats``: how the ids of a data sample spread over the rows of the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from predictor.errors import InputError

if TYPE_CHECKING:
    from shardopt.stats.collect import ReadOptions, TimeWindow, Windows
    from shardopt.stats.readers import DataFormat
    from shardopt.stats.result import FeatureStats


def stats(
    data: list[Path],
    data_format: str | None = None,
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
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Measure pooling factors, distinct rows, skew and hot rows of a data sample.

    Arguments:
        data (DATA...): Criteo TSV (also .gz), .npy, multi-hot .npz, Parquet, files of torch.save
            (KeyedJaggedTensors, dlrm_datasets), or RecBole's .inter. Several files are read as one
            data set.

    Data:
        data_format (--format NAME): tsv, npy, npz, parquet, torch or inter; by default the file
            name decides.
        features (--features --columns A,B,...): Features to read, separated by commas; all by
            default.
        table_rows (N|FILE): Number of rows of every table, or a YAML or JSON file with 'feature:
            rows'; by default the largest id plus one.
        model (FILE): Model file: its features are read, and its tables say how many rows there
            are.
        modulo: Take every id modulo the number of rows of its table.
        max_ids (N): Distinct ids per feature to count exactly; beyond that, a sample is counted.
        chunk_rows (N): Samples to read at once.
        window (COLUMN=1d): Count every hour, day or week (h, d, w) of this column of times by
            itself, write a file for each, and print how fast the features move.

    Output:
        hot (N): Number of hottest rows to list per feature.
        output (-o FILE): Write the statistics to this .npz file, for `index_distribution: {file,
            feature}`.
        write_model (FILE): Copy the model file with the pooling factors and distributions found;
            needs --model and -o.
        checkpoint (FILE): Save progress in this file and continue from it; it is removed at the
            end.
    """
    from shardopt.cli.output import check_writable, note
    from shardopt.report.progress import LineProgress
    from shardopt.stats.collect import ReadOptions, TimeWindow, collect

    check_writable(output, data)
    _check_copy(write_model, model, output, data)
    check_writable(checkpoint, [*data, *([output] if output else [])])
    for flag, value, low, high in (
        ("max-ids", max_ids, 1, 2**40),
        ("chunk-rows", chunk_rows, 1, 2**24),
        ("hot", hot, 0, 10**6),
    ):
        if not low <= value <= high:
            raise InputError(f"--{flag}: got {value}; allowed: {low} to {high}")
    if window is not None and write_model is not None:
        raise InputError("--write-model describes all of the data; leave --window out")
    reading = ReadOptions(
        _names(features),
        _rows(table_rows, model, modulo),
        modulo,
        max_ids,
        chunk_rows,
        _format(data_format),
        None if window is None else TimeWindow.parse(window),
    )
    for path in (output, checkpoint, write_model):
        check_writable(path)
    with LineProgress("reading", on=not quiet) as status:
        counts = collect(data, reading, checkpoint=checkpoint, on_chunk=status.reading)
    show = _Shown(hot, output, json, quiet)
    if reading.window is None:
        told = _whole(counts, reading, model, write_model, show)
    else:
        told = _windows(counts, reading, reading.window, show)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    note(told, quiet=quiet)


@dataclass(frozen=True)
class _Shown:
    """What is written and printed: hot rows listed, the file, JSON, little."""

    hot: int
    output: Path | None
    json: bool
    quiet: bool


def _whole(
    counts: Windows,
    reading: ReadOptions,
    model: Path | None,
    write_model: Path | None,
    show: _Shown,
) -> list[str]:
    """Write and print what all samples say; returns notes."""
    from shardopt.cli.output import print_json
    from shardopt.report.console import make_console
    from shardopt.report.stats import Hints, show_short, show_stats, stats_object
    from shardopt.stats.collect import WHOLE
    from shardopt.stats.result import summarise, write_stats

    found = list(summarise(counts[WHOLE], reading, show.hot))
    told = [f"feature '{f.name}' has no ids; no file describes it" for f in found if f.seen is None]
    told += _lacking(reading, [f.name for f in found])
    if show.output is not None:
        write_stats(show.output, found)
        told.append(f"wrote {show.output}")
    if write_model is not None and model is not None and show.output is not None:
        _write_model(write_model, model, show.output, found)
        told.append(f"wrote {write_model}")
    if show.json:
        print_json(stats_object(found))
    elif show.quiet:
        show_short(make_console(), found)
    else:
        hints = Hints(
            rows="--table-rows or --model sets them", distinct="--max-ids counts more exactly"
        )
        show_stats(make_console(), found, show.output, hints)
    return told


def _windows(counts: Windows, reading: ReadOptions, window: TimeWindow, show: _Shown) -> list[str]:
    """Write a file for each window, and print how the features move; returns notes."""
    from shardopt.cli.output import print_json
    from shardopt.report.console import make_console
    from shardopt.report.stats import WindowStats, show_windows, windows_object
    from shardopt.stats.result import measure_drift, summarise, write_stats

    found, told = [], _lacking(reading, list(next(iter(counts.values()))))
    for start, features in counts.items():
        name = window.name(start)
        seen = list(summarise(features, reading, show.hot))
        file = None
        if show.output is not None:
            file = show.output.with_suffix(f".{name}{show.output.suffix}")
            write_stats(file, seen)
        found.append(WindowStats(name, start, seen, file))
    if show.output is not None:
        told.append(f"wrote {len(found)} files, {found[0].file} to {found[-1].file}")
    drift = measure_drift(counts)
    if show.json:
        print_json(windows_object(found, drift))
    else:
        show_windows(make_console(), found, drift, short=show.quiet)
    return told


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


def _lacking(reading: ReadOptions, found: Sequence[str]) -> list[str]:
    """Features of the model, or of the file of rows, that the data has not."""
    if reading.features is not None or not isinstance(reading.rows, Mapping):
        return []
    lacking = [name for name in reading.rows if name not in found]
    if not lacking:
        return []
    return [
        f"the data lacks {len(lacking)} of the {len(reading.rows)} features whose rows are given: "
        f"{', '.join(lacking)}"
    ]


def _write_model(copy: Path, model: Path, output: Path, found: Sequence[FeatureStats]) -> None:
    from shardopt.config.write import fill_model, relative
    from shardopt.files import atomic_write_text, decode, read_bytes
    from shardopt.stats.result import model_values

    file = relative(output, copy)
    values = {f.name: model_values(f, file) for f in found if f.seen is not None}
    text = decode(read_bytes(model, "model file"), model)
    atomic_write_text(copy, fill_model(text, values, model, copy))


def _names(features: str | None) -> tuple[str, ...] | None:
    if features is None:
        return None
    names = tuple(name.strip() for name in features.split(","))
    if not all(names):
        raise InputError(f"--features: got '{features}'; give names with commas between them")
    return names


def _format(name: str | None) -> DataFormat | None:
    from predictor.errors import did_you_mean
    from shardopt.stats.readers import DataFormat

    if name is None:
        return None
    if name not in list(DataFormat):
        raise InputError(
            f"--format: got '{name}'{did_you_mean(name, DataFormat)}; allowed: "
            f"{', '.join(DataFormat)}"
        )
    return DataFormat(name)


def _rows(
    table_rows: str | None, model: Path | None, modulo: bool
) -> Mapping[str, int] | int | None:
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
        return _count(int(table_rows[:30]), "--table-rows")
    from predictor.document import Problems, parse_yaml
    from shardopt.files import decode, read_bytes

    problems = Problems(table_rows)
    raw = parse_yaml(decode(read_bytes(table_rows, "file of table rows"), table_rows), problems)
    problems.raise_if_any()
    if not isinstance(raw, dict) or not raw:
        raise InputError(f"{table_rows}: must be a mapping 'feature: rows', one line a feature")
    return {name: _count(rows, f"{problems.place((name,))}: {name}") for name, rows in raw.items()}


def _count(rows: object, where: str) -> int:
    from predictor.document import shown
    from shardopt.config.schema import MAX_ROWS

    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= MAX_ROWS:
        raise InputError(f"{where}: got {shown(rows)}; allowed: whole numbers from 1 to {MAX_ROWS}")
    return rows
