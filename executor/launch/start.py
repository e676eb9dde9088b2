"""This process as a rank: its process group, its threads, and freed memory.

The process group comes from torchrun's environment, or has this process alone.
"""

import atexit
import ctypes
import datetime
import os
import socket
import struct
import sys
import time
from math import ceil
from pathlib import Path

import torch
import torch.distributed as dist

from ...planner.schema.errors import InputError, RunError
from ..cgroups import allowed_cores, memory_groups
from .devices import agreed_device, local_device, ranks_on
from .worker import LAUNCHER

# What torchrun tells every process of a run.
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# An address that no host has (RFC 5737): the way to it is the way to other networks.
ELSEWHERE = "192.0.2.1"


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun (or anything like it) started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_process_group(timeout_s: float = 300.0) -> torch.device:
    """Initialises torch.distributed where that was not done yet; the device of this rank.

    Under torchrun by its environment, else as the only rank of a world of one. gloo on the CPU;
    with a GPU for each rank that (``devices``), NCCL for its tensors and gloo for those on the
    host. ``timeout_s`` is how long a collective may take. Raises ``InputError`` for half an
    environment.
    """
    device = local_device()
    # gloo's threads destroy a collective some time after it completed, and need Python's lock for
    # that; one that asks for it when the interpreter is already ending aborts the process with
    # "terminate called without an active exception" (torch 2.13; seen in 1 of 14 runs). So they get
    # the lock for a moment before.
    atexit.register(time.sleep, 0.1)
    if dist.is_initialized():
        return _with_memory(device)
    if local_ranks() > 1:
        torch.set_num_threads(threads_of(local_ranks()))
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    limit = datetime.timedelta(seconds=timeout_s)
    if under_torchrun():
        _check_environment()
        try:
            world = int(os.environ["WORLD_SIZE"])
            here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
            tell_gloo(os.environ["MASTER_ADDR"], several=world > here)
            dist.init_process_group(backend, timeout=limit)
        except (RuntimeError, ValueError, dist.DistError) as error:
            raise RunError(f"the ranks did not find each other: {error}") from error
    else:
        store = torch._C._distributed_c10d.HashStore()  # in this process: no port is opened
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    atexit.register(_end_process_group)
    return _with_memory(agreed_device(device))


def threads_of(ranks: int) -> int:
    """Threads of each of so many ranks on this host: they divide its cores, unless the user has
    said how many each takes."""
    return torch.get_num_threads() if _threads_are_told() else max(1, cores() // ranks)


def _threads_are_told() -> bool:
    """Whether the user, or our own launcher, has said how many threads a process takes."""
    if "OMP_NUM_THREADS" not in os.environ:
        return False
    # torchrun says 1 to ranks that share a host where the user has said nothing to torchrun.
    one = os.environ["OMP_NUM_THREADS"] == "1" and torch.get_num_threads() == 1
    if not one or LAUNCHER in os.environ or "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    try:
        started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:  # no Linux, or not ours to read
        return True
    return any(entry.startswith(b"OMP_NUM_THREADS=") for entry in started_with.split(b"\0"))


def _with_memory(device: torch.device) -> torch.device:
    if device.type == "cpu":
        keep_freed_memory()
    else:
        let_segments_grow()
    return device


def _end_process_group() -> None:
    if dist.is_initialized():  # the user may have ended it
        dist.destroy_process_group()


def _check_environment() -> None:
    missing = [name for name in TORCHRUN if not os.environ.get(name)]
    if missing:
        raise InputError(
            f"the environment has RANK and lacks {', '.join(missing)}: start with torchrun or "
            f"'meshwright launch', or set all of {', '.join(TORCHRUN)}"
        )


def local_ranks() -> int:
    """Ranks on this host, this one included."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores() -> int:
    """Cores that this process may use."""
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(ceil(min(affine or 1, allowed_cores())), 1)


def tell_gloo(host: str, *, several: bool) -> None:
    """Tells gloo, by the environment, which interface to use in a run whose host 0 is at that
    address, unless the user has; ``several`` hosts or one."""
    if GLOO_INTERFACE in os.environ:
        return
    chosen = interface_for_gloo(host, several=several)
    if chosen is not None:
        os.environ[GLOO_INTERFACE] = chosen


def interface_for_gloo(host: str, *, several: bool = False) -> str | None:
    """The network interface that gloo is to use in a run whose host 0 is at that address: the
    loopback's in a run on one host, else the one on the way to host 0. None: it chooses itself."""
    # By itself it binds to what the host's name resolves to, which on many machines is no address
    # of theirs, the loopback's, or one behind a firewall.
    names = [name for _, name in socket.if_nameindex()]
    if host in LOOPBACK:
        return next((name for name in names if name in ("lo", "lo0")), None)
    own = address_towards(host)
    # On host 0 its own name may stand for the loopback's address (Debian: 127.0.1.1), at which no
    # other host finds it. Where that address itself was given, all are on this machine.
    if several and own and own.startswith("127.") and not host.startswith("127."):
        own = address_towards(ELSEWHERE)
    return next((name for name in names if own and own == _address_of(name)), None)


def address_towards(host: str) -> str | None:
    """This host's own address on the way to another; None where there is no way."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as unsent:
            unsent.connect(place)  # sends nothing: it only looks up the route
            return str(unsent.getsockname()[0])
    except OSError:
        return None


_SIOCGIFADDR = 0x8915  # linux/sockios.h


def _address_of(interface: str) -> str | None:
    """An interface's first IPv4 address."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(answer[20:24])


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = -1
# Up to which size an allocation comes from the heap; some versions allow 32 MiB at most.
_THRESHOLDS_BYTES = (1 << 30, 32 << 20)


def keep_freed_memory() -> bool:
    """Asks glibc to keep freed memory for the next step instead of giving it back to the kernel.

    By default every buffer above some megabytes is mapped anew in each step and its pages faulted
    in one by one, which took 15% of a step of VGG-11 on a 2-core machine (glibc 2.36), with DDP as
    without. The process keeps its peak memory, which the next step needs anyway. Does nothing, and
    returns False, where the user has set any of malloc's own variables or it is not glibc's.
    """
    told = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if told or not sys.platform.startswith("linux"):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    if not any(set_option(_MMAP_THRESHOLD, size) for size in _THRESHOLDS_BYTES):
        return False
    return bool(set_option(_TRIM_THRESHOLD, _NEVER))


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def let_segments_grow() -> bool:
    """Asks torch's allocator of GPU memory for segments that grow.

    By default it cuts tensors from segments of fixed sizes and keeps what lies unused between them:
    steps that recompute had 1.3 to 2 times as much reserved as their tensors took at most
    (docs/results/gpu.md). Does nothing, and returns False, where the user has set any of the
    allocator's settings, by variables or in code, or this torch has none.
    """
    ask = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    told = getattr(torch._C, "_accelerator_getAllocatorSettings", str)
    if ask is None or told() or any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return False
    ask("expandable_segments:True")
    return True


def memory_bytes(device: torch.device, sharing: int = 1) -> int:
    """A device's memory, of a GPU that ranks share a rank's part; on a CPU the host's, or what its
    control groups allow, divided among the ``sharing`` ranks on it."""
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory)
        return total // ranks_on(device)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *(group.limit_bytes for group in memory_groups())]) // sharing
