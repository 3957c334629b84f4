"""What an attempt can leave in its process: threads, child processes, and settings of torch.

An attempt that was interrupted in the middle of a ``with`` statement can leave what the statement had set,
such as that no gradients are recorded. Its process would compute something else in the next attempt.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Collection, Mapping

import attrs

#: Seconds for an attempt's threads to end, after which its process is not used again.
THREADS = 2.0


def torch_settings() -> dict[str, object]:
    """Return torch's settings of this thread and process that ``with`` statements change, by name.

    Settings that a run makes once and for all, such as its number of threads, are not among them.
    """
    import torch
    from torch.nn.modules import module

    kinds = ("cpu", torch.accelerator.current_accelerator(check_available=True) or "cpu")
    return {
        "inference mode": torch.is_inference_mode_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": [
            (torch.is_autocast_enabled(str(kind)), torch.get_autocast_dtype(str(kind))) for kind in kinds
        ],
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "hooks on saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "attention's kernels": [
            getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
            for name in ("flash", "mem_efficient", "math", "cudnn")
        ],
        "torch.compile's callback": torch._C._dynamo.eval_frame.get_eval_frame_callback(),
        "hooks on all modules": [
            len(getattr(module, name))
            for name in dir(module)
            if name.startswith("_global_") and name.endswith("_hooks")
        ],
    }


@attrs.define(frozen=True)
class ProcessState:
    """A process between two attempts; taken in its main thread."""

    settings: Mapping[str, object] = attrs.Factory(torch_settings)
    work: Collection[object] = attrs.Factory(
        lambda: [*threading.enumerate(), *multiprocessing.active_children()]
    )
    """Threads and child processes, torch's among them."""

    def left(self) -> str:
        """Return what was left since this state: a thread, process groups, a process or a setting; or ""."""
        import torch.distributed as dist

        until = time.monotonic() + THREADS
        while threads := [each for each in threading.enumerate() if each not in self.work and _ends(each)]:
            if time.monotonic() > until:
                return f"the thread {threads[0].name}"
            threads[0].join(0.05)
        if dist.is_initialized():
            return "its process groups"
        for child in multiprocessing.active_children():
            if child not in self.work:
                return f"the process {child.name}"
        changed = [name for name, value in torch_settings().items() if value != self.settings[name]]
        return f"another value of {changed[0]}" if changed else ""


def _ends(thread: threading.Thread) -> bool:
    """Return whether a thread belongs to an attempt: not one of C++, or that a library keeps for the process,
    as Inductor, tqdm and fsspec do."""
    target = getattr(thread, "_target", None)
    module = getattr(target, "__module__", "") or ""
    kept = module.startswith("torch._inductor") or type(thread).__module__.startswith("tqdm")
    return not kept and thread.name != "fsspecIO" and not isinstance(thread, threading._DummyThread)
