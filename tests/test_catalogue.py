"""Every metric that a training run should show is declared by the core or by a monitor of this repository."""

import pytest

from nanotrain_core.api import CORE_METRICS, MetricNames, load_plugins

CATALOGUE = {
    "loss": "loss loss/ema loss/spike loss/perplexity validation/perplexity validation/loss validation/gap "
    "loss/nonfinite losses/mtp",
    "data": "tokens data/effective_tokens data/tokens_per_update data/effective_tokens_per_update data/drift "
    "data/ignored validation/ignored data/mixture/web data/epochs",
    "gradients": "grad_norm gradients/clip_coefficient gradients/clipped gradients/clip_rate "
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
    "device": "device/utilisation/max device/memory/max device/power/max device/temperature/max",
    "moe": "moe/max_load/layers.0.router moe/entropy/layers.0.router moe/bias_norm/layers.0.router "
    "moe/empty/layers.0.router moe/all_to_all_bytes/layers.0.experts",
    "pipeline": "pipeline/bubble/measured/rank-0 pipeline/bubble/ideal/rank-0 pipeline/skew "
    "pipeline/work/rank",
    "reliability": "checkpoint/ok checkpoint/size checkpoint/seconds checkpoint/blocked checkpoint/age "
    "reliability/restarts reliability/rollbacks reliability/lost_steps goodput",
}


@pytest.mark.parametrize("group", CATALOGUE)
def test_every_row_of_the_catalogue_is_declared_in_its_group(group):
    registry = load_plugins()
    monitors = [registry.get("monitor", use) for use in registry.names("monitor")]
    declared = MetricNames([*CORE_METRICS, *(metric for each in monitors for metric in each.metrics)])
    for name in CATALOGUE[group].split():
        found = declared.find(name)
        assert found is not None, name
        assert found.group == group, name
        assert found.summary
        assert found.unit or found.kind == "text", name
