"""Folders on disk and in object stores behind one small interface: ranges of bytes in, whole files out.

A location with "://" (s3://, hf://, gs://, memory:// ...) is opened by fsspec and the driver it names; everything else
is a path.
"""

from pathlib import Path

from z2all_ds.base.storage.folders import Folder, Stamp, reason
from z2all_ds.base.storage.local import LocalFolder

__all__ = ["Folder", "Stamp", "open_folder", "reason"]


def open_folder(location: str | Path) -> Folder:
    """The folder at a path or URL. Nothing is read yet, but a driver that is missing is said."""
    text = str(location)
    if "://" not in text:
        return LocalFolder(text)
    from z2all_ds.base.storage.remote import RemoteFolder

    return RemoteFolder(text)
