"""The planner: estimates what a run needs before it starts, on a login node without torch, GPU or DeepSpeed.

hardware ─▶ fleet ┐
                  ├─▶ estimate (memory with activations, traffic, time) ─▶ choose ─▶ report
run config ───────┘                                                        └─▶ outlook, scaling
"""

from z2all_ds.plan.choose import with_json
from z2all_ds.plan.estimate import Estimate, estimate
from z2all_ds.plan.fleet import Fleet, Wishes, make_fleet
from z2all_ds.plan.outlook import Risks
from z2all_ds.plan.report import Plan, content_of, describe, make_plan

__all__ = [
    "Estimate",
    "Fleet",
    "Plan",
    "Risks",
    "Wishes",
    "content_of",
    "describe",
    "estimate",
    "make_fleet",
    "make_plan",
    "with_json",
]
