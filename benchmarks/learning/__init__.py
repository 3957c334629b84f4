"""``python -m benchmarks.learning``: finished runs on real text, and nanoGPT's on the same text."""
