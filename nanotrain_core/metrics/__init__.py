"""Metrics: numbers under declared names, reduced over ranks once a logged step, handed to every sink."""
