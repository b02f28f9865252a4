"""For all tests."""

from __future__ import annotations

import signal

# A background shell starts its jobs with it ignored, and they what they start. Tests interrupt processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
