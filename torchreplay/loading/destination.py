"""Where the batches of a dataset go, and how."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info

from torchreplay.buffer.base import PINS, Pin
from torchreplay.cuda.copies import require_devices
from torchreplay.validation import checked_choice


def require_device(device: Any) -> torch.device:
    """Returns the device that `device` names.

    Raises:
        ValueError: If it names none, or a CUDA device that is not there.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device is {device!r}: expected a torch device, such as 'cpu' or 'cuda:0'") from error
    if found.type == "cuda":
        require_devices(found)
    return found


def require_pin(pin: Any, device: torch.device | None) -> Pin:
    """Returns how batches reach `device`, where None stands for the best way.

    Raises:
        ValueError: It is none of the ways, or not one to this device.
    """
    to_cuda = device is not None and device.type == "cuda"
    if pin is None:
        return "staging" if to_cuda else "off"
    checked_choice("pin", pin, PINS)
    if pin != "off" and not to_cuda:
        raise ValueError(
            f"pin is {pin!r}, which page-locks memory for copies to a CUDA device, and device is {device}; give "
            f"device='cuda', or leave pin out"
        )
    return pin  # type: ignore[no-any-return]  # one of PINS


def refuse_worker(dataset: Any) -> None:
    """Raises RuntimeError in a worker of a `DataLoader`, where a dataset with a CUDA device has no place."""
    if get_worker_info() is not None:
        raise RuntimeError(
            f"{type(dataset).__name__}(device={str(dataset.device)!r}) in a worker of a DataLoader: drawing and "
            f"copying are native and need no worker. Leave num_workers at 0; or, where workers transform batches in "
            f"Python, leave device out and move the batches in the main process, batch.to(device)"
        )
