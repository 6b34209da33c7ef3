"""Retrofit: relative positions for timm models that exist already, weights and all."""

from relvit.models.retrofit.api import retrofit, retrofit_arguments

__all__ = ["retrofit", "retrofit_arguments"]
