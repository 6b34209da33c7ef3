"""Small image encoders of Segment Anything (`transformers`, `segment_anything`) with large random weights."""

import pytest
import torch

import relvit

CONFIG = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 8,
    # The grid of 7 x 7 patches is not a multiple of the window.
    "window_size": 3,
    "global_attn_indexes": [1],
    "output_channels": 16,
    "num_pos_feats": 8,
    "mlp_dim": 32,
}
ENCODER = {
    "img_size": 56,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 2,
    "out_chans": 16,
    "use_rel_pos": True,
    "window_size": 3,
    "global_attn_indexes": (1,),
}
SAMS = ("hf sam", "hf sam eager", "hf sam_hq", "hf sam_hq eager", "segment_anything")


def transformers():
    """Import the package, or skip the test."""
    return pytest.importorskip("transformers", reason="pip install 'relvit[elsewhere]' brings transformers")


def sam_encoder(case, **kwargs):
    """Build an encoder in double precision, for square images; tests use images that are not square."""
    torch.manual_seed(0)
    if case == "segment_anything":
        reason = "pip install --no-deps --require-hashes -r tests/segment_anything.txt brings it"
        model = pytest.importorskip(case, reason=reason).modeling.ImageEncoderViT(**{**ENCODER, **kwargs})
    else:
        library, implementation = transformers(), "eager" if case.endswith("eager") else "sdpa"
        kind = "SamHQ" if case.startswith("hf sam_hq") else "Sam"
        config = getattr(library, f"{kind}VisionConfig")(**{**CONFIG, **kwargs}, attn_implementation=implementation)
        model = getattr(library, f"{kind}VisionModel")(config).vision_encoder
    return with_large_weights(model)


def sam_model():
    """Build a whole `SamModel` of transformers, whose mask decoder gets the features."""
    library, sizes = transformers(), {"hidden_size": 16, "mlp_dim": 16, "num_hidden_layers": 1}
    config = library.SamConfig(
        vision_config=CONFIG,
        prompt_encoder_config={"hidden_size": 16, "image_size": 56, "patch_size": 8, "image_embedding_size": 7},
        mask_decoder_config={**sizes, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    )
    torch.manual_seed(0)
    return with_large_weights(library.SamModel(config))


def with_large_weights(model):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def sgd_steps(model, batches):
    """Run two steps of SGD on batches of images; return each step's gradients and new weights, by name."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-3), {}
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        # Each device has the same number of images, so the mean over the devices is the mean over the whole batch.
        model(batch)[0].square().mean().backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            name = name.removeprefix("module.")
            found |= {f"gradient {number}, {name}": parameter.grad.clone(), f"{number}, {name}": parameter.data.clone()}
    return found


def sgd_batches():
    """Make two batches of four images in double precision."""
    return torch.randn(2, 4, 3, 56, 56, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ddp_steps(folder):
    """Compute `sgd_steps` of a retrofitted encoder in one of two processes, which has every other image."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(relvit.retrofit(sam_encoder("sam")).train())
    torch.save(sgd_steps(model, sgd_batches()[:, rank::2]), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def sam_blocks(model):
    return model.blocks if hasattr(model, "blocks") else model.layers
