"""Run by the deepspeed launcher: several trainings one after the other in one set of ranks.

Starting ranks costs over ten seconds, training a toy for twelve steps less than one. The file named on the command
line holds a JSON list of argument lists, each for one training; exit codes are written beside it, one file a rank.
"""

import json
import os
import sys
from pathlib import Path

from deepspeed.utils import groups

from z2all_ds.train.pretrain import main

if __name__ == "__main__":
    plan = Path(sys.argv[-1])
    codes = []
    for arguments in json.loads(plan.read_text(encoding="utf-8")):
        codes.append(main(arguments))
        # DeepSpeed keeps the groups of a hierarchical partition for good and refuses to make them twice in a process.
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    plan.with_name(f"codes_{os.environ['RANK']}.json").write_text(json.dumps(codes), encoding="utf-8")
