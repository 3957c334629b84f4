"""Starts the ranks of a run, connects them, and reports how they ended; the main function of a rank."""
