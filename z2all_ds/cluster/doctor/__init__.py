"""The doctor: checks this machine for everything that has stopped a run before, and names the fix of each problem.

It imports no torch, so it is fast and also works if the installation is broken. `examine` also runs on every node of a
hostfile. `examine_further` runs checks that take seconds or need the network, on this machine only.
"""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from z2all_ds.base.errors import Z2allError
from z2all_ds.cluster.doctor import building, gpus, inputs, installation, network, resources
from z2all_ds.cluster.doctor.findings import FAIL, OK, WARN, Check, Finding, describe, has_failures
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


def examine(folder: str | os.PathLike[str] = ".") -> list[Finding]:
    """Run all fast checks; runs will be written into `folder`."""
    return _run_all([*installation.CHECKS, gpus.check, *building.CHECKS, *resources.checks(folder), *network.CHECKS])


def examine_further(folder: str | os.PathLike[str] = ".", run: "RunConfig | None" = None) -> list[Finding]:
    """Run checks that take a few seconds: imports, disk speed, reachable hubs, and the inputs of a run config."""
    findings = _run_all([installation.loading, partial(resources.disk_speed, Path(folder)), network.hubs])
    return [*findings, *(examine_run(run) if run is not None else [])]


def examine_run(run: "RunConfig") -> list[Finding]:
    """Check tokenizer, data and DeepSpeed JSON of a run config."""
    return _run_all([partial(check, run) for check in inputs.CHECKS])


def _run_all(checks: Iterable[Check]) -> list[Finding]:
    """Return all findings. If two checks fail by one thing, such as a missing tokenizer, it is listed once."""
    findings: list[Finding] = []
    for check in checks:
        try:
            found = check()
        except Z2allError as error:
            is_known = any(finding.name == error.what for finding in findings)
            found = [] if is_known else Finding(error.what, FAIL, error.rule, error.fix)
        findings += [found] if isinstance(found, Finding) else found
    return findings
