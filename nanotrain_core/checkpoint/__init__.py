"""Checkpoints: the saver, tensor boxes, listing and conversion, and the `simple` format."""
