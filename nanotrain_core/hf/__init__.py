"""Hugging Face: names and options of its models, and reading and writing their weights."""
