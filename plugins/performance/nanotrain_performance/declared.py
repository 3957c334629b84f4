"""What the monitors publish: units, meanings, and the limits that are worth a word. Torch-free."""

from __future__ import annotations

from functools import partial

from nanotrain_core.api import Metric, Rule, of_ranks

_time = partial(Metric, unit="s", group="time")
_speed = partial(Metric, group="speed")

THROUGHPUT: tuple[Metric, ...] = (
    _time(name="time/step/p50", summary="of one step, median of the window; evaluations and saves left out"),
    _time(name="time/step/p95", summary="of one step, 95th percentile of the window"),
    _time(
        name="time/step/over_median",
        unit="1",
        summary="the fastest of the last three steps over the median of the window, from the tenth step on",
        rule=Rule(
            warn_above=2.0,
            high="steps take over twice their usual time: see which of time/data, time/exposed_communication "
            "and time/forward_backward has grown, and whether another program uses the machine",
        ),
    ),
    _time(name="time/data", summary="a step in which a rank waits for data"),
    _time(
        name="time/data_fraction",
        unit="1",
        reduce="max",
        summary="share of a step in which the rank that waits longest waits for data",
        rule=Rule(
            warn_above=0.3,
            bad_above=0.5,
            high="the run is input-bound: steps wait for data; tokenize ahead, read from a faster disk, or "
            "make batches smaller",
        ),
    ),
    _time(name="time/forward_backward", summary="a step in forward and backward, waits for ranks left out"),
    _time(name="time/optimizer", summary="a step in the optimizer, waits for other ranks left out"),
    _time(
        name="time/exposed_communication",
        summary="a step in which a rank does nothing but wait for collectives, or carry them out",
    ),
    _time(name="time/exposed_fraction", unit="1", summary="share of a step that is exposed communication"),
    _time(name="time/pipeline_wait", summary="a step in which a rank waits for messages of other stages"),
    _time(name="time/monitors", summary="a step in monitors and in telling them, waits included"),
    _time(
        name="time/checkpoint",
        reduce="max",
        summary="that training stood still for checkpoints, since the last logged step",
    ),
    _time(name="time/evaluation", reduce="max", summary="in evaluations, since the last logged step"),
    _speed(
        name="speed/tokens_per_second_per_device",
        unit="tokens/s",
        summary="tokens_per_second over the number of ranks",
    ),
    _speed(
        name="speed/effective_tokens_per_second",
        unit="tokens/s",
        summary="tokens that the loss predicts, ignored ones left out, over all ranks",
    ),
    _speed(name="speed/samples_per_second", unit="sequences/s", summary="sequences, over all ranks"),
    _speed(name="speed/steps_per_second", unit="steps/s", summary="since the last logged step"),
    _speed(
        name="speed/tflops",
        unit="TFLOP/s",
        summary="of the model's FLOPs, achieved by one device: what is recomputed counts once",
    ),
    _speed(name="speed/mfu", unit="1", summary="model FLOPs utilization: speed/tflops over a device's peak"),
    _speed(
        name="speed/eta", unit="s", summary="until the last step, at the pace since the first logged step"
    ),
)

_memory = partial(of_ranks, unit="MiB", group="memory")
FULL = partial(Rule, warn_above=0.9, bad_above=0.95)
LESS = "use a smaller batch.microbatch, activation checkpointing (recompute), or shard more"
#: MiB a step. Fragments of memory that experts with other numbers of rows in each step leave behind grow by
#: 1.3 a step for the first hundred steps of ``deepseek_4d_small``, and no more then.
GROWS = 2.0

#: Logged steps from one report of every rank's memory to the next; the last step has one, too.
RANKS_EVERY = 10

