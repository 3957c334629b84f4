"""Checkpoints: what a saver writes, how tensors are cut into boxes, listing and conversion, the `simple` format."""
