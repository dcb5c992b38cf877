"""A worker for tests: says back what it is told, fails, sleeps or dies."""

import json
import os
import signal
import sys
import time

from z2all_ds.cluster.agents.worker import MARK

for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if order["do"] == "exit":
        sys.exit("no such library")
    time.sleep(order.get("seconds", 0))
    print("a library talks")
    said = {"problem": "it hurts"} if order["do"] == "fail" else {"answer": order["do"]}
    print(MARK + json.dumps(said), flush=True)
