"""A worker for `tools/fuzz.py` of whose cases one kills its process, one never ends, and the others are accepted."""

import os
import signal
import time


def work(kind, seed, first, step, folder, outcomes, now, slot):
    for index in range(first, len(outcomes), step):
        now[3 * slot : 3 * slot + 3] = index, time.monotonic(), time.process_time()
        if index == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        while index == 3:
            pass
        outcomes[index] = 1
        now[3 * slot + 1] = 0
