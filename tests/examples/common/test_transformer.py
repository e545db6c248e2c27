"""The transformer of the torch.compile topic: it computes what it says, and the work that is counted is its work."""

from dataclasses import astuple, replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from examples.common.transformer import (
    FORTY_BILLION,
    ONE_BILLION,
    SMALL,
    TINY,
    WIDE,
    Config,
    Transformer,
    pieces,
    rotate,
)

CPU = torch.device("cpu")
# One block; grouped heads; as many key heads as query heads; odd sizes where they are allowed.
ODD = Config(width=24, layers=3, heads=4, kv_heads=2, hidden=37, vocab=53, max_tokens=19)
SMALLEST = Config(width=2, layers=1, heads=1, kv_heads=1, hidden=1, vocab=2, max_tokens=3)
CONFIGS = [TINY, ODD, SMALLEST, replace(ODD, kv_heads=4), replace(ODD, kv_heads=1)]


def tokens(config, batch, length, seed=0):
    return torch.randint(config.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def rms(x):
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float64, 1e-12)])
def test_it_agrees_with_float64_as_far_as_its_dtype_goes(config, dtype, allowed):
    model = Transformer.random(config, CPU, dtype)
    ids = tokens(config, 2, min(48, config.max_tokens))
    want, got = model.float64(ids), model(ids)
    assert got.shape == (2, config.vocab)
    assert want.dtype is torch.float64
    assert got.dtype is dtype
    assert rms(got.double() - want) < allowed * rms(want)
    if dtype is torch.bfloat16 and config is not SMALLEST:  # and that is not by chance
        assert rms(got.double() - want) > 1e-4 * rms(want)


def test_float64_is_written_out_independently():
    """Each step by hand for one token: attention is then the identity on its values."""
    model = Transformer.random(ODD, CPU, torch.float64)
    ids = tokens(ODD, 2, 1)
    c, x = ODD, model.embedding.weight[ids[:, 0]]
    for block in model.blocks:

        def normed(v, norm):
            return v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight

        v = (normed(x, block.attention_norm) @ block.qkv.weight.T)[:, c.width + c.kv_width :]
        values = v.view(2, c.kv_heads, c.head_width).repeat_interleave(c.heads // c.kv_heads, dim=1)
        x = x + values.reshape(2, c.width) @ block.attention_out.weight.T
        gate, up = (normed(x, block.mlp_norm) @ block.gate_up.weight.T).split(c.hidden, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ block.down.weight.T
    want = normed(x, model.norm) @ model.embedding.weight.T
    torch.testing.assert_close(model(ids), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", [TINY, ODD])
def test_attention_is_causal(config):
    """What comes later changes nothing: the blocks give the prefix of a row what they give it alone."""
    model = Transformer.random(config, CPU, torch.float64)
    ids = tokens(config, 2, 17)

    def hidden(ids):
        x = model.embedding(ids)
        for block in model.blocks:
            x = block(x, model.cos[: ids.shape[1]], model.sin[: ids.shape[1]])
        return x

    whole = hidden(ids)
    changed = ids.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % config.vocab
    for length in (1, 2, 11):
        torch.testing.assert_close(hidden(ids[:, :length]), whole[:, :length], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(hidden(changed)[:, :11], whole[:, :11], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(hidden(changed)[:, 11:], whole[:, 11:])
    last = model(ids[:, :11])
    assert torch.allclose(last, model(changed[:, :11]))
    earlier = ids.clone()
    earlier[:, 0] = (earlier[:, 0] + 1) % config.vocab
    assert not torch.allclose(model(earlier), model(ids))  # the last token sees the first


def test_positions_matter_only_relative_to_each_other():
    """The rotary embedding turns pairs without changing their length, and a product by the distance alone."""
    model = Transformer.random(ODD, CPU, torch.float64)
    cos, sin = model.angles(ODD.max_tokens)
    q, k = torch.randn(2, ODD.max_tokens, ODD.head_width, dtype=torch.float64)
    q[1:], k[1:] = q[0].clone(), k[0].clone()  # the same vectors at every position
    turned_q, turned_k = rotate(q, cos, sin), rotate(k, cos, sin)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
    products = turned_q @ turned_k.T
    for distance in range(-5, 6):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    torch.testing.assert_close(rotate(q, cos, sin)[0], q[0])  # position 0 is not turned


def test_the_table_of_angles_is_in_the_models_dtype_and_no_parameter():
    model = Transformer.random(ODD, CPU, torch.bfloat16)
    cos, sin = model.angles(ODD.max_tokens)
    assert model.cos.dtype is torch.bfloat16
    assert torch.equal(model.cos, cos.bfloat16())
    assert torch.equal(model.sin, sin.bfloat16())
    assert not {"cos", "sin"} & set(model.state_dict())
    made = Transformer(ODD)  # without random()
    assert torch.equal(made.cos, cos.float())


@pytest.mark.parametrize("config", [*CONFIGS, SMALL, ONE_BILLION, WIDE, FORTY_BILLION])
def test_parameters_are_counted_right(config):
    with torch.device("meta"):
        model = Transformer(replace(config, max_tokens=2))
    assert config.parameters == sum(p.numel() for p in model.parameters())
    assert config.block_parameters == sum(p.numel() for p in model.blocks[0].parameters())
    assert len(model.blocks) == config.layers


def test_random_weights_keep_the_size_of_what_goes_through_and_follow_the_seed():
    state = torch.get_rng_state()
    first, again, other = (Transformer.random(TINY, CPU, torch.float32, seed=seed) for seed in (0, 0, 1))
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim == 1 or not torch.equal(a, c)
        assert not a.requires_grad
    assert not first.training
    assert torch.equal(torch.get_rng_state(), state)  # which the global random numbers have no part in
    assert 0.1 < rms(first(tokens(TINY, 4, 32))) < 10


def test_another_way_to_run_each_block():
    model = Transformer.random(ODD, CPU, torch.float64)
    seen = []

    def run_block(block, x, cos, sin):
        seen.append(block)
        return block(x, cos, sin)

    ids = tokens(ODD, 1, 5)
    assert torch.equal(model(ids, run_block), model(ids))
    assert seen == list(model.blocks)


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 5}, {"kv_heads": 3}, {"width": 36, "heads": 4},  # a head 9 wide cannot be turned in pairs
        {"heads": 0}, {"kv_heads": 0}, {"width": 0}, {"layers": 0}, {"hidden": 0}, {"vocab": 0}, {"max_tokens": 0},
        {"heads": -4}, {"layers": -1},
    ],
)  # fmt: skip
def test_bad_configurations(change):
    with pytest.raises(ValueError, match=r"^Config.* must be"):
        replace(ODD, **change)


def test_more_tokens_than_the_table_has():
    model = Transformer.random(ODD, CPU, torch.float32)
    assert model(tokens(ODD, 1, ODD.max_tokens)).shape == (1, ODD.vocab)
    with pytest.raises(ValueError, match="Transformer: 20 tokens in a row; max_tokens is 19"):
        model(tokens(ODD, 1, ODD.max_tokens + 1))


# --- the work that is counted


def counted(config, batch, length):
    """FLOPs by operator, as torch counts them while the model runs on nothing."""
    with torch.device("meta"):
        model = Transformer(config)
        ids = torch.zeros(batch, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids)
    return {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 3), (4, 2)])
