"""The harness's own components: minimal ones, with which others are tested without other plugins.

Each has a torch-free file that registers it, under the name in its first line, and one that implements it.
"""
