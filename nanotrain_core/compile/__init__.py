"""Decides what in a run is compiled by ``torch.compile`` and what stays eager, and compiles it."""
