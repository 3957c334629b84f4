"""Which settings are secrets, and texts without them. Torch-free."""

from __future__ import annotations

import re

#: Last words of keys whose values must not be disclosed, and the placeholder that replaces them.
SECRETS = frozenset({"webhook", "token", "secret", "password", "key"})
HIDDEN = "(hidden)"
#: A user and a password before a host, where a port and an `@` in a path or a query are none, nor are a
#: repository and its branch. A password may have a slash, which ends the host for urlsplit.
_PASSWORD = re.compile(r"(?<!github)(?<!git)://[^/@:?#\[]*:(?!\d+(?:[/?#]|$))[^@]*@")


def is_secret(key: str) -> bool:
    """Return whether the value of a key is a secret.

    >>> [is_secret(key) for key in ("webhook", "api_key", "tokenizer", "keep", "access_token")]
    [True, True, False, False, True]
    """
    return key.rpartition("_")[2] in SECRETS or key in SECRETS


def has_password(url: str) -> bool:
    """Return whether a URL has a password, which logs and checkpoints would show.

    >>> [has_password(url) for url in ("ftp://me:S3CRET@host/a", "http://host:80/a@b", "github://org:repo@ref/a")]
    [True, False, False]
    """
    return _PASSWORD.search(url) is not None


def without_secrets(text: str) -> str:
    """Return TOML, or a command with ``--set``, with the values of secret keys hidden.

    >>> print(without_secrets('webhook = "https://hooks.example/T0/S3CRET"  # r.toml:7'))
    webhook = "(hidden)"  # r.toml:7
    >>> print(without_secrets("nanotrain run r --set monitor.3.to.webhook=https://hooks.example/S3CRET -q"))
    nanotrain run r --set monitor.3.to.webhook="(hidden)" -q
    """
    # In a command a value may lack quotes of its own, and end with a quote that began before its key.
    bare = r"""[^\s"'[{]\S*?(?=["']?(?:\s|$))"""
    key = rf"""\b(?:\w*_)?(?:{"|".join(SECRETS)})["']?\s*=\s*"""
    return re.sub(rf"""(?i)({key})(?:(["'])(?:(?!\2).)+\2|{bare})""", rf'\1"{HIDDEN}"', text)
