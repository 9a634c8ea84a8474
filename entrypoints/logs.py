"""What the log of a server looks like, in each of its processes."""

import logging

FORMAT = "%(asctime)s %(levelname)s [%(processName)s] %(name)s: %(message)s"
TALKATIVE = ("octavo", "uvicorn.access")
"""Loggers whose information is wanted; of others, warnings are."""


def configure_logging() -> None:
    """Log to stderr."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.INFO)
