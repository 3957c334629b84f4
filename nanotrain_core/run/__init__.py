"""Run: the parts around a training step: events, stop, rollback, metrics, data feed, folder, log."""
