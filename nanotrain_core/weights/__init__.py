"""Weights that others saved: opened where they lie, read block by block, and written in another form."""
