"""Phases of a run: what of its recipe changes after how many tokens."""
