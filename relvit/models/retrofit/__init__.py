"""Retrofit: relative positions for timm models that exist already, weights and all."""

from relvit.models.retrofit.api import retrofit, retrofit_arguments
from relvit.models.retrofit.original import restore

__all__ = ["restore", "retrofit", "retrofit_arguments"]
