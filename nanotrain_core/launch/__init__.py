"""Starts the ranks of a run, lets them meet, and tells how they ended; what one rank's process does."""
