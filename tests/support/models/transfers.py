"""Small classifiers between which weights are transferred, and images to compare their outputs."""

import timm
import torch

import relvit
from relvit.models.weights.transfer import Weights

SIZE = (16, 24)


def make(name="test_relvit", classes=3, chans=3, size=SIZE, seed=0, retrofit=None, **kwargs):
    """Build a model whose parameters are all random, since equal zeros and ones could hide mistakes."""
    kwargs = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, **kwargs}
    net = timm.create_model(name, num_classes=classes, in_chans=chans, img_size=size, **kwargs).eval()
    net = net if retrofit is None else relvit.retrofit(net, **retrofit)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return net


def weights_of(net, **kwargs):
    return Weights("there", net.state_dict(), **kwargs)


def pictures(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))
