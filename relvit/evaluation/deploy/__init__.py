"""Trained models for use elsewhere: published folders and Hugging Face repositories, exported files."""

from relvit.evaluation.deploy.publish import PublishError, publish_model

__all__ = ["PublishError", "publish_model"]
