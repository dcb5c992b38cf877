"""Passwords and access tokens in URLs (https://user:password@host, https://host/x?token=...): they would stay in run
folders, trackers, logs and process lists."""

import re
from collections.abc import Iterator
from typing import Any

_START = r"(?:https?:/+|://)"
"""HTTP libraries accept any number of slashes."""
_USER = r"(?!\[)[^/?#@:]*:(?!\d{0,5}(?:[/?#](?![\d/]*@)|$))"
"""`user:` and not `host:port/`. A port has up to 5 digits; in `user:12/34@host` they belong to the password."""
_USER_IN_TEXT = r"(?!\[)[^/?#@:\s]*:(?!\d{0,5}(?:[/?#](?![\d/]*@)|\s|$))"
# A password may contain @, and / if it was not escaped. In other text it ends at a space, and paths have one slash.
_PASSWORD = re.compile(rf"({_START}{_USER})(?:[^/?#]+|[^@]+)(?=@)", re.I)
_PASSWORD_IN_TEXT = re.compile(rf"({_START}{_USER_IN_TEXT})(?:[^/?#\s]+|[^@\s]+)(?=@)", re.I)
_PASSWORD_IN_PATH = re.compile(rf"(:/{_USER_IN_TEXT})[^/?#\s]+(?=@)")
_USER_TOKEN = re.compile(r"(https?:/+)(?!\[)[^/?#:\s]+(?=:?@)", re.I)
"""For a web server a user without a password is a token; elsewhere it is the name of a user or a bucket."""
_NAME_ENDS = (
    "token", "password", "passwd", "pwd", "secret", "sig", "signature", "credential", "credentials", "authorization",
    "jwt", "apikey", "api_key", "api-key", "accesskey", "access_key", "access-key",
)  # fmt: skip
_NAMES = ("key", "auth", "pass", "code")


def _any_of(words: tuple[str, ...]) -> str:
    """Return a pattern of these words, in which any character may be percent-encoded."""
    patterns = ("".join(f"(?:{one}|%{ord(one):x}|%{ord(one.upper()):x})" for one in word) for word in words)
    return f"(?:{'|'.join(patterns)})"


_PARAMETER = re.compile(rf"([?&;#](?:[\w.%-]*{_any_of(_NAME_ENDS)}|{_any_of(_NAMES)})=)[^&#\s'\"]+", re.I)


def without_passwords(value: Any) -> Any:
    """Return a setting, or nested settings, with *** in place of passwords and tokens in URLs."""
    if isinstance(value, dict):
        return {key: without_passwords(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_passwords(inner) for inner in value]
    if not isinstance(value, str) or "://" not in value:
        return value
    return _masked(value, _PASSWORD)


def text_without_passwords(text: str) -> str:
    """Return a message with *** in place of passwords and tokens in URLs that it quotes."""
    return _masked(text, _PASSWORD_IN_TEXT, _PASSWORD_IN_PATH) if ":/" in text else text


def _masked(text: str, *passwords: re.Pattern[str]) -> str:
    for secret in (*passwords, _USER_TOKEN, _PARAMETER):
        text = secret.sub(r"\1***", text)
    return text


def urls_with_passwords(value: Any, name: str = "") -> Iterator[str]:
    """Yield NAME=URL, with *** in place of the secret, for each such URL in a setting or nested settings."""
    if isinstance(value, str):
        shown = without_passwords(value)
        if shown != value:
            yield f"{name}={shown}" if name else shown
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from urls_with_passwords(inner, f"{name}.{key}" if name else str(key))
