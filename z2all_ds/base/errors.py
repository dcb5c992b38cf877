"""The error family: what a user can put right, said in one line that gives the value, the rule and the fix.

Every class has its own exit code, so that a script or a supervisor can tell a typo from a lost node. Whatever is not
of this family is a bug of ours and shows its traceback.
"""

EXIT_OK = 0
EXIT_BUG = 1
EXIT_INTERRUPTED = 130
"""Ctrl-C, as shells report it (128 + SIGINT)."""
EXIT_REQUEUE = 75
"""Stopped on request with a checkpoint: start the same command again (EX_TEMPFAIL of sysexits.h)."""


class Z2allError(Exception):
    """Base of the family. `what` names the value, `rule` what it broke, `fix` what to do about it."""

    exit_code = EXIT_BUG

    def __init__(self, what: str, rule: str, fix: str) -> None:
        self.what, self.rule, self.fix = what, rule, fix
        # A file name or a library's message inside may have line breaks; ours is one line.
        super().__init__(" ".join(f"{what}: {rule.rstrip('.')}. {fix}".splitlines()))

    def __reduce__(self) -> tuple[type["Z2allError"], tuple[str, str, str]]:
        return type(self), (self.what, self.rule, self.fix)  # so that it comes out of a worker process as it is


class ConfigError(Z2allError):
    """A setting, an override, a preset, a DeepSpeed JSON or a command line that cannot be meant."""

    exit_code = 2


class DataError(Z2allError):
    """A corpus, shard, record or tokenizer that is missing, broken, or not the one the run began with."""

    exit_code = 3


class CheckpointError(Z2allError):
    """A checkpoint that was asked for and cannot be read, or a run folder that cannot be continued."""

    exit_code = 4


class NotSaved(CheckpointError):
    """A checkpoint that could not be written: the disk's fault, and another try may find room."""


class ClusterError(Z2allError):
    """Ranks, nodes, ports or launchers that fail."""

    exit_code = 5


class PortTaken(ClusterError):
    """The port the ranks were to meet on belongs to another process; with another port it may work at once."""

    exit_code = 9


class MachineError(Z2allError):
    """What the machine lacks: a compiler, disk space, a writable folder, a library."""

    exit_code = 6


class ExportError(Z2allError):
    """An exported folder that does not give the logits of the weights it was made from."""

    exit_code = 7


class TrainingError(Z2allError):
    """A run that went wrong in itself: a loss that is not finite or does not fall."""

    exit_code = 8