MEMORY: tuple[Metric, ...] = (
    Metric(
        name="memory/ranks",
        unit="MiB",
        group="memory",
        kind="histogram",
        every=RANKS_EVERY,
        summary="most memory that each rank held so far, of its device or else of the host: bin n is rank n",
    ),
    *_memory("memory/allocated", "tensors on the device now"),
    *_memory("memory/allocated_peak", "most that tensors took on the device so far"),
    *_memory("memory/reserved", "what torch's allocator holds of the device"),
    *_memory("memory/reserved_peak", "most that torch's allocator held of the device so far"),
    *_memory(
        "memory/allocated_fraction",
        "most that tensors took so far, as a share of the device",
        unit="1",
        rule=FULL(high=f"the device is almost full of tensors and the run may go out of memory: {LESS}"),
    ),
    *_memory(
        "memory/reserved_fraction",
        "most that torch's allocator held so far, as a share of the device",
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
        summary="times since the last logged step that torch's allocator had to empty its cache, all ranks",
        rule=Rule(warn_above=0.0, high=f"the device is full: each retry waits for it to become idle; {LESS}"),
    ),
    *_memory("memory/weights", "of the model's parts on a rank, buffers included"),
    *_memory("memory/gradients", "that holds gradients before the update, buckets included"),
    *_memory("memory/optimizer", "optimizer state and master weights on the device"),
    *_memory(
        "memory/activations",
        "the peak but weights, gradients and optimizer: activations, and all buffers of a moment",
    ),
    *_memory("memory/host", "resident in the host's memory (RSS)"),
    *_memory("memory/host_peak", "most that was resident in the host's memory so far"),
    Metric(
        name="memory/host_fraction",
        unit="1",
        group="memory",
        reduce="max",
        summary="share of the host's memory, or of what the cgroup may have, in use by all programs",
        rule=FULL(
            high="the host is almost out of memory and may kill a rank: use fewer workers, less offload, "
            "or a smaller batch"
        ),
    ),
    *_memory(
        "memory/host_growth",
        "by how much the host's memory of a rank grows a step, robust to single jumps",
        unit="MiB/step",
        rule=Rule(
            warn_above=GROWS,
            bad_above=2 * GROWS,
            high="host memory grows with every step: something keeps tensors, as a list of losses with their "
            "graphs does; keep numbers (.item()), or detach()",
        ),
    ),
    *_memory(
        "memory/device_growth",
        "by how much tensors on the device grow a step, at the same point of each",
        unit="MiB/step",
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
        summary="share of forward and backward in which a pipeline rank waits for others' messages",
    ),
    _pipeline(
        name="pipeline/bubble/ideal/{stage}",
        summary="pipeline/bubble/measured on paper: forward takes 1, backward 2, messages nothing",
    ),
    *of_ranks(
        "pipeline/work",
        "seconds of a rank's own work in forward, backward and the optimizer, median of 15 steps, over its "
        "pipeline stage's share of the FLOPs",
        unit="s",
        group="pipeline",
    ),
    _pipeline(
        name="pipeline/skew",
        reduce="last",
        summary="pipeline/work/max over its median, of the logged step before; pipeline/work/rank says who",
        rule=Rule(
            warn_above=2.0,
            high="one rank computes for over twice as long as the others, which wait for it: see "
            "pipeline/work/rank, and look at that GPU's clocks and at what else runs on its host",
        ),
    ),
)

_device = partial(of_ranks, group="device")
DEVICE: tuple[Metric, ...] = (
    *_device("device/utilisation", "share of the time in which a kernel ran", unit="1"),
    *_device("device/memory", "used of the GPU, by all programs", unit="MiB"),
    *_device("device/power", "drawn", unit="W"),
    *_device(
        "device/temperature",
        "of the GPU",
        unit="C",
        rule=Rule(
            warn_above=87.0,
            bad_above=93.0,
            high="a GPU is hot and will lower its clocks: look at its fans, and at the room's cooling",
        ),
    ),
    *_device("device/clock", "of the streaming multiprocessors", unit="MHz"),
)

_reliable = partial(Metric, group="reliability", reduce="last")
LOST = {
    "start": "starting: from the process's first moment to the first step, of all attempts",
    "data": "waiting for data",
    "evaluation": "evaluations",
    "checkpoint": "training standing still for checkpoints",
    "redone": "steps that a restart or a rollback made anew",
    "down": "between an attempt's last sign of life and the start of the next",
}
GOODPUT: tuple[Metric, ...] = (
    _reliable(
        name="goodput",
        unit="1",
        summary="share of the time since the run's first start in which it trained on what it keeps",
    ),
    *(
        _reliable(
            name=f"lost/{to}", unit="1", summary=f"share of the time since the run's first start: {what}"
        )
        for to, what in LOST.items()
    ),
    _reliable(name="reliability/restarts", unit="1", summary="how often the run was started again"),
    _reliable(name="reliability/rollbacks", unit="1", summary="how often it went back to a checkpoint"),
    _reliable(
        name="reliability/lost_steps", unit="steps", summary="steps that restarts and rollbacks made anew"
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
    _reliable(name="checkpoint/size", unit="MiB", summary="of the newest checkpoint, on disk"),
    _reliable(name="checkpoint/age", unit="s", summary="since the newest checkpoint was complete"),
)
