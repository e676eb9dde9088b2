"""``python -m benchmarks.testbed``: a bed that stays until Ctrl-C, and how to enter its hosts."""

import argparse
import shlex
import signal
import sys

from meshwright.planner.schema.errors import MeshwrightError

from .bed import BURST_BYTES, Bed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.testbed", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts, 2 to 8")
    parser.add_argument(
        "--mbit", type=float, nargs="+", default=[200.0], help="one rate, or one for each host"
    )
    asked = parser.parse_args()
    rates = asked.mbit[0] if len(asked.mbit) == 1 else asked.mbit
    # An exit, and not the signal's end of the process, leaves the context and removes the bed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with Bed(asked.hosts, rates) as bed:
            print(f"{bed.count} hosts, links shaped by token buckets of {BURST_BYTES // 1024} KiB:")
            for host, rate in zip(bed.hosts, bed.rates, strict=True):
                print(f"  {host.name}  {host.address}  {rate:g} Mbit/s each way  core {host.core}")
                print(f"    enter: {shlex.join(host.command(['bash']))}")
            print(
                "on each of them, with its own number for N:\n"
                f"  GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 torchrun --nnodes {bed.count} "
                f"--node-rank N --master-addr {bed.hosts[0].address} --master-port 29500 train.py\n"
                f"cut a link:   ip -n {bed.switch} link set port1 down     (and up again)\n"
                "Ctrl-C removes everything",
                flush=True,
            )
            signal.pause()
    except MeshwrightError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nremoved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
