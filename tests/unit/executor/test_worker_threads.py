"""A process that ends waits for what it has started beside itself, and lets nothing hold it up."""

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.timeout(60)


def ended(code: str) -> tuple[subprocess.CompletedProcess, float]:
    start_s = time.monotonic()
    code = f"""
import sys, threading, time
from meshwright.executor.comm import worker_threads
{code}
print("over", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done, time.monotonic() - start_s


def test_a_thread_that_works_is_waited_for():
    done, _ = ended(
        "def work():\n    time.sleep(0.5)\n    print('done', flush=True)\n"
        "worker_threads.spawn('slow', work)"
    )
    assert done.stdout.split() == ["over", "done"]
    assert done.returncode == 0, done.stderr


def test_a_thread_that_never_ends_by_itself_is_told():
    done, _ = ended(
        "stop = threading.Event()\n"
        "def work():\n    stop.wait()\n    print('told', flush=True)\n"
        "worker_threads.spawn('beats', work, stop)"
    )
    assert done.stdout.split() == ["over", "told"]
    assert done.returncode == 0, done.stderr


def test_a_thread_that_is_stuck_is_left():
    done, seconds = ended(
        "worker_threads.LEAVE_S = 0.2\nworker_threads.spawn('stuck', lambda: time.sleep(50))"
    )
    assert done.stdout.split() == ["over"]
    assert done.returncode == 0, done.stderr
    assert seconds < 40


def test_a_collective_whose_model_is_gone_is_waited_for():
    done, _ = ended(
        "class Work:\n"
        "    asked = 0\n"
        "    def is_completed(self):\n"
        "        self.asked += 1\n"
        "        if self.asked == 20:\n            print('completed', flush=True)\n"
        "        return self.asked >= 20\n"
        "worker_threads.abandon(Work())"
    )
    assert done.stdout.split() == ["over", "completed"]
    assert done.returncode == 0, done.stderr


def test_what_ends_by_itself_is_finished_before_another_run_and_nothing_else_is():
    done, _ = ended(
        "stop = threading.Event()\n"
        "def work():\n    time.sleep(0.5)\n    print('done', flush=True)\n"
        "worker_threads.spawn('beats', stop.wait, stop)\n"
        "worker_threads.spawn('slow', work)\n"
        "worker_threads.finish_all(20)\n"
        "print('next', threading.active_count(), flush=True)"
    )
    assert done.stdout.split() == ["done", "next", "2", "over"]
    assert done.returncode == 0, done.stderr


def test_a_queue_s_thread_waits_for_more_and_ends():
    done, _ = ended(
        "queue = worker_threads.IssueQueue('queue', linger_s=0.5)\n"
        "seen, both = [], threading.Event()\n"
        "def work():\n"
        "    seen.append(threading.current_thread())\n    len(seen) == 2 and both.set()\n"
        "queue.submit(work, in_thread=True)\n"
        "time.sleep(0.1)\n"
        "queue.submit(work, in_thread=True)\n"
        "both.wait(20)\n"
        "print(len(set(seen)), seen[0] is not threading.main_thread())\n"
        "worker_threads.finish_all(20)\n"
        "print(threading.active_count())\n"
        "queue.submit(lambda: print('again'), in_thread=True)\n"
        "worker_threads.finish_all(20)\n"
    )
    assert done.stdout.split() == ["1", "True", "1", "again", "over"]
    assert done.returncode == 0, done.stderr
