"""Binds a rank to the CPUs next to its GPU (their NUMA node), as reported by NVML.

Batches and kernel launches go from there to the GPU; from the other socket, every byte crosses the link between the
two. Threads and data workers that the rank starts later inherit the binding.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

BITS_A_WORD = 64
"""NVML's masks are arrays of unsigned longs."""


def bind_to_gpu(device: torch.device, say: Callable[[str], None]) -> None:
    """Bind this process if there are several NUMA nodes. A failure is logged and does not end the run."""
    if device.type != "cuda" or numa_nodes() < 2:
        return
    try:
        near = processors_near(device)
    except ImportError:
        say("no NUMA binding: nvidia-ml-py is not installed (pip install 'z2all_ds[gpu]')")
        return
    except RuntimeError as error:
        say(f"no NUMA binding: {error}")
        return
    allowed = os.sched_getaffinity(0)
    if near & allowed and near & allowed != allowed:
        bind_all_threads(near & allowed)
        say(f"bound to {len(near & allowed)} of {len(allowed)} CPUs, those next to this GPU")


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> int:
    return sum(1 for _ in folder.glob("node[0-9]*"))


def processors_near(device: torch.device) -> set[int]:
    """Return the CPUs near this GPU. It is identified by UUID: NVML ignores CUDA_VISIBLE_DEVICES."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        words = -(-(os.cpu_count() or 1) // BITS_A_WORD)
        return bits_set(pynvml.nvmlDeviceGetCpuAffinity(handle, words))
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML reports {error}") from error


def bits_set(words: Sequence[int]) -> set[int]:
    """Return the positions of bits that are 1, least significant first, over all words."""
    return {
        BITS_A_WORD * index + bit for index, word in enumerate(words) for bit in range(BITS_A_WORD) if word >> bit & 1
    }


def bind_all_threads(processors: set[int]) -> None:
    """Bind all threads, including those that libraries have already started."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), processors)
