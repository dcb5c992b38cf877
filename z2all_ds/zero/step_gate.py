"""Decides whether the weights are changed: after DeepSpeed has computed the gradient norm, before the optimizer step.

For all ZeRO stages, DeepSpeed reduces, measures and clips the gradients and then calls `step` of the inner optimizer,
once or once per group. Intercepting that call, a step can be skipped so that weights and moments stay bitwise the same.
The callback may read values from the device: in ZeRO-1 with fp32 accumulation and in ZeRO-3, DeepSpeed has just
synchronized for the norm itself.
"""

from collections.abc import Callable
from typing import Any


class StepGate:
    """Calls `allows` once per engine step, at the first call of the inner optimizer."""

    def __init__(self, engine: Any, allows: Callable[[float | None], bool]) -> None:
        self._engine, self._allows = engine, allows
        self._answer: bool | None = None
        # At stage 0 DeepSpeed uses the optimizer directly.
        self._inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._plain_step = self._inner.step
        self._inner.step = self._step

    def take_answer(self) -> bool | None:
        """Return whether the last step was allowed, or None if DeepSpeed skipped it itself; reset for the next."""
        answer, self._answer = self._answer, None
        return answer

    def _step(self, *arguments: Any, **options: Any) -> Any:
        if self._answer is None:
            self._answer = self._allows(self.grad_norm())
        return self._plain_step(*arguments, **options) if self._answer else None

    def grad_norm(self) -> float | None:
        """Return the norm of the current step before clipping; None if DeepSpeed does not provide it."""
        norm = self._engine.get_global_grad_norm()
        # ZeRO's optimizers set it before the engine does.
        norm = getattr(self._engine.optimizer, "_global_grad_norm", norm)
        return None if norm is None else float(norm)
