"""Mixture of experts: routing, token permutation, grouped GEMMs."""
