"""Breaks a real run in every way of the fault matrix, and measures what it cost. See docs/reliability.md."""
