"""Data: text and synthetic batches with a position, the same global batch on every layout."""
