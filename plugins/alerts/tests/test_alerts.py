"""Who is told what, and when: rules, their rate, and every way an alert travels."""

import json
import math
import multiprocessing
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import nanotrain_alerts.deliver
import pytest
from nanotrain_alerts import USUAL, AlertRule, AlertsConfig, Target
from nanotrain_alerts.alerts import Alerts, verdict
from nanotrain_alerts.deliver import Alert, deliver
from structlog.testing import capture_logs

from nanotrain_core.api import Metric, Rule
from nanotrain_core.api.torch import EndReport, FailedSaveReport, MetricsReport, RollbackReport
from nanotrain_core.errors import NanotrainError, RecipeError
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine


class Info:
    name, rank, world_size, first_step, folder = "mine", 0, 2, 0, None


@pytest.fixture
def told(tmp_path):
    """Return a function that has reports compared with rules, and returns the alerts' texts."""

    def compare(rules, *reports, minutes=0.0, clock=lambda: 0.0):
        file = tmp_path / "alerts.jsonl"
        config = AlertsConfig(rules=tuple(rules), to=Target(file=str(file)), every_minutes=minutes)
        alerts = Alerts(config, clock)
        alerts.on_start(Info())
        for report in reports:
            alerts.on_metrics(report)
        alerts.on_end(EndReport(9, "done", 8))
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    return compare


def values(step, **found):
    return MetricsReport(step, found)


def test_a_rule_holds_when_it_has_held_for_so_many_steps(told):
    rule = AlertRule(metric="grad_*", above=100.0, in_a_row=3)
    norms = [200.0, 200.0, 1.0, 200.0, math.nan, 300.0, 400.0, 50.0]
    found = told([rule], *(values(n, grad_norm=x, other=x) for n, x in enumerate(norms, 1)))
    assert [(each["step"], each["value"], each["metric"]) for each in found] == [
        (6, 300.0, "grad_norm"),
        (7, 400.0, "grad_norm"),
    ]
    assert found[0]["text"] == "mine, step 6: grad_norm is 300, above 100, 3 in a row"


def test_a_rule_relative_to_the_usual_holds_once_that_is_known(told):
    rule = Rule(warn_times=2, high="{where} takes {times} times as long as usual")
    metric = Metric(name="seconds/{part}", unit="s", group="time", summary="", rule=rule)

    def seconds(step, value):
        return MetricsReport(step, {"seconds/io": value}, metrics={"seconds/io": metric})

    asks = AlertRule(metric="seconds/*", verdict="warn")
    found = told([asks], seconds(1, 9.0), *(seconds(n, 1.0) for n in range(2, 62)), seconds(62, 3.0))
    assert [each["text"] for each in found] == ["mine, step 62: io takes 3 times as long as usual"]


def test_alerts_of_one_rule_and_metric_come_no_faster_than_asked_for(told):
    now = iter([0.0, 60.0, 119.0, 121.0])
    rule = AlertRule(metric="*", below=0.0)
    reports = [values(1, a=-1.0), values(2, a=-1.0, b=-2.0), values(3, a=-3.0), values(4, a=-4.0)]
    found = told([rule], *reports, minutes=2.0, clock=lambda: next(now))
    assert [(each["metric"], each["step"], each["left_out"]) for each in found] == [
        ("a", 1, 0),
        ("b", 2, 0),
        ("a", 4, 2),
    ]


NORM = Metric(name="norm/{block}", unit="1", group="test", summary="", rule=Rule(warn_above=2, bad_above=4))
LOSS = Metric(name="loss", unit="nats", group="loss", summary="", rule=Rule(high="the loss is no number"))


def declared(step, **found):
    """Return a report of ``loss`` and norms of layers."""
    values = {name if name == "loss" else f"norm/{name}": x for name, x in found.items()}
    return MetricsReport(step, values, metrics={name: LOSS if name == "loss" else NORM for name in values})


