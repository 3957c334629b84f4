"""Metrics: numbers under declared names, reduced over ranks once a logged step, told to every sink."""
