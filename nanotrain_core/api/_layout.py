"""The layout of ranks, and roles of a model's modules."""

from nanotrain_core.layout.layout import Layout, Span, View, above_one
from nanotrain_core.layout.roles import (
    Role,
    Tag,
    added_by,
    main_layers,
    natural_sort_key,
    replace,
    share_tokens,
    tag,
    tagged,
    take_over,
)

__all__ = [
    "Layout",
    "Role",
    "Span",
    "Tag",
    "View",
    "above_one",
    "added_by",
    "main_layers",
    "natural_sort_key",
    "replace",
    "share_tokens",
    "tag",
    "tagged",
    "take_over",
]
