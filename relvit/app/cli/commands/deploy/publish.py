"""`relvit publish`: the model as a folder or a Hugging Face repository in timm's own format."""

from __future__ import annotations

from relvit.app.evaluation.deploy import publish_model


def publish(ckpt_path: str, *, to: str, license: str | None = None, curve: str | None = None) -> None:
    """Write a folder or Hugging Face repository that timm.create_model loads.

    Args:
        to: The folder to write to, or hf-hub:OWNER/NAME to upload to this repository (log in with hf auth login first).
        license: The identifier of the licence of the weights, such as apache-2.0; by default the card names no licence.
        curve: The file that relvit resolutions --output FILE.json wrote for this checkpoint; by default
            resolutions.json in the folder of the run, if it has one.
    """
    missing: list[str] = []
    name = publish_model(ckpt_path, to, license, curve, missing.extend)
    print("Published, and checked: timm computes the same logits, bit by bit. In Python, after import relvit:")
    print(f"  model = timm.create_model({name!r}, pretrained=True)", flush=True)
    if missing:
        print("\n  ".join(["The model card lacks:", *missing]), flush=True)
