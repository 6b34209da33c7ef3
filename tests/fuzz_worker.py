"""A worker for `tools/fuzz.py` of whose cases one kills its process, one never ends, and the others are accepted."""

import os
import signal
import time


def work(kind, seed, first, step, folder, outcomes, now, slot):
    for index in range(first, len(outcomes), step):
        now[2 * slot], now[2 * slot + 1] = index, time.monotonic()
        if index == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        if index == 3:
            time.sleep(600)
        outcomes[index] = 1
        now[2 * slot + 1] = 0
