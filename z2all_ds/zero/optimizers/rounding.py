"""Adding small numbers to bf16 without losing them: stochastic rounding, or keeping the discarded bits.

bf16 has 8 bits of mantissa: adding less than 1/512 of a number does not change it. Rounding up with a probability equal
to the discarded fraction is correct on average; with the discarded bits kept, the pair is an fp32 number.
"""

import hashlib

import torch
from torch import Tensor

CUT_OFF_BITS = 16
"""bf16 is the upper half of an fp32."""


def seed_from(*numbers: int) -> int:
    """Return a seed of 32 bits (the limit of CPU generators), the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "little")


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 to one of the two neighbouring bf16 numbers such that the mean is x. bf16 numbers do not change.

    Since the bits of the magnitude form one integer, adding random low bits and truncating rounds the magnitude.
    """
    assert x.dtype == torch.float32
    noise = torch.randint(1 << CUT_OFF_BITS, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = noise.add_(x.view(torch.int32)).bitwise_and_(-1 << CUT_OFF_BITS).view(torch.float32)
    # NaN on a GPU has all bits set: the noise would overflow and turn it into -0.
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into the nearest bf16 and the remaining 16 bits (int16, difference between the bits of x and bf16).

    Kahan's compensation keeps the remainder as bf16, whose own rounding loses a few percent of small updates of one
    sign; kept as bits it costs the same and loses nothing.
    """
    assert x.dtype == torch.float32
    bits = x.view(torch.int32)
    upper = bits.add(1 << (CUT_OFF_BITS - 1)).bitwise_and_(-1 << CUT_OFF_BITS)
    lower = bits.sub(upper).to(torch.int16)
    nan = x.isnan()
    return torch.where(nan, x, upper.view(torch.float32)).to(torch.bfloat16), lower.masked_fill_(nan, 0)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the fp32 number that was split."""
    assert upper.dtype == torch.bfloat16 and lower.dtype == torch.int16
    return upper.float().view(torch.int32).add_(lower).view(torch.float32)
