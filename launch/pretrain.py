"""For `deepspeed --hostfile H launch/pretrain.py --config run.yaml --deepspeed zero2`; the work is the package's."""

from z2all_ds.train.pretrain import run

if __name__ == "__main__":
    run()
