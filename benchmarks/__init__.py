"""Side by side with plain PyTorch and torch DDP: ``python -m benchmarks``. See docs/benchmarks.md."""
