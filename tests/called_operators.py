"""Which operators of torch are called."""

from torch.utils._python_dispatch import TorchDispatchMode


class CalledOperators(TorchDispatchMode):
    """Lists the operators that are called, in order."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.called.append(operator)
        return operator(*args, **(kwargs or {}))
