"""Registry: plugins are found, loaded one by one, and their components looked up by name."""
