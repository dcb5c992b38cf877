"""Script for the deepspeed launcher that runs several trainings one after another in the same ranks.

Starting ranks takes over ten seconds, training a tiny model for twelve steps less than one. The file named on the
command line holds a JSON list of argument lists, one per training; exit codes are written next to it, one file per
rank.
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
        # DeepSpeed never deletes the groups of a hierarchical partition and refuses to create them twice in a process.
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    plan.with_name(f"codes_{os.environ['RANK']}.json").write_text(json.dumps(codes), encoding="utf-8")