def test_flops_are_those_that_torch_counts(config, batch, length):
    by_operator = counted(config, batch, length)
    matmuls = by_operator.pop("aten.mm")
    attention = sum(by_operator.values())  # the products of its heads, or an operator of its own
    steps = pieces(config, batch, length, 2)
    assert sum(p.count * p.flops for p in steps if p.name != "attention") == matmuls
    ours = sum(p.count * p.flops for p in steps if p.name == "attention")
    square = 4 * batch * length**2 * config.width * config.layers
    assert attention == square  # torch counts the whole of it
    assert ours * 2 * length == square * (length + 1)  # and half of it, with its diagonal, must be computed


@pytest.mark.parametrize("config", [TINY, ODD, ONE_BILLION])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_weight_is_read_once(config, itemsize):
    """With one token and no activations to speak of, the bytes are those of the weights that a token needs."""
    steps = pieces(config, 1, 1, itemsize)
    gemms = [p for p in steps if p.flops and p.name != "attention"]
    weights = sum(p.count * p.flops // 2 for p in gemms)  # one row: a multiply and an add for each weight
    norms = (2 * config.layers + 1) * config.width
    assert weights == config.parameters - norms  # the head's are the embedding's
    moved = sum(p.count * p.bytes for p in steps)
    assert weights * itemsize < moved
    activations = moved - weights * itemsize
    assert activations < 40 * config.layers * (config.width + config.hidden) * itemsize + 2 * config.vocab * itemsize


def test_a_step_counts_what_goes_in_and_out():
    """By hand, for the matrix products of one small model."""
    by_name = {p.name: p for p in pieces(ODD, 2, 5, 2)}
    rows, c = 10, ODD
    assert by_name["down"] == (
        type(by_name["down"])("down", 3, (rows * 37 + 37 * 24 + rows * 24) * 2, 2 * rows * 37 * 24)
    )
    assert by_name["head"].bytes == (2 * 24 + 24 * 53 + 2 * 53) * 2
    assert by_name["qkv"].flops == 2 * rows * 24 * (24 + 2 * c.kv_width)
    assert by_name["attention"].flops == 2 * 2 * 5 * 6 * 24
    assert all(min(astuple(p)[1:3]) > 0 for p in by_name.values())
    between = sum(p.count * p.bytes for p in by_name.values() if "norm" in p.name)
    assert between == (3 * rows + 4 * rows * (2 * c.layers - 1) + 3 * 2) * c.width * 2
