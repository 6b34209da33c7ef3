"""Small BEiT and Data2Vec vision models of `transformers`, with large random weights."""

import torch
from sam_cases import transformers, with_large_weights

CONFIG = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 40,
    "patch_size": 8,
    "layer_scale_init_value": 0.5,
    "drop_path_rate": 0.0,
    "use_absolute_position_embeddings": True,
}
OWN, SHARED = "use_relative_position_bias", "use_shared_relative_position_bias"
# Each name has its family, its attention implementation and its tables.
BEITS = {
    "hf beit": ("Beit", "sdpa", (OWN,)),
    "hf beit shared": ("Beit", "sdpa", (SHARED,)),
    "hf beit both": ("Beit", "sdpa", (OWN, SHARED)),
    "hf beit eager": ("Beit", "eager", (OWN, SHARED)),
    "data2vec": ("Data2VecVision", "sdpa", (OWN,)),
    "data2vec shared": ("Data2VecVision", "sdpa", (SHARED,)),
    "data2vec eager": ("Data2VecVision", "eager", (OWN, SHARED)),
}


def hf_beit(case, head="Model", **kwargs):
    """Build a model, or one with a head, in double precision; the images in training must be square."""
    library, (family, implementation, tables) = transformers(), BEITS[case]
    torch.manual_seed(0)
    options = {**CONFIG, **dict.fromkeys(tables, True), **kwargs}
    config = getattr(library, f"{family}Config")(**options, attn_implementation=implementation)
    arguments = {"add_pooling_layer": True} if head == "Model" else {}
    return with_large_weights(getattr(library, family + head)(config, **arguments))
