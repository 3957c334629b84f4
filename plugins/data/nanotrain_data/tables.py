"""Texts of a column: parquet files, and the Arrow files that Hugging Face ``datasets`` saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanotrain_core.api import DataError, did_you_mean
from nanotrain_data.fields import Field, checked

if TYPE_CHECKING:
    from nanotrain_data.sources import Part


def row_groups(path: Path, unit_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield a parquet file in stretches of row groups: first, end and about how many bytes of text.

    Raises:
        DataError: it is no parquet file, or pyarrow is missing.
    """
    with _reading(path) as arrow:
        metadata = arrow.parquet.ParquetFile(path).metadata
        sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    begin = size = 0
    for number, more in enumerate(sizes):
        if number > begin and size + more > unit_bytes:
            yield begin, number, size
            begin, size = number, 0
        size += more
    if sizes:
        yield begin, len(sizes), size


def values_of(part: Part, fields: Sequence[Field]) -> Iterator[tuple[Callable[[], str], list[Any]]]:
    """Yield what columns have, each row with a function that says where: the first column has to be there.

    Raises:
        DataError: it is not, a row has something else than is expected of it, or the file is damaged.
    """
    row = 0
    with _reading(Path(part.path)) as arrow:
        for batch in _batches(arrow, part, [name for name, _ in fields]):
            names = [name for name, _ in fields if name in batch.schema.names]
            columns = [_listed(batch.column(name), name, part, row) for name in names]
            for values in zip(*columns, strict=True):
                where = partial(_where, part, row)
                found = _without_nulls(dict(zip(names, values, strict=True)))
                yield where, checked(found, fields, partial(_column, where))
                row += 1


def _listed(column: Any, name: str, part: Part, first: int) -> list[Any]:
    """Return the values of a column, of which the first is in row ``first``.

    Raises:
        DataError: a text is not UTF-8, which Arrow does not check.
    """
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        for row, value in enumerate(column, first):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                where = _column(partial(_where, part, row), name)
                text = f"has no UTF-8 at byte {error.start} of a text; expected texts: write the table anew"
                raise DataError(f"{where} {text}") from None
        raise


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields that are null: Arrow has each where any row does.

    To a template a field that is null is there: it would write ``None``.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _column(where: Callable[[], str], name: str) -> str:
    return f"{where()}: column '{name}'"


def _where(part: Part, row: int) -> str:
    return f"{part.path}, row {row}" + (f" of row group {part.begin} on" if part.begin else "")


def _batches(arrow: Any, part: Part, columns: list[str]) -> Iterator[Any]:
    if part.form == "parquet":
        file = arrow.parquet.ParquetFile(part.path)
        names = file.schema_arrow.names
        _check_column(part, columns[0], names)
        there = [name for name in columns if name in names]
        yield from file.iter_batches(1024, row_groups=range(part.begin, part.end), columns=there)
        return
    with arrow.memory_map(part.path) as mapped, arrow.ipc.open_stream(mapped) as stream:
        _check_column(part, columns[0], stream.schema.names)
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
