"""The error classes: problems a user can fix, reported in one line with the value, the rule and the fix.

Every class has its own exit code, so that a script or a supervisor can tell a typo from a lost node. Other exceptions
are bugs in this package and show their traceback.
"""

from z2all_ds.base.url_passwords import text_without_passwords

EXIT_OK = 0
EXIT_BUG = 1
EXIT_INTERRUPTED = 130
"""Ctrl-C, as shells report it (128 + SIGINT)."""
EXIT_REQUEUE = 75
"""Stopped on request after saving a checkpoint: run the same command again (EX_TEMPFAIL of sysexits.h)."""


class Z2allError(Exception):
    """Base class. `what` names the value, `rule` the rule it broke, `fix` how to fix it."""

    exit_code = EXIT_BUG

    def __init__(self, what: str, rule: str, fix: str) -> None:
        self.what, self.rule, self.fix = what, rule, fix
        # File names and library messages may contain line breaks; the message must be one line. Messages are kept in
        # logs and events, and sent to trackers.
        super().__init__(text_without_passwords(" ".join(f"{what}: {rule.rstrip('.')}. {fix}".splitlines())))

    def __reduce__(self) -> tuple[type["Z2allError"], tuple[str, str, str]]:
        return type(self), (self.what, self.rule, self.fix)  # keeps the fields when pickled from a worker process


class ConfigError(Z2allError):
    """A setting, an override, a preset, a DeepSpeed JSON or a command line that is invalid."""

    exit_code = 2


class DataError(Z2allError):
    """A corpus, shard, record or tokenizer that is missing, corrupt, or differs from the one the run started with."""

    exit_code = 3


class BadRecordError(DataError):
    """A record without a valid text, in a file that is otherwise readable."""


class CheckpointError(Z2allError):
    """A requested checkpoint that cannot be read, or a run folder that cannot be resumed."""

    exit_code = 4


class NotSaved(CheckpointError):
    """A checkpoint that could not be written because of the disk; a later attempt may succeed."""


class ClusterError(Z2allError):
    """Failure of ranks, nodes, ports or launchers."""

    exit_code = 5


class PortTaken(ClusterError):
    """The rendezvous port of the ranks is in use by another process; another port may work at once."""

    exit_code = 9


class MachineError(Z2allError):
    """Something the machine lacks: a compiler, disk space, a writable folder, a library."""

    exit_code = 6


class ExportError(Z2allError):
    """An exported folder whose logits differ from those of the source weights."""

    exit_code = 7


class TrainingError(Z2allError):
    """A run that failed in training itself: the loss is not finite or does not fall."""

    exit_code = 8
