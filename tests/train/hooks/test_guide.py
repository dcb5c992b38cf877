"""The example hook in docs/architecture.md, which must work as described there."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from z2all_ds.train.guard.guarded_steps import StepFigures
from z2all_ds.train.hooks.hook import Step

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "architecture.md"


def test_the_example_hook_records_a_value_and_reports_a_jump() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, str(GUIDE), "exec"), names)
    said: list[str] = []
    hook = names["GradientJump"](SimpleNamespace(recorder=SimpleNamespace(say=said.append)))
    steps = [
        Step(number, None, 0.1, StepFigures(1.0, {}, norm))  # type: ignore[arg-type]
        for number, norm in enumerate((1.0, 1.5, 6.0), 1)
    ]
    for step in steps:
        hook.after_step(step)
    assert [step.record.get("grad_norm_ratio") for step in steps] == [None, 1.5, 4.0]
    assert said == ["step 3: gradient norm 1.50 -> 6.00"]
