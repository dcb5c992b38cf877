"""`python -m z2all_ds` is the command z2all."""

from z2all_ds.cli import main

main()
