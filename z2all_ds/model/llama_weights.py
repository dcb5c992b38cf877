"""Reads the weights of a Llama folder under Z2all's names: one parameter at a time, in fp32, with remapped rows."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from z2all_ds.base.llama_folder import EMBEDDING, HEAD, LlamaFolder
from z2all_ds.base.vocabulary_rows import NEW, VocabularyRows
from z2all_ds.model.initialization import normal_values
from z2all_ds.model.stock_keys import STOCK_PARTS

NOISE = 0.01
"""Noise of new rows relative to each column's deviation: enough to make them differ, too little to carry meaning."""
ROWS_AT_A_TIME = 4096


class LlamaWeights:
    """Weights determined by the folder and the seed, the same on every rank."""

    def __init__(self, folder: LlamaFolder, rows: VocabularyRows, seed: int) -> None:
        self._folder, self._rows, self._seed = folder, rows, seed
        self._files: dict[str, Any] = {}
        self._last: tuple[str, Tensor] | None = None

    def parameter(self, name: str) -> Tensor:
        """Return a complete parameter; the last one is cached, as partitions may begin in the middle of it."""
        if self._last is None or self._last[0] != name:
            self._last = None  # freed first, so that there are never two in memory
            self._last = name, self._read(name)
        return self._last[1]

    def _read(self, name: str) -> Tensor:
        for fused, stock_names in STOCK_PARTS.items():
            if f".{fused}." in name:
                return torch.cat([self._stock(name.replace(fused, stock)) for stock in stock_names])
        whole = self._stock(name)
        return self._remapped(name, whole) if name in (EMBEDDING, HEAD) else whole

    def _stock(self, name: str) -> Tensor:
        file = str(self._folder.tensors[name].file)
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        tensor: Tensor = self._files[file].get_tensor(name)
        return tensor.float()

    def _remapped(self, name: str, there: Tensor) -> Tensor:
        """Return the mapped rows plus new ones: the mean of all rows, the best guess for an untrained row (a randomly
        drawn one may be likelier than every real token), with a little noise."""
        if self._rows.are_all_the_same and len(self._rows.rows) == len(there):
            return there
        sources = torch.tensor(self._rows.rows)
        is_new = sources == NEW
        here = there[sources.clamp(min=0)]
        if is_new.any():
            mean, deviation = _mean_and_deviation(there)
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                noise = normal_values(self._seed, f"{name}, new rows", here.shape, threads)[is_new]
            here[is_new] = (mean + NOISE * deviation * noise.double()).float()
        return here


def _mean_and_deviation(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return both per column, in fp64, so that the order of the sum does not matter in fp32: ranks must agree."""
    total, squares = torch.zeros(2, rows.shape[1], dtype=torch.float64).unbind()
    for some in rows.split(ROWS_AT_A_TIME):
        total += some.double().sum(0)
        squares += some.double().square().sum(0)
    mean = total / len(rows)
    return mean, (squares / len(rows) - mean.square()).clamp(min=0).sqrt()
