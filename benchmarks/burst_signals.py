"""What pacing a background job costs the foreground: a rank's word, and the pacer's turn.

    python benchmarks/burst_signals.py

Sends the words of a rank that has a gap of 6 ms in every 10 ms, first with the background held by
the law (nothing is switched), then let run (two switches a gap). The last line is one JSON object:
seconds of processor for a word, and for the pacer's answer to one with and without a switch.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from meshwright.executor.background.job import Job, background_job
from meshwright.executor.background.law import FIRST_HELD
from meshwright.executor.background.protocol import VARIABLE, Kind, PacerMessage, Settings
from rows import print_json, print_row

GAPS = 600
GAP_S, BETWEEN_S = 0.006, 0.004
# What steps are said to take: long, so that none is past its limit meanwhile.
STEP_S = 10.0


def pacer_s(job: Job) -> float:
    """Processor seconds of the pacer."""
    # The pacer is the background's parent: the fourth field of its stat, counted after the name in
    # brackets, which may hold blanks.
    pid = Path(f"/proc/{job.last.pid}/stat").read_text().rpartition(")")[2].split()[1]
    # In nanoseconds. The utime and stime of stat have hundredths of a second.
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) * 1e-9


def gaps(job: Job, pipe: int) -> tuple[float, float]:
    """Median seconds of a rank's word, and processor seconds of the pacer for each."""
    words, before = [], pacer_s(job)
    for _ in range(GAPS):
        for kind, pause_s in ((Kind.WAITS, GAP_S), (Kind.WORKS, BETWEEN_S)):
            record = PacerMessage(kind, 0, 0, seconds=GAP_S)
            start = time.perf_counter()
            os.write(pipe, record.packed())
            words.append(time.perf_counter() - start)
            time.sleep(pause_s)
    return median(words), (pacer_s(job) - before) / len(words)


def main() -> None:
    busy = (sys.executable, "-c", "while True: pass")
    with (
        tempfile.TemporaryDirectory() as name,
        background_job(Settings(busy, f"{name}/log", 1.1, grace_s=0.2)) as job,
    ):
        pipe = os.open(job.environment[VARIABLE], os.O_WRONLY)
        os.write(pipe, PacerMessage(Kind.BEGAN, 0, 0).packed())
        word_s, held_s = gaps(job, pipe)
        # After so many steps the share has risen past a half: all of each gap is the background's.
        for number in range(1, FIRST_HELD + 11):
            os.write(pipe, PacerMessage(Kind.STEPPED, 0, 0, number, STEP_S).packed())
        _, switched_s = gaps(job, pipe)
        open_part = job.state().open_s / job.state().seconds
    row = {"word_s": word_s, "answer_s": held_s, "switched_s": switched_s, "open": open_part}
    print_row(row)
    print_json(row)


if __name__ == "__main__":
    main()
