"""Monitors: components that react to what happens in a run and never change its numbers."""
