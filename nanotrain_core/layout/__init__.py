"""Layout: where ranks stand, which block of which parameter each holds, and how gradients are completed."""
