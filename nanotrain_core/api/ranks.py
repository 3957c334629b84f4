"""The names for a command that computes on its own ranks: a job, its launcher, and the rendezvous of ranks.

Torch-free until ranks start. Files of the core may move; these names stay.
"""

from nanotrain_core.checkpoint.info import strip_ema
from nanotrain_core.deprecated import attribute_of
from nanotrain_core.launch.device import choose_device
from nanotrain_core.launch.environment import Ranks, is_port, loopback
from nanotrain_core.launch.hosts import Nodes
from nanotrain_core.launch.launcher import start_forkserver as prepare_ranks
from nanotrain_core.launch.launcher import start_ranks
from nanotrain_core.launch.process_groups import ending_process_groups
from nanotrain_core.launch.rendezvous import rendezvous_store
from nanotrain_core.launch.worker import Job, join_ranks
from nanotrain_core.run.added_parameters import adding_wrappers
from nanotrain_core.run.stop import EXIT_OF
from nanotrain_core.testing.degrees import Degrees
from nanotrain_core.testing.pool import RankFailure, run_ranks

__all__ = [
    "EXIT_OF",
    "Degrees",
    "Job",
    "Nodes",
    "RankFailure",
    "Ranks",
    "adding_wrappers",
    "choose_device",
    "ending_process_groups",
    "is_port",
    "join_ranks",
    "loopback",
    "prepare_ranks",
    "rendezvous_store",
    "run_ranks",
    "start_ranks",
    "strip_ema",
]

__getattr__ = attribute_of(__name__)
