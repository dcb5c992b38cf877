"""Ways to add small numbers to bf16 without losing them: stochastic rounding, and keeping what was cut off.

bf16 has 8 bits of mantissa: a number to which less than 1/512 of it is added stays as it was. Rounded up with the
probability of the fraction cut off, it is right on average; with the bits cut off kept beside it, the two are an fp32.
"""

import hashlib

import torch
from torch import Tensor

CUT_OFF_BITS = 16
"""bf16 is the upper half of an fp32."""


def seed_from(*numbers: int) -> int:
    """A seed of 32 bits (a CPU generator takes no more), the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "little")


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to one of the two bf16 around it, the nearer the likelier, so that the mean is x. bf16 numbers stay.

    As sign and magnitude share one integer scale, adding random low bits and cutting them off rounds the magnitude.
    """
    assert x.dtype == torch.float32
    noise = torch.randint(1 << CUT_OFF_BITS, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = noise.add_(x.view(torch.int32)).bitwise_and_(-1 << CUT_OFF_BITS).view(torch.float32)
    # A GPU's NaN has all bits set: the noise would carry over and make it -0.
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as the nearest bf16 and the 16 bits cut off (int16, by how much the bits of x are above those of the bf16).

    Kahan's compensation keeps what was cut off as a bf16, whose own roundings lose a few hundredths of small updates
    of one sign; kept as bits it costs the same and loses nothing.
    """
    assert x.dtype == torch.float32
    bits = x.view(torch.int32)
    upper = bits.add(1 << (CUT_OFF_BITS - 1)).bitwise_and_(-1 << CUT_OFF_BITS)
    lower = bits.sub(upper).to(torch.int16)
    nan = x.isnan()
    return torch.where(nan, x, upper.view(torch.float32)).to(torch.bfloat16), lower.masked_fill_(nan, 0)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 that was split."""
    assert upper.dtype == torch.bfloat16 and lower.dtype == torch.int16
    return upper.float().view(torch.int32).add_(lower).view(torch.float32)
