"""Run: what surrounds a training step: events, stop, rollback, metrics, data feed, folder, log."""
