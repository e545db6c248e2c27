"""The transformer of the torch.compile topic: it computes what it says, and the work that is counted is its work."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from examples.common.transformer import FORTY_BILLION, ONE_BILLION, TINY, Config, Transformer, pieces, rotate

CPU = torch.device("cpu")
# Odd sizes where they are allowed; one block of the least; grouped heads, as many key heads as query heads, one.
ODD = Config(width=24, layers=3, heads=4, kv_heads=2, hidden=37, vocab=53, max_tokens=19)
SMALLEST = Config(width=2, layers=1, heads=1, kv_heads=1, hidden=1, vocab=2, max_tokens=3)
CONFIGS = [TINY, ODD, SMALLEST, replace(ODD, kv_heads=4), replace(ODD, kv_heads=1)]


def tokens(config, batch, length, seed=0):
    return torch.randint(config.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def rms(x):
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_it_agrees_with_float64_as_far_as_its_dtype_goes(config, dtype, allowed):
    model = Transformer.random(config, CPU, dtype)
    ids = tokens(config, 2, min(48, config.max_tokens))
    want, got = model.float64(ids), model(ids)
    assert (got.shape, got.dtype, want.dtype) == ((2, config.vocab), dtype, torch.float64)
    assert rms(got.double() - want) < allowed * rms(want)
    assert (model.cos.dtype, "cos" in model.state_dict()) == (dtype, False)  # a table in its dtype and no parameter
    assert torch.equal(model.sin, model.angles(config.max_tokens)[1].to(dtype))


def test_each_step_is_that_of_the_family():
    """By hand for rows of several tokens, every head alone, with an explicit mask."""
    c, model, ids = ODD, Transformer.random(ODD, CPU, torch.float64), tokens(ODD, 2, 11)
    cos, sin = model.angles(11)
    past, x = torch.ones(11, 11, dtype=torch.bool).tril(), model.embedding.weight[ids]

    def normed(v, norm):
        return v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight

    for block in model.blocks:
        qkv = (normed(x, block.attention_norm) @ block.qkv.weight.T).split(c.head_width, dim=-1)
        outs = []
        for head in range(c.heads):
            group = head // (c.heads // c.kv_heads)
            q, k = (rotate(qkv[i], cos, sin) for i in (head, c.heads + group))
            scores = (q @ k.mT / c.head_width**0.5).masked_fill(~past, -torch.inf)
            outs.append(scores.softmax(-1) @ qkv[c.heads + c.kv_heads + group])
        x = x + torch.cat(outs, -1) @ block.attention_out.weight.T
        gate, up = (normed(x, block.mlp_norm) @ block.gate_up.weight.T).split(c.hidden, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ block.down.weight.T
    want = normed(x[:, -1], model.norm) @ model.embedding.weight.T
    seen = []

    def run_block(block, x, cos, sin):  # another way to run each block
        seen.append(block)
        return block(x, cos, sin)

    torch.testing.assert_close(model(ids, run_block), want, rtol=1e-10, atol=1e-10)
    assert seen == list(model.blocks)


def test_positions_matter_only_relative_to_each_other():
    """The rotary embedding turns pairs without changing their length, and a product by the distance alone."""
    cos, sin = Transformer.random(ODD, CPU, torch.float64).angles(ODD.max_tokens)
    q, k = (torch.randn(ODD.head_width, dtype=torch.float64).expand(ODD.max_tokens, -1) for _ in range(2))
    turned = rotate(q, cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(turned[0], q[0])  # position 0 is not turned
    products = turned @ rotate(k, cos, sin).T
    for distance in range(-5, 6):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))


def test_random_weights_keep_the_size_of_what_goes_through_and_follow_the_seed():
    state = torch.get_rng_state()
    first, again, other = (Transformer.random(TINY, CPU, torch.float32, seed=seed) for seed in (0, 0, 1))
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim == 1 or not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), state)  # which the global random numbers have no part in
    assert 0.1 < rms(first(tokens(TINY, 4, 32))) < 10


def test_sizes_that_cannot_be():
    for change in (
        {"heads": 5}, {"kv_heads": 3}, {"width": 36, "heads": 4},  # a head 9 wide cannot be turned in pairs
        {"heads": 0}, {"kv_heads": 0}, {"width": 0}, {"max_tokens": 0}, {"layers": -1},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^Config.* must be"):
            replace(ODD, **change)
    with pytest.raises(ValueError, match="Transformer: 20 tokens in a row; max_tokens is 19"):
        Transformer.random(ODD, CPU, torch.float32)(tokens(ODD, 1, ODD.max_tokens + 1))


@pytest.mark.parametrize("config", [*CONFIGS, ONE_BILLION, FORTY_BILLION])
def test_work_and_parameters_are_those_that_torch_counts(config):
    batch, length = 4, 2
    with torch.device("meta"):
        model = Transformer(replace(config, max_tokens=2))
        ids = torch.zeros(batch, length, dtype=torch.int64)
    assert config.parameters == sum(p.numel() for p in model.parameters())
    assert config.block_parameters == sum(p.numel() for p in model.blocks[0].parameters())
    with FlopCounterMode(display=False) as counter:
        model(ids)
    by_operator = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    steps = {p.name: p for p in pieces(config, batch, length, 2)}
    attention = steps.pop("attention")
    assert sum(p.count * p.flops for p in steps.values()) == by_operator.pop("aten.mm")
    # torch counts the whole of attention's square, and half of it, with its diagonal, must be computed.
    assert attention.count * attention.flops * 2 * length == sum(by_operator.values()) * (length + 1)
    between = sum(p.count * p.bytes for p in steps.values() if "norm" in p.name)
    rows = batch * length
    assert between == (3 * rows + 4 * rows * (2 * config.layers - 1) + 3 * batch) * config.width * 2
    for name, m, k, n in (("down", rows, config.hidden, config.width), ("head", batch, config.width, config.vocab)):
        assert steps[name].bytes == (m * k + k * n + m * n) * 2
