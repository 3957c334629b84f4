"""Texts of a column: parquet files, and the Arrow files that Hugging Face ``datasets`` saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nanotrain_core.api import DataError, did_you_mean
from nanotrain_data.sources import Part

T = TypeVar("T")


def row_groups(path: Path, unit_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield a parquet file in stretches of row groups: first, end and about how many bytes of text.

    Raises:
        DataError: it is no parquet file, or pyarrow is missing.
    """
    with _reading(path) as arrow:
        metadata = arrow.parquet.ParquetFile(path).metadata
        sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    begin = 0
    for number in range(1, len(sizes)):
        if sum(sizes[begin : number + 1]) > unit_bytes:
            yield begin, number, sum(sizes[begin:number])
            begin = number
    if sizes:
        yield begin, len(sizes), sum(sizes[begin:])


def values_of(part: Part, field: str, check: Callable[[Any], T]) -> Iterator[tuple[Callable[[], str], T]]:
    """Yield what a column has, each with a function that says where.

    Raises:
        DataError: there is no such column, a row has not what ``check`` expects, or the file is damaged.
    """
    path = Path(part.path)
    row = 0
    with _reading(path) as arrow:
        for batch in _batches(arrow, part, field):
            for value in batch.column(field).to_pylist():
                where = partial(_where, part, row)
                try:
                    yield where, check(value)
                except ValueError as error:
                    raise DataError(f"{where()}: column '{field}' {error}") from None
                row += 1


def _where(part: Part, row: int) -> str:
    return f"{part.path}, row {row}" + (f" of row group {part.begin} on" if part.begin else "")


def _batches(arrow: Any, part: Part, field: str) -> Iterator[Any]:
    if part.form == "parquet":
        file = arrow.parquet.ParquetFile(part.path)
        _check_column(part, field, file.schema_arrow.names)
        yield from file.iter_batches(1024, row_groups=range(part.begin, part.end), columns=[field])
        return
    with arrow.memory_map(part.path) as mapped, arrow.ipc.open_stream(mapped) as stream:
        _check_column(part, field, stream.schema.names)
        yield from stream


def _check_column(part: Part, field: str, names: list[str]) -> None:
    if field not in names:
        near = did_you_mean(field, names)
        text = f"no column '{field}'{near}; it has {', '.join(names)}; --field names another"
        raise DataError(f"{part.path}: {text}")


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path} needs the package pyarrow: pip install nanotrain-data[parquet]") from None
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
