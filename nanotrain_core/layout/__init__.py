"""Layout: the ranks' coordinates, which block of which parameter each holds, and gradient reduction."""
