"""The metrics that this plugin publishes, by subject, each with its rule and what to do. Torch-free."""
