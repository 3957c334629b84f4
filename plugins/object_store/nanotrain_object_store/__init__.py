"""Checkpoints of a run in an object store: uploaded beside training, fetched where the run resumes.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from collections.abc import Iterator

import attrs

from nanotrain_core.api import (
    Command,
    Component,
    Layout,
    Metric,
    Problem,
    Range,
    Recipe,
    Register,
    RegisterCommand,
    did_you_mean,
    has_password,
    hookimpl,
)

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class ObjectStoreConfig:
    """``[[monitor]] use = "object_store"``. Every checkpoint of the run is copied to ``url``."""

    url: str
    """A prefix of the run's own, as fsspec writes it: `"s3://bucket/runs/mine"`. Credentials and endpoints
    come from where its library looks for them, as `AWS_ENDPOINT_URL`, and never from here. `{folder}` stands
    for the name of the run folder."""
    keep: int = attrs.field(default=3, validator=Range(1))
    """Newest checkpoints to keep in the store, beside the newest before the last finite validation loss."""
    part_mib: float = attrs.field(default=64.0, validator=Range(5.0, 5120.0))
    """Size of the parts that larger files are uploaded in, in MiB, where the store has multipart uploads."""
    wait_at_end: float = attrs.field(default=600.0, validator=Range(0.0, 1e6))
    """Seconds that the end of a run waits for its last checkpoint to be in the store; where the run was asked
    to stop by a signal, at most half of `run.grace`."""
    lease: float = attrs.field(default=30.0, validator=Range(1.0, 3600.0))
    """Seconds without a heartbeat after which the run that holds the prefix is considered dead."""


METRICS = (
    Metric(
        name="checkpoint/upload_seconds",
        unit="s",
        group="reliability",
        reduce="last",
        summary="time from when the last uploaded checkpoint was in place until it was in the store",
    ),
    Metric(
        name="checkpoint/upload_age",
        unit="s",
        group="reliability",
        reduce="last",
        summary="time since the newest checkpoint in the store was in place, or since the run began",
    ),
    Metric(
        name="checkpoint/uploads_left_out",
        unit="1",
        group="reliability",
        reduce="last",
        summary="checkpoints so far that were skipped in favor of a newer one",
    ),
)


def check_store(recipe: Recipe, config: ObjectStoreConfig, layout: Layout) -> Iterator[Problem]:
    """Refuse what is no URL or has a password, and file systems whose library is not installed."""
    index = next(n for n, each in enumerate(recipe.monitor) if each.config is config)
    for key, text in problems_of(config.url):
        yield Problem(f"monitor.{index}.{key}", text)
    others = [each for each in recipe.monitor if each.use == "object_store"]
    if len(others) > 1 and others[0].config is config:
        yield Problem(f"monitor.{index}", "a run has one object store; expected one such monitor")


def problems_of(url: str) -> Iterator[tuple[str, str]]:
    """Yield why nothing can be stored at ``url``: a key of the config and a sentence."""
    import fsspec  # over 50 ms: where it is used alone

    protocol, found, path = url.partition("://")
    if has_password(url):
        variable = f"FSSPEC_{protocol[:50].rpartition(':')[2].upper()}_PASSWORD"
        text = f"it has a password, which logs and checkpoints would show; expected none, but {variable} set"
        yield "url", f"{text}, or a file in ~/.config/fsspec"
        return
    if not found or not path.strip("/") or "::" in url or "\0" in url:
        yield "url", f"'{url[:200]}' names no place in a store; expected one as s3://bucket/prefix"
        return
    known = fsspec.available_protocols()
    if protocol not in known:
        yield "url", f"there is no file system '{protocol[:50]}'{did_you_mean(protocol[:50], known)}"
        return
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        yield "url", f"{protocol}:// needs a library: {error}"


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Register ``object_store``."""
    register(
        Component(
            name="object_store",
            config=ObjectStoreConfig,
            factory="nanotrain_object_store.monitor:ObjectStore",
            summary="uploads checkpoints to S3 and other stores, and fetches them for a resume",
            metrics=METRICS,
            check=check_store,
            example={"url": "memory://example/{folder}"},
        )
    )


@hookimpl
def nanotrain_register_command(register: RegisterCommand) -> None:
    """Register ``nanotrain store``."""
    register(
        Command(
            name="store",
            summary="list, verify and fetch checkpoints in an object store",
            module="nanotrain_object_store.command",
        )
    )
