"""Models that nobody here wrote, small: those of transformers, timm and torchvision, where they are installed."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn


def of_libraries() -> dict[str, Callable[[], tuple[nn.Module, tuple]]]:
    """Models that nobody here wrote, of the packages that are installed."""
    found: dict[str, Callable] = {}
    w, n, t, depth = 32, 2, 8, 2
    if find_spec("transformers"):
        import transformers as hf

        def text(config, cls):
            class Wrapped(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.model = cls(config)

                def forward(self, tokens):
                    return self.model(tokens, **({} if "Bert" in cls.__name__ else {"use_cache": False}))[0]

            return lambda: (Wrapped(), (torch.randint(0, 96, (n, t)),))

        common = {"vocab_size": 96, "hidden_size": w, "num_hidden_layers": depth, "num_attention_heads": 4}
        common["intermediate_size"] = 2 * w
        none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        found["hf BERT"] = text(hf.BertConfig(**common, **none), hf.BertModel)
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        gpt = hf.GPT2Config(vocab_size=96, n_embd=w, n_layer=depth, n_head=4, **none)
        found["hf GPT-2"] = text(gpt, hf.GPT2LMHeadModel)
        found["hf Llama"] = text(hf.LlamaConfig(**common, num_key_value_heads=2), hf.LlamaForCausalLM)
    side = 64

    def images() -> tuple[torch.Tensor]:
        return (torch.randn(n, 3, side, side),)

    if find_spec("torchvision"):
        from torchvision.models import mobilenet_v3_small, resnet18

        found["tv ResNet-18"] = lambda: (resnet18(num_classes=10), images())
        found["tv MobileNet"] = lambda: (mobilenet_v3_small(num_classes=10, dropout=0.0), images())
    if find_spec("timm"):
        from timm.models import VisionTransformer

        sizes = {"embed_dim": w, "depth": depth, "num_heads": 4, "num_classes": 10}
        found["timm ViT"] = lambda: (VisionTransformer(side, 16, **sizes), images())
    return found
