"""Registry: discovers plugins, loads each separately, and looks up their components by name."""
