"""Which kind of failure ssh reports on its stderr."""

import re

_KINDS = (
    ("name", r"Could not resolve hostname"),
    ("host_key", r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED"),
    ("key", r"Permission denied|Too many authentication failures"),
    ("key_file", r"[Ll]oad key|no such identity|bad permissions"),
    ("port", r"Connection refused|kex_exchange_identification|banner exchange"),
    ("unreachable", r"timed out|No route to host|Network is unreachable|not responding"),
)


def recognise(stderr: str) -> tuple[str, str]:
    """The kind of failure and the line that shows it; `other` and the last line, if any, where none is recognised."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for kind, pattern in _KINDS:
        for line in lines:
            if re.search(pattern, line):
                return kind, line
    return "other", lines[-1] if lines else ""
