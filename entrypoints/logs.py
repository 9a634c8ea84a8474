"""What the log of a server looks like, in each of its processes."""

import logging

FORMAT = "%(asctime)s %(levelname)s [%(processName)s] %(name)s: %(message)s"


def configure_logging() -> None:
    """Log to stderr from INFO on; the HTTP server's own messages from WARNING on."""
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