def test_a_rule_sends_one_alert_of_a_step_and_of_all_layers_of_a_metric(told):
    """One for each layer was sent, each after up to 20 seconds if an address did not answer."""
    rule = AlertRule(metric="*", verdict="warn")
    reports = [declared(1, a=3.0, b=9.0, c=3.0, d=1.0), declared(2, d=9.0), declared(3, a=5.0)]
    now = iter([0.0, 60.0, 121.0])
    found = told([rule], *reports, minutes=2.0, clock=lambda: next(now))
    assert [(each["metric"], each["step"], each["level"], each["left_out"]) for each in found] == [
        ("norm/b", 1, "bad", 0),
        ("norm/a", 3, "bad", 1),
    ]
    assert found[0]["text"].startswith("mine, step 1: norm/b is 9: ")
    assert found[0]["text"].endswith("; and 2 more")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_of_a_loss_that_is_no_number_rules_for_all_metrics_tell_that_alone(told, loss):
    layers = {f"l{n}": math.nan for n in range(50)}
    rules = [AlertRule(metric="*"), AlertRule(metric="norm/l7")]
    found = told(rules, *(declared(step, loss=loss, **layers) for step in (1, 2)), minutes=9.0)
    assert [(each["metric"], each["text"]) for each in found] == [
        ("loss", f"mine, step 1: the loss is no number (loss is {loss})"),
        ("norm/l7", "mine, step 1: norm/l7 is nan, not a finite number"),
    ]


def test_that_a_run_failed_is_told_before_alerts_that_wait(tmp_path, monkeypatch):
    sent, free, began = [], threading.Event(), threading.Event()

    def slowly(alert, to, folder):
        sent.append(alert.event or alert.metric)
        began.set()
        free.wait(20)
        return []

    monkeypatch.setattr("nanotrain_alerts.alerts.deliver", slowly)
    rules = (AlertRule(event="failed"), AlertRule(metric="a", above=0.0), AlertRule(metric="b", above=0.0))
    alerts = Alerts(AlertsConfig(rules=rules, every_minutes=0.0))
    alerts.on_start(Info())
    alerts.on_metrics(values(1, a=1.0, b=1.0))
    alerts.on_metrics(values(2, a=1.0, b=1.0))
    assert began.wait(20)
    threading.Timer(0.1, free.set).start()
    alerts.on_end(EndReport(2, "failed", 8))
    assert sent == ["a", "failed", "b", "a", "b"]


def test_a_rule_that_never_holds_is_warned_of_once(told):
    with capture_logs() as logs:
        assert (
            told([AlertRule(metric="lr"), AlertRule(metric="l*")], values(1, lr=1.0), values(2, lr=1.0)) == []
        )
    (warned,) = (entry for entry in logs if entry["log_level"] == "warning")
    assert (warned["metric"], warned["key"]) == ("lr", "rules.0")


@pytest.mark.parametrize(
    ("value", "asked", "said"),
    [
        (5.0, "bad", None),
        (20.0, "bad", None),
        (20.0, "warn", ("warn", "too slow (x is 20)")),
        (200.0, "bad", ("bad", "too slow (x is 200)")),
        (-1.0, "warn", ("warn", "too fast (x is -1)")),
        (math.nan, "bad", ("bad", "x is nan, not a finite number")),
        (math.inf, "bad", ("bad", "x is inf, not a finite number")),
    ],
)
def test_a_metrics_own_rule_judges(value, asked, said):
    declared = Rule(warn_below=0.0, warn_above=10.0, bad_above=100.0, low="too fast", high="too slow")
    metric = Metric(name="{x}", unit="s", group="test", summary="", rule=declared)
    found = verdict(AlertRule(metric="*", verdict=asked), "x", value, metric)
    assert (found and (found[1], found[0])) == said


