"""What the monitors publish: units, meanings, and the limits that are worth a word. Torch-free."""

from __future__ import annotations

from functools import partial

from nanotrain_core.api import Metric, Rule, rank_metrics

_time = partial(Metric, unit="s", group="time")
_speed = partial(Metric, group="speed")
#: Multiple of their usual time from which on steps are slow.
SLOW = 2.0

THROUGHPUT: tuple[Metric, ...] = (
    _time(
        name="time/step/p50", summary="time of one step, median of the window; without evaluations and saves"
    ),
    _time(name="time/step/p95", summary="time of one step, 95th percentile of the window"),
    _time(
        name="time/step/recent",
        summary="time of the fastest of the last three steps, from the tenth step on",
    ),
    _time(
        name="time/step/over_median",
        unit="1",
        summary="the fastest of the last three steps over the median of the window; while that is above 2, "
        "over the median from before",
        rule=Rule(
            warn_above=SLOW,
            high="steps take over twice their usual time: see which of time/data, time/exposed_communication "
            "and time/forward_backward has grown, and whether another program uses the machine",
        ),
    ),
    _time(name="time/data", summary="time per step in which a rank waits for data"),
    _time(
        name="time/data_fraction",
        unit="1",
        reduce="max",
        summary="fraction of a step for which the rank that waits longest waits for data",
        rule=Rule(
            warn_above=0.3,
            bad_above=0.5,
            high="the run is input-bound: steps wait for data; tokenize ahead, read from a faster disk, or "
            "make batches smaller",
        ),
    ),
    _time(
        name="time/forward_backward", summary="time per step in forward and backward, without waits for ranks"
    ),
    _time(name="time/optimizer", summary="time per step in the optimizer, without waits for other ranks"),
    _time(
        name="time/exposed_communication",
        summary="time per step in which a rank only waits for collectives or executes them",
    ),
    _time(name="time/exposed_fraction", unit="1", summary="fraction of a step that is exposed communication"),
    _time(
        name="time/pipeline_wait",
        summary="time per step in which a rank waits for send/recv from other stages",
    ),
    _time(name="time/monitors", summary="time per step in monitors and their reports, including waits"),
    _time(
        name="time/checkpoint",
        reduce="max",
        summary="time for which training stopped for checkpoints, since the last logged step",
    ),
    _time(name="time/evaluation", reduce="max", summary="time in evaluations, since the last logged step"),
    _speed(
        name="speed/tokens_per_second_per_device",
        unit="tokens/s",
        summary="tokens_per_second over the number of ranks",
    ),
    _speed(
        name="speed/effective_tokens_per_second",
        unit="tokens/s",
        summary="tokens per second that the loss does not ignore, over all ranks",
    ),
    _speed(
        name="speed/samples_per_second", unit="sequences/s", summary="sequences per second, over all ranks"
    ),
    _speed(
        name="speed/steps_per_second", unit="steps/s", summary="steps per second since the last logged step"
    ),
    _speed(
        name="speed/tflops",
        unit="TFLOP/s",
        summary="rate of model FLOPs achieved by one device: recomputed FLOPs count once",
    ),
    _speed(name="speed/mfu", unit="1", summary="model FLOPs utilization: speed/tflops over a device's peak"),
    _speed(
        name="speed/eta", unit="s", summary="time to the last step, at the pace since the first logged step"
    ),
)

FULL = partial(Rule, warn_above=0.9, bad_above=0.95)
LESS = "use a smaller batch.microbatch, activation checkpointing (recompute), or shard more"
#: MiB a step. Fragments of memory that experts with other numbers of rows in each step leave behind grow by
#: 1.3 a step for the first hundred steps of ``deepseek_4d_small``, and no more then.
GROWS = 2.0

#: Logged steps from one report of every rank's memory, and of what holds it, to the next; the last step has
#: one, too.
RANKS_EVERY = 10

#: Logged steps from one report of what is in use to the next, in the same way: each value of a rank takes a
#: place for every rank in what all ranks reduce.
USE_EVERY = 5

_memory = partial(rank_metrics, unit="MiB", group="memory", every=USE_EVERY)

