"""What is read of a row, be it a JSON object or of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanotrain_core.api import DataError

#: A field or column, and who takes what is in it, or raises ValueError with what was expected.
Field = tuple[str, Callable[[Any], Any]]


def checked(row: Mapping[str, Any], fields: Sequence[Field], place: Callable[[str], str]) -> list[Any]:
    """Return what each of the fields has; None is in those that are missing.

    Args:
        row: by names of fields.
        fields: that are read.
        place: returns how messages call a field: with file, and line or row.

    Raises:
        DataError: a field has something else than is expected there.
    """
    found = []
    for name, check in fields:
        try:
            found.append(check(row.get(name)))
        except ValueError as error:
            raise DataError(f"{place(name)} {error}") from None
    return found
