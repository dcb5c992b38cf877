"""What must be the same on all nodes, and what each must have: judged from the facts they tell."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from z2all_ds.cluster.doctor import FAIL, OK, WARN, Finding

MOST_SKEW_SECONDS = 2.0
LOCKED_MEMORY_BYTES = 1 << 30
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class NodeFinding(Finding):
    """With the nodes that are to blame, all of them; of a pair it is not known which one is."""

    nodes: tuple[str, ...] = ()
    pair: tuple[str, ...] = ()

    @property
    def is_of_no_node(self) -> bool:
        """Then it does not help to leave one out."""
        return not self.nodes and not self.pair


def judge_nodes(facts: Mapping[str, Facts], slots: Mapping[str, int]) -> list[NodeFinding]:
    """Findings about all nodes together, then those of each one's own doctor that are not ok."""
    findings = [
        _same("python", {name: fact["python"] for name, fact in facts.items()}, "Use the same Python on all nodes."),
        *_packages(facts),
        _same(
            "code of z2all_ds",
            {name: fact["code"] for name, fact in facts.items()},
            "Bring the same version of the package to all nodes (git pull, rsync, or a shared disk).",
        ),
        *_files(facts),
        _same("GPUs", {name: ", ".join(_counted(fact["gpus"])) or "none" for name, fact in facts.items()}, "", WARN),
    ]
    for name, fact in facts.items():
        findings += [*_gpus(name, fact, slots[name]), *_locked_memory(name, fact)]
    return [*findings, *_of_their_doctors(facts)]


def _of_their_doctors(facts: Mapping[str, Facts]) -> list[NodeFinding]:
    """What is not ok; the same trouble on several nodes is one finding."""
    having: dict[Finding, list[str]] = {}
    for name, fact in facts.items():
        for found in fact["findings"]:
            if found["status"] != OK:
                having.setdefault(Finding(**found), []).append(name)
    return [
        NodeFinding(f"{_listed(names, len(facts))}: {found.name}", found.status, found.value, found.fix, tuple(names))
        for found, names in having.items()
    ]


def _listed(names: list[str], of: int) -> str:
    return "all nodes" if len(names) == of > 1 else ", ".join(names)


def _same(what: str, values: Mapping[str, str], fix: str, status: str = FAIL) -> NodeFinding:
    """One value on all nodes, or those that differ from most with theirs."""
    usual, _ = Counter(values.values()).most_common(1)[0]
    others = {name: value for name, value in values.items() if value != usual}
    if not others:
        return NodeFinding(what, OK, usual)
    told = ", ".join(f"{name} has {value}" for name, value in others.items())
    return NodeFinding(what, status, f"{told}; the others {usual}", fix, tuple(others))


def _packages(facts: Mapping[str, Facts]) -> list[NodeFinding]:
    names = next(iter(facts.values()))["packages"]
    return [
        _same(
            package,
            {node: fact["packages"].get(package, "not installed") for node, fact in facts.items()},
            f"Install the same {package} on all nodes: pip install -c constraints.txt {package}.",
        )
        for package in names
    ]


def _files(facts: Mapping[str, Facts]) -> list[NodeFinding]:
    names = next(iter(facts.values()))["files"]
    fix = "Copy it to the same path on every node, or keep it on a shared disk."
    findings = []
    for file in names:
        hashes = {node: fact["files"][file] for node, fact in facts.items()}
        finding = _same(file, hashes, fix)
        unread = {node: value for node, value in hashes.items() if " " in value}  # a reason, not a hash
        if unread:
            told = ", ".join(f"{node}: {reason}" for node, reason in unread.items())
            finding = NodeFinding(file, FAIL, f"cannot be read ({told})", fix, tuple(unread))
        findings.append(finding)
    return findings


def _counted(gpus: list[str]) -> list[str]:
    return [f"{count} x {gpu}" for gpu, count in Counter(gpus).items()]


def _gpus(name: str, fact: Facts, slots: int) -> list[NodeFinding]:
    if fact["gpus"] and len(fact["gpus"]) < slots:
        fix = f"Give {name} at most {len(fact['gpus'])} slots in the hostfile."
        return [NodeFinding(f"{name}: GPUs", FAIL, f"{len(fact['gpus'])} for {slots} slots", fix, (name,))]
    return []


def _locked_memory(name: str, fact: Facts) -> list[NodeFinding]:
    """InfiniBand needs memory that stays where it is; docker's default limit is 64 KiB or 8 MiB."""
    limit = fact["locked_memory"]
    if fact["gpus"] and 0 <= limit < LOCKED_MEMORY_BYTES:
        fix = "Start the container with `--ulimit memlock=-1`: InfiniBand fails without, plain TCP does not need it."
        return [NodeFinding(f"{name}: locked memory", WARN, f"at most {limit} bytes", fix, (name,))]
    return []


def judge_clock(name: str, skew_seconds: float, uncertainty_seconds: float) -> NodeFinding:
    """Against the clock of the machine that launches."""
    told = f"{skew_seconds:+.2f} s (within {uncertainty_seconds:.2f})"
    if abs(skew_seconds) > MOST_SKEW_SECONDS + uncertainty_seconds:
        fix = f"Set its clock (chrony, ntp) on {name}: records of different nodes are put in order by time."
        return NodeFinding(f"{name}: clock", WARN, told, fix, (name,))
    return NodeFinding(f"{name}: clock", OK, told)
