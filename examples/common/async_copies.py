"""cp.async in Gluon, whose name for a copy differs between versions of Triton."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.ampere import async_copy

# copy_in(buffer, pointers, mask): 16 bytes at a time where the pointers allow. Where mask is false it writes zeros:
# Gluon does not promise them, but Triton 3.6 and 3.9 give cp.async a size of 0 there.
copy_in = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit_group, wait_group = async_copy.commit_group, async_copy.wait_group
