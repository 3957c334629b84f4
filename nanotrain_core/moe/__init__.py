"""Mixture of experts: routing, token permutation, grouped matrix products."""
