"""Compares the facts of all nodes: what must be the same on all of them, and what each one needs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from z2all_ds.cluster.doctor import FAIL, OK, WARN, Finding

MAX_SKEW_SECONDS = 2.0
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class NodeFinding(Finding):
    """A finding with the nodes at fault, or with a pair of which one node is at fault."""

    nodes: tuple[str, ...] = ()
    pair: tuple[str, ...] = ()

    @property
    def concerns_all(self) -> bool:
        """True if excluding nodes does not help."""
        return not self.nodes and not self.pair


def judge_nodes(facts: Mapping[str, Facts], slots: Mapping[str, int]) -> list[NodeFinding]:
    """Return findings about all nodes together, then those of each node's own doctor that are not ok."""
    first = next(iter(facts.values()))
    pythons = {name: fact["python"] for name, fact in facts.items()}
    findings = [_same("python", pythons, "Use the same Python on all nodes.")]
    for package in first["packages"]:
        versions = {node: fact["packages"].get(package, "not installed") for node, fact in facts.items()}
        fix = f"Install the same {package} on all nodes: pip install -c constraints.txt {package}."
        findings.append(_same(package, versions, fix))
    fix = "Install the same version of the package on all nodes (git pull, rsync, or a shared disk)."
    findings.append(_same("code of z2all_ds", {name: fact["code"] for name, fact in facts.items()}, fix))
    findings += [
        _same_file(file, {node: fact["files"][file] for node, fact in facts.items()}) for file in first["files"]
    ]
    gpus = {name: _counted(fact["gpus"]) or "none" for name, fact in facts.items()}
    findings.append(_same("GPUs", gpus, "", WARN))
    for name, fact in facts.items():
        count = len(fact["gpus"])
        if 0 < count < slots[name]:
            fix = f"Give {name} at most {count} slots in the hostfile."
            findings.append(NodeFinding(f"{name}: GPUs", FAIL, f"{count} for {slots[name]} slots", fix, (name,)))
    return [*findings, *_doctor_findings(facts)]


def _doctor_findings(facts: Mapping[str, Facts]) -> list[NodeFinding]:
    """Return what the nodes' doctors found that is not ok; the same problem on several nodes is one finding."""
    nodes_with: dict[Finding, list[str]] = {}
    for name, fact in facts.items():
        for found in fact["findings"]:
            if found["status"] != OK:
                nodes_with.setdefault(Finding(**found), []).append(name)
    findings = []
    for found, names in nodes_with.items():
        where = "all nodes" if len(names) == len(facts) > 1 else ", ".join(names)
        findings.append(NodeFinding(f"{where}: {found.name}", found.status, found.value, found.fix, tuple(names)))
    return findings


def _same(what: str, values: Mapping[str, str], fix: str, status: str = FAIL) -> NodeFinding:
    """Return ok if all nodes have one value, else names the nodes that differ from the majority."""
    usual, _ = Counter(values.values()).most_common(1)[0]
    others = {name: value for name, value in values.items() if value != usual}
    if not others:
        return NodeFinding(what, OK, usual)
    differing = ", ".join(f"{name} has {value}" for name, value in others.items())
    return NodeFinding(what, status, f"{differing}; the others {usual}", fix, tuple(others))


def _same_file(file: str, hashes: Mapping[str, str]) -> NodeFinding:
    fix = "Copy it to the same path on every node, or keep it on a shared disk."
    unread = {node: value for node, value in hashes.items() if " " in value}  # a reason, not a hash
    if unread:
        reasons = ", ".join(f"{node}: {reason}" for node, reason in unread.items())
        return NodeFinding(file, FAIL, f"cannot be read ({reasons})", fix, tuple(unread))
    return _same(file, hashes, fix)


def _counted(gpus: list[str]) -> str:
    return ", ".join(f"{count} x {gpu}" for gpu, count in Counter(gpus).items())


def judge_clock(name: str, skew_seconds: float, uncertainty_seconds: float) -> NodeFinding:
    """Compare a node's clock with that of the launching machine."""
    value = f"{skew_seconds:+.2f} s (within {uncertainty_seconds:.2f})"
    if abs(skew_seconds) > MAX_SKEW_SECONDS + uncertainty_seconds:
        fix = f"Synchronize the clock of {name} (chrony, ntp): records of different nodes are ordered by time."
        return NodeFinding(f"{name}: clock", WARN, value, fix, (name,))
    return NodeFinding(f"{name}: clock", OK, value)
