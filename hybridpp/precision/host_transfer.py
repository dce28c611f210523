"""Gradients to host memory, and weights back, where the optimizer steps there."""

from collections.abc import Mapping

import torch
from torch import Tensor


class HostTransfer:
    """Page-locked host memory between a device and masters that lie in host memory.

    A gradient and the rounded weight take turns in the same memory. Where the weights lie in host memory themselves,
    nothing is copied.

    Args:
        masters: in host memory, by the parameter's name.
    """

    def __init__(self, masters: Mapping[str, Tensor]):
        self._masters = dict(masters)
        # Made at the first step: models on the meta device have no memory before.
        self._staging: dict[str, Tensor] = {}
        # On CUDA: of copies to the device that may still read this memory.
        self._reading: dict[str, torch.cuda.Stream] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._masters

    def to_host(self, gradients: Mapping[str, Tensor]) -> None:
        """Copy gradients to :meth:`beside`. The host waits for the device, once."""
        streams = set(self._reading.values())
        for name, gradient in gradients.items():
            if name in self._masters and gradient.device.type != "cpu":
                self.beside(name, gradient).copy_(gradient, non_blocking=gradient.is_cuda)
                if gradient.is_cuda:
                    streams.add(torch.cuda.current_stream(gradient.device))
        for stream in streams:
            stream.synchronize()
        self._reading.clear()

    def beside(self, name: str, gradient: Tensor) -> Tensor:
        """A tensor in host memory for a gradient of a master: the gradient itself, if it is there."""
        return gradient if gradient.device.type == "cpu" else self._staged(name, gradient.dtype, gradient.is_cuda)

    def to_device(self, name: str, weight: Tensor) -> None:
        """Round a master into a weight."""
        master = self._masters[name].detach()
        if weight.device.type == "cpu":
            weight.copy_(master)
            return
        if name in self._reading:
            self._reading.pop(name).synchronize()
        staged = self._staged(name, weight.dtype, weight.is_cuda).copy_(master)
        weight.copy_(staged, non_blocking=weight.is_cuda)
        if weight.is_cuda:
            self._reading[name] = torch.cuda.current_stream(weight.device)

    def _staged(self, name: str, dtype: torch.dtype, pinned: bool) -> Tensor:
        """Memory like a master, in a dtype that is not wider."""
        if not self._staging:
            self._allocate(pinned)
        master = self._masters[name]
        return self._staging[name].view(dtype).as_strided(master.size(), master.stride())

    def _allocate(self, pinned: bool) -> None:
        # In one piece: page-locked memory is given out in powers of two.
        sizes = [-(-master.nbytes // 64) * 64 for master in self._masters.values()]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        self._staging = dict(zip(self._masters, torch.split(memory, sizes), strict=True))
