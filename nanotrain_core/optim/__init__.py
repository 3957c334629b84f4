"""Optimizers: AdamW and SGD on master weights, low-precision moments, learning-rate schedules."""
