"""Finds ranks that hang: each leaves a beat, and the launcher and a thread of the rank look at it."""
