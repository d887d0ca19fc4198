"""Networks that measure compute the same everywhere."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """float32 throughout, whatever the training loop around prefers; no gradients."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
            stack.enter_context(exact)
        yield
