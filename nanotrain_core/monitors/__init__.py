"""Monitors: components that react to the events of a run and never change its results."""
