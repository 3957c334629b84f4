"""Every metric that a training run should show is declared, and compared with a definition of it.

Of ``STEP``, ``HISTOGRAMS`` and ``SERIES`` every value of one process is compared with its definition by tests
of the plugin health, and those on pp x tp x ep x dp with those of one process by tests/test_health.py. Of
``MEASURED`` every value of both is compared with its definition by tests/test_performance.py. A row without
a definition fails here; a definition of which there is no value fails there.
"""

import re

import pytest
import test_health
import test_mtp
import test_performance
import test_series
from definitions import HISTOGRAMS, STEP, matching
from measured import MEASURED
from series import SERIES

from nanotrain_core.api import CORE_METRICS, MetricNames, load_plugins

CATALOGUE = {
    "loss": "loss loss/ema loss/spike loss/perplexity validation/perplexity validation/loss validation/gap "
    "loss/nonfinite losses/mtp",
    "data": "tokens data/effective_tokens data/tokens_per_update data/effective_tokens_per_update data/drift "
    "data/ignored validation/ignored data/mixture/web data/epochs",
    "gradients": "grad_norm gradients/clip_coefficient gradients/clipped gradients/clip_rate "
    "gradients/clip_mean "
    "gradients/norm/layers.0 gradients/first_last gradients/parameters/norm/head.weight "
    "gradients/parameters/mean/head.weight gradients/parameters/std/head.weight gradients/histogram/layers.0",
    "updates": "updates/proxy updates/proxy_median updates/proxy_p95 updates/proxy_max "
    "updates/proxy/layers.0 updates/proxy_first_last updates/ratio updates/ratio/layers.0 "
    "updates/parameters/ratio/head.weight",
    "weights": "weights/norm weights/norm/layers.0 weights/spread weights/parameters/norm/head.weight "
    "weights/histogram/layers.0",
    "optimizer": "optimizer/nonfinite lr loss_scale skipped",
    "attention": "attention/max_logit/layers.0 attention/entropy/layers.0 attention/entropy_ratio/layers.0",
    "residual stream": "residual/rms/layers.0 residual/outliers/layers.0 residual/max_abs/layers.0 "
    "norms/rms/layers.0.attn_norm norms/max_abs/layers.0.attn_norm",
    "probes": "probes/batch probes/loss probes/entropy probes/top_mass probes/kl",
    "time": "seconds time/step/p50 time/step/p95 time/step/over_median time/data time/data_fraction "
    "time/forward_backward time/optimizer time/exposed_communication time/checkpoint time/evaluation",
    "speed": "tokens_per_second speed/tokens_per_second_per_device speed/effective_tokens_per_second "
    "speed/samples_per_second speed/steps_per_second speed/tflops speed/mfu speed/eta",
    "memory": "memory/allocated/max memory/reserved/mean memory/allocated_peak/rank memory/reserved_peak/max "
    "memory/allocated_fraction/max memory/reserved_fraction/max memory/weights/max memory/gradients/max "
    "memory/optimizer/max memory/activations/max memory/host/max memory/ranks",
    "device": "device/utilization/max device/memory/max device/power/max device/temperature/max",
    "moe": "moe/max_load/layers.0.router moe/entropy/layers.0.router moe/bias_norm/layers.0.router "
    "moe/empty/layers.0.router moe/all_to_all_bytes/layers.0.experts",
    "pipeline": "pipeline/bubble/measured/rank-0 pipeline/bubble/ideal/rank-0 pipeline/skew "
    "pipeline/work/rank",
    "reliability": "checkpoint/ok checkpoint/size checkpoint/seconds checkpoint/blocked checkpoint/age "
    "reliability/restarts reliability/rollbacks reliability/lost_steps goodput",
}


#: Of one process and of many alike.
SAME = {**STEP, **HISTOGRAMS, **SERIES}
#: What is no number of every run, with the tests of it: on one process and on ranks.
OTHERWISE = {
    "losses/mtp": (test_mtp.test_loss_is_the_sum_of_cross_entropies_of_tokens_two_and_three_on, test_health),
    "probes/batch": (test_series.test_histograms_of_loads_and_the_hash_of_the_batch, test_health),
    "memory/ranks": (test_performance.test_every_rank_is_told_the_memory_of_each,) * 2,
    "moe/all_to_all_bytes/{experts}": (test_health.test_ranks_count_the_bytes_that_they_send_to_experts,) * 2,
}
ROWS = [(group, name) for group, names in CATALOGUE.items() for name in names.split()]


def held(name, table):
    """Return the entries of a table that are of a name."""
    return [pattern for pattern in table if any(matching(pattern, [name]))]


@pytest.fixture(scope="module")
def declared():
    registry = load_plugins()
    monitors = [registry.get("monitor", use) for use in registry.names("monitor")]
    return MetricNames([*CORE_METRICS, *(metric for each in monitors for metric in each.metrics)])


@pytest.mark.parametrize("group", CATALOGUE)
def test_every_row_of_the_catalogue_is_declared_in_its_group(declared, group):
    for name in CATALOGUE[group].split():
        found = declared.find(name)
        assert found is not None, name
        assert found.group == group, name
        assert found.summary
        assert found.unit or found.kind == "text", name


def test_what_a_metric_is_can_be_read_without_the_one_listed_before_it(declared):
    """The report shows it below a curve of its own; those of max, mean, median and rank are one chart."""
    pointing = re.compile(r"^(the same|of these|seconds of these)\b|\blikewise\b|share of the same")
    apart = [m for m in declared.metrics if m.name.rpartition("/")[2] not in ("mean", "median", "rank")]
    assert len(apart) > 69
    assert [metric.name for metric in apart if pointing.search(metric.summary)] == []


def test_every_row_has_a_definition_that_values_are_compared_with():
    without = [
        name for _, name in ROWS if not any(held(name, table) for table in (SAME, MEASURED, OTHERWISE))
    ]
    assert without == []


def test_every_row_is_compared_on_many_ranks():
    """What :mod:`test_health` leaves out of the comparison with one process has a definition on ranks."""
    left_out = [name for _, name in ROWS if name.startswith(test_health.OF_LAYOUT)]
    assert left_out
    assert [name for name in left_out if not held(name, {**MEASURED, **OTHERWISE})] == []


def test_every_definition_is_of_a_metric_that_is_declared(declared):
    names = [metric.name for metric in declared.metrics]
    for pattern in {**SAME, **MEASURED, **OTHERWISE}:
        assert declared.find(pattern) or any(matching(pattern, names)), pattern
