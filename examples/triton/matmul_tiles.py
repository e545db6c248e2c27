"""The tiles that matmul times, and which of them are worth compiling for given sizes and a given GPU."""

from __future__ import annotations

import triton

from examples.common.device import device_limits

# (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages). BLOCK_K is 128 bytes of a row, the widest swizzle of shared
# memory: 64 values of two bytes, 32 of four. The first is the best known on Hopper for large sizes; with float32
# products on the CUDA cores ("ieee") it would spill, so four-byte values stop at 128 x 128.
TILES = [
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4),
    (128, 128, 32, 8, 3), (64, 128, 32, 4, 3), (64, 64, 32, 4, 3),
]  # fmt: skip
BLOCK_K_MAX = max(k for _, _, k, _, _ in TILES)  # a K that it divides needs no mask in any tile
CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in TILES
]


def fitting_configs(configs: list[triton.Config], named_args: dict, **kwargs) -> list[triton.Config]:
    """The configurations worth compiling: those that may fit shared memory, with tiles not far larger than C.

    wgmma and tcgen05 keep num_stages buffers, mma.sync one fewer. The smaller count decides here; what then turns
    out not to fit, autotune itself leaves out.
    """
    a, M, N = named_args["a_ptr"], named_args["M"], named_args["N"]
    shared, itemsize = device_limits(a.device).shared_bytes, a.element_size()

    def fits(config: triton.Config) -> bool:
        m, n, k = config.kwargs.values()
        return (
            k * itemsize == 128
            and (m + n) * k * itemsize * (config.num_stages - 1) <= shared
            and m <= max(64, triton.next_power_of_2(M))
            and n <= max(64, triton.next_power_of_2(N))
        )

    return [config for config in configs if fits(config)]
