"""Phases of a run: changes of its recipe after given numbers of tokens."""
