"""`relvit demo`: a page in the browser to try a classifier."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import tempfile

from relvit.app.cli.errors import UsageError
from relvit.app.evaluation import Predictor
from relvit.app.utils.devices import find_device
from relvit.app.utils.exceptions import MissingPackageError
from relvit.app.utils.number_types import Port, PositiveFloat, PositiveInt
from relvit.models import Reach

LOCAL = ("127.0.0.1", "localhost", "::1")


def demo(
    ckpt_path: str,
    *,
    host: str = "127.0.0.1",
    port: Port = 7860,
    max_mb: PositiveFloat = 20,
    max_total_mb: PositiveFloat = 1000,
    max_pixels: PositiveInt = 50_000_000,
    reach: Reach = "trained",
    device: str = "auto",
) -> None:
    """Open a page: drop an image, choose its size, see classes, attention and positions. Ctrl-C ends it.

    The page works without internet. Uploaded images are removed, at the latest when the command ends.

    Args:
        host: The address of this machine to listen at. Other machines cannot open the page at 127.0.0.1 or localhost;
            at other addresses they can.
        port: The port to listen at; 0 takes any free port.
        max_mb: The largest size of an uploaded file, in MB of 2^20 bytes.
        max_total_mb: The largest size of all uploads and pictures of the page together, in MB of 2^20 bytes.
        max_pixels: The largest number of pixels of an uploaded image.
    """
    with tempfile.TemporaryDirectory(prefix="relvit-demo-") as folder, contextlib.ExitStack() as stack:
        # Gradio reads these environment variables when it is imported, so set them before the import.
        os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}
        try:
            from relvit.app.evaluation.deploy.demo_page import Viewer, build_app
        except ModuleNotFoundError as error:
            raise MissingPackageError("relvit demo", error.name) from error
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = stack.enter_context(socket.create_server((host, port), family=family))
        except OSError as error:
            of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            hint = "--port 0 takes a free one" if of_port else "give an address of this machine, or 0.0.0.0 for all"
            raise UsageError(f"cannot listen at host {host}, port {port}: {error}; {hint}") from error
        predictor = Predictor(ckpt_path, reach=reach).to(find_device(device))
        predictor.check_channels()
        app = build_app(Viewer(predictor, max_pixels), max_mb, host, max_total_mb)
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        who = "only this machine" if host in LOCAL else "everyone who can reach this machine, without a password,"
        print(f"The page is at {address}, and {who} can open it. Ctrl-C ends it.", flush=True)
        # Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that the temporary folder is removed in both cases.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        import uvicorn

        # Log only critical errors: otherwise uvicorn complains of pages that are still open when the server ends.
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