MEMORY: tuple[Metric, ...] = (
    Metric(
        name="memory/ranks",
        unit="MiB",
        group="memory",
        kind="histogram",
        every=RANKS_EVERY,
        summary="peak memory of each rank so far, on its device or else on the host: bin n is rank n",
    ),
    *_memory("memory/allocated", "memory of tensors on the device"),
    *_memory("memory/allocated_peak", "peak memory of tensors on the device so far"),
    *_memory("memory/reserved", "device memory reserved by torch's allocator"),
    *_memory("memory/reserved_peak", "peak device memory reserved by torch's allocator so far"),
    *_memory(
        "memory/allocated_fraction",
        "peak memory of tensors so far, as a fraction of the device",
        unit="1",
        rule=FULL(high=f"the device is almost full of tensors and the run may go out of memory: {LESS}"),
    ),
    *_memory(
        "memory/reserved_fraction",
        "peak memory reserved by torch's allocator so far, as a fraction of the device",
        unit="1",
        rule=FULL(
            high="torch's allocator holds almost all of the device; if memory/allocated_fraction is less, "
            "it is fragmented: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; else "
            f"{LESS}"
        ),
    ),
    Metric(
        name="memory/retries",
        unit="1",
        group="memory",
        reduce="sum",
        every=USE_EVERY,
        summary="times that torch's allocator emptied its cache since the last report, all ranks",
        rule=Rule(warn_above=0.0, high=f"the device is full: each retry waits for it to become idle; {LESS}"),
    ),
    *_memory("memory/weights", "memory of the model's parts on a rank, including buffers", every=RANKS_EVERY),
    *_memory("memory/gradients", "memory of gradients before the update, with buckets", every=RANKS_EVERY),
    *_memory("memory/optimizer", "optimizer state and master weights on the device", every=RANKS_EVERY),
    *_memory(
        "memory/activations",
        "the peak minus weights, gradients and optimizer: activations, and temporary buffers",
    ),
    *_memory("memory/host", "resident set size of the rank's process (RSS)"),
    *_memory("memory/host_peak", "peak resident set size of the rank's process so far"),
    Metric(
        name="memory/host_fraction",
        unit="1",
        group="memory",
        reduce="max",
        every=USE_EVERY,
        summary="fraction of the host's memory, or of the cgroup's limit, in use by all programs",
        rule=FULL(
            high="the host is almost out of memory and may kill a rank: use fewer workers, less offload, "
            "or a smaller batch"
        ),
    ),
    *_memory(
        "memory/host_growth",
        "growth of a rank's host memory per step, robust to single jumps",
        unit="MiB/step",
        every=1,
        rule=Rule(
            warn_above=GROWS,
            bad_above=2 * GROWS,
            high="host memory grows with every step: something keeps tensors, as a list of losses with their "
            "graphs does; keep numbers (.item()), or detach()",
        ),
    ),
    *_memory(
        "memory/device_growth",
        "growth of tensor memory on the device per step, at the same point of each step",
        unit="MiB/step",
        every=1,
        rule=Rule(
            warn_above=GROWS,
            bad_above=2 * GROWS,
            high="device memory grows with every step: something keeps tensors, as a list of losses with "
            "their graphs does; keep numbers (.item()), or detach()",
        ),
    ),
)

_pipeline = partial(Metric, unit="1", group="pipeline")
PIPELINE: tuple[Metric, ...] = (
    _pipeline(
        name="pipeline/bubble/measured/{stage}",
        summary="fraction of forward and backward in which a pipeline rank waits for send/recv",
    ),
    _pipeline(
        name="pipeline/bubble/ideal/{stage}",
        summary="simulated pipeline/bubble/measured: forward takes 1, backward 2, send/recv 0",
    ),
    *rank_metrics(
        "pipeline/work",
        "seconds of a rank's own work in forward, backward and the optimizer, median of 15 steps, over its "
        "pipeline stage's share of the FLOPs",
        unit="s",
        group="pipeline",
    ),
    _pipeline(
        name="pipeline/skew",
        reduce="last",
        summary="pipeline/work/max over its median, previous logged step; pipeline/work/rank is the rank",
        rule=Rule(
            warn_above=2.0,
            high="one rank computes for over twice as long as the others, which wait for it: see "
            "pipeline/work/rank, and look at that GPU's clocks and at what else runs on its host",
        ),
    ),
)

_device = partial(rank_metrics, group="device")
DEVICE: tuple[Metric, ...] = (
    *_device("device/utilization", "fraction of the time in which a kernel ran", unit="1"),
    *_device("device/memory", "GPU memory in use, by all programs", unit="MiB"),
    *_device("device/power", "power draw", unit="W"),
    *_device(
        "device/temperature",
        "temperature of the GPU",
        unit="C",
        rule=Rule(
            warn_above=87.0,
            bad_above=93.0,
            high="a GPU is hot and will lower its clocks: look at its fans, and at the room's cooling",
        ),
    ),
    *_device("device/clock", "clock of the streaming multiprocessors", unit="MHz"),
)

_reliable = partial(Metric, group="reliability", reduce="last")
LOST = {
    "start": "startup, from the start of the process to the first step, of all attempts",
    "data": "waiting for data",
    "evaluation": "evaluations",
    "checkpoint": "training stopped for checkpoints",
    "redone": "steps that a restart or a rollback repeated",
    "down": "downtime between an attempt's last record and the start of the next",
}
GOODPUT: tuple[Metric, ...] = (
    _reliable(
        name="goodput",
        unit="1",
        summary="fraction of the time since the run's first start spent on training steps that were kept",
    ),
    *(
        _reliable(
            name=f"lost/{to}", unit="1", summary=f"fraction of the time since the run's first start: {what}"
        )
        for to, what in LOST.items()
    ),
    _reliable(name="reliability/restarts", unit="1", summary="number of restarts of the run"),
    _reliable(name="reliability/rollbacks", unit="1", summary="number of rollbacks to a checkpoint"),
    _reliable(
        name="reliability/lost_steps", unit="steps", summary="steps that restarts and rollbacks repeated"
    ),
    _reliable(
        name="checkpoint/ok",
        unit="1",
        summary="1 if the last save succeeded, 0 if it failed",
        rule=Rule(
            bad_below=0.5,
            low="the last checkpoint could not be saved: look at the disk; what was trained since the one "
            "before would be lost",
        ),
    ),
    _reliable(name="checkpoint/size", unit="MiB", summary="size of the newest checkpoint, on disk"),
    _reliable(name="checkpoint/age", unit="s", summary="time since the newest checkpoint was complete"),
)
