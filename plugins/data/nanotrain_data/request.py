"""What ``nanotrain data prepare`` is asked for."""

from __future__ import annotations

from pathlib import Path

import attrs

from nanotrain_data.sources import TEXT_SUFFIXES


@attrs.define(frozen=True, kw_only=True)
class Request:
    """What is to be prepared."""

    sources: tuple[str, ...]
    tokenizer: str
    """``bytes``, or the file of a tokenizer."""
    out: Path
    field: str = "text"
    """Where the text is in a JSON object or a table."""
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    """Files that are a document each."""
    unit_bytes: int = 2**28
    """Of text that becomes one shard, about."""
    end_documents: bool = True
    """Whether each document ends with the tokenizer's token for it, if it has one."""
    chat: bool = False
    """Whether documents are conversations: lists of messages, of which the assistant's are learned."""
    chat_template: str | None = None
    """The file of a template, or ``plain``; None: what lies beside the tokenizer, or else the plain form."""
    date: str | None = None
    """What a template is told that asks for the day, as 2026-11-29; None: that of what is prepared in part,
    or else today's."""