def test_events_are_told(told, tmp_path):
    file = tmp_path / "events.jsonl"
    rules = (*USUAL, AlertRule(event="start"), AlertRule(event="end", text="call Ada"))
    alerts = Alerts(AlertsConfig(rules=rules, to=Target(file=str(file))))
    alerts.on_start(Info())
    alerts.on_rollback(RollbackReport(8, 7, 4, (0, 1), 1, "a spike"))
    alerts.on_save_failed(FailedSaveReport(8, "no space", 2))
    alerts.on_end(EndReport(9, "interrupted", 8))
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(each["event"], each["level"], each["text"]) for each in found] == [
        ("start", "good", "mine, step 0: the run begins, on 2 ranks"),
        ("rollback", "warn", "mine, step 8: rolled back from step 8 to step 4: a spike"),
        (
            "save_failed",
            "bad",
            "mine, step 8: the checkpoint of step 8 could not be saved, 2 in a row: no space",
        ),
        ("end", "good", "mine, step 9: call Ada: the run ended after step 9: interrupted"),
    ]


ALERT = Alert(
    run="a;$(touch x)`y`",
    step=3,
    level="bad",
    text="it said \"no\" and\nleft; rm -rf $HOME 'ü'",
    event="",
    metric="loss",
    value=math.inf,
    left_out=1,
    time=5.0,
)


