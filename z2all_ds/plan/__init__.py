"""The planner: what a run takes before anything is started, on a login node without torch, GPU or DeepSpeed.

wishes ─▶ fleet ┐
                ├─▶ estimate (memory, traffic, time) ─▶ choose ─▶ report
run config ─────┘                                       └─▶ outlook (days, checkpoints, failures), scaling
"""

from z2all_ds.plan.choose import with_json
from z2all_ds.plan.estimate import Estimate, estimate
from z2all_ds.plan.fleet import Fleet, Wishes, make_fleet
from z2all_ds.plan.memory import zero_states
from z2all_ds.plan.outlook import Risks
from z2all_ds.plan.report import Plan, make_plan, render, to_json

__all__ = [
    "Estimate",
    "Fleet",
    "Plan",
    "Risks",
    "Wishes",
    "estimate",
    "make_fleet",
    "make_plan",
    "render",
    "to_json",
    "with_json",
    "zero_states",
]
