"""Injects every fault of the fault matrix into a real run, and measures the cost. See docs/reliability.md."""
