"""The doctor: looks at everything on this machine that has stopped a run before, and says what to do about each.

It imports no torch and starts nothing heavy, so it answers at once and also where the installation itself is what is
broken. `examine` is what every node of a hostfile is asked, too; what takes seconds or needs the outside world is
looked at by `examine_further`, on this machine alone.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from z2all_ds.doctor import building, gpus, inputs, installation, network, resources
from z2all_ds.doctor.findings import FAIL, OK, WARN, Finding, has_failures, render, to_json
from z2all_ds.doctor.installation import PACKAGES_TESTED
from z2all_ds.errors import Z2allError

if TYPE_CHECKING:
    from z2all_ds.config import RunConfig

__all__ = [
    "FAIL",
    "OK",
    "PACKAGES_TESTED",
    "WARN",
    "Finding",
    "examine",
    "examine_further",
    "has_failures",
    "render",
    "to_json",
]

Check = Callable[[], list[Finding]]


def examine(folder: str | os.PathLike[str] = ".") -> list[Finding]:
    """What is known at once, in the order in which a run would meet it; runs will be written into `folder`."""
    of_machine = (*installation.CHECKS, *gpus.CHECKS, *building.CHECKS, *resources.checks(Path(folder)))
    return _all_of([*of_machine, *network.CHECKS])


def examine_further(folder: str | os.PathLike[str] = ".", run: "RunConfig | None" = None) -> list[Finding]:
    """What takes a few seconds: the disk's speed, the way to the hubs and, of a run config, its data and tokenizer."""
    checks: list[Check] = [lambda: resources.disk_speed(Path(folder)), network.hubs]
    if run is not None:
        checks += inputs.checks(run)
    return _all_of(checks)


def _all_of(checks: Sequence[Check]) -> list[Finding]:
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Z2allError as error:
            findings.append(Finding(error.what, FAIL, error.rule, error.fix))
    return findings
