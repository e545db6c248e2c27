"""Models such as users bring: each is loaded from here by path or by name."""

import os
import signal
import time

import torch
from torch import nn

made = nn.Linear(4, 4)


def step(x, scale):
    y = x * scale
    y = y / x.abs().max().item()
    return torch.tanh(y)


class Counts(nn.Module):
    """It holds state, prints, and returns something that is no tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.calls_made = 0

    def forward(self, x):
        print("a line of the model's own")
        self.calls_made += 1
        self.calls += 1
        return {"out": x + self.calls, "name": "counts", "number": 3}


def make_model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def make_inputs():
    return {"x": torch.ones(4, 8), "scale": 2.0}


def raises(x):
    raise RuntimeError("the tokenizer is missing")


def needs_another_device(x):
    return x + torch.ones(4, device="cuda:7")


calls = 0  # of the two below: the first call, before any phase, goes well


def takes_minutes_later(x):
    global calls
    calls += 1
    if calls > 1:
        time.sleep(600)
    return x + 1


def is_killed_later(x):
    global calls
    calls += 1
    if calls > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return x + 1


def leaves_quietly_later(x):
    global calls
    calls += 1
    if calls > 1:
        os._exit(0)
    return x + 1


def takes_too_much_memory(x):
    return x + torch.empty(10**13, device=x.device)


needs_arguments = nn.Linear
number = 3
