"""Alerts: runs a command, calls a webhook or appends to a file when a run goes wrong.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import attrs

from nanotrain_core.api import Component, Layout, Problem, Range, Recipe, Register, hookimpl

__version__ = "0.1.0"

#: What a metric may be compared with: any number that is one.
LIMIT = Range(-1e18, 1e18)


@attrs.define(frozen=True, kw_only=True)
class Target:
    """``to``: where an alert goes. Of several keys, to each."""

    command: tuple[str, ...] = ()
    """A program and its arguments, run without a shell: `["notify-send", "nanotrain"]`. The alert is JSON on
    its standard input, and in the variables `NANOTRAIN_ALERT_TEXT`, `_RUN`, `_STEP`, `_LEVEL`, `_METRIC` and
    `_VALUE`."""
    webhook: str = ""
    """A URL to which the alert is sent as JSON, by POST. Slack and Mattermost show its key `text`. It is in
    the run folder and in checkpoints, unlike that of `webhook_variable`."""
    webhook_variable: str = ""
    """Name of an environment variable with such a URL, where rank 0 runs. It is read as the run begins."""
    file: str = ""
    """A file to which the alert is appended, as a line of JSON. A relative path is in the run folder."""


@attrs.define(frozen=True, kw_only=True)
class AlertRule:
    """An item of ``rules``: either a metric or an event."""

    metric: str = ""
    """A name or a pattern: `"grad_norm"`, `"validation/*"`."""
    above: float | None = attrs.field(default=None, validator=LIMIT)
    """Values above it count; so does what is not a number."""
    below: float | None = attrs.field(default=None, validator=LIMIT)
    """Values below it count; so does what is not a number."""
    verdict: Literal["warn", "bad"] = "bad"
    """Without `above` and `below`: values that the metric's declared rule calls so, or worse."""
    in_a_row: int = attrs.field(default=1, validator=Range(1))
    """Logged steps for which that must be so."""
    event: Literal["start", "end", "failed", "rollback", "save_failed"] | None = None
    """`end` is one without a failure, also after a stop request."""
    text: str = ""
    """Text to put before the alert, such as whom to call."""
    to: Target | None = None
    """Unset: the monitor's own `to`."""


#: What is watched where a recipe says nothing else.
USUAL = (
    AlertRule(event="failed"),
    AlertRule(event="rollback"),
    AlertRule(event="save_failed"),
    AlertRule(metric="*", verdict="bad", in_a_row=3),
)


@attrs.define(frozen=True, kw_only=True)
class AlertsConfig:
    """``[[monitor]] use = "alerts"``. Alerts are logged, and sent where ``to`` says."""

    rules: tuple[AlertRule, ...] = USUAL
    """Unset: failures, rollbacks, failed saves, and metrics that are bad for 3 logged steps."""
    to: Target = attrs.field(factory=Target)
    """Where alerts go whose rule does not say."""
    every_minutes: float = attrs.field(default=10.0, validator=Range(0.0, 1e6))
    """At most one alert of a rule and a metric, of all its layers, in that time; the next one says how many
    were left out."""


def asked_metrics(config: AlertsConfig) -> Iterator[tuple[str, str]]:
    """Yield the metrics that rules name, for the core to look up."""
    for number, rule in enumerate(config.rules):
        if rule.metric:
            yield f"rules.{number}.metric", rule.metric


def check_rules(recipe: Recipe, config: AlertsConfig, layout: Layout) -> Iterator[Problem]:
    """Refuse rules that say too little or too much, programs that are not there, and other addresses."""
    index = next(n for n, each in enumerate(recipe.monitor) if each.config is config)
    for number, rule in enumerate(config.rules):
        key = f"monitor.{index}.rules.{number}"
        limits = [name for name in ("above", "below") if getattr(rule, name) is not None]
        if bool(rule.metric) == bool(rule.event):
            yield Problem(key, "expected either a metric or an event")
        elif rule.event and (limits or rule.in_a_row > 1):
            yield Problem(f"{key}.{(limits or ['in_a_row'])[0]}", f"the event '{rule.event}' has no values")
        if rule.above is not None and rule.below is not None and rule.above < rule.below:
            text = f"every value is above {rule.above:g} or below {rule.below:g}; expected above >= below"
            yield Problem(f"{key}.above", text)
        if rule.to is not None:
            yield from _check_target(f"{key}.to", rule.to)
    yield from _check_target(f"monitor.{index}.to", config.to)


def _check_target(key: str, to: Target) -> Iterator[Problem]:
    if to.command and shutil.which(to.command[0]) is None:
        yield Problem(
            f"{key}.command", f"there is no program '{to.command[0]}'; expected one in PATH, or its path"
        )
    if to.webhook and not webhook_host(to.webhook):
        yield Problem(f"{key}.webhook", "this is no address; expected https://host/path")
    if Path(to.file).is_absolute() and not Path(to.file).parent.is_dir():
        yield Problem(f"{key}.file", f"there is no folder {Path(to.file).parent} for it")


def webhook_host(url: str) -> str:
    """Return the host of a webhook's URL, empty if it is not valid. The rest of the URL is a secret.

    >>> [webhook_host(url) for url in ("https://hooks.example/T0/S3CRET", "https://[x", "http://me:pw@host/")]
    ['hooks.example', '', '']
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is no number
    except ValueError:
        return ""
    valid = parts.scheme in ("http", "https") and "@" not in parts.netloc  # urllib takes no user
    return parts.hostname or "" if valid and url.isascii() and url.isprintable() and " " not in url else ""


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Register ``alerts``."""
    register(
        Component(
            name="alerts",
            config=AlertsConfig,
            factory="nanotrain_alerts.alerts:Alerts",
            summary="alerts to commands, webhooks and files when something goes wrong in a run",
            check=check_rules,
            reads_metrics=asked_metrics,
        )
    )
