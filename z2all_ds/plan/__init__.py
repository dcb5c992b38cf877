"""The planner: what a model of a given size needs per GPU under each ZeRO JSON, before anything is started.

It runs on a login node: no torch, no GPU, no DeepSpeed. This first version counts the model states only, and says so
under every table it prints.
"""

from z2all_ds.plan.memory import ModelStates, parse_size, zero_states
from z2all_ds.plan.report import Plan, PlanRow, plan_table, render, to_json

__all__ = ["ModelStates", "Plan", "PlanRow", "parse_size", "plan_table", "render", "to_json", "zero_states"]
