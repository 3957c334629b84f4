"""Metrics: values under declared names, reduced over ranks once per logged step, passed to every sink."""
