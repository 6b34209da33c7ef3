"""Count which of timm's models `relvit.retrofit` takes, and the reasons why it refuses the others.

    python tools/retrofit/retrofit_survey.py                        # all models, four minutes
    python tools/retrofit/retrofit_survey.py --models '*dinov3*'    # those whose names match

Models are built without weights on the meta device, where nothing is downloaded or computed. Each retrofitted model
runs there on images of its own size and of a size that is not square.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter, defaultdict

import timm
import torch
from torch import nn

import relvit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="*", help="pattern of model names, as in timm.list_models")
    names = timm.list_models(parser.parse_args().models)
    warnings.filterwarnings("ignore")
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for name in names:
        text, kind = answer(name)
        kinds[text][kind] += 1
    for text, counts in sorted(kinds.items(), key=lambda item: -item[1].total()):
        print(f"{counts.total():5d}  {text}: {', '.join(f'{kind} {count}' for kind, count in counts.most_common())}")
    print(f"{sum(kinds['retrofitted'].values())} of {len(names)} models can be retrofitted")


def answer(name: str) -> tuple[str, str]:
    """Return the result for a model as a text that models with the same result share, and the model's class."""
    try:
        with torch.device("meta"):
            model = timm.create_model(name).eval()
    except Exception as error:
        return f"not built, {type(error).__name__}: {str(error).splitlines()[0]}", name
    kind = type(model).__name__
    before = dict(model.named_modules())
    classes = [type(module) for module in before.values()]
    try:
        relvit.retrofit(model)
    except ValueError as error:
        unchanged = list(before) == [key for key, _ in model.named_modules()]
        if not unchanged or classes != [type(module) for module in before.values()]:
            return "refused halfway", name
        reason = str(error).partition(f"{kind} cannot be retrofitted: ")[2] or str(error)
        return f"refused, {re.sub(r'own, [^;]+', 'own', re.sub(r'blocks[.][0-9]+', 'blocks.N', reason))}", kind
    attn = next(module.attn for module in model.modules() if hasattr(module, "attn"))
    return run(model), f"{kind} with {type(attn).__mro__[-3].__name__}"


def run(model: nn.Module) -> str:
    """Run a retrofitted model on the meta device, at its own size and at a size that is not square."""
    channels, height, width = timm.data.resolve_model_data_config(model)["input_size"]
    patch = getattr(model, "patch_embed", None) or model.embeds
    rows, cols = 32 * patch.patch_size[0], 16 * patch.patch_size[1]
    for size in ((height, width), (rows, cols)):
        with torch.device("meta"):
            out = model(torch.empty(2, channels, *size))
        if out.shape != (2, model.num_classes or model.num_features):
            return f"retrofitted, but shape {tuple(out.shape)} at {size}"
    return "retrofitted"


if __name__ == "__main__":
    main()