def test_a_command_is_told_on_its_input_and_in_its_environment_and_no_shell_reads_any_of_it(tmp_path):
    out = tmp_path / "out"
    code = (
        "import json, os, sys; alert = json.load(sys.stdin); "
        "env = {k: v for k, v in os.environ.items() if k.startswith('NANOTRAIN_ALERT_')}; "
        "json.dump([alert, env, sys.argv[1:]], open(sys.argv[1], 'w'))"
    )
    assert [
        *deliver(ALERT, Target(command=(sys.executable, "-c", code, str(out), "$HOME; echo")), tmp_path)
    ] == []
    alert, environment, words = json.loads(out.read_text())
    assert words == [str(out), "$HOME; echo"]
    assert alert == {
        **{"run": ALERT.run, "step": 3, "level": "bad", "text": ALERT.text, "event": "", "metric": "loss"},
        **{"value": "Infinity", "left_out": 1, "time": 5.0},
    }
    assert environment == {
        "NANOTRAIN_ALERT_TEXT": ALERT.text,
        "NANOTRAIN_ALERT_RUN": ALERT.run,
        "NANOTRAIN_ALERT_STEP": "3",
        "NANOTRAIN_ALERT_LEVEL": "bad",
        "NANOTRAIN_ALERT_METRIC": "loss",
        "NANOTRAIN_ALERT_VALUE": "inf",
    }
    assert [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize("killed", [True, False])
def test_a_command_that_hangs_ends_with_all_it_has_started_also_if_the_rank_is_killed(
    tmp_path, monkeypatch, killed
):
    monkeypatch.setattr(nanotrain_alerts.deliver, "COMMAND_TIMEOUT", 0.7)
    out, shell = tmp_path / "out", "sleep 1234 & echo $! > out.new; mv out.new out; wait"
    to = Target(command=("sh", "-c", f"cd {tmp_path}; {shell}"))
    rank = multiprocessing.get_context("fork").Process(target=lambda: [*deliver(ALERT, to, tmp_path)])
    rank.start()
    while not out.exists():
        assert rank.is_alive()
        time.sleep(0.01)
    if killed:
        rank.kill()
    rank.join()
    until = time.monotonic() + 20
    while runs("sleep 1234", int(out.read_text())):
        assert time.monotonic() < until
        time.sleep(0.02)


def runs(words, pid):
    """Return whether a process runs these words, and not one that nobody has waited for."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and words in path.read_bytes().replace(b"\0", b" ").decode()


def test_what_could_not_be_delivered_is_said(tmp_path):
    failing = Target(
        command=(sys.executable, "-c", "import sys; sys.exit('no such user')"),
        webhook="http://127.0.0.1:9/hook",
        file=str(tmp_path / "no/such/folder"),
    )
    file, command, webhook = deliver(ALERT, failing, tmp_path)
    assert "No such file" in file
    assert command.endswith("exit code 1: no such user")
    assert webhook.startswith("webhook at 127.0.0.1: ")


class Redirects(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(302)
        self.send_header("Location", f"gopher://other.example{self.path}")
        self.end_headers()

    def log_message(self, *_): ...


def test_no_sentence_about_a_failed_delivery_has_a_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(nanotrain_alerts.deliver, "COMMAND_TIMEOUT", 0.01)
    serving = HTTPServer(("127.0.0.1", 0), Redirects)
    threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
    said = [
        sentence
        for target in (
            Target(webhook="http://127.0.0.1:9/S3CRET"),
            Target(webhook="http://127.0.0.1:9/S3CRET x"),
            Target(webhook=f"http://127.0.0.1:{serving.server_port}/S3CRET"),
            Target(command=(sys.executable, "-c", "import time; time.sleep(9)", "S3CRET")),
        )
        for sentence in deliver(ALERT, target, tmp_path)
    ]
    serving.shutdown()
    serving.server_close()
    assert "S3CRET" not in str(said)
    assert said[0].endswith("Connection refused>")
    assert said[1:] == [
        "webhook at : InvalidURL",
        "webhook at 127.0.0.1: 302",
        f"{sys.executable}: no end after 0.01 seconds",
    ]


@pytest.fixture
def server():
    """A server that fails the first request, answers after a while, and keeps what it is sent."""

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, self.headers["Content-Type"], json.loads(body)))
            time.sleep(0.2)
            self.send_response(503 if len(got) == 1 else 200)
            self.end_headers()

        def log_message(self, *_): ...

    got = []
    serving = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}", got
    serving.shutdown()
    serving.server_close()


def test_an_address_in_the_environment_is_in_no_recipe(server, monkeypatch, tmp_path):
    """Of `webhook` it is in the run folder and in checkpoints."""
    address, got = server
    monkeypatch.setenv("ALERT_WEBHOOK", f"{address}/S3CRET")
    case = Case("monitor", use="alerts", config={"to": {"webhook_variable": "ALERT_WEBHOOK"}})
    assert "S3CRET" not in str(case.recipe())
    assert list(deliver(ALERT, Target(webhook_variable="ALERT_WEBHOOK"), tmp_path)) == []
    assert [path for path, _, _ in got] == ["/S3CRET", "/S3CRET"]  # the first try fails


def test_a_variable_without_an_address_is_refused_as_the_run_begins_and_not_before():
    """A check on a login node was refused, and ranks that send nothing had to have it."""
    rules = [{"event": "end", "to": {"webhook_variable": "NO_SUCH_WEBHOOK"}}]
    engine = make_engine(Case("monitor", use="alerts", config={"rules": rules}), {"run": {"steps": 1}})
    with pytest.raises(
        NanotrainError, match=r"variable NO_SUCH_WEBHOOK .*rank 0's host; expected `export NO_SUCH_"
    ):
        engine.fit()
    assert engine.step == 0


def test_a_run_tells_a_slow_webhook_and_waits_for_it_at_its_end_alone(server):
    address, got = server
    rules = [{"metric": "loss", "above": 0.0, "text": "loss!"}, {"event": "end"}]
    case = Case("monitor", use="alerts", config={"rules": rules, "to": {"webhook": f"{address}/hook"}})
    engine = make_engine(case, {"run": {"steps": 4}})
    with capture_logs() as logs:
        engine.fit()
    (first, again, end) = got
    assert first == again == ("/hook", "application/json", first[2])
    assert (first[2]["metric"], first[2]["step"]) == ("loss", 1)
    assert (end[2]["event"], end[2]["step"]) == ("end", 4)
    said = [(each["log_level"], each["event"]) for each in logs if each["event"].startswith("alert: ")]
    assert said == [("warning", f"alert: {first[2]['text']}"), ("info", f"alert: {end[2]['text']}")]


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({"metric": "grad_nrom", "above": 1.0}, "rules.0.metric: .* 'grad_nrom' .*did you mean 'grad_norm'"),
        ({"metric": "zzz/*"}, "rules.0.metric: .*`nanotrain metrics` lists what there is"),
        ({"above": 1.0}, "rules.0: expected either a metric or an event"),
        ({"metric": "loss", "event": "end"}, "rules.0: expected either a metric or an event"),
        ({"event": "ended"}, "rules.0.event: .*did you mean|rules.0.event: expected one of"),
        ({"event": "end", "above": 1.0}, "rules.0.above: the event 'end' has no values"),
        ({"event": "end", "in_a_row": 2}, "rules.0.in_a_row: the event 'end' has no values"),
        ({"metric": "loss", "above": 1.0, "below": 2.0}, "rules.0.above: every value is"),
        ({"event": "end", "to": {"webhook": "example.org/x"}}, "rules.0.to.webhook: .*expected https://"),
        ({"event": "end", "to": {"webhook": "https://[x"}}, "rules.0.to.webhook: .*expected https://"),
        ({"event": "end", "to": {"webhook": "https://me:pw@host/x"}}, "rules.0.to.webhook: .*expected http"),
        ({"event": "end", "to": {"command": ["no-such-program"]}}, "rules.0.to.command: there is no program"),
        ({"event": "end", "to": {"file": "/no/such/folder/x"}}, "rules.0.to.file: there is no folder"),
        ({"event": "end", "to": {"mail": "x"}}, "rules.0.to.*mail"),
        ({"metric": "loss", "for": 3}, "rules.0.*for"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_before_the_run(rule, problem):
    with pytest.raises(RecipeError, match=f"monitor.0.{problem}"):
        Case("monitor", use="alerts", config={"rules": [rule]}).recipe()


def test_a_refused_address_is_not_printed():
    with pytest.raises(RecipeError, match=r"monitor\.0\.to\.webhook: this is no address") as refused:
        Case("monitor", use="alerts", config={"to": {"webhook": "hooks.example/S3CRET"}}).recipe()
    assert "S3CRET" not in str(refused.value)


def test_a_metric_of_a_monitor_that_the_recipe_lacks_names_it(tmp_path):
    plugin = tmp_path / "own.py"
    plugin.write_text(
        "import attrs\nfrom nanotrain_core.api import Component, Metric, hookimpl\n"
        "@attrs.define(frozen=True)\nclass Config:\n    'Own.'\n"
        "METRICS = [Metric(name='own/{layer}/max', unit='1', group='own', summary='of a test')]\n"
        "@hookimpl\ndef nanotrain_register_monitor(register):\n"
        "    register(Component(name='own', config=Config, factory=f'{__name__}:Own', metrics=METRICS))\n"
        "class Own: ...\n"
    )
    rules = [{"metric": "own/layers.?/max", "above": 1.0}]
    case = Case("monitor", use="alerts", config={"rules": rules}, plugins=(str(plugin),))
    with pytest.raises(RecipeError, match=r'rules.0.metric: .*; add \[\[monitor\]\] use = "own", which does'):
        case.recipe()
    case.recipe(monitor=[{"use": "own"}, {"use": "alerts", "rules": rules}])


def test_a_files_relative_path_is_in_the_run_folder(tmp_path):
    assert [*deliver(ALERT, Target(file="alerts.jsonl"), tmp_path)] == []
    assert json.loads((tmp_path / "alerts.jsonl").read_text())["text"] == ALERT.text
    (tmp_path / "alerts.jsonl").write_text('{"text')  # another, cut short
    assert [*deliver(ALERT, Target(file="alerts.jsonl"), tmp_path)] == []
    assert json.loads((tmp_path / "alerts.jsonl").read_text().splitlines()[1])["text"] == ALERT.text
