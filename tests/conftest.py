"""Fixtures of plugins' tests that tests of several packages together use as well."""

from s3_server import server  # noqa: F401
