"""Tests that read a network device's own counters, and where they cannot."""

from __future__ import annotations

import pytest

from benchmarks.hosts import why_not

# Without root and iproute2 there are no network namespaces, so no device whose counter is ours alone to read, and a
# shared one's would prove nothing. Then these tests skip, with what is missing as the reason; as root all of them run.
_MISSING = why_not()  # once: it tries to make a namespace
needs_two_hosts = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
