"""The doctor: looks at everything on this machine that has stopped a run before, and says what to do about each.

It imports no torch, so it answers at once and also where the installation itself is what is broken. `examine` is what
every node of a hostfile is asked, too; what takes seconds or needs the outside world is looked at by `examine_further`,
on this machine alone.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from z2all_ds.base.errors import Z2allError
from z2all_ds.cluster.doctor import building, gpus, inputs, installation, network, resources
from z2all_ds.cluster.doctor.findings import FAIL, OK, WARN, Finding, describe, has_failures
from z2all_ds.cluster.doctor.installation import PACKAGES_TESTED
from z2all_ds.cluster.doctor.resources import require_folder

if TYPE_CHECKING:
    from z2all_ds.base.config import RunConfig

__all__ = [
    "FAIL",
    "OK",
    "PACKAGES_TESTED",
    "WARN",
    "Finding",
    "describe",
    "examine",
    "examine_further",
    "examine_run",
    "has_failures",
    "require_folder",
]

Check = Callable[[], list[Finding]]


def examine(folder: str | os.PathLike[str] = ".") -> list[Finding]:
    """What is known at once, in the order in which a run would meet it; runs will be written into `folder`."""
    of_machine = (*installation.CHECKS, *gpus.CHECKS, *building.CHECKS, *resources.checks(Path(folder)))
    return _all_of([*of_machine, *network.CHECKS])


def examine_further(folder: str | os.PathLike[str] = ".", run: "RunConfig | None" = None) -> list[Finding]:
    """What takes a few seconds: packages that load, the disk's speed, the way to the hubs, and what a run config names.

    Locked memory, too, of which the preflight of several nodes says a line of its own.
    """
    checks: list[Check] = [
        installation.loading,
        resources.locked_memory,
        lambda: resources.disk_speed(Path(folder)),
        network.hubs,
    ]
    return [*_all_of(checks), *(examine_run(run) if run is not None else [])]


def examine_run(run: "RunConfig") -> list[Finding]:
    """Tokenizer, data and DeepSpeed JSON of a run config, against each other and this machine."""
    return _all_of(inputs.checks(run))


def _all_of(checks: Sequence[Check]) -> list[Finding]:
    """What all of them found. Two checks may meet the same trouble (a tokenizer that is gone): it is told once."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Z2allError as error:
            finding = Finding(error.what, FAIL, error.rule, error.fix)
            if finding not in findings:
                findings.append(finding)
    return findings
