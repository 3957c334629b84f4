"""Detects hanging ranks: each writes a heartbeat, which the launcher and a thread of the rank check."""
