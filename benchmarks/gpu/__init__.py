"""One command for one GPU: equality, tests, speed and memory, each in a process of its own."""
