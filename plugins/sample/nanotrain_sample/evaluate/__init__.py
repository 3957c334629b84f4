"""``nanotrain eval``: how likely a model finds texts: validation loss, files, and tasks of ``lm_eval``."""
