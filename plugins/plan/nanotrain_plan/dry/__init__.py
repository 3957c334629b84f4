"""A dry run: one rank's step with the objects that would run, recorded operator by operator.

On ``meta`` tensors, in a process group that talks to nobody.
"""
