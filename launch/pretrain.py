"""For `deepspeed --hostfile H launch/pretrain.py --config run.yaml --deepspeed zero2`; the work is the package's."""

import sys

from z2all_ds.train.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
