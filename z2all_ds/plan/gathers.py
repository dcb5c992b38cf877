"""Which weights ZeRO-3 gathers in a micro-batch, and when: DeepSpeed 0.19.8's coordinator, played through."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from z2all_ds.base.accounting import ModelShape, count_parameters
from z2all_ds.zero.ds_config import ResolvedDeepSpeed
from z2all_ds.zero.ds_json import zero_section

DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_model_persistence_threshold": sys.maxsize,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""DeepSpeed's own, of keys that a JSON may leave out."""


@dataclass(frozen=True)
class Weight:
    """One parameter of the model."""

    name: str
    numel: int
    is_vector: bool = False


def _layer(shape: ModelShape, index: int) -> list[Weight]:
    """In the order of use."""
    d, kv = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    rows = shape.attention_width + 2 * kv
    biased = shape.attention_bias
    return [
        Weight(f"{index}.input_norm", d, True),
        Weight(f"{index}.qkv", d * rows),
        *([Weight(f"{index}.qkv_bias", rows, True)] if biased else []),
        Weight(f"{index}.o", shape.attention_width * d),
        *([Weight(f"{index}.o_bias", d, True)] if biased else []),
        Weight(f"{index}.mlp_norm", d, True),
        Weight(f"{index}.gate_up", 2 * d * shape.intermediate_size),
        Weight(f"{index}.down", d * shape.intermediate_size),
    ]


def weights_of(shape: ModelShape) -> list[Weight]:
    """In the order of use, a shared table once."""
    table = shape.vocab_size * shape.hidden_size
    layers = [weight for index in range(shape.num_layers) for weight in _layer(shape, index)]
    head = [] if shape.tie_embeddings else [Weight("head", table)]
    weights = [Weight("embedding", table), *layers, Weight("norm", shape.hidden_size, True), *head]
    assert sum(weight.numel for weight in weights) == count_parameters(shape).total
    return weights


def setting(resolved: ResolvedDeepSpeed, key: str) -> int:
    """Of zero_optimization: the JSON's, or DeepSpeed's own."""
    value = zero_section(resolved.config).get(key)
    return int(DEFAULTS[key] if value is None else value)


@dataclass(frozen=True)
class Message:
    """Gathered in one call."""

    names: tuple[str, ...]
    ahead: bool
    """Of their use."""
    copied: bool
    """From the group's second copy."""


@dataclass(frozen=True)
class _Module:
    """As the hooks know it."""

    name: str
    own: tuple[str, ...] = ()
    """Weights that it fetches; a layer's are all of those inside it."""
    inside: tuple[str, ...] = ()
    is_layer: bool = False


class Gathers:
    """DeepSpeed's coordinator of stage 3, played through: which weights it gathers in a micro-batch, and when.

    A module's weights are let go of after its pass unless they are small, or used again within
    `stage3_max_reuse_distance` elements. Behind a layer's own use that walk meets the whole model at the beginning of
    the backward pass, and all weights with it: whatever is less than the distance away from the end of the forward
    pass stays. And what was seen there when fetching ahead, by `stage3_prefetch_bucket_size`, stays too.
    """

    def __init__(self, resolved: ResolvedDeepSpeed, shape: ModelShape) -> None:
        weights = weights_of(shape)
        self.numels = {weight.name: weight.numel for weight in weights}
        self.kept = _kept_whole(resolved, weights)
        self._ahead = setting(resolved, "stage3_prefetch_bucket_size")
        self._live = setting(resolved, "stage3_max_live_parameters")
        self._distance = setting(resolved, "stage3_max_reuse_distance")
        self._layers = [tuple(weight.name for weight in _layer(shape, index)) for index in range(shape.num_layers)]
        self._head = ("embedding",) if shape.tie_embeddings else ("head",)
        self._modules = list(self._order())

    def _order(self) -> Iterator[_Module]:
        """As the hooks come. A layer has two outputs, and so comes twice in the backward pass."""
        every = tuple(self.numels)
        whole = _Module("all", inside=every)
        model = _Module("model", inside=tuple(name for name in every if name != "head"))
        layers = [_Module(f"layer {index}", names, names, True) for index, names in enumerate(self._layers)]
        embedding, norm, head = (
            _Module(name, weight, weight)
            for name, weight in (("embedding", ("embedding",)), ("norm", ("norm",)), ("head", self._head))
        )
        yield from (whole, model, embedding, *layers, norm, head)
        yield from (whole, head, model, norm)
        for layer in reversed(layers):
            yield from (layer, layer)
        yield embedding

    def micro_batch(self, copies: bool) -> list[Message]:
        """`copies`: those of the group are there from the beginning."""
        here, copied = set(self.kept), set(self.numels) if copies else set()
        queue = deque((name, step) for step, module in enumerate(self._modules) for name in module.own)
        seen = dict.fromkeys(self.numels, -1)
        live = 0
        messages: list[Message] = []

        def gather(names: Iterable[str], ahead: bool) -> int:
            missing = [name for name in names if name not in here]
            for of_group in (True, False):
                together = tuple(name for name in missing if (name in copied) == of_group)
                if together:
                    messages.append(Message(together, ahead, of_group))
            here.update(missing)
            return sum(self.numels[name] for name in missing)

        for step, module in enumerate(self._modules):
            live += gather(module.own, ahead=False)
            fresh = {name for name in module.own if seen[name] < step}
            taken: set[str] = set()
            while queue and len(taken) < len(fresh):
                name, seen_at = queue.popleft()
                seen[name] = seen_at
                taken.add(name)
            wanted: dict[str, None] = {}
            room, numel = min(self._live - live, self._ahead), 0
            while queue and numel < room:
                name, seen_at = queue.popleft()
                seen[name] = max(seen[name], seen_at)
                if name not in here and name not in wanted:
                    wanted[name] = None
                    numel += self.numels[name]
            live += gather(wanted, ahead=True)
            if self._ends(step):
                gone = self._let_go(module, step + 1, seen) & here
                here -= gone
                copied |= gone
                live -= sum(self.numels[name] for name in gone)
        return messages

    def _ends(self, step: int) -> bool:
        """A layer is let go of once both of its outputs have come by."""
        return step + 1 == len(self._modules) or self._modules[step] != self._modules[step + 1]

    def _let_go(self, module: _Module, step: int, seen: dict[str, int]) -> set[str]:
        gone = {name for name in module.own if name not in self.kept and seen[name] <= step}
        walked = 0
        for ahead in self._modules[step:]:
            if walked >= self._distance or not gone:
                break
            # DeepSpeed asks of the module it lets go of, not of those it meets, whether to look inside.
            met = ahead.inside if module.is_layer else () if ahead.is_layer else ahead.own
            gone.difference_update(met)
            walked += sum(self.numels[name] for name in met)
        return gone


def _kept_whole(resolved: ResolvedDeepSpeed, weights: Iterable[Weight]) -> dict[str, None]:
    kept: dict[str, None] = {}
    each, room = (setting(resolved, f"stage3_{of}_persistence_threshold") for of in ("param", "model"))
    for weight in weights:
        if weight.numel <= min(each, room):
            kept[weight.name] = None
            room -= weight.numel
    return kept
