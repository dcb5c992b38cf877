"""A worker for tests that echoes an order, fails, sleeps or dies."""

import os
import signal
import sys
import time

from z2all_ds.base.child_process import read_messages, write_message

for order in read_messages(sys.stdin):
    if order["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if order["do"] == "exit":
        sys.exit("no such library")
    time.sleep(order.get("seconds", 0))
    print("a library talks")
    said = {"problem": "it hurts"} if order["do"] == "fail" else {"answer": order["do"]}
    write_message(sys.stdout, said)
