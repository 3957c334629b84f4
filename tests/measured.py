"""What metrics of time, speed, memory, devices and reliability are: written apart, from what ranks noted.

``MEASURED`` has by declared name what was told last, from what each rank saw: of any number of ranks.
"""

import statistics
from collections.abc import Callable, Mapping

import numpy
from noted import (
    BEFORE,
    BESIDE,
    LENGTH,
    MIB,
    MONITORS,
    PASSES,
    PEAK,
    PLANNED,
    SEQUENCES,
    STEPS,
    TRAINED,
    counters,
    readings,
)


def of_ranks(values, how):
    """Return what is told of one number of each rank."""
    return {
        "max": max,
        "mean": statistics.fmean,
        "median": statistics.median_low,
        "rank": lambda each: each.index(max(each)),
    }[how]([*values])


def mean(each):
    return lambda ranks: statistics.fmean(each(rank) for rank in ranks)


def most(each):
    return lambda ranks: max(each(rank) for rank in ranks)


def of_each(each):
    """Of a metric with ``{over}``."""
    return lambda ranks, over: of_ranks([each(rank) for rank in ranks], over)


def tflops(rank):
    last = rank.reports[-1]
    return rank.flops_per_token * last.tokens_per_second / rank.ranks / 1e12


def eta(rank):
    pace = (rank.paces[-1] - rank.paces[0]) / (len(rank.paces) - 1)
    return (PLANNED - STEPS) * pace


def counted(name):
    return lambda rank: counters(rank.rank)[f"{name}"] / MIB


def activations(rank):
    return counted("allocated_bytes.all.peak")(rank) - sum(rank.bytes.values()) / MIB


def waited(ranks, stage):
    mine = [rank.in_step(PASSES.__eq__) for rank in ranks if f"rank-{rank.stage}" == stage]
    return statistics.fmean(messages / seconds for seconds, _, messages in mine)


def ideal(ranks, stage):
    """1F1B: (p - 1) / (m + p - 1), here of two stages and of the microbatches of a data rank."""
    stages, replicas = 2, 2
    microbatches = SEQUENCES // replicas
    return (stages - 1) / (microbatches + stages - 1)


def skew(ranks):
    """Of the logged step before: what ranks said of it is then known."""
    each = [rank.own_work(STEPS - 1) for rank in ranks]
    return max(each) / statistics.median_low(each)


def own_time(rank):
    """Return seconds of the attempt, and of them those of its steps, but in data."""
    wall = rank.spent(lambda part: True, 0, rank.marks[-1])[0]
    beside = rank.spent((BESIDE | {"data"}).__contains__, 0, rank.marks[-1])[0]
    return wall, wall - beside


def goodput(ranks):
    wall, productive = own_time(ranks[0])
    return productive / (wall + TRAINED + ranks[0].down)


def lost(ranks, part):
    wall, _ = own_time(ranks[0])
    seconds = ranks[0].spent(part.__eq__, 0, ranks[0].marks[-1])[0]
    down = ranks[0].down
    return {"redone": TRAINED, "down": down}.get(part, seconds) / (wall + TRAINED + down)


def saved(ranks):
    return ranks[0].saves[-1][1]


def age(ranks):
    return ranks[0].ended - ranks[0].saves[-1][0]


def over_median(ranks):
    """The first report with enough steps is the one before the last: if it was slow, its median is kept."""
    then = statistics.fmean(min(rank.windows[:-1][-3:]) for rank in ranks)
    usual = statistics.fmean(numpy.percentile(rank.windows[:-1], 50) for rank in ranks)
    return RECENT(ranks) / (usual if then > 2 * usual else MEDIAN(ranks))


def exact(each):
    return lambda ranks: each


MEDIAN = mean(lambda r: numpy.percentile(r.windows, 50))
RECENT = mean(lambda r: min(r.windows[-3:]))
A_STEP = SEQUENCES * LENGTH

MEASURED: Mapping[str, Callable] = {
    "seconds": lambda ranks: ranks[0].step,
    "time/step/p50": MEDIAN,
    "time/step/p95": mean(lambda r: numpy.percentile(r.windows, 95)),
    "time/step/recent": RECENT,
    "time/step/over_median": over_median,
    "time/data": mean(lambda r: r.busy("data")),
    "time/data_fraction": most(lambda r: r.busy("data") / r.step),
    "time/forward_backward": mean(lambda r: r.busy(PASSES, "gradient sync")),
    "time/optimizer": mean(lambda r: r.busy("optimizer")),
    "time/exposed_communication": mean(lambda r: r.work[1]),
    "time/exposed_fraction": mean(lambda r: r.work[1] / r.step),
    "time/pipeline_wait": mean(lambda r: r.work[2]),
    "time/monitors": mean(lambda r: r.in_step(MONITORS.__contains__)[0]),
    "time/checkpoint": most(lambda r: r.in_step("checkpoint".__eq__)[0]),
    "time/evaluation": most(lambda r: r.in_step("evaluation".__eq__)[0]),
    "tokens_per_second": lambda ranks: A_STEP / ranks[0].step,
    "speed/tokens_per_second_per_device": mean(lambda r: A_STEP / r.reports[-1].seconds / r.ranks),
    "speed/effective_tokens_per_second": mean(lambda r: A_STEP / r.reports[-1].seconds),  # none is ignored
    "speed/samples_per_second": mean(lambda r: SEQUENCES / r.reports[-1].seconds),
    "speed/steps_per_second": mean(lambda r: 1 / r.reports[-1].seconds),
    "speed/tflops": mean(tflops),
    "speed/mfu": mean(lambda r: tflops(r) / PEAK),
    "speed/eta": mean(eta),
    **{
        f"memory/{name}_{kind}/{{over}}".replace("_/", "/"): of_each(counted(f"{name}_bytes.all.{counter}"))
        for name in ("allocated", "reserved")
        for kind, counter in (("", "current"), ("peak", "peak"))
    },
    "memory/allocated_fraction/{over}": of_each(lambda r: counted("allocated_bytes.all.peak")(r) / 100),
    "memory/reserved_fraction/{over}": of_each(lambda r: counted("reserved_bytes.all.peak")(r) / 100),
    **{
        f"memory/{name}/{{over}}": of_each(lambda r, name=name: r.bytes[name] / MIB)
        for name in ("weights", "gradients", "optimizer")
    },
    "memory/activations/{over}": of_each(activations),
    "memory/host/{over}": of_each(lambda r: r.resident),
    **{
        f"device/{name}/{{over}}": of_each(lambda r, name=name: readings(r.rank)[name])
        for name in ("utilization", "memory", "power", "temperature")
    },
    "bubble": mean(lambda r: r.idle[-1]),
    "pipeline/bubble/measured/{stage}": waited,
    "pipeline/bubble/ideal/{stage}": ideal,
    "pipeline/work/{over}": of_each(lambda r: r.own_work(STEPS)),
    "pipeline/skew": skew,
    "goodput": goodput,
    "lost/{part}": lost,
    "reliability/restarts": exact(1),
    "reliability/rollbacks": exact(0),
    "reliability/lost_steps": exact(BEFORE),
    "checkpoint/ok": exact(1),
    "checkpoint/size": lambda ranks: ranks[0].size / MIB,
    "checkpoint/seconds": lambda ranks: saved(ranks).seconds,
    "checkpoint/blocked": lambda ranks: saved(ranks).blocked,
    "checkpoint/age": age,
}
