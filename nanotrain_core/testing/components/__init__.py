"""The harness's own components: minimal ones, with which others are tested without other plugins.

``registered.py`` registers them, without torch; each of the other files implements one.
"""
