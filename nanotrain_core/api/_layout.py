"""The layout of ranks, and roles of a model's modules."""

from nanotrain_core.checkpoint.tensor_boxes import Shape
from nanotrain_core.layout.layout import Layout, Span, View, nontrivial_views
from nanotrain_core.layout.roles import (
    Role,
    Tag,
    added_by,
    lies_in,
    main_layers,
    natural_sort_key,
    override_forward,
    replace_module,
    share_tokens,
    shared_tokens,
    tag,
    tagged,
)

__all__ = [
    "Layout",
    "Role",
    "Shape",
    "Span",
    "Tag",
    "View",
    "added_by",
    "lies_in",
    "main_layers",
    "natural_sort_key",
    "nontrivial_views",
    "override_forward",
    "replace_module",
    "share_tokens",
    "shared_tokens",
    "tag",
    "tagged",
]
