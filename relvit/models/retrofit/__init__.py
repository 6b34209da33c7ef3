"""Retrofit: give existing timm models relative positions, and keep their weights."""

from relvit.models.retrofit.api import retrofit, retrofit_arguments
from relvit.models.retrofit.original import restore

__all__ = ["restore", "retrofit", "retrofit_arguments"]
