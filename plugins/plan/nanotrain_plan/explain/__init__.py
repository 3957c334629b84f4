"""One step of a recipe in words, pictures and numbers, each read from the objects that would run."""
