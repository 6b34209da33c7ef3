"""Commands run as users run them: in a terminal, or with their output in files."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
ESCAPE = "\x1b"


def in_terminal(arguments, folder, seconds=240):
    """Exit status of `relvit` in a pseudo-terminal of 40 x 120 characters, and what it showed, without colours."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    ends = {"stdin": slave, "stdout": slave, "stderr": slave}
    process = subprocess.Popen(_command(arguments), cwd=folder, env=_environment(), start_new_session=True, **ends)
    os.close(slave)
    watch = threading.Timer(seconds, lambda: os.killpg(process.pid, 9))
    watch.start()
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:
        # The last process that has the terminal has closed it.
        pass
    finally:
        os.close(master)
        status = process.wait()
        watch.cancel()
    return status, re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())


def into_files(arguments, folder, seconds=240):
    """Exit status of `relvit` without a terminal, standard output and standard error."""
    out, err = folder / "output.txt", folder / "errors.txt"
    with open(out, "w") as stdout, open(err, "w") as stderr:
        ends = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
        done = subprocess.run(_command(arguments), cwd=folder, env=_environment(), timeout=seconds, **ends)
    return done.returncode, out.read_text(), err.read_text()


def _command(arguments):
    return [sys.executable, "-m", "relvit", *map(str, arguments)]


def _environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
