"""Folders on disk and in object stores with one small interface: read byte ranges, write complete files.

A location with "://" (s3://, hf://, gs://, memory:// ...) is opened by fsspec; everything else is a path.
"""

from pathlib import Path

from z2all_ds.base.paths import refuse_passwords
from z2all_ds.base.storage.folders import Folder, Stamp, reason
from z2all_ds.base.storage.local import LocalFolder

__all__ = ["Folder", "Stamp", "open_folder", "reason"]


def open_folder(location: str | Path) -> Folder:
    """Return the folder at a path or URL without reading anything; raise if the driver of the URL is missing."""
    text = str(location)
    if "://" not in text:
        return LocalFolder(text)
    refuse_passwords(text)
    from z2all_ds.base.storage.remote import RemoteFolder

    return RemoteFolder(text)
