"""How fields of metrics.jsonl are called that there is one of for each domain or probe."""

LOSS_PREFIX = "loss_of_"
"""The loss of domain X is under loss_of_X."""
TOKENS_PREFIX = "tokens_of_"
"""Its counted tokens in the step."""
PROBE_PREFIX = "probe_"
"""The value of probe X."""
