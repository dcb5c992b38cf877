"""Decides at the last moment whether the weights are changed: after DeepSpeed has the gradient's norm, before it steps.

DeepSpeed's optimizers for all ZeRO stages reduce, measure and clip the gradients and then call `step` of the optimizer
they were given, once or once per group. Standing in front of that call, a step can be left out so that weights and
moments keep every bit. Whoever answers may read figures of the step from the device: in ZeRO-1 with fp32 accumulation
and in ZeRO-3 DeepSpeed has just waited for the norm itself.
"""

from collections.abc import Callable
from typing import Any


class StepGate:
    """Asks `allows` once per step of the engine, on its first call of the inner optimizer."""

    def __init__(self, engine: Any, allows: Callable[[float | None], bool]) -> None:
        self._engine, self._allows = engine, allows
        self._answer: bool | None = None
        # At stage 0 DeepSpeed uses the optimizer as it is.
        self._inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._plain_step = self._inner.step
        self._inner.step = self._step

    def take_answer(self) -> bool | None:
        """Whether the step just taken was let through, or None if DeepSpeed left it out itself; ready for the next."""
        answer, self._answer = self._answer, None
        return answer

    def _step(self, *arguments: Any, **options: Any) -> Any:
        if self._answer is None:
            self._answer = self._allows(self.grad_norm())
        return self._plain_step(*arguments, **options) if self._answer else None

    def grad_norm(self) -> float | None:
        """Of the step in progress, before clipping; None where DeepSpeed does not tell."""
        norm = self._engine.get_global_grad_norm()
        # ZeRO's optimizers have it a moment before the engine has.
        norm = getattr(self._engine.optimizer, "_global_grad_norm", norm)
        return None if norm is None else float(norm)
